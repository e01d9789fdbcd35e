"""Constructed series for every robust rule: where it fires, where it stays silent, when it heals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from gradflow_export.profiles import profile
from gradflow_export.records.evidence import Wiring, evidence_of
from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.attention import RankCollapse
from gradflow_export.rules.bottleneck import Bottleneck, RankBottleneck, TokenBottleneck
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.learning_rate import LearningRate
from gradflow_export.rules.memory import MemoryLeak, MemoryUsage
from gradflow_export.rules.numerical import Numerical
from gradflow_export.rules.progress import Stagnation
from gradflow_export.rules.stability import LossSpike, Unstable, residuals
from gradflow_export.rules.units import Dead, Saturated
from gradflow_export.rules.vanishing_exploding import ExplodingDepth, Vanishing, VanishingParameters
from gradflow_export.rules.weight_decay import WeightDecay


def record(step, **metrics):
    """Build a record; ``a__b=1.0`` is a run metric ``a.b``, ``a__b={site: value}`` one with sites."""
    readings = []
    for key, value in metrics.items():
        name = key.replace("__", ".")
        if isinstance(value, dict):
            readings.append(Reading.of(name, tuple(value), tuple(value.values())))
        else:
            readings.append(Reading.run(name, value))
    return StepRecord(step, float(step), tuple(readings))


def judged(rule, records):
    judge = Judge([rule], strict=True)
    for item in records:
        judge.check(item)
    return judge


def named(values):
    return {f"blocks.{i}": v for i, v in enumerate(values)}


def chain(gain, blocks, scale=1.0):
    """Gradient norms of a chain in which every block passes on ``gain``."""
    return named([scale * gain ** (blocks - 1 - i) for i in range(blocks)])


def repeat(n, **metrics):
    return [record(step, **metrics) for step in range(1, n + 1)]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_vanishing_chain_is_found_at_any_scale_of_the_loss(scale):
    """Ten blocks with a gain of 0.3 lose five decades, whatever the loss is multiplied by."""
    judge = judged(Vanishing(), repeat(3, block__gradient_norm=chain(0.3, 11, scale)))
    (issue,) = judge.issues
    assert (issue.issue_type, issue.layer, issue.step) == (IssueType.VANISHING, "blocks.0", 1)
    assert issue.value == pytest.approx(0.3**10, rel=1e-4)
    assert issue.severity is Severity.HIGH


def test_vanishing_stays_silent_just_above_its_threshold():
    """A depth gain of 1.1e-4 is not yet vanishing, 0.9e-4 is."""
    for total, count in ((1.1e-4, 0), (0.9e-4, 1)):
        judge = judged(Vanishing(), repeat(3, block__gradient_norm=chain(total ** (1 / 8), 9)))
        assert len(judge.issues) == count


def test_one_damping_block_is_a_bottleneck_not_vanishing():
    """A single block that lets 1e-5 through in an otherwise healthy chain has its own name."""
    norms = named([1e-5, 1e-5, 1e-5, 1e-5, 1, 1, 1, 1])
    assert not judged(Vanishing(), repeat(4, block__gradient_norm=norms)).issues
    (issue,) = judged(Bottleneck(), repeat(4, block__gradient_norm=norms)).issues
    assert (issue.issue_type, issue.layers) == (IssueType.BOTTLENECK, ("blocks.4",))


@pytest.mark.parametrize(("sizes", "layers"), [
    ([300, 300, 1, 1, 1, 1], ()), ([300, 300, 20, 1, 1, 1], ("blocks.2",)), ([1, 1, 3e-3, 1, 1, 1], ("blocks.2",)),
    ([1, 1, 1, 1, 1, 1], ("blocks.2",)), ([math.inf, math.inf, 1, 1, 1, 1], ()),
])  # fmt: skip
def test_what_takes_large_values_down_is_no_bottleneck(sizes, layers):
    """A normalization divides the gradient by the scale that enters it; small weights make small values of usual ones.

    Nor is it one where it damps by far more than that.
    """
    norms = named([3e-3, 3e-3, 1, 1, 1, 1])
    issues = judged(Bottleneck(), repeat(4, block__gradient_norm=norms, block__output_rms=named(sizes))).issues
    assert tuple(layer for issue in issues for layer in issue.layers) == layers


def test_vanishing_heals_when_the_chain_recovers():
    """Three healthy readings in a row close it."""
    judge = judged(
        Vanishing(),
        repeat(3, block__gradient_norm=chain(0.3, 11))
        + [record(s, block__gradient_norm=chain(1.0, 11)) for s in (10, 20, 30)],
    )
    assert judge.issues[0].healed_step == 30


@pytest.mark.parametrize("site", ["rnn.weight_ih_l{}", "qwertz.l{}_a"])
def test_vanishing_in_stacked_recurrent_layers_needs_no_blocks(site):
    """The input weights of a stack are compared end to end, by root mean square, in the order that was recorded."""
    sizes = {site.format(i): 64.0 for i in (2, 0, 1, 5, 4, 3)}
    layers = Reading.of("parameter.recurrent_layer", tuple(sizes), (2, 0, 1, 5, 4, 3))

    def found(step):
        norms = {site.format(i): 10.0 ** (step * (i - 6)) for i in range(6)}
        records = repeat(3, parameter__gradient_norm=norms, parameter__numel=sizes)
        records[0] = replace(records[0], evidence=evidence_of(1, {layers.metric: layers.as_dict()}))
        return judged(VanishingParameters(), records).issues

    (issue,) = found(1.0)
    assert issue.layer == site.format(0)
    assert not found(0.5)


def test_one_small_gradient_without_a_trend_is_not_vanishing():
    """Where the depth is unknown, only a line through the weights counts."""
    sizes = {f"m{i}.weight": 64.0 for i in range(8)}
    odd = {name: 1e-6 if i == 0 else 1.0 for i, name in enumerate(sizes)}
    line = {name: 0.1 ** (7 - i) for i, name in enumerate(sizes)}
    assert not judged(VanishingParameters(), repeat(3, parameter__gradient_norm=odd, parameter__numel=sizes)).issues
    assert judged(VanishingParameters(), repeat(3, parameter__gradient_norm=line, parameter__numel=sizes)).issues


@pytest.mark.parametrize(("matrix", "vector"), [("weight", "bias"), ("c", "weight")])
def test_a_trend_is_one_of_matrices_whatever_they_are_called(matrix, vector):
    """Parameters of one dimension belong to no trend; names of attributes say nothing of dimensions."""
    sizes, norms, states = {}, {}, {}
    for i in range(8):
        for own, norm, state in ((matrix, 0.1 ** (7 - i), Wiring.OWNED), (vector, 1.0, Wiring.OWNED | Wiring.VECTOR)):
            name = f"m{i}.{own}"
            sizes[name], norms[name], states[name] = 64.0, norm, state
    records = repeat(3, parameter__gradient_norm=norms, parameter__numel=sizes)
    evidence = evidence_of(1, {"connection.state": states})
    (issue,) = judged(VanishingParameters(), [replace(each, evidence=evidence) for each in records]).issues
    assert issue.layer == f"m0.{matrix}"


@pytest.mark.parametrize(("total", "steps", "count"), [(90.0, 5, 0), (110.0, 2, 0), (110.0, 3, 1), (5000.0, 1, 1)])
def test_exploding_chain_opens_by_patience_or_at_once_when_extreme(total, steps, count):
    """Just above a hundredfold takes three readings; five thousandfold takes one."""
    judge = judged(ExplodingDepth(), repeat(steps, block__gradient_norm=chain(total ** (1 / 8), 9)))
    assert len(judge.issues) == count


@pytest.mark.parametrize(("now", "count"), [(1.0, 1), (0.9, 1), (0.01, 0)])
def test_exploding_forward_signal_is_found(now, count):
    """Outputs that grow two hundredfold while blocks amplify are an explosion; of what was learned, they are scores."""
    spread = named([2.15**i for i in range(8)])
    begun = repeat(6, loss=1.0, block__gradient_norm=chain(1.0, 8))
    later = repeat(6, loss=now, block__gradient_norm=chain(1.5, 8), block__output_spread=spread)
    later = [replace(record, step=record.step + 6) for record in later]
    assert len(judged(ExplodingDepth(), begun + later).issues) == count


@pytest.mark.parametrize(("size", "total", "count"), [(1.0, 150.0, 1), (400.0, 150.0, 0), (400.0, 1e5, 1)])
def test_targets_that_ask_for_large_outputs_ask_for_large_gradients_too(size, total, count):
    """What makes outputs as large as the targets multiplies the gradient on its way back, not more."""
    spread, norms = named([400.0 ** (i / 8) for i in range(9)]), chain(total ** (1 / 8), 9)
    records = repeat(3, block__gradient_norm=norms, block__output_spread=spread)
    evidence = evidence_of(1, {"target.rms": {"loss": size}})
    assert len(judged(ExplodingDepth(), [replace(each, evidence=evidence) for each in records]).issues) == count


def losses(values, norms=None, **more):
    norms = norms or values
    return [
        record(i + 1, loss=v, gradient__total_norm=n, **more)
        for i, (v, n) in enumerate(zip(values, norms, strict=True))
    ]


def test_bottleneck_needs_a_factor_of_twenty_and_robust_distance():
    """Just below twenty is silent; in a noisy chain twenty is not enough."""
    for factor, count in ((19.0, 0), (21.0, 1)):
        norms = named([1.0, 1.0, 1.0, factor, factor, factor])
        assert len(judged(Bottleneck(), repeat(3, block__gradient_norm=norms)).issues) == count
    noisy = named(np.cumprod([1, 8, 0.1, 9, 0.125, 30, 0.2, 7, 0.1]).tolist())
    assert not judged(Bottleneck(), repeat(3, block__gradient_norm=noisy)).issues


def test_block_that_lets_nothing_through_is_a_bottleneck_unless_a_dead_module_explains_it():
    """An exact zero is the strongest outlier; a dead module inside has its own rule."""
    norms = named([0.0, 0.0, 1.0, 1.0, 1.0])
    assert judged(Bottleneck(), repeat(3, block__gradient_norm=norms)).issues[0].layer == "blocks.2"
    dead = {"blocks.2.1": 1.0}
    assert not judged(Bottleneck(), repeat(3, block__gradient_norm=norms, activation__dead_share=dead)).issues


def test_first_rank_drop_is_the_bottleneck():
    """From 20 directions to 4 is a drop to a quarter or less, to 6 it is not; a small rank cannot drop."""
    assert judged(RankBottleneck(), repeat(3, block__effective_rank=named([20, 4, 1, 1]))).issues[0].layers == (
        "blocks.1",
    )
    assert not judged(RankBottleneck(), repeat(3, block__effective_rank=named([20, 6, 5]))).issues
    assert not judged(RankBottleneck(), repeat(3, block__effective_rank=named([3.9, 0.5, 0.5]))).issues


@pytest.mark.parametrize(("share", "severity"), [(None, Severity.HIGH), (0.3, Severity.HIGH), (0.1, Severity.LOW)])
def test_a_rank_drop_is_a_remark_until_the_loss_has_had_its_time(share, severity):
    """A narrow layer may hold all that the task needs: then the loss ends far below a constant's."""
    judge = Judge([RankBottleneck()], strict=True)
    for told in repeat(3, block__effective_rank=named([20, 4, 8, 8])):
        judge.check(told)
    assert [issue.severity for issue in judge.issues] == [Severity.LOW]
    known = {} if share is None else {"loss.over_constant": {"head": share}}
    for step in range(4, 9):
        judge.check(replace(record(step, loss=1.0), evidence=evidence_of(step, known)))
    judge.end()
    assert [issue.severity for issue in judge.issues] == [severity]


def test_what_a_dead_unit_loses_is_no_bottleneck_of_the_next_layer():
    """No gradient arrives at what comes before it."""
    for arrives, count in ((0.0, 0), (1.0, 1)):
        norms = named([arrives, 1.0, 1.0])
        ranks = repeat(3, block__effective_rank=named([20, 1, 1]), block__gradient_norm=norms)
        assert len(judged(RankBottleneck(), ranks).issues) == count


def test_a_rank_drops_only_where_that_of_all_rows_did():
    """From 20 to 4 is a drop; where either may be off by a tenth it may be one from 14 to 5, which is none."""
    for error, found in ((0.01, 1), (0.1, 0)):
        told = repeat(3, block__effective_rank=named([20, 4, 1, 1]), block__effective_rank_error=named([error] * 4))
        assert len(judged(RankBottleneck(), told).issues) == found


def test_a_layer_that_begins_at_zero_gains_its_directions_one_by_one():
    """As the last layer of an adapter does, which has a way around it."""
    gains = {"blocks.0.weight": 0.6, "blocks.1.weight": 0.0}
    ranks = repeat(3, block__effective_rank=named([20, 1, 1]), parameter__initial_gain=gains)
    assert not judged(RankBottleneck(), ranks).issues


def test_a_network_that_narrows_down_to_its_answer_is_no_bottleneck_unless_the_loss_is_stuck():
    """Pooling and few classes go on narrowing; a waist before wider layers is one whatever the loss does."""

    def run(ranks, losses):
        last = [record(s, loss=v, block__effective_rank=named(ranks)) for s, v in enumerate(losses[-3:], 300)]
        return judged(RankBottleneck(), [record(s, loss=v) for s, v in enumerate(losses[:-3], 1)] + last).issues

    falls, stands = [0.99**s for s in range(100)], [1.0] * 100
    for funnel in ([92, 15.4, 4.8], [33, 24, 5.5, 1.7], [81, 10.6, 7.3, 1.7]):
        assert not run(funnel, falls)
        assert run(funnel, stands)
    assert run([26, 22, 2.0, 2.5, 3.1], falls)
    assert run([16, 1.0, 1.2, 1.0], falls)


def test_rank_of_a_solved_classifier_may_collapse():
    """Neural collapse at the end of training is no bottleneck."""
    records = [record(s, loss=1.0 if s == 1 else 0.01) for s in range(1, 8)]
    assert not judged(RankBottleneck(), [*records, record(8, loss=0.01, block__effective_rank=named([20, 2]))]).issues


def test_one_amplifying_block_is_blamed_for_the_whole_growth():
    """When a single block makes the growth, it alone is named, with its own factor."""
    norms = {f"blocks.{i}": 500.0 if i < 3 else 1.0 for i in range(6)}
    (issue,) = judged(ExplodingDepth(), repeat(3, block__gradient_norm=norms)).issues
    assert issue.layers == ("blocks.3",)
    assert issue.value == pytest.approx(500.0)
    assert "blocks.3 alone" in issue.message
    assert "0.002" in issue.advice


@pytest.mark.parametrize(("first", "lowers"), [(2.0, True), (500.0, False)])
def test_gradients_that_began_to_grow_while_training_are_no_fault_of_initial_weights(first, lowers):
    """Smaller steps are the remedy of what steps have made."""
    before = [record(s, learning_rate=5.0, block__gradient_norm=named([first, 1.0, 1.0])) for s in range(1, 4)]
    after = [record(s, learning_rate=5.0, block__gradient_norm=named([500.0, 1.0, 1.0])) for s in range(4, 8)]
    (issue,) = judged(ExplodingDepth(), before + after).issues
    assert ("lower the learning rate from 5 " in issue.advice) is lowers
    assert ("initial weights" in issue.advice) is not lowers


@pytest.mark.parametrize(
    ("broken", "at", "layer"),
    [("ab", 5, ""), ("b", 5, "b"), ("ab", 3, "a")],
    ids=["all after a gap", "some after a gap", "all at once"],
)
def test_weights_that_are_all_nan_after_steps_that_nobody_recorded_name_none(broken, at, layer):
    """By then NaN is everywhere, wherever it began."""
    norms = {site: math.nan if site in broken else 1.0 for site in "ab"}
    begin = [record(s, loss=1.0, gradient__total_norm=1.0) for s in (1, 2)]
    last = record(
        at, loss=1.0, gradient__total_norm=1.0, parameter__weight_norm=norms,
        origin__weights=dict.fromkeys(broken, 0.0),
    )  # fmt: skip
    (issue,) = judged(Numerical(), [*begin, last]).issues
    assert (issue.layer, "not recorded" in issue.message) == (layer, at == 5)


def test_dead_share_threshold_is_inclusive():
    """0.9 is dead, 0.89 is not; missing modules are neither."""
    shares = {"a": 0.89, "b": 0.9, "c": None}
    (issue,) = judged(Dead(), repeat(3, activation__dead_share=shares)).issues
    assert issue.layers == ("b",)


@pytest.mark.parametrize("spacing", [2, 25, 50])
@pytest.mark.parametrize("died", [120, 301, 430])
@pytest.mark.parametrize("left", [0.0, 0.05])
def test_units_are_dated_to_the_readings_between_which_they_died(spacing, died, left):
    """Although readings are pooled, so that the share of dead units rises only many readings later."""
    judge, readings = Judge((Dead(),), strict=True), 0
    for step in range(spacing, 1600, spacing):
        readings += step >= died
        shares = {"a": 1.0 - left if readings >= 7 else 0.03}
        zero = {"a": 0.5 if step < died else 1.0 - left / 2}
        judge.check(record(step, loss=1.0, activation__dead_share=shares, activation__zero_share=zero))
    (issue,) = judge.issues
    assert issue.step - (issue.before or 0) <= died <= issue.step
    assert left or (issue.before or 0) < spacing


@pytest.mark.parametrize(
    ("rule", "metric"), [(Dead(), "activation__dead_share"), (Saturated(), "activation__saturated_share")]
)
def test_what_falls_ill_later_is_told_in_numbers_of_its_own(rule, metric):
    """The issue of a layer that another one preceded says nothing of that one."""
    first, second = {"a": 0.98, "b": 0.0}, {"a": 0.98, "b": 0.96}
    records = [record(s, loss=1.0, **{metric: first if s < 5 else second}) for s in range(1, 9)]
    for issue, layer, share in zip(judged(rule, records).issues, "ab", ("98 %", "96 %"), strict=True):
        assert issue.layers == (layer,)
        assert share in issue.message
        assert f"of {layer} are" in issue.message
        assert layer in issue.advice.split(":")[0].split()


def test_units_that_die_at_once_are_dead_since_then():
    """It takes three steps to know."""
    shares = [record(s, activation__dead_share={"a": 0.0}, activation__zero_share={"a": 0.5}) for s in range(1, 20)]
    died = [record(s, activation__dead_share={"a": 0.1}, activation__zero_share={"a": 1.0}) for s in range(20, 23)]
    (issue,) = judged(Dead(), shares + died).issues
    assert (issue.step, issue.layers, issue.value) == (20, ("a",), 1.0)


def test_saturation_is_silent_on_solved_losses():
    """The last activation may saturate when the answers are right; a hidden one may when the loss has fallen."""
    flat = {"hidden": 0.9, "last": 0.9}
    assert judged(Saturated(), repeat(3, loss=1.0, activation__saturated_share=flat)).issues[0].layers == (
        "hidden",
        "last",
    )
    assert judged(Saturated(), repeat(3, loss=1e-5, activation__saturated_share=flat)).issues[0].layers == ("hidden",)
    fallen = [record(s, loss=1.0 if s == 1 else 0.01, activation__saturated_share=flat) for s in range(6, 16)]
    start = [record(s, loss=1.0 if s == 1 else 0.01) for s in range(1, 6)]
    assert not judged(Saturated(), start + fallen).issues


def test_nan_at_forty_parameters_is_one_issue_naming_the_first_in_backward_order():
    """The last parameter in order of registration is the first of the backward pass."""
    norms = {f"p{i}": math.nan for i in range(40)}
    (issue,) = judged(Numerical(), [record(1, parameter__gradient_norm=norms)]).issues
    assert (issue.layer, len(issue.layers), issue.severity) == ("p39", 40, Severity.CRITICAL)


def test_nan_in_the_forward_pass_names_the_first_block():
    """Forward order comes before backward order."""
    item = record(
        1,
        loss=math.nan,
        block__output_rms={"blocks.0": 1.0, "blocks.1": math.inf, "blocks.2": math.nan},
        parameter__gradient_norm={"head.weight": math.nan},
    )
    (issue,) = judged(Numerical(), [item]).issues
    assert issue.layer == "blocks.1"
    assert math.isnan(issue.value)


def test_nan_in_the_loss_alone_is_found_and_heals_when_it_passes():
    """A single non-finite loss opens at once and closes after three finite steps."""
    values = [1.0, math.inf, 1.0, 1.0, 1.0]
    (issue,) = judged(Numerical(), [record(i + 1, loss=v) for i, v in enumerate(values)]).issues
    assert (issue.step, issue.healed_step) == (2, 5)


def test_infinite_gain_is_no_numerical_issue():
    """A gain is infinite by definition where its denominator vanishes."""
    assert not judged(Numerical(), repeat(3, block__gain={"a": math.inf}, block__log_gain={"a": math.inf})).issues


def test_residuals_of_a_geometric_series_are_zero():
    """A trend leaves nothing, one outlier leaves its height."""
    logs = -0.7 * np.arange(30.0)
    assert np.abs(residuals(logs)).max() < 1e-12
    logs[15] += 3.0
    assert residuals(logs)[11] == pytest.approx(3.0, abs=0.8)


HEADS = {"trunk.0": 1.0, "trunk.1": 2.0, "trunk.2": -1.0, "kind": -1.0, "copy": -1.0}


def test_heads_side_by_side_are_no_bottleneck():
    """A head that gets a thousandth of the other's gradient, or spans one direction, takes nothing from anybody."""
    norms = {"trunk.0": 900.0, "trunk.1": 900.0, "trunk.2": 1000.0, "kind": 1.0, "copy": 1000.0}
    spans = {"trunk.0": 16.0, "trunk.1": 16.0, "trunk.2": 16.0, "kind": 1.0, "copy": 16.0}
    assert judged(Bottleneck(), repeat(4, block__gradient_norm=norms)).issues
    assert not judged(Bottleneck(), repeat(4, block__gradient_norm=norms, block__next=HEADS)).issues
    assert judged(
        RankBottleneck(), repeat(4, block__effective_rank=spans, parameter__gradient_norm={"z.w": 1.0})
    ).issues
    assert not judged(RankBottleneck(), repeat(4, block__effective_rank=spans, block__next=HEADS)).issues


def test_a_loss_on_an_inner_layer_is_no_explosion():
    """A trunk that has a loss of its own gets far more gradient than the small head on it: that is no growth."""
    norms = {"trunk.0": 900.0, "trunk.1": 900.0, "trunk.2": 1000.0, "kind": 1.0}
    assert judged(ExplodingDepth(), repeat(4, block__gradient_norm=norms)).issues
    assert not judged(ExplodingDepth(), repeat(4, block__gradient_norm=norms, block__next=HEADS)).issues


def test_bottleneck_within_one_of_two_networks_is_found():
    """Chains are judged apart: the narrow layer of the second network is named, its output is not."""
    following = {"a.0": 1.0, "a.1": -1.0, "b.0": 3.0, "b.1": 4.0, "b.2": -1.0}
    spans = {"a.0": 8.0, "a.1": 1.0, "b.0": 16.0, "b.1": 1.0, "b.2": 1.0}
    judge = judged(RankBottleneck(), repeat(4, block__effective_rank=spans, block__next=following))
    (issue,) = judge.issues
    assert (issue.issue_type, issue.layers) == (IssueType.BOTTLENECK, ("b.1",))


def test_block_that_pools_tokens_is_a_bottleneck_and_attention_that_merges_them_is_not():
    """Tokens that differ when they leave one block of attention and not when they enter the next were pooled between."""
    given, left = named([0.9, 0.9, 1e-7, 1e-7]), named([0.9, 0.8, 1e-7, 1e-7])
    chained = {"blocks.0": 1.0, "blocks.1": 1.0, "pool": 1.0, "blocks.2": 1.0, "blocks.3": 1.0}
    records = repeat(4, block__input_residual=given, block__rank_residual=left, block__gradient_norm=chained)
    (issue,) = judged(TokenBottleneck(), records).issues
    assert (issue.issue_type, issue.layers) == (IssueType.BOTTLENECK, ("pool",))
    assert not judged(RankCollapse(), records).issues
    merging = repeat(4, block__input_residual=named([0.9, 0.5, 1e-3]), block__rank_residual=named([0.5, 1e-3, 1e-7]))
    assert not judged(TokenBottleneck(), merging).issues
    assert judged(RankCollapse(), merging).issues


def test_leaps_of_solved_batches_are_stable_and_the_same_leaps_of_unsolved_ones_are_not():
    """A margin loss leaves most batches without a gradient, beside which those that still have one leap."""

    def run(share):
        norms = [0.05] * 10 + [0.2 if i % 9 == 0 else 0.002 for i in range(40)]
        losses = [1.0] * 10 + [share if i % 9 == 0 else 0.001 for i in range(40)]
        each = enumerate(zip(norms, losses, strict=True))
        records = [record(i + 1, gradient__total_norm=n, gradient__cosine=0.1, loss=v) for i, (n, v) in each]
        return judged(Unstable(), records).issues

    assert not run(0.05)
    assert run(0.5)


def test_growing_sign_flips_that_do_not_raise_the_loss_are_stable():
    """Players of a game, and training at the edge of stability, swing wider for a while and lose nothing by it."""

    def run(losses):
        records = [
            record(i + 1, gradient__total_norm=1.05**i, gradient__cosine=-0.9, loss=v) for i, v in enumerate(losses)
        ]
        return judged(Unstable(), records).issues

    assert run([1.1**i for i in range(30)])
    assert not run([1.0 + 0.01 * (-1) ** i for i in range(30)])
    assert not run([0.97**i for i in range(30)])


def unstable(norms, cosines=None):
    cosines = cosines or [0.1] * len(norms)
    return judged(
        Unstable(),
        [
            record(i + 1, gradient__total_norm=n, gradient__cosine=c)
            for i, (n, c) in enumerate(zip(norms, cosines, strict=True))
        ],
    ).issues


def test_two_leaps_are_unstable_one_is_not():
    """Every eighth batch a hundredfold gradient is instability; once is an incident."""
    base = [1.0] * 40
    once, often = list(base), list(base)
    once[12] = 100.0
    often[11::8] = [100.0] * len(often[11::8])
    assert not unstable(once)
    (issue,) = unstable(often)
    assert issue.step == 12


def test_gradients_of_single_samples_that_scatter_over_decades_do_not_leap():
    """A classifier that is sure of most samples: ordinary gradients among those next to nothing, whatever the seed."""
    for seed, sure in itertools.product(range(20), (2.0, 6.0, 15.0)):
        margins = np.random.default_rng(seed).normal(scale=sure, size=80)
        later = (1.0 / (1.0 + np.exp(np.abs(margins)))).tolist()
        assert not unstable([1.0] * 10 + later), (seed, sure)


def test_fast_geometric_convergence_is_stable():
    """A norm that halves every step has a coefficient of variation above 3 by trend alone."""
    assert not unstable([0.5**i for i in range(60)])


def test_noise_of_a_solved_problem_does_not_count():
    """Leaps far below the greatest norm of the run are rounding noise."""
    quiet = [1.0] * 10 + [1e-9 * (100.0 if i % 8 == 0 else 1.0) for i in range(60)]
    assert not unstable(quiet)


def test_growing_sign_flips_are_unstable_shrinking_ones_are_not():
    """Above 2 / lambda_max consecutive gradients turn round while they grow."""
    cosines = [-0.9] * 30
    assert unstable([1.05**i for i in range(30)], cosines)
    assert not unstable([0.95**i for i in range(30)], cosines)


def test_gradients_that_merely_take_turns_are_stable():
    """Two batches that pull in opposite directions give a cosine near -1 without any growth."""
    assert not unstable([1.0 + 0.3 * (i % 3) for i in range(60)], [-0.9] * 60)


def test_problem_solved_from_the_start_is_no_stagnation():
    """A tiny loss that scatters by orders of magnitude is what solved samples leave; a scaled one does not scatter."""
    rng = np.random.default_rng(0)
    for scatter, count in ((2.0, 0), (0.05, 1)):
        records = []
        for step in range(1, 20):
            item = updates(step, {"w": 0.0}, {"w": 0.1}, {"w": 1e-9})
            loss = Reading.run("loss", 1e-8 * math.exp(rng.normal(0, scatter)))
            kept = tuple(reading for reading in item.readings if reading.metric != "loss")
            records.append(StepRecord(step, 0.0, (*kept, loss)))
        assert len(judged(Stagnation(), records).issues) == count


def spikes(values):
    return judged(LossSpike(), [record(i + 1, loss=v) for i, v in enumerate(values)]).issues


def test_spike_needs_three_times_the_greatest_recent_loss():
    """Just below three times is silent, just above fires at that step."""
    assert not spikes([1.0] * 10 + [2.95])
    (issue,) = spikes([1.0] * 10 + [3.1, 1.0, 1.0])
    assert (issue.step, issue.healed_step) == (11, 13)


def test_spike_is_judged_against_the_noise_of_the_run():
    """A loss that varies by factors may jump by a factor."""
    rng = np.random.default_rng(0)
    assert not spikes(np.exp(rng.normal(0, 1.0, 200)).tolist())


def test_leaps_that_come_again_and_again_are_of_the_data():
    """After two leaps that were nearly as high the third is no spike; ten times the usual loss always is one."""
    leaps = [1.0, *([0.1] * 12), 0.27, *([0.1] * 12), 0.27]
    assert not spikes([*leaps, *([0.1] * 12), 0.36])
    assert spikes([*leaps[:14], *([0.1] * 12), 0.36])
    assert spikes([*leaps, *([0.1] * 12), 1.1])


def test_spike_of_a_signed_loss_is_judged_by_differences():
    """Losses below zero have no ratio; a jump far beyond their range is still one."""
    rng = np.random.default_rng(1)
    noise = rng.normal(-1, 0.1, 60).tolist()
    assert not spikes(noise)
    assert spikes([*noise, 3.0])


def test_tiny_spike_of_a_solved_loss_is_irrelevant():
    """A jump that stays below a twentieth of the first loss is not worth an alarm."""
    assert not spikes([1.0] + [1e-4] * 20 + [1e-2])


def updates(step, values, rates, grads, weights=None, trainable=None, changed=None):
    names, trained = tuple(values), trainable or dict.fromkeys(values, 1.0)
    moved = {name: float(bool(value)) if trained[name] else None for name, value in values.items()}
    return record(
        step,
        parameter__update_norm=values,
        parameter__changed=changed or moved,
        parameter__weight_norm=weights or dict.fromkeys(names, 1.0),
        parameter__learning_rate=rates,
        parameter__gradient_norm=grads,
        parameter__trainable=trained,
        loss=1.0,
    )


REASONS = (
    ("learning rate 0", {"w": 0.0}, {"w": 0.0}, {"w": 1.0}),
    ("not in an optimizer", {"w": None, "v": 0.1}, {"w": None, "v": 0.1}, {"w": 1.0, "v": 1.0}),
    ("no gradient", {"w": 0.0}, {"w": 0.1}, {"w": None}),
    ("zero gradient", {"w": 0.0}, {"w": 0.1}, {"w": 0.0}),
    ("rounding", {"w": 0.0}, {"w": 0.1}, {"w": 1e-3}),
)


@pytest.mark.parametrize(("reason", "values", "rates", "grads"), REASONS, ids=[r[0] for r in REASONS])
def test_stagnation_names_its_reason(reason, values, rates, grads):
    """Ten executed steps without a changed bit are stagnation, nine are not, and the message says why."""
    assert not judged(Stagnation(), [updates(s, values, rates, grads) for s in range(1, 10)]).issues
    (issue,) = judged(Stagnation(), [updates(s, values, rates, grads) for s in range(1, 11)]).issues
    assert reason in issue.message
    assert (issue.step, issue.layer) == (1, "w")


def test_frozen_parameters_do_not_stagnate():
    """What was frozen on purpose is left alone."""
    frozen = [updates(s, {"w": None}, {"w": None}, {"w": None}, trainable={"w": 0.0}) for s in range(1, 20)]
    assert not judged(Stagnation(), frozen).issues


def test_zero_gradient_by_invariance_is_no_stagnation():
    """A bias before BatchNorm rests while its module learns."""
    values, rates = {"c.weight": 0.1, "c.bias": 0.0}, {"c.weight": 0.1, "c.bias": 0.1}
    for tiny in (0.0, 1e-9):
        grads = {"c.weight": 1.0, "c.bias": tiny}
        assert not judged(Stagnation(), [updates(s, values, rates, grads) for s in range(1, 20)]).issues


@pytest.mark.parametrize("metric", ["activation__zero_share", "activation__saturated_share"])
def test_zero_gradient_behind_a_shut_activation_is_left_to_dead_and_saturation(metric):
    """An activation all of whose outputs are 0 or flat explains it, unless the weights are 0 or it lets some through."""
    values, rates, grads = {"w": 0.0}, {"w": 0.1}, {"w": 0.0}
    for share, issues in ((1.0, 0), (0.95, 1)):
        shut = record(1, **{metric: {"act": share}})
        records = [shut, *(updates(s, values, rates, grads) for s in range(2, 20))]
        assert len(judged(Stagnation(), records).issues) == issues
    blank = [updates(s, values, rates, grads, weights={"w": 0.0}) for s in range(2, 20)]
    assert "zero gradient" in judged(Stagnation(), [record(1, **{metric: {"act": 1.0}}), *blank]).issues[0].message
    off = [record(1, **{metric: {"act": 1.0}}), *(updates(s, values, {"w": 0.0}, grads) for s in range(2, 20))]
    assert "learning rate 0" in judged(Stagnation(), off).issues[0].message


def test_parameters_that_move_between_readings_do_not_stagnate():
    """With alternating optimizers, or an average, a parameter may rest in every step that is read, and still learn."""
    for update in (0.0, None):
        records = [updates(s, {"w": update}, {"w": 0.1}, {"w": 1e-3}, changed={"w": 1.0}) for s in range(20, 400, 20)]
        assert not judged(Stagnation(), records).issues


def test_what_is_not_known_to_rest_is_not_accused():
    """An update of 0 alone, be it of a sample or of one step, says nothing of bits; nor does a reading that is missing."""
    still = {"w": 0.0}, {"w": 0.1}, {"w": 1e-3}
    unknown = [updates(s, *still, changed={"w": None}) for s in range(1, 40)]
    assert not judged(Stagnation(), unknown).issues
    rests = [updates(s, *still) for s in range(1, 9)]
    assert not judged(
        Stagnation(), [*rests, updates(9, *still, changed={"w": None}), *map(still_at, range(10, 18))]
    ).issues


def still_at(step):
    return updates(step, {"w": 0.0}, {"w": 0.1}, {"w": 1e-3})


@pytest.mark.parametrize("name", ["experts", "paths"])
def test_parameters_nothing_was_sent_to_are_told_as_not_chosen_whatever_they_are_called(name):
    """One of like modules that got a gradient before, or whose kind takes turns, matters little; one cut off more."""
    names = [f"{name}.{i}.weight" for i in range(3)]
    values, rates = dict(zip(names, (0.1, 0.1, 0.0), strict=True)), dict.fromkeys(names, 0.1)

    def told(first, others):
        records = [
            updates(s, values, rates, dict(zip(names, (1.0, others(s), first if s == 1 else None), strict=True)))
            for s in range(1, 14)
        ]
        (issue,) = judged(Stagnation(), records).issues
        assert issue.layers == (names[2],)
        return issue.severity, "not chosen" in issue.message

    assert told(1.0, lambda _: 1.0) == (Severity.LOW, True)
    assert told(None, lambda s: 1.0 if s % 2 else None) == (Severity.LOW, True)
    assert told(None, lambda _: 1.0) == (Severity.MEDIUM, False)


@pytest.mark.parametrize(("state", "why"), [
    (Wiring.CALLED, "no gradient"), (Wiring.CALLED | Wiring.ROUTED, "not chosen"), (Wiring.UNCALLED, "not chosen"),
    (Wiring.CALLED | Wiring.UNCALLED, "not chosen"), (Wiring.CALLED | Wiring.GRADIENT, "not in an optimizer"),
])  # fmt: skip
@pytest.mark.parametrize("until", [6, 30])
def test_what_is_called_with_every_batch_is_chosen_though_it_had_a_gradient_before(state, why, until):
    """Its graph is cut since then, or it is not the tensor that the optimizer holds."""
    names, rates = [f"{i}.weight" for i in range(3)], 0.1
    before = Wiring.CALLED | Wiring.GRADIENT | Wiring.OWNED

    def updated(step):
        codes = dict.fromkeys(names, before) | ({names[0]: state} if step > until else {})
        evidence = evidence_of(step, {"connection.state": {site: float(code) for site, code in codes.items()}})
        norms = dict.fromkeys(names, 1.0) | ({names[0]: None} if step > until else {})
        moved = dict.fromkeys(names, 0.1) | ({names[0]: 0.0} if step > until else {})
        return replace(updates(step, moved, dict.fromkeys(names, rates), norms), evidence=evidence)

    (issue,) = judged(Stagnation(), map(updated, range(1, 50))).issues
    assert issue.layers == (names[0],)
    assert f": {why}." in issue.message


def test_what_rests_before_a_flat_activation_is_no_router_s_choice():
    """Layers whose gradients come and go as an activation saturates are no experts: SATURATION reports that."""
    names = ["0.weight", "2.weight", "4.weight"]
    values, rates = dict(zip(names, (0.0, 0.0, 0.1), strict=True)), dict.fromkeys(names, 0.1)
    records = [record(1, activation__saturated_share={"1": 1.0, "3": 1.0})]
    for step in range(2, 20):
        grads = (1.0 if step < 4 else 0.0, 0.0, 1.0)
        records.append(updates(step, values, rates, dict(zip(names, grads, strict=True))))
    assert not judged(Stagnation(), records).issues


def test_stagnation_heals_when_the_parameter_moves():
    """One update closes it."""
    still = [updates(s, {"w": 0.0}, {"w": 0.0}, {"w": 1.0}) for s in range(1, 12)]
    moved = [updates(s, {"w": 0.1}, {"w": 0.1}, {"w": 1.0}) for s in (12,)]
    assert judged(Stagnation(), still + moved).issues[0].healed_step == 12


def test_a_parameter_that_never_moved_has_one_issue_though_one_reading_excuses_its_rest():
    """A bias whose gradient is tiny for a batch, beside that of its weight, rests as before and after."""
    values, rates = {"c.weight": 0.1, "c.bias": 0.0}, {"c.weight": 0.1, "c.bias": 0.1}
    grads = [{"c.weight": 1.0, "c.bias": 1e-9 if step in {15, 22} else 0.1} for step in range(1, 60)]
    records = [updates(step, values, rates, each) for step, each in enumerate(grads, 1)]
    (issue,) = judged(Stagnation(), records).issues
    assert issue.open


def test_memory_usage_compares_with_what_there_is():
    """Ninety per cent of the container is the limit."""
    assert not judged(MemoryUsage(), repeat(5, runtime__rss=899.0, runtime__memory_limit=1000.0)).issues
    assert judged(MemoryUsage(), repeat(5, runtime__rss=901.0, runtime__memory_limit=1000.0)).issues


def memory(values):
    return judged(MemoryLeak(), [record(i + 1, runtime__rss=v) for i, v in enumerate(values)]).issues


def test_steady_rise_is_a_leak_with_its_slope():
    """Four megabytes per step, noise and an outlier notwithstanding."""
    rng = np.random.default_rng(0)
    values = (500 + 4.0 * np.arange(80) + rng.normal(0, 3, 80)).tolist()
    values[50] += 300
    (issue,) = memory(values)
    assert issue.value == pytest.approx(4.0, rel=0.15)


def test_a_small_cache_that_fills_and_what_its_allocator_loses_are_no_leak():
    """Thirty megabytes that fill up by step 30 and creep on a little say nothing; the same rise, steady, is a leak."""
    rng = np.random.default_rng(0)
    cache = [500 + min(1.0 * i, 30.0) + 0.1 * i + noise for i, noise in enumerate(rng.normal(0, 1, 120))]
    assert memory(cache) == ()
    (issue,) = memory([500 + 0.8 * i + noise for i, noise in enumerate(rng.normal(0, 1, 80))])
    assert issue.value == pytest.approx(0.8, rel=0.15)


def test_leak_is_seen_through_readings_that_come_in_stairs():
    """Memory that is read once for several steps still rises."""
    assert memory([500 + 4.0 * (i // 6 * 6) for i in range(60)])


@pytest.mark.parametrize(
    "values",
    [
        [500 + min(20.0 * i, 160.0) for i in range(200)],
        [500 + 0.1 * i for i in range(200)],
        [500 + 100.0 * (i % 10) for i in range(200)],
        [500.0] * 5 + [900.0] * 195,
        [500 + 0.08 * i + 250.0 * (i >= 90) for i in range(120)],
    ],
    ids=["fills-then-plateaus", "too-little", "saw-tooth", "one-allocation", "late-allocation"],
)
def test_memory_that_levels_off_or_comes_back_is_no_leak(values):
    """A buffer that fills, a saw-tooth and one allocation are not leaks."""
    assert not memory(values)


def scaled(step, factor, order):
    rng = np.random.default_rng(step)
    blocks = {f"blocks.{i}": factor * 0.3 ** (8 - i) * (1 + 0.1 * rng.random()) for i in range(9)}
    params = {f"m{i}.weight": factor * 10.0 ** (i - 6) * (1 + rng.random()) for i in order}
    return record(
        step,
        loss=1.0 + rng.random(),
        gradient__total_norm=factor * (100.0 if step % 8 == 3 else 1.0),
        gradient__cosine=0.1,
        block__gradient_norm=blocks,
        parameter__gradient_norm=params,
        parameter__numel=dict.fromkeys(params, 64.0),
    )


@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_verdicts_do_not_depend_on_the_scale_of_the_gradients(factor):
    """Every gradient times 1e8 or 1e-8 gives the same issues."""
    verdicts = []
    for scale in (1.0, factor):
        judge = Judge(profile(), strict=True)
        for step in range(1, 41):
            judge.check(scaled(step, scale, range(6)))
        verdicts.append([(i.issue_type, i.layers, i.step, round(math.log(abs(i.value)), 3)) for i in judge.issues])
    assert verdicts[0]
    assert verdicts[0] == verdicts[1]


def test_verdicts_do_not_depend_on_the_order_of_parameters():
    """Permuting the parameters changes no verdict of the stagnation rule."""
    outcomes = []
    for names in (("a.w", "b.w", "c.w"), ("c.w", "a.w", "b.w")):
        still = {name: 0.0 if name != "b.w" else 0.1 for name in names}
        rates, grads = dict.fromkeys(names, 0.1), dict.fromkeys(names, 1e-3)
        judge = judged(Stagnation(), [updates(s, still, rates, grads) for s in range(1, 15)])
        outcomes.append({(i.issue_type, frozenset(i.layers), i.step) for i in judge.issues})
    assert outcomes[0] == outcomes[1]


def test_a_leap_far_above_the_start_is_a_spike_after_a_steep_fall():
    """Losses that fell by orders of magnitude scatter widely in logarithms, and hide no leap far above all of them."""
    fallen = [2.33, 1.9, 1.2, 0.9, 0.5, 0.2, 0.05, 0.3, 0.02, 0.09, 0.01, 0.2]
    assert not spikes([*fallen, 2.0])
    assert [issue.step for issue in spikes([*fallen, 7.08])] == [13]


@pytest.mark.parametrize(("gain", "rule"), [(0.25, Vanishing()), (4.0, ExplodingDepth())])
def test_the_worst_quarter_of_an_even_chain_is_named(gain, rule):
    """Of a gradient that changes by the same factor at every block, those blocks are named where most of it is done."""
    norms = {f"blocks.{i}": gain ** (20 - i) for i in range(21)}
    (issue,) = judged(rule, repeat(3, block__gradient_norm=norms)).issues
    assert issue.layers == tuple(f"blocks.{i}" for i in range(6))


@pytest.mark.parametrize("place", [{}, {"origin__loss": 1.0}, {"origin__weights": {"a.weight": 0.0}}])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_overflow_after_growth_is_told_as_one(place, scale):
    """Wherever it is seen first and whatever the loss is multiplied by, the rate is named and no log."""
    losses = [scale * loss for loss in (5.9, 4.0, 6e3, 1e9, 2.8e22)]
    records = [record(i, loss=v, learning_rate=1.0) for i, v in enumerate(losses, 1)]
    (issue,) = judged(Numerical(), [*records, record(6, loss=math.inf, **place)]).issues
    assert f"from {4.0 * scale:.3g} to {2.8e22 * scale:.3g} in 3 steps before it overflowed" in issue.advice
    assert "lower the learning rate from 1" in issue.advice
    assert "log" not in issue.advice


@pytest.mark.parametrize(("losses", "place"), [
    ((5.9, 4.0, 3.0), {"origin__loss": 1.0}), ((5.9, 4.0, 40.0), {}), ((5.9, 4.0, 1e9), {"origin__input": 1.0}),
])  # fmt: skip
def test_what_did_not_grow_or_entered_is_no_overflow(losses, place):
    """A loss as it was, or a batch that holds NaN, has another advice."""
    records = [record(i, loss=v) for i, v in enumerate(losses, 1)]
    (issue,) = judged(Numerical(), [*records, record(4, loss=math.nan, **place)]).issues
    assert "overflowed" not in issue.advice


def large_steps(first, later, loss=1.1, rate=30.0):
    """Records of a run whose first steps are far too large, whose later ones are not, and which changes at step 61."""
    ratios, losses = [first, 1e5, 1e9] + [0.5] * 21 + [later] * 136, [1.09] + [9.4] * 23 + [1.1] * 36 + [loss] * 100
    for step, (ratio, now) in enumerate(zip(ratios, losses, strict=True), 1):
        sites = {"parameter__update_ratio": {"a": ratio}, "parameter__initial_gain": {"a": 1.0}}
        yield record(step, loss=now, update__ratio=ratio, learning_rate=30.0 if step <= 60 else rate, **sites)


@pytest.mark.parametrize("first", [0.3, 2.0, 1e8])
def test_the_rate_that_is_named_comes_from_the_first_step_and_is_bounded(first):
    """However far later steps went, it lies between a thousandth and a tenth of what it was."""
    (issue,) = judged(LearningRate(), large_steps(first, 0.5)).issues
    lower = float(issue.advice.split("to about ")[1].split(";")[0])
    assert lower == pytest.approx(30.0 / min(max(first / 1e-2, 10), 1000), rel=0.01)


@pytest.mark.parametrize(("loss", "rate", "healed"), [(1.1, 30.0, False), (0.5, 30.0, True), (1.1, 0.1, True)])
def test_a_rate_too_large_does_not_heal_while_nothing_is_better(loss, rate, healed):
    """Small steps of dead units mend nothing; a lower rate or a lower loss does."""
    issues = judged(LearningRate(), large_steps(2.0, 1e-6, loss, rate)).issues
    (issue,) = (each for each in issues if each.cause == "too large")
    assert issue.open is not healed


def tiny_steps(level, steps=range(1, 181), agree=0.7, rise=0.0):
    """Records of a run of tiny steps that agree, whose loss scatters around a level and falls by ``rise`` a step."""
    noise = np.random.default_rng(0).normal(size=len(steps))
    for step, scatter in zip(steps, noise, strict=True):
        beside = {"gradient__cosine": agree, "gradient__total_norm": 1.0, "update__total_norm": 1e-7 * step}
        loss = level + 0.3 * scatter - rise * step
        yield record(step, loss=loss, update__ratio=5e-7 * step, learning_rate=1e-9 * step, **beside)


def test_a_warm_up_is_counted_in_steps_and_a_loss_may_lie_below_zero():
    """However few of them are recorded, and wherever its zero is, a loss that rests is told, one that falls is not."""
    sparse = (*range(1, 101), *range(104, 181, 4))
    for level, steps in itertools.product((3.0, -1.0), (range(1, 181), sparse)):
        (issue,) = judged(LearningRate(), tiny_steps(level, steps)).issues
        assert issue.cause == "too small"
    assert not judged(LearningRate(), tiny_steps(-1.0, agree=0.1)).issues
    assert not judged(LearningRate(), tiny_steps(-1.0, rise=0.01)).issues


@pytest.mark.parametrize("lowest", [0.3, 0.8])
def test_steps_that_brought_the_loss_far_down_were_not_too_short(lowest):
    """Targets that grow, as those of a value that is estimated by itself, turn a loss that had fallen and its gradients
    one way; a loss that never came down is told."""
    levels = np.interp(np.arange(1, 401), [1, 100, 150, 300, 400], [1.0, lowest, lowest, 0.9, 0.9])
    beside = {"update__ratio": 4e-4, "learning_rate": 1e-3, "gradient__cosine": 0.7, "gradient__total_norm": 1.0}
    records = [record(i, loss=float(level), **beside) for i, level in enumerate(levels, 1)]
    assert bool(judged(LearningRate(), records).issues) == (lowest > 0.5)


def clipped_away(ends):
    """Records of a run whose gradients are clipped to next to nothing from step 31 on, read seldom from step 41 on."""
    for step in (*range(1, 41), *range(44, 201, 4)):
        left = 1e-7 if 30 < step <= ends else 1.0
        ratios = {"update__ratio": 5e-4} if step <= 40 or not step % 8 else {}
        cosines = {"gradient__cosine": 0.0, "gradient__clip_scale": left, "gradient__total_norm": 1.0}
        sizes = {"gradient__norm_before_clip": 1.0, "update__total_norm": 1e-3}  # as an adaptive optimizer makes them
        yield record(step, loss=1.0 - 1e-3 * step, learning_rate=1e-3, **cosines, **ratios, **sizes)


@pytest.mark.parametrize(("ends", "healed"), [(200, None), (120, 128)])
def test_steps_that_were_not_read_heal_no_clipping(ends, healed):
    """Three steps in a row show that clipping leaves next to nothing; then each that is read, until it leaves more."""
    (issue,) = judged(LearningRate(), clipped_away(ends)).issues
    assert (issue.step, issue.healed_step) == (31, healed)
    assert "raise the limit of clipping" in issue.advice


@pytest.mark.parametrize("told", [True, False])
def test_weights_that_shrink_while_a_loss_below_zero_rises(told):
    """A loss without a zero tells by its course; one that falls as weights shrink is none."""
    sign = 1 if told else -1
    first = replace(record(0, loss=-2.0), evidence=evidence_of(0, {"parameter.initial_gain": {"a": 1.0}}))
    records = [
        record(step, loss=sign * 0.01 * step - 2.0, parameter__weight_norm={"a": 0.9 ** min(step, 70)})
        for step in range(1, 80)
    ]
    assert bool(judged(WeightDecay(), [first, *records]).issues) is told


def test_the_batch_to_check_is_that_of_the_first_loss_out_of_range():
    """An update made of a corrupt batch raises the losses of those after it, which are clean."""
    judge = Judge([LossSpike()], strict=True)
    for step, loss in enumerate([*([0.07, 0.06, 0.05] * 10), 1.347, 28.4, 19.8], 1):
        judge.check(StepRecord(step, float(step), (Reading.run("loss", loss),)))
    (issue,) = judge.issues
    assert "check the batch of step 31 for" in issue.advice


def test_of_a_loss_that_rises_no_longer_steps_are_asked_for():
    """Longer steps of the wrong sign would only make it worse."""
    assert not judged(LearningRate(), tiny_steps(3.0, rise=-0.01)).issues
