"""A card in a notebook is drawn anew no more often than was asked for, and never outside of one."""

import sys
from types import SimpleNamespace

import IPython
import IPython.display
import pytest

from gradflow_export import LiveCard
from gradflow_export.errors import ArgumentError, MissingPackageError
from gradflow_export.records.step_record import Reading, RunInfo, StepRecord

INFO = RunInfo("1700000000123-0", 1700000000.0, "Net", 10)


def record(step, time):
    return StepRecord(step, time, (Reading.run("loss", 1.0 / step),))


@pytest.fixture
def drawn(monkeypatch):
    """What a notebook would show, one entry for each drawing."""
    shown = []

    def display(what, display_id):
        shown.append(what.data)
        return SimpleNamespace(update=lambda what: shown.append(what.data))

    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(IPython.display, "display", display)
    return shown


@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_drawings_are_bounded_by_the_time_that_passed(drawn, steps):
    """However many steps a second has; the last state is shown at the end, and nothing afterwards."""
    card, seconds = LiveCard(2.0), 60.0
    card.open(INFO)
    for step in range(1, steps + 1):
        card.write(record(step, 1700000000.0 + seconds * step / steps))
    card.close()
    assert len(drawn) <= seconds / 2.0 + 3
    assert f"step {steps}" in drawn[-1]
    count = len(drawn)
    card.write(record(steps + 1, 1800000000.0))
    card.close()
    assert len(drawn) == count


def test_outside_of_a_notebook_nothing_is_shown(capsys):
    """A script that is run both ways needs no change."""
    card = LiveCard()
    card.open(INFO)
    card.write(record(1, 1700000001.0))
    card.close()
    assert capsys.readouterr().out == ""


def test_what_cannot_be_used_is_named(monkeypatch):
    """A pause that is none, and a missing package with the command that installs it."""
    with pytest.raises(ArgumentError, match="seconds above 0, got 0"):
        LiveCard(0)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(MissingPackageError, match="pip install ipython"):
        LiveCard()
