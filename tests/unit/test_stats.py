"""Streaming and robust statistics at their edges; values against numpy and scipy stand with the closed forms."""

import math

import numpy as np
import pytest

from gradflow_export.records.statistics import (
    Ends,
    Welford,
    Window,
    distinct,
    first_of_each,
    median,
    pair_slopes,
    theil_sen,
    theil_sen_bounds,
)


def test_nothing_seen_is_no_number():
    """Before the first number the mean is 0, the spread 0 and the last NaN."""
    running = Welford()
    assert (running.count, running.mean, running.std) == (0, 0.0, 0.0)
    assert math.isnan(running.last)
    running.add(3.0)
    assert (running.mean, running.std, running.last) == (3.0, 0.0, 3.0)


def test_nonfinite_numbers_are_counted_and_remembered_as_the_last():
    """They do not spoil the mean."""
    running = Welford()
    for value in (1.0, math.nan, 3.0, math.inf):
        running.add(value)
    assert (running.mean, running.nonfinite, running.last) == (2.0, 2, math.inf)


def test_a_window_forgets_the_oldest():
    """It never holds more than its size."""
    window = Window(3)
    assert len(window) == 0
    for step in range(5):
        window.add(step, step * 0.5)
    assert len(window) == 3
    assert window.steps.tolist() == [2, 3, 4]
    assert window.values.tolist() == [1.0, 1.5, 2.0]


def test_slopes_leave_out_equal_positions():
    """Points above one another have no slope; without two positions the slope is NaN."""
    x, y = np.array([1.0, 1.0, 2.0]), np.array([0.0, 5.0, 3.0])
    assert sorted(pair_slopes(x, y)) == [-2.0, 3.0]
    assert theil_sen(x, y) == 0.5
    for empty in (np.array([]), np.array([1.0]), np.array([1.0, 1.0])):
        assert math.isnan(theil_sen(empty, empty))
        assert all(math.isnan(v) for v in theil_sen_bounds(empty, empty))


def test_slopes_leave_out_what_is_not_finite():
    """NaN and Inf at some points change neither the slope of the others nor its bounds, and warn nobody."""
    generator = np.random.default_rng(0)
    x, y = np.arange(30.0), generator.normal(size=30)
    holes = generator.choice(30, 9, replace=False)
    broken = y.copy()
    broken[holes] = np.tile([math.nan, math.inf, -math.inf], 3)
    rest = np.delete(x, holes), np.delete(y, holes)
    with np.errstate(all="raise"):
        assert theil_sen(x, broken) == theil_sen(*rest)
        assert theil_sen_bounds(x, broken) == theil_sen_bounds(*rest)
        assert math.isnan(theil_sen(x, np.full(30, math.inf)))


def test_bounds_hold_the_slope_between_them():
    """For any series the lower bound is at most, the upper at least the slope."""
    generator = np.random.default_rng(0)
    for n in range(2, 30):
        slope, low, high = theil_sen_bounds(np.arange(float(n)), generator.normal(size=n))
        assert low <= slope <= high


def test_a_line_has_its_own_slope_exactly():
    """Without noise slope and bounds agree."""
    x = np.arange(10.0)
    assert theil_sen_bounds(x, 3 * x + 1) == pytest.approx((3.0, 3.0, 3.0))


@pytest.mark.parametrize(
    "values", [[3.0], [1.0, 2.0], [5.0, 1.0, 2.0, 9.0], [1.0, math.nan, 2.0], [-math.inf, 1.0, 0.0]]
)
def test_the_median_is_that_of_numpy(values):
    """It is the middle value, the mean of the two middle ones, or NaN where there is one, to the last bit."""
    for dtype in (np.float64, np.float32):
        np.testing.assert_equal(median(np.array(values, dtype)), float(np.median(np.array(values, dtype))))
    assert math.isnan(median(np.array([])))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_is_distinct_is_what_numpy_says(dtype):
    """Entries, each once and in order; the first of rows that are equal, -0.0 and 0.0 among them."""
    values = np.random.default_rng(0).integers(-2, 2, (40, 2)).astype(dtype) * dtype(0.5)
    np.testing.assert_array_equal(distinct(values), np.unique(values))
    values[values == 0.0] *= np.random.default_rng(1).choice([-1.0, 1.0], int((values == 0.0).sum()))
    first = np.unique(values, axis=0, return_index=True)[1]
    np.testing.assert_array_equal(first_of_each(values), np.sort(first))


def test_the_ends_of_a_series_are_medians():
    """One odd reading at either end does not matter, NaN and Inf are left out, and ten readings are needed."""
    ends = Ends()
    for value in (math.nan, 9.0, 1.0, 1.0, 1.0, math.inf, 2.0, 5.0, 0.1, 0.1, 0.2):
        ends.add(value)
    assert ends.values is None
    ends.add(8.0)
    assert ends.values == (1.0, 0.2)
    ends.add(0.1)
    assert ends.values == (1.0, 0.1)
