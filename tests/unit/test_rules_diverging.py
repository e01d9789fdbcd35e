"""DIVERGING: a loss that leaves its first values for good, whatever raised it."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.records.evidence import Evidence
from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.diverging import Diverging
from gradflow_export.rules.judge import Judge


def issues(losses, ratio, constant=None):
    """Judge a run by its losses, the size of its steps, and what a constant would lose, where that is known."""
    judge = Judge([Diverging()], strict=True)
    for step, loss in enumerate(losses, 1):
        facts = () if constant is None else (Evidence("loss", "", step, {"over_constant": constant}),)
        readings = (Reading.run("loss", loss), Reading.run("update.ratio", ratio))
        judge.check(StepRecord(step, float(step), readings, evidence=facts))
    return judge.issues


GROWING = [0.7 * 1.04**t for t in range(160)]


@given(scale=st.floats(1e-6, 1e6), noise=st.lists(st.floats(0.8, 1.25), min_size=160, max_size=160))
def test_a_loss_that_grows_is_told_at_any_scale(scale, noise):
    """The unit of the loss and the scatter of its batches change nothing: there is one issue, and it stays open."""
    (issue,) = issues([scale * loss * factor for loss, factor in zip(GROWING, noise, strict=True)], ratio=0.05)
    assert issue.healed_step is None
    assert issue.severity is Severity.MEDIUM


@given(scale=st.floats(1e-6, 1e6), noise=st.lists(st.floats(0.5, 2.0), min_size=160, max_size=160))
def test_a_loss_that_falls_is_left_in_peace(scale, noise):
    """However it scatters."""
    assert not issues([scale * factor / (1 + 0.05 * t) for t, factor in enumerate(noise)], ratio=0.05)


def test_how_much_it_matters_depends_on_what_the_loss_is_measured_against():
    """Beside a constant prediction it is a fault, beside nothing a remark: targets of a value function grow too."""
    (known,) = issues(GROWING, constant=9.0, ratio=1e-3)
    (grown,) = issues(GROWING, constant=0.4, ratio=0.05)
    (unknown,) = issues(GROWING, ratio=1e-3)
    assert [i.severity for i in (known, grown, unknown)] == [Severity.HIGH, Severity.LOW, Severity.LOW]


@pytest.mark.parametrize(
    "losses",
    [
        [*[1.0] * 30, *[80.0] * 8, *[1.0] * 60],
        [1.0 + 0.01 * t for t in range(120)],
        [t - 5.0 for t in range(160)],
        [0.0, *GROWING],
        [*GROWING[:40], *[math.nan] * 60],
    ],
    ids=["comes back", "rises a little", "below zero", "begins at zero", "not finite"],
)
def test_other_courses_are_not_told(losses):
    """A peak, a slow rise, a loss without a zero, one that began solved, NaN: others tell of these."""
    assert not issues(losses, ratio=0.05)


def test_a_loss_that_is_back_where_it_was_is_a_remark_with_both_levels():
    """Of which it is not known what it measures: harder data may do that."""
    (issue,) = issues([*[9.0] * 3, *[0.5] * 60, *[8.0] * 60], ratio=0.05)
    assert (issue.severity, issue.step, issue.healed_step) == (Severity.LOW, 64, None)
    assert issue.message.startswith("the loss was about 0.5 up to step 63, and since step 64 it has been about 8 (")


def below_zero(losses, known):
    """Judge a run whose loss is known as a whole, or in parts, by its losses."""
    judge = Judge([Diverging()], strict=True)
    for step, loss in enumerate(losses, 1):
        facts = (Evidence("loss", "head", step, {"over_constant": 1.5, "known": known}),) if step % 10 == 1 else ()
        judge.check(StepRecord(step, float(step), (Reading.run("loss", loss),), evidence=facts))
    return judge.issues


@pytest.mark.parametrize(
    ("error", "data", "reported"),
    [
        (lambda t: 1 + t**2, 1.0, True),
        (lambda t: 1 + t**2, 0.0, False),
        (lambda t: 30.0, 1.0, False),
        (lambda t: 9.0, 1.0, False),
    ],
)
def test_a_loss_that_falls_while_the_error_in_it_rises(error, data, reported):
    """A term with the wrong sign does that. Errors that are large from the first, or of a teacher's answers, do not."""
    judge = Judge([Diverging()], strict=True)
    for step in range(1, 100):
        known = {"over_constant": float(error(step)), "supervised": data}
        facts = (Evidence("loss", "head", step, known),) if step % 5 == 1 else ()
        judge.check(StepRecord(step, float(step), (Reading.run("loss", 1.0 - step**2),), evidence=facts))
    assert ["falls" in issue.cause for issue in judge.issues] == [True] * reported


def relapse(after, steps=range(1, 601), known=1.0, supervised=1.0):
    """Judge a classifier of ten classes that learns until step 250, then has the losses of ``after``."""
    judge, chance = Judge([Diverging()], strict=True), math.log(10)
    for step in steps:
        loss = max(chance * 0.98**step, 0.1) if step < 250 else after(step - 250)
        loss *= 1 + 0.05 * math.sin(2.4 * step)
        seen = {"over_constant": loss / chance, "known": known, "supervised": supervised}
        facts = (Evidence("loss", "head", step, seen),) if step % 32 == 0 else ()
        judge.check(StepRecord(step, float(step), (Reading.run("loss", loss),), evidence=facts))
    return judge.issues


SPARSE = (*range(1, 129), 160, 192, 224, 256, 512, 768)


@pytest.mark.parametrize("steps", [range(1, 601), SPARSE], ids=["every step", "a budget"])
def test_learning_that_is_lost_is_told_with_the_step(steps):
    """The loss goes back to that of a constant prediction, and stays: whether each step is read or very few."""
    (issue,) = relapse(lambda t: 2.31 + 4.0 * 0.9**t, steps)
    assert (issue.severity, issue.healed_step, issue.cause) == (Severity.HIGH, None, "learning lost")
    assert 250 <= issue.step <= 256
    assert f"since step {issue.step}" in issue.message


@pytest.mark.parametrize("steps", [range(1, 601), (*range(1, 129), *range(150, 601, 25))], ids=["every step", "few"])
@pytest.mark.parametrize("rate", [0.02, 0.08])
def test_a_rise_that_begins_slowly_is_dated_where_it_began(steps, rate):
    """What changed is looked for where the loss was last at its level, not where it is surely risen."""
    issue = relapse(lambda t: 0.1 * math.exp(rate * t), steps)[0]
    last, since = map(int, re.search(r"between steps (\d+) and (\d+)", issue.advice).groups())
    level, up_to, begun = re.search(r"about (\S+) up to step (\d+), and since step (\d+)", issue.message).groups()
    assert 0.09 < float(level) < 0.15
    assert (last, since) == (int(up_to), int(begun))
    assert abs(issue.step - since) <= 3  # the level before is known a little better when the severity rises
    assert 0.1 * math.exp(rate * (last - 250)) < 0.13
    assert 0.1 * math.exp(rate * (since - 250 - (25 if len(steps) < 600 else 0))) < 0.2


def test_a_loss_that_comes_down_to_a_constants_has_learned_nothing_by_that():
    """Wrong answers become cautious ones; below the level of a constant a fall is one."""
    (issue,) = relapse(lambda t: 2.31 + 1.2 * 0.98**t, range(1, 385))
    assert issue.cause == "learning lost"
    (issue,) = relapse(lambda t: 2.31 * 0.998**t, range(1, 385))
    assert issue.severity is Severity.LOW


@pytest.mark.parametrize(
    ("after", "known", "back"),
    [
        (lambda t: 2.31 * 0.98**t, {}, True),
        (lambda t: 1.4, {}, False),
        (lambda t: 2.31, {"known": 0.0}, False),
        (lambda t: 2.31, {"supervised": 0.0}, False),
    ],
    ids=["learned anew", "harder data", "a part", "no answers"],
)
def test_what_harder_data_may_do_is_a_remark_that_stays_in_the_list(after, known, back):
    """New data are learned, or leave something; what is no answer to a question may rise."""
    (issue,) = relapse(after, **known)
    assert (issue.severity, issue.step, issue.healed_step is not None) == (Severity.LOW, 250, back)


def test_tasks_that_take_turns_are_told_once():
    """The loss was up there for as long before, and came back."""
    assert len(relapse(lambda t: 2.31 * 0.97 ** (t % 100), range(1, 900))) == 1


def test_what_else_changed_is_named():
    """The learning rate, and what is known of inputs and targets."""
    judge = Judge([Diverging()], strict=True)
    for step in range(1, 200):
        new = step > 120
        facts = {"input": {"rms": 30.0 if new else 1.0, "std": 1.0}, "target": {"rms": 1.0}}
        evidence = (
            tuple(Evidence(kind, "first", step, values) for kind, values in facts.items()) if step % 5 == 1 else ()
        )
        readings = (
            Reading.run("loss", 1.0 if new else 0.97**step),
            Reading.run("learning_rate", 0.02 if new else 0.01),
        )
        judge.check(StepRecord(step, float(step), readings, evidence=evidence))
    (issue,) = judge.issues
    assert issue.advice.startswith(
        "check what changed between steps 120 and 121: the learning rate and its scheduler (0.01 before, 0.02 now), the "
        "size of the inputs (1 before, 30 now); also the pairing"
    )


@pytest.mark.parametrize("jump", [1.0, 10.0])
def test_a_rise_that_came_with_the_learning_rate_is_laid_to_it(jump):
    """At several times all earlier rates the losses are higher: that rate is too large."""
    judge = Judge([Diverging()], strict=True)
    for step in range(1, 200):
        new = step > 120
        readings = (
            Reading.run("loss", 1.0 if new else 0.97**step),
            Reading.run("learning_rate", 0.01 * jump if new else 0.01),
        )
        judge.check(StepRecord(step, float(step), readings))
    (issue,) = judge.issues
    assert issue.cause == ("too large" if jump > 1 else "learning lost")
    assert issue.severity == (Severity.HIGH if jump > 1 else Severity.LOW)


@pytest.mark.parametrize(
    ("loss", "facts", "severity"),
    [
        (lambda t: 0.9 ** min(t, 5) + 0.4, {}, None),
        (lambda t: 1.0, {}, Severity.LOW),
        (lambda t: 1.0 + 0.1 * (t > 20), {"over_constant": 1.2, "supervised": 1.0}, Severity.MEDIUM),
        (lambda t: 1.0, {"over_constant": 0.4, "supervised": 1.0}, None),
        (lambda t: -1.0, {}, None),
    ],
    ids=["fell at first", "never fell", "rose", "began trained", "below zero"],
)
@pytest.mark.parametrize("every", [1, 16])
def test_a_loss_that_never_fell_is_an_issue_of_its_own(loss, facts, severity, every):
    """Whatever it measures, once there are hundreds of steps."""
    judge = Judge([Diverging()], strict=True)
    for step in (step for step in range(1, 600) if step < 100 or step % every == 0):
        evidence = (Evidence("loss", "head", step, facts),) if facts else ()
        value = loss(step) * (1 + 0.02 * math.sin(2.4 * step))
        judge.check(StepRecord(step, float(step), (Reading.run("loss", value),), evidence=evidence))
    found = [issue.severity for issue in judge.issues if issue.issue_type is IssueType.NOT_LEARNING]
    assert found == ([] if severity is None else [severity])


def test_learning_that_was_lost_is_over_when_it_is_back():
    """One batch that is answered well is no end of it."""
    (lucky,) = relapse(lambda t: 0.5 if t in {290, 300} else 2.31)
    (back,) = relapse(lambda t: 2.31 if t < 250 else 0.1)
    assert lucky.healed_step is None
    assert back.healed_step is not None
