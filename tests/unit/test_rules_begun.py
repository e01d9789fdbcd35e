"""What begins in the middle of a run is judged by the readings since."""

import numpy as np
import pytest

from gradflow_export.rules.signals import AGAIN, begun


def flags(*rows):
    return np.array(rows, dtype=np.bool_)[:, None]


@pytest.mark.parametrize("before", [AGAIN, 7, 12])
@pytest.mark.parametrize("after", [AGAIN, 5])
def test_what_holds_since_a_step_and_never_before_has_begun(before, after):
    """The place of the first reading with it is returned, whatever lies how far back."""
    steps = np.array([100 * n for n in range(before)] + [5000 + n for n in range(after)])
    assert begun(steps, flags(*[0] * before, *[1] * after)).tolist() == [before]


@pytest.mark.parametrize(
    "rows",
    [
        [0] * 8 + [1] * (AGAIN - 1),
        [0, 1] * 5 + [0] + [1] * AGAIN,
        [0] * 8 + [1] * AGAIN + [0],
        [1] * 10,
        [0] * (AGAIN - 1) + [1] * 5,
        [0] * 10,
    ],
    ids=["too few", "was there before", "over", "always", "nothing known before", "never"],
)
def test_what_comes_and_goes_or_was_always_there_has_not_begun(rows):
    """Players that take turns, experts that are chosen now and then and what is over begin nothing."""
    assert begun(np.arange(len(rows)), flags(*rows)).tolist() == [len(rows)]


def test_readings_far_apart_show_no_steps_in_a_row():
    """Three readings, each a hundred steps after the other, may each be the one step in a hundred that is special."""
    rows = [0] * 8 + [1] * AGAIN
    assert begun(100 * np.arange(len(rows)), flags(*rows)).tolist() == [len(rows)]


def test_each_site_has_a_beginning_of_its_own():
    """One site begins, one comes and goes."""
    table = np.array([[0, 0]] * 6 + [[1, 1]] + [[1, 0]] + [[1, 1]] * 3, dtype=np.bool_)
    assert begun(np.arange(len(table)), table).tolist() == [6, len(table)]


def test_without_readings_nothing_has_begun():
    """An empty past is no evidence."""
    assert begun(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.bool_)).tolist() == [0, 0]
