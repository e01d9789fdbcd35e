"""Columns: whatever is drawn as one, nothing that stands out is lost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.records.catalog import spec
from gradflow_export.storage.event_chunks import MISSING_BITS, NAN_BITS
from tensorboard_plugin_gradflow.decimate import Columns, column_width, neutral_value

MISSING = np.array([MISSING_BITS], np.uint32).view(np.float32)[0]
VALUES = st.one_of(
    st.none(),
    st.floats(width=32, allow_nan=True, allow_infinity=True, min_value=None, max_value=None),
    st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]),
)


def stored(values):
    """Return a column of values as they are stored, None as missing."""
    out = np.array([0.0 if value is None else value for value in values], np.float32)
    bits = out.view(np.uint32)
    bits[np.isnan(out)] = NAN_BITS
    bits[[value is None for value in values]] = MISSING_BITS
    return out[:, None]


def obvious(values, how):
    """Reduce one column the slow way; None is missing."""
    arrived = [value for value in values if value is not None]
    if not arrived:
        return None
    if any(math.isnan(value) for value in arrived):
        return math.nan
    if how == "mean":
        infinite = {value for value in arrived if math.isinf(value)}
        return sum(infinite) if infinite else float(np.mean(np.array(arrived, np.float64)))
    if how == "extreme":
        return max(arrived, key=lambda value: (abs(value), value))
    return min(arrived) if how == "min" else max(arrived)


@given(st.lists(VALUES, min_size=1, max_size=24), st.integers(1, 7), st.integers(0, 24))
def test_columns_agree_with_a_slow_twin_however_the_rows_are_split(values, width, split):
    """Every reduction equals the obvious one, with the rows in one chunk or in two."""
    steps = np.arange(1, len(values) + 1, dtype=np.int64)
    columns = Columns(steps, steps.astype(float), width, 1)
    rows, site = stored(values), np.array([0])
    for part in (slice(None, split), slice(split, None)):
        columns.add(steps[part], rows[part], site)
    for how in ("extreme", "min", "max", "mean"):
        out = columns.reduce(how, None)[:, 0]
        for number, ident in enumerate(np.unique(steps // width)):
            expected = obvious([v for v, step in zip(values, steps, strict=True) if step // width == ident], how)
            if expected is None:
                assert out.view(np.uint32)[number] == MISSING_BITS
            elif math.isnan(expected):
                assert out.view(np.uint32)[number] == NAN_BITS
            else:
                assert out[number] == pytest.approx(np.float32(expected), rel=1e-6, abs=1e-40)


@given(st.lists(VALUES, min_size=1, max_size=24), st.integers(1, 7), st.integers(16, 20))
def test_wide_rows_are_reduced_as_narrow_ones(values, width, sites):
    """Rows of many sites are summed group by group, those of few all at once."""
    steps = np.arange(1, len(values) + 1, dtype=np.int64)
    wide = Columns(steps, steps.astype(float), width, sites)
    # Site after site begins one value later.
    rows = np.concatenate([np.roll(stored(values), -site, axis=0) for site in range(sites)], axis=1)
    wide.add(steps, rows, np.arange(sites))
    for how in ("extreme", "min", "max", "mean"):
        for site in (0, sites - 1):
            narrow = Columns(steps, steps.astype(float), width, 1)
            narrow.add(steps, np.ascontiguousarray(rows[:, [site]]), np.array([0]))
            found, expected = wide.reduce(how, None)[:, site], narrow.reduce(how, None)[:, 0]
            number = ~np.isnan(expected)
            assert found.view(np.uint32)[~number].tolist() == expected.view(np.uint32)[~number].tolist()
            assert found[number] == pytest.approx(expected[number], rel=1e-6, abs=1e-40)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 0.01, 3.0], 0.01), ([0.9, 30.0, 0.5], 30.0), ([1.0, 0.0, 99.0], 0.0), ([0.0, math.inf], math.inf)],
)
def test_the_extreme_of_a_gain_is_furthest_from_one_in_ratio(values, expected):
    """A gain of 0.01 stands out more than one of 3."""
    columns = Columns(np.array([0, 1, 2][: len(values)]), np.zeros(len(values)), 8, 1)
    columns.add(np.arange(len(values)), stored(values), np.array([0]))
    assert columns.reduce("extreme", neutral_value(spec("block.gain")))[0, 0] == expected


def test_only_balanced_metrics_have_a_neutral_value():
    """Gains are balanced around 1; a norm or a share stands out by its size."""
    assert neutral_value(spec("block.gain")) == pytest.approx(1.0)
    assert neutral_value(spec("parameter.gradient_norm")) is None
    assert neutral_value(spec("parameter.zero_share")) is None


@given(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(1, 4096))
def test_the_width_gives_at_most_one_column_more_than_asked(first, span, columns):
    """Aligned columns may need one more at the edge, and never a second one."""
    width = column_width(first, first + span, columns)
    assert (first + span) // width - first // width + 1 <= columns + 1
