"""What looks like a sick run and is none: harder data, rare classes, bounces at the edge of stability, adapters."""

from __future__ import annotations

import random

import pytest

from gradflow_export.checks.data_scale import TargetScale
from gradflow_export.checks.reloads import Reloaded
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.evidence import evidence_of
from gradflow_export.records.step_record import Reading, Severity, StepRecord
from gradflow_export.rules.bottleneck import Bottleneck
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.learning_rate import LearningRate
from gradflow_export.rules.stability import LossSpike, Unstable


def issues(rule, at=(), **series):
    """Judge a run; each series is the values of one metric or fact, numbers or mappings from site to value.

    ``at`` are the steps that were recorded, where these are not all.
    """
    judge = Judge([rule], strict=True)
    for index, values in enumerate(zip(*series.values(), strict=True)):
        readings, facts = [], {}
        for key, value in zip(series, values, strict=True):
            name = key.replace("__", ".")
            if name not in CATALOG:
                facts[name] = value
            elif isinstance(value, dict):
                readings.append(Reading.of(name, tuple(value), tuple(value.values())))
            else:
                readings.append(Reading.run(name, value))
        step = at[index] if at else index + 1
        judge.check(StepRecord(step, float(step), tuple(readings), evidence=evidence_of(step, facts)))
    return judge.issues


def test_a_loss_that_the_run_has_seen_before_is_no_spike_that_matters():
    """Harder data after easy ones bring the loss to where it began; a bad batch brings it far above."""
    learned = [2.0 * 0.9**i for i in range(30)]
    (harder,) = issues(LossSpike(), loss=[*learned, 1.8, 1.7, 1.6])
    assert harder.severity is Severity.LOW
    (broken,) = issues(LossSpike(), loss=[*learned, 60.0, 0.1, 0.1])
    assert broken.severity is Severity.HIGH


@pytest.mark.parametrize(("rate", "over"), [(0.98, True), (1.0, False)])
def test_a_new_level_from_which_learning_goes_on_is_no_open_spike(rate, over):
    """A change of the data puts the loss far above its past for good; the spike is over once it falls from there."""
    draw = random.Random(0)
    learned = [2.0 * 0.9**i for i in range(30)]
    (issue,) = issues(LossSpike(), loss=[*learned, *(60.0 * rate**i * draw.uniform(0.9, 1.1) for i in range(60))])
    assert (issue.healed_step is not None) is over


def test_a_spike_that_comes_down_to_a_constant_answer_stays_open():
    """After a step that broke the model the loss falls to that of saying one thing: nothing has come back."""
    draw = random.Random(0)
    losses = [2.0 * 0.9**i for i in range(30)] + [2.0 + 20 * 0.9**i + draw.uniform(0.0, 0.01) for i in range(60)]
    (issue,) = issues(LossSpike(), loss=losses, loss__over_constant=[{"head": loss / 2} for loss in losses])
    assert issue.healed_step is None


@pytest.mark.parametrize(("before", "severity"), [(8, Severity.LOW), (19, Severity.LOW), (20, Severity.HIGH)])
def test_a_loss_of_a_kind_that_may_only_have_been_rare_so_far_is_a_remark(before, severity):
    """The first reward after eight steps without one is no broken batch."""
    (issue,) = issues(LossSpike(), loss=[0.01 + 0.001 * (i % 3) for i in range(before)] + [2.0, 0.01, 0.01])
    assert issue.severity is severity


def test_a_signed_loss_must_leave_its_range_to_matter():
    """A likelihood that falls below 0 may come back to its first values; far above them it has broken."""
    learned = [1.0 - 0.1 * i for i in range(30)]
    (outlier,) = issues(LossSpike(), loss=[*learned, 2.5, -1.9, -1.9])
    assert outlier.severity is Severity.LOW
    (broken,) = issues(LossSpike(), loss=[*learned, 30.0, -1.9, -1.9])
    assert broken.severity is Severity.MEDIUM


def test_next_to_nothing_after_nothing_is_no_spike():
    """A margin loss of solved batches is 0; the first that is not is told of where it compares with the start."""
    assert not issues(LossSpike(), loss=[1.0, 0.5] + [0.0] * 12 + [0.01, 0.0])
    assert issues(LossSpike(), loss=[1.0, 0.5] + [0.0] * 12 + [0.9, 0.0])


@pytest.mark.parametrize("seed", range(40))
def test_whether_a_loss_is_0_or_next_to_it_changes_nothing(seed):
    """A cross-entropy that has nothing left to say is 0 on one processor and 1e-9 on another."""
    draw = random.Random(seed)
    losses = [2.3 * 0.7**t * draw.lognormvariate(0, draw.uniform(0.1, 2.0)) for t in range(60)]
    losses = [0.0 if loss < 1e-3 * draw.random() else loss for loss in losses]
    for at in draw.sample(range(30, 60), 3):
        losses[at] = draw.choice((0.05, 0.2, 0.5, 3.0))
    exact, rounded = (issues(LossSpike(), loss=[max(loss, least) for loss in losses]) for least in (0.0, 1e-9))
    assert [(i.step, i.healed_step, i.severity) for i in exact] == [
        (i.step, i.healed_step, i.severity) for i in rounded
    ]


def test_leaps_to_what_the_run_began_with_are_of_a_rare_class():
    """Gradients as at first come back whenever a batch holds the rare class; greater ones do not."""

    def run(height):
        norms = [1.0] * 10 + [height if i % 9 == 4 else 0.01 for i in range(50)]
        losses = [0.7] * 10 + [0.5 if i % 9 == 4 else 0.02 for i in range(50)]
        return issues(Unstable(), gradient__total_norm=norms, gradient__cosine=[0.1] * 60, loss=losses)

    assert not run(1.0)
    assert run(5.0)
    assert run(20.0)


def test_a_bounce_below_the_first_loss_is_stable_until_it_lasts():
    """Gradients that turn round and grow for a dozen steps are a bounce; steadily for thirty they leave the valley."""

    def run(length):
        grows = [0.1 * 1.1**i for i in range(length)]
        norms, losses = [1.0] * 10 + grows, [5.0] * 10 + [g * g for g in grows]
        return issues(Unstable(), gradient__total_norm=norms, gradient__cosine=[-0.9] * len(norms), loss=losses)

    assert not run(14)
    assert run(30)


def test_a_layer_of_usual_weights_is_not_at_fault_for_what_stands_before_it():
    """A mean between two layers damps the gradient; a layer whose own weights are tiny does so itself."""
    norms = {f"layers.{i}": value for i, value in enumerate([1e-3, 1e-3, 1.0, 1.0])}

    def run(gain, size=1.0):
        firsts = {f"layers.{i}.weight": 1.0 for i in range(4)} | {"layers.2.weight": gain}
        sizes = [dict.fromkeys(firsts, 1.0), dict.fromkeys(firsts, 1.0) | {"layers.2.weight": size}]
        return issues(
            Bottleneck(),
            block__gradient_norm=[norms] * 4,
            parameter__initial_gain=[firsts] * 4,
            parameter__weight_norm=[sizes[0]] + [sizes[1]] * 3,
        )

    assert not run(1.0)
    assert run(0.01)
    assert run(1.0, size=0.01)


def test_a_branch_that_joins_others_is_no_bottleneck():
    """An adapter that begins at 0 is added to what goes past it; alone it would hold everything up."""
    norms = {"down.0": 1e-4, "down.1": 1e-4, "up": 1.0, "head": 1.0, "main": 1.0}

    def run(main):
        order = {"down.0": 1.0, "down.1": 2.0, "up": 3.0, "head": -1.0, "main": main}
        return issues(Bottleneck(), block__gradient_norm=[norms] * 4, block__next=[order] * 4)

    assert not run(3.0)
    assert run(-1.0)


@pytest.mark.parametrize("count", [3, 20, 300])
def test_a_spike_lasts_until_most_of_what_was_gained_is_back(count):
    """However few or many losses follow it."""
    learned = [2.3, 1.8, 1.2, 0.7, 0.4, *[0.1] * 12]
    (lost,) = issues(LossSpike(), loss=[*learned, 6.0, *[2.2] * count])
    (back,) = issues(LossSpike(), loss=[*learned, 6.0, *[0.15] * count])
    assert lost.healed_step is None
    assert back.healed_step is not None


def scaled(reach, over):
    """Judge targets of a size of 1600 by the size of predictions against theirs, and the loss against a constant's."""
    count = len(reach)
    return issues(
        TargetScale(),
        loss=[1e6] * count,
        target__rms=[{"r": 1600.0}] * count,
        target__reach=[{"r": value} for value in reach],
        loss__over_constant=[{"r": value} for value in over],
    )


def test_targets_out_of_scale_are_over_when_they_are_answered_better_than_by_a_constant():
    """That predictions come nearer refutes nothing: they average a tenth of what they should."""
    (nearer,) = scaled([0.01] * 30 + [0.11] * 30, [40.0] * 60)
    (answered,) = scaled([0.01] * 30 + [0.9] * 30, [40.0] * 30 + [0.4] * 30)
    assert nearer.healed_step is None
    assert answered.healed_step is not None


@pytest.mark.parametrize(("last", "told"), [(0.8, True), (0.05, False)])
def test_nothing_that_was_learned_is_lost_where_the_loss_is_next_to_nothing(last, told):
    """Weights that are projected after each step keep little of it once there is nothing left to move towards."""
    losses = [1.0 - (1.0 - last) * min(i / 10, 1.0) + 0.001 * (i * 7 % 5) for i in range(120)]
    found = issues(Reloaded(), loss=losses, wiring__kept=[{"": 1.0}] * 60 + [{"": 0.02}] * 60)
    assert [issue.cause for issue in found] == ["taken back"] * told


def run_out(fall, count=330):
    """Judge a run of which the last readings are at a millionth of the rate; ``fall`` of the loss a step until then."""
    loss = [2.3 - fall * min(step, 210) + 0.02 * (step * 7 % 5 - 2) for step in range(count)]
    return issues(
        LearningRate(),
        loss=loss,
        learning_rate=[0.02 if step < 200 else 2e-8 if step >= 220 else 1e-3 for step in range(count)],
        update__ratio=[1e-3] * count,
    )


def test_a_schedule_that_ran_out_while_the_loss_fell_is_told():
    """Where the loss had long been flat, the rate may go to nothing."""
    (stopped,) = run_out(0.001)
    assert (stopped.cause, stopped.step, stopped.healed_step) == ("decayed", 221, None)
    assert not run_out(0.0)


def test_a_rate_that_falls_on_is_not_said_to_stay():
    """Of a rate that is halved again and again, the date is that of its limit, and the last value that of now."""
    (found,) = issues(
        LearningRate(),
        loss=[2.3 - 0.004 * min(step, 60) + 0.02 * (step * 7 % 5 - 2) for step in range(200)],
        learning_rate=[0.1 * 0.5 ** (step // 3) for step in range(200)],
        update__ratio=[1e-3] * 200,
    )
    assert (found.cause, found.step) == ("decayed", 31)
    rest = int(found.message.split(" steps later")[0].split()[-1])
    assert "from 0.1 to under 0.0001 by step 31; " in found.message
    assert f"{rest} steps later it is {0.1 * 0.5 ** ((30 + rest) // 3):.3g}, " in found.message


SELDOM = (*range(1, 133), *range(144, 193, 16), *range(256, 1100, 128))


@pytest.mark.parametrize("at", [tuple(range(1, 1100)), SELDOM])
@pytest.mark.parametrize("learns", [True, False])
def test_after_a_range_test_it_counts_whether_the_loss_falls(learns, at):
    """The greatest rate of such a test is none to train with; at a rate that is far too small the loss stays."""

    def loss(step):
        trained = max(step - 100, 0)
        level = 1.4 + max(step - 80, 0) if step <= 100 else 0.3 + 1.07 * 0.99 ** (trained if learns else 0.0)
        return level + 0.02 * (step * 7 % 5 - 2)

    found = issues(
        LearningRate(),
        at,
        loss=[loss(step) for step in at],
        learning_rate=[1e-4 * 10 ** (step / 16) if step <= 100 else 0.03 for step in at],
        update__ratio=[1e-3] * len(at),
    )
    assert [issue.cause for issue in found if issue.cause == "decayed"] == ([] if learns else ["decayed"])
