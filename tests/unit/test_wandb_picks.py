"""Which numbers go to W&B: the worst layers first, none hidden that broke, and few charts."""

import math

import numpy as np
import pytest

from gradflow_export.errors import ArgumentError
from gradflow_export.records import Histogram, Reading, StepRecord
from gradflow_export.writers.wandb_picks import PER_SITE, Picks, few_bins, matches

SITES = tuple(f"net.{number}.weight" for number in range(200))


def picks(metrics=PER_SITE, top=8, layers=()):
    return Picks(metrics, top, layers)


def norms(values, step=1, metric="parameter.gradient_norm"):
    return StepRecord(step, float(step), (Reading.of(metric, SITES[: len(values)], values),))


def sent(chooser, record):
    """Return the numbers of the layers that are sent."""
    return [int(key.split(".")[-2]) for key in chooser.scalars(record)]


def test_a_small_model_is_sent_whole():
    """Where there are no more layers than places, all go."""
    assert sent(picks(), norms([1.0] * 8)) == list(range(8))


def test_the_worst_layers_are_sent():
    """Norms far from the median in either direction are worst, NaN and Inf worst of all."""
    values = [1.0] * 200
    values[7], values[9], values[100], values[150] = 1e-9, 1e6, math.nan, math.inf
    assert sent(picks(top=4), norms(values)) == [7, 9, 100, 150]


def test_gains_are_judged_by_their_marks():
    """A gain of 1 is good wherever the other layers are."""
    gains = [3.0] * 20
    gains[4], gains[5] = 1.0, 1e-3
    assert 5 in sent(picks(top=3), norms(gains, metric="block.gain"))
    assert 4 not in sent(picks(top=19), norms(gains, metric="block.gain"))


def test_curves_have_no_gaps():
    """The choice does not follow every step's noise."""
    random, chooser = np.random.default_rng(0), picks()
    choices = {tuple(sent(chooser, norms(random.lognormal(size=200), step))) for step in range(1, 101)}
    assert len(choices) == 1


def test_a_layer_that_breaks_is_sent_at_once():
    """NaN is not held back until the next choice."""
    chooser = picks(top=4)
    values = [float(1 + number % 3) for number in range(200)]
    before = sent(chooser, norms(values))
    values[177] = math.nan
    after = chooser.scalars(norms(values, 2))
    assert 177 not in before
    assert math.isnan(after["parameter.gradient_norm/net.177.weight"])


def test_the_number_of_charts_is_bounded():
    """However the worst layers change, no more than 64 of a metric ever get a chart."""
    chooser, seen = picks(), set()
    for step in range(1, 2000):
        values = [1.0] * 200
        values[step % 200] = math.inf
        seen.update(sent(chooser, norms(values, step)))
    assert len(seen) == 64


def test_chosen_layers_are_always_sent():
    """The user names layers or gives patterns."""
    assert set(sent(picks(top=0, layers=("net.3", "net.19*.weight")), norms([1.0] * 200))) == {3, 19, *range(190, 200)}


@pytest.mark.parametrize(
    ("site", "patterns", "wanted"),
    [
        ("encoder.0.weight", ("encoder",), True),
        ("encoder.0.weight", ("encoder.*",), True),
        ("encoder.0.weight", ("*.weight",), True),
        ("encoder2.weight", ("encoder",), False),
        ("Encoder.weight", ("encoder",), False),
        ("a", (), False),
    ],
)
def test_patterns_name_layers(site, patterns, wanted):
    """A layer's name stands for its parameters."""
    assert matches(site, patterns) is wanted


def test_missing_is_absent_and_zero_is_zero():
    """The four states of a value stay apart."""
    record = norms([None, 0.0, math.nan, -math.inf])
    got = picks().scalars(record)
    assert list(got) == [f"parameter.gradient_norm/net.{number}.weight" for number in (1, 2, 3)]
    assert got["parameter.gradient_norm/net.1.weight"] == 0.0


def test_other_layers_may_come():
    """When the layers change, the choice is made anew."""
    chooser = picks(top=2)
    chooser.scalars(norms([1.0] * 50))
    other = StepRecord(2, 2.0, (Reading.of("parameter.gradient_norm", ("x", "y", "z"), [1.0, 1e9, 1e-9]),))
    assert list(chooser.scalars(other)) == ["parameter.gradient_norm/y", "parameter.gradient_norm/z"]


def test_an_unknown_metric_is_answered_with_the_nearest():
    """A run-level metric has no layers to choose from."""
    with pytest.raises(ArgumentError, match=r"did you mean 'block\.gain'"):
        picks(metrics=("block.gian",))
    with pytest.raises(ArgumentError, match="read per layer, got 'loss'"):
        picks(metrics=("loss",))


def test_histograms_have_at_most_32_bins():
    """Neighbours are joined, no entry is lost, and few bins stay as they are."""
    for bins in (1, 3, 32, 33, 64, 100, 512):
        counts, edges = few_bins(Histogram("parameter.weight", "a", np.linspace(-1, 2, bins + 1), np.arange(bins)))
        assert len(edges) == len(counts) + 1 <= 33
        assert sum(counts) == sum(range(bins))
        assert (edges[0], edges[-1]) == (-1.0, 2.0)
        assert edges == sorted(edges)


@pytest.mark.parametrize("edges", [[0.0, math.nan, 1.0], [0.0, 1.0, math.inf], [0.0, 0.0, 1.0], [0.0]])
def test_edges_that_are_no_scale_leave_the_count(edges):
    """Of a tensor that is all NaN, how many are NaN is still sent."""
    histogram = Histogram("parameter.gradient", "a", edges, [1] * (len(edges) - 1), 7)
    got = picks().histograms(StepRecord(1, 1.0, (), (histogram,)), dict)
    assert got == {"parameter.gradient_nonfinite/a": 7}


def test_few_histograms_are_sent_and_always_the_same():
    """The first layers seen and those the user chose."""
    chooser = picks(top=2, layers=("z",))
    for names in ("abz", "cbaz"):
        one = [Histogram("parameter.weight", name, [0.0, 1.0], [1]) for name in names]
        got = chooser.histograms(StepRecord(1, 1.0, (), tuple(one)), dict)
        assert [key for key in got if "nonfinite" not in key] == [f"parameter.weight/{name}" for name in "abz"]
