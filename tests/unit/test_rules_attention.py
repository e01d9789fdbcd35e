"""What the rules of attention take for a fault, and what for something that was learned."""

import math

import pytest

from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.attention import (
    AttentionCollapse,
    FixedEntropy,
    HeadRedundancy,
    RankCollapse,
    layer_of,
)
from gradflow_export.rules.bottleneck import TokenBottleneck
from gradflow_export.rules.history import History
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.seed import FixedDiversity

HEADS = ("a.attn.head0", "a.attn.head1", "b.attn.head0", "b.attn.head1")


def judged(rule, readings, losses=None):
    """Judge records made of one function from step to readings, and return the issues."""
    judge = Judge([rule], strict=True)
    for step in range(1, 41):
        loss = 2.0 if losses is None else losses(step)
        judge.check(StepRecord(step, 0.0, (Reading.run("loss", loss), *readings(step))))
    return judge.issues


def entropy(values, sink=0.2):
    return (
        Reading.of("attention.entropy", HEADS, values),
        Reading.of("attention.sink", ("a.attn", "b.attn"), (sink, 0.2)),
        Reading.of("attention.max_logit", ("a.attn", "b.attn"), (80.0, 2.0)),
    )


def falling(step):
    return 2.0 * math.exp(-step / 20)


SHARP, FINE = (0.01, 0.05, 0.9, 0.8), (0.9, 0.8, 0.9, 0.8)


def test_a_layer_of_sharp_heads_is_a_collapse_and_one_sharp_head_is_none():
    """All heads of a layer must have lost their choice."""
    (issue,) = judged(AttentionCollapse(), lambda _: entropy(SHARP))
    assert (issue.layer, issue.severity, issue.step) == ("a.attn", Severity.HIGH, 1)
    assert issue.value == pytest.approx(0.05)
    assert judged(AttentionCollapse(), lambda _: entropy((0.01, 0.4, 0.9, 0.01))) == ()


def test_what_sharpened_while_the_loss_fell_was_learned():
    """The same readings are a fault when the loss stands still, and none when it fell meanwhile."""

    def readings(step):
        return entropy((max(0.9 - 0.05 * step, 0.02), max(0.8 - 0.05 * step, 0.02), 0.9, 0.8))

    assert [i.step for i in judged(AttentionCollapse(), readings)] == [16]
    assert judged(AttentionCollapse(), readings, falling) == ()
    assert [i.step for i in judged(AttentionCollapse(), readings, lambda step: 2.0 + step)] == [16]
    assert judged(AttentionCollapse(), readings, lambda step: -1.0 - step / 20) == ()


def test_sharp_from_the_first_look_was_not_learned():
    """A layer that was never seen to choose is at fault, also while other layers bring the loss down."""
    assert [i.open for i in judged(AttentionCollapse(), lambda _: entropy(SHARP), falling)] == [True]


def test_a_sink_and_a_solved_task_are_no_collapse():
    """Resting on one key, and being sharp because everything is right, are what trained models do."""
    assert judged(AttentionCollapse(), lambda _: entropy(SHARP, sink=0.9)) == ()
    assert judged(AttentionCollapse(), lambda step: entropy(FINE if step < 9 else SHARP), lambda s: 2.0 * 0.5**s) == ()


def test_missing_and_non_finite_heads_are_no_evidence():
    """A head that was not read, or is NaN, does not make its layer collapse."""
    assert judged(AttentionCollapse(), lambda _: entropy((None, math.nan, 0.9, 0.8))) == ()


def test_redundancy_needs_heads_alike_from_the_start_or_without_learning():
    """Equal heads are named; heads that all learned the same are not."""

    def readings(values):
        return lambda step: (Reading.of("attention.diversity", ("a", "b"), values(step)),)

    (issue,) = judged(HeadRedundancy(), readings(lambda _: (1.0, 0.001)))
    assert (issue.layer, issue.issue_type) == ("b", IssueType.HEAD_REDUNDANCY)
    assert judged(HeadRedundancy(), readings(lambda step: (1.0, max(1 - 0.06 * step, 0.001))), falling) == ()
    assert judged(HeadRedundancy(), readings(lambda _: (1.0, None))) == ()


def test_rank_collapse_names_the_block_from_which_it_never_recovers():
    """The last block that was given differing tokens is named, each stack apart; a skip around attention saves it."""
    sites = ("enc.0", "enc.1", "enc.2", "dec.0", "dec.1")

    def readings(before, after):
        return lambda _: (
            Reading.of("block.input_residual", sites, before),
            Reading.of("block.rank_residual", sites, after),
        )

    (issue,) = judged(RankCollapse(), readings((0.9, 0.5, 1e-3, 0.7, 0.6), (0.5, 1e-3, 1e-5, 0.6, 0.5)))
    assert issue.layers == ("enc.1", "enc.2")
    (other,) = judged(RankCollapse(), readings((0.9, 0.5, 0.4, 0.6, 1e-3), (0.5, 0.4, 0.3, 1e-3, 1e-4)))
    assert other.layers == ("dec.0", "dec.1")
    around = readings((0.9, 0.8, 0.8, 0.7, 0.7), (1e-3, 1e-3, 1e-3, 1e-3, 1e-3))
    assert judged(RankCollapse(), around) == ()
    alike_before = readings((0.03, 0.02, 0.02, 0.7, 0.7), (0.02, 0.02, 0.02, 0.6, 0.5))
    assert judged(RankCollapse(), alike_before) == ()
    assert judged(RankCollapse(), readings((None,) * 5, (1e-3,) * 5)) == ()


@pytest.mark.parametrize(
    ("rule", "metric", "sites", "just", "below"),
    [
        (FixedEntropy(threshold=0.5), "attention.entropy", HEADS[:2], (0.6, 0.41), (0.6, 0.39)),
        (FixedDiversity(threshold=0.3), "attention.diversity", ("a",), (0.31,), (0.29,)),
    ],
)
def test_fixed_thresholds_are_literal(rule, metric, sites, just, below):
    """A number that the user gave is compared as it is, layer by layer."""
    assert rule.fixed
    assert judged(rule, lambda _: (Reading.of(metric, sites, just),)) == ()
    (issue,) = judged(rule, lambda _: (Reading.of(metric, sites, below),))
    assert issue.threshold == rule.threshold
    assert issue.layer == (layer_of(sites[0]) or sites[0])


def test_the_history_keeps_the_first_value_of_each_site():
    """However long the run, what was seen first at a site is known, also of sites that came later or as missing."""
    history = History({"attention.diversity"})
    for step in range(1, 100):
        values = [0.5 + step, None if step < 40 else 7.0] + ([3.0 * step] if step > 60 else [])
        history.add(StepRecord(step, 0.0, (Reading.of("attention.diversity", ("a", "b", "c")[: len(values)], values),)))
    assert history.at_sites("attention.diversity").first.tolist() == [1.5, 7.0, 183.0]


SITES = tuple(f"enc.{n}" for n in range(3))
SHARE = {"sharp": AttentionCollapse(), "alike": HeadRedundancy(), "tokens": RankCollapse(), "merged": TokenBottleneck()}


def told(kind, error, sink=0.2):
    """Return readings that are ill by themselves, with a standard error each."""
    residuals = {"tokens": ((0.9, 0.5, 1e-3), (0.5, 1e-3, 1e-5)), "merged": ((0.9, 0.5, 1e-3), (0.5, 0.4, 1e-5))}
    readings = {
        "attention.entropy": (HEADS[:2], (0.01, 0.05)),
        "attention.diversity": (("a.attn",), (0.01,)),
        "attention.sink": (("a.attn",), (sink,)),
        "block.input_residual": (SITES, residuals.get(kind, ((0.9,) * 3,))[0]),
        "block.rank_residual": (SITES, residuals.get(kind, ((), (0.9,) * 3))[1]),
    }
    for name, (sites, values) in readings.items():
        yield Reading.of(name, sites, values)
        yield Reading.of(f"{name}_error", sites, (error,) * len(sites))


@pytest.mark.parametrize("kind", SHARE)
def test_what_few_samples_say_is_reported_only_where_the_others_cannot_differ(kind):
    """Three standard errors that lead out of the range of faults leave nothing to report."""
    assert len(judged(SHARE[kind], lambda _: told(kind, 0.005))) == 1
    assert judged(SHARE[kind], lambda _: told(kind, 0.1)) == ()


@pytest.mark.parametrize("kind", ["sharp", "alike"])
def test_what_may_be_a_sink_is_none_of_a_fault(kind):
    """A key that gets nearly the least share of a sink in a few samples may get it in all."""
    assert len(judged(SHARE[kind], lambda _: told(kind, 0.0, SHARE[kind].sink - 0.02))) == 1
    assert judged(SHARE[kind], lambda _: told(kind, 0.008, SHARE[kind].sink - 0.02)) == ()


def halved(step):
    return 1.0 + 1.0 / step


def test_what_may_have_been_healthy_at_first_can_have_been_learned():
    """Where the first reading may have been healthy, a loss that fell since says that the fault was learned."""

    def readings(step, error):
        yield from told("sharp", 0.0) if step > 1 else ()
        if step == 1:
            yield Reading.of("attention.entropy", HEADS[:2], (0.12, 0.1))
            yield Reading.of("attention.entropy_error", HEADS[:2], (error, error))

    assert len(judged(AttentionCollapse(), lambda step: readings(step, 0.001), halved)) == 1
    assert judged(AttentionCollapse(), lambda step: readings(step, 0.02), halved) == ()


@pytest.mark.parametrize(
    ("rule", "metric", "sites", "below"),
    [
        (FixedEntropy(threshold=0.5), "attention.entropy", HEADS[:2], (0.6, 0.3)),
        (FixedDiversity(threshold=0.3), "attention.diversity", ("a",), (0.2,)),
    ],
)
def test_a_fixed_threshold_is_passed_only_where_the_error_cannot_change_that(rule, metric, sites, below):
    """Estimated values are compared with it at the end of what they may be."""
    for error, count in ((0.01, 1), (0.1, 0)):
        more = Reading.of(f"{metric}_error", sites, (error,) * len(sites))
        assert len(judged(rule, lambda _, more=more: (Reading.of(metric, sites, below), more))) == count
