"""The gradient's way through the model in words, frequent bottlenecks, and how a series moved."""

import itertools
import math
from statistics import mean, median, stdev

import numpy as np
import pytest

from gradflow_export.records.statistics import spread_of
from gradflow_export.records.step_record import IssueType, Reading, StepRecord
from gradflow_export.report.flow_pattern import PATTERNS, WINDOW, FlowPatterns, hoyer, quiet
from gradflow_export.report.summary import RunSummary

SITES = ("a.weight", "b.weight", "c.weight", "d.weight")


def record(norms=(1.0, 1.0, 1.0, 1.0), step=1, *, depth=None, zeros=None, l1=None, blocks=None, numel=100.0):
    """Return a record as a sampled step makes it."""
    readings = [
        Reading.of("parameter.gradient_norm", SITES, norms),
        Reading.of("parameter.numel", SITES, [numel] * 4),
    ]
    for metric, values in (("parameter.zero_share", zeros), ("parameter.gradient_l1", l1)):
        if values is not None:
            readings.append(Reading.of(metric, SITES, values))
    if blocks is not None:
        sites = tuple(f"blocks.{index}" for index in range(len(blocks)))
        readings.append(Reading.of("block.gradient_norm", sites, blocks))
    if depth is not None:
        readings.append(Reading.run("gain.depth", depth))
    return StepRecord(step, 0.0, tuple(readings))


def pattern(*records, open_types=()):
    """Return the pattern after some records."""
    flow = FlowPatterns()
    for one in records:
        flow.add(one)
    return flow.pattern(open_types)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "uniform"),
        ({"norms": (1.0, 3.0, 9.0, 99.0)}, "uniform"),
        ({"norms": (1.0, 3.0, 9.0, 101.0)}, "mixed"),
        ({"depth": math.log(0.9e-4)}, "vanishing"),
        ({"depth": math.log(1.1e-4)}, "uniform"),
        ({"depth": math.log(101)}, "exploding"),
        ({"norms": (1.0, math.inf, 1.0, 1.0)}, "exploding"),
        ({"zeros": (0.95, 0.95, 0.0, 0.0)}, "sparse"),
        ({"zeros": (0.95, 0.0, 0.0, 0.0)}, "uniform"),
        ({"zeros": (0.0,) * 4, "l1": (1.5, 1.5, 9.9, 9.9)}, "sparse"),
        ({"zeros": (0.0,) * 4, "l1": (9.0,) * 4}, "uniform"),
        ({"zeros": (1.0,) * 4, "depth": math.log(1e-9)}, "vanishing"),
        ({"blocks": (0.0, 0.0, 1.0)}, "vanishing"),
        ({"blocks": (0.0, 0.0, 0.0)}, "uniform"),
    ],
)
def test_the_pattern_of_one_record(given, expected):
    """Depth gain decides first, then non-finite norms, sparsity, and how far apart the layers are."""
    assert expected in PATTERNS
    assert pattern(record(**given)) == expected


def test_the_pattern_is_what_was_seen_most_and_rules_have_the_last_word():
    """One odd batch changes nothing; an open issue does."""
    seen = [record(step=1), record(step=2, depth=math.log(1e5)), record(step=3)]
    assert pattern(*seen) == "uniform"
    assert pattern(*seen, open_types={IssueType.VANISHING}) == "vanishing"
    assert pattern(*seen, open_types={IssueType.EXPLODING}) == "exploding"
    assert pattern() is None


def test_blocks_that_are_narrow_often_are_named():
    """A block flagged in a fifth of the samples is named with its count, one flagged less is not; old samples go."""
    flow, even, narrow = FlowPatterns(), [1.0] * 6, [1e-3, 1e-3, 1e-3, 1.0, 1.0, 1.0]
    for step in range(30):
        flow.add(record(step=step, blocks=narrow if step % 5 == 0 else even))
    assert flow.as_dict()["frequent_bottlenecks"] == [{"block": "blocks.3", "count": 6, "share": 0.2}]
    for step in range(WINDOW):
        flow.add(record(step=step, blocks=even))
    assert flow.as_dict()["frequent_bottlenecks"] == []
    assert flow.as_dict()["pattern_counts"] == {"uniform": WINDOW}


def test_parameters_with_unusually_small_gradients_are_named():
    """Far below the median by root mean square, and zero is left to other rules."""
    flow = FlowPatterns()
    flow.add(record((1.0, 1.0, 1.0, 1e-3)))
    assert flow.as_dict()["unusually_small"] == [{"parameter": "d.weight", "count": 1, "share": 1.0}]
    assert not quiet(np.log([1.0, 1.0])).any()
    assert quiet(np.log([1.0, 1.1, 0.9, 0.04])).tolist() == [False] * 3 + [True]
    assert not quiet(np.log([1.0, 1e2, 1e4, 1e-2, 1e-4])).any()


def test_hoyer_is_one_for_a_single_entry_and_zero_for_equal_ones():
    """Both ends, and undefined for zeros."""
    values = hoyer(np.array([2.0, 4.0, 0.0]), np.array([2.0, 2.0, 0.0]), np.array([4.0, 4.0, 4.0]))
    assert values[:2].tolist() == [1.0, 0.0]
    assert math.isnan(values[2])


def spread_twin(values):
    """Return the five numbers of a series, by plain loops."""
    rates = [abs(b - a) / abs(a) for a, b in itertools.pairwise(values)]
    slopes = [
        (math.log(values[j]) - math.log(values[i])) / (j - i)
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return stdev(values) ** 2, stdev(values) / mean(values), mean(rates), median(slopes)


def test_spread_equals_the_twin():
    """Variance, CV, change rate and trend of a series; one spike in twenty has the greatest CV there is."""
    values = np.exp(np.random.default_rng(0).normal(size=20))
    got = spread_of(np.arange(20), values)
    assert (got.variance, got.cv, got.change_rate, got.trend) == pytest.approx(spread_twin(values.tolist()))
    spike = spread_of(np.arange(20), np.array([0.0] * 19 + [7.0]))
    assert spike.cv == pytest.approx(math.sqrt(20))
    assert math.isnan(spike.trend)


def test_spread_leaves_out_what_is_not_finite():
    """Too few values say nothing, and NaN does not count."""
    assert spread_of(np.arange(3), np.array([1.0, math.nan, 1.0])).variance == 0.0
    assert math.isnan(spread_of(np.arange(2), np.array([1.0, math.inf])).cv)


def test_the_summary_tells_pattern_and_trends():
    """A gradient that halves at each step has a trend of -ln 2, and the text names the pattern."""
    summary = RunSummary()
    for step in range(1, 25):
        one = record(step=step)
        summary.add(StepRecord(step, 0.0, (*one.readings, Reading.run("gradient.total_norm", 2.0**-step))))
    told = summary.as_dict()
    assert told["flow"]["pattern"] == "uniform"
    assert told["trends"]["gradient.total_norm"]["trend"] == pytest.approx(-math.log(2), rel=1e-6)
    assert told["trends"]["gradient.total_norm"]["count"] == 20
    assert "gradient flow: uniform" in summary.as_text("run")
