"""Which numbers go to W&B: the same layers in every run of a model, none hidden that broke, and few charts."""

import dataclasses
import math

import numpy as np
import pytest

from gradflow_export.errors import ArgumentError
from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, Severity, StepRecord
from gradflow_export.writers.wandb.picks import Picks, few_bins, matches, worst

SITES = tuple(f"net.{number}.weight" for number in range(200))


def picks(metrics=None, top=5, layers=()):
    return Picks(metrics, top, layers)


def norms(values, step=1, metric="parameter.gradient_norm"):
    return StepRecord(step, float(step), (Reading.of(metric, SITES[: len(values)], values),))


def sent(chooser, record):
    """Return the numbers of the layers that are sent."""
    return [int(key.split(".")[-2]) for key in chooser.scalars(record) if not key.startswith("flagged/")]


def test_a_small_model_is_sent_whole():
    """Where there are no more layers than places, all go."""
    assert sent(picks(), norms([1.0] * 5)) == list(range(5))


@pytest.mark.parametrize("count", [6, 7, 50, 200])
def test_layers_are_spread_over_depth_and_stay(count):
    """First, last and between at equal distances, whatever the values are, so that runs can be compared."""
    random = np.random.default_rng(count)
    choices = {
        tuple(sent(chooser, norms(random.lognormal(sigma=5, size=count).tolist(), step)))
        for chooser in (picks(), picks())
        for step in range(1, 51)
    }
    ((first, *_, last),) = choices
    assert (first, last) == (0, count - 1)
    assert len(next(iter(choices))) == 5


def test_gains_begin_at_the_second_block():
    """The first has none."""
    chooser = picks(metrics=("block.gain",), top=3)
    assert sent(chooser, norms([None, *[1.0] * 20], metric="block.gain")) == [1, 11, 20]


def flagged(values):
    return {key: value for key, value in values.items() if key.startswith("flagged/")}


def test_a_layer_that_breaks_is_sent_at_once():
    """NaN is not held back, and the layer stays in a section of its own."""
    chooser = picks()
    values = [float(1 + number % 3) for number in range(200)]
    assert flagged(chooser.scalars(norms(values))) == {}
    values[177] = math.nan
    after = flagged(chooser.scalars(norms(values, 2)))
    values[177] = 2.0
    later = flagged(chooser.scalars(norms(values, 3)))
    key = "flagged/parameter.gradient_norm:net.177.weight"
    assert list(after) == list(later) == [key]
    assert math.isnan(after[key])
    assert later[key] == 2.0


def test_an_issue_flags_its_layer():
    """Under a metric that knows the layer, or a parameter in it; one that has a curve anyway is not shown twice."""
    chooser = picks()
    issues = [
        Issue(IssueType.DEAD, Severity.HIGH, layer, 1, 1.0, 0.5, "Dead.", "Mend.", (layer,), None)
        for layer in ("net.3", "net.0.weight", "nowhere")
    ]
    record = dataclasses.replace(norms([1.0] * 200), issues=tuple(issues))
    assert flagged(chooser.scalars(record)) == {"flagged/parameter.gradient_norm:net.3.weight": 1.0}


def test_no_more_than_six_are_ever_flagged():
    """However many layers break."""
    chooser, seen = picks(), set()
    for step in range(1, 500):
        values = [1.0] * 200
        values[step % 200] = math.inf
        seen.update(flagged(chooser.scalars(norms(values, step))))
    assert len(seen) == 6


def test_the_count_of_nonfinite_gradients_comes_with_the_first():
    """A panel of zeros says nothing."""
    chooser = picks()
    counts = [
        chooser.scalars(StepRecord(step, 1.0, (Reading.run("gradient.nonfinite", count),)))
        for step, count in enumerate((0.0, 0.0, 3.0, 0.0), 1)
    ]
    assert [flagged(values) for values in counts] == [
        {}, {}, {"flagged/gradient.nonfinite": 3.0}, {"flagged/gradient.nonfinite": 0.0},
    ]  # fmt: skip


def test_the_worst_layer_is_known_by_name():
    """Gains by their distance from 1, norms by that from the median; NaN and Inf are worst of all."""
    values = [1.0] * 200
    values[7], values[9] = 1e-9, 1e6
    assert worst(norms(values))[1] == "net.7.weight"
    values[150] = math.inf
    assert worst(norms(values))[1] == "net.150.weight"
    assert worst(norms([3.0, 1.0, 1e-3], metric="block.gain"))[1] == "net.2.weight"
    assert worst(StepRecord(1, 1.0)) is None


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
    assert list(chooser.scalars(other)) == ["parameter.gradient_norm/x", "parameter.gradient_norm/z"]


def test_any_metric_can_be_asked_for():
    """One of the whole model is one curve; an unknown one is answered with the nearest."""
    assert picks(metrics=("gain.min",)).scalars(StepRecord(1, 1.0, (Reading.run("gain.min", 2.0),))) == {
        "gain.min": 2.0
    }
    with pytest.raises(ArgumentError, match=r"did you mean 'block\.gain'"):
        picks(metrics=("block.gian",))


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
    """Of a tensor that is all NaN, how many are NaN is still sent, and that there is no histogram."""
    histogram = Histogram("parameter.gradient", "a", edges, [1] * (len(edges) - 1), 7)
    got = picks().histograms(StepRecord(1, 1.0, (), (histogram,)), dict)
    assert got == {"flagged/parameter.gradient_nonfinite:a": 7, "histogram/first": None}


def test_few_histograms_are_sent_and_always_the_same():
    """Two, and those of layers that the user chose; how many entries were not finite, once there were any."""
    chooser = picks(layers=("y",))
    for names, broken in (("abcyz", 0), ("zcbay", 3)):
        one = [Histogram("parameter.weight", name, [0.0, 1.0], [1], broken) for name in names]
        got = chooser.histograms(StepRecord(1, 1.0, (), tuple(one)), dict)
        drawn = [key for key in got if not key.startswith("flagged/")]
        assert drawn == ["histogram/first", "parameter.weight/y", "histogram/last"]
        assert len(got) - len(drawn) == (3 if broken else 0)
    assert chooser.drawn == {("parameter.weight", "a"): "histogram/first", ("parameter.weight", "z"): "histogram/last"}
