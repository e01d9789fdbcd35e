"""What may have begun in steps that nobody read is dated so, also where it shows in seldom readings or in two only."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from gradflow_export.checks.evaluation.modes import WrongMode
from gradflow_export.checks.parameters.left_frozen import LeftFrozen
from gradflow_export.checks.parameters.not_training import NotTraining
from gradflow_export.checks.wrong_loss import WrongLoss
from gradflow_export.records.evidence import Evidence, Wiring
from gradflow_export.records.issues import IssueType, Severity
from gradflow_export.records.loss_mistakes import BROADCAST, MAXIMISED, SOFTMAX_BEFORE_CE
from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.rules.base import Finding, Rule
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.progress import Stagnation

SITES = ("a.weight", "b.weight", "c.weight")
CONNECTED = Wiring.TRAINABLE | Wiring.OWNED | Wiring.GRADIENT | Wiring.STEPPED


def told(rule, records):
    """Return since when the only issue has been, and how many steps before were not read."""
    judge = Judge([rule], strict=True)
    for record in records:
        judge.check(record)
    (issue,) = judge.issues
    return issue.step, issue.before


@pytest.mark.parametrize(("steps", "shows", "since", "before"), [
    ((*range(1, 11), 384, 427, 428, 429, 430), 428, 427, 42), ((*range(1, 11), 384, 427, 428, 429, 430), 427, 427, 42),
    (range(1, 40), 22, 20, 0),
])  # fmt: skip
def test_a_loss_with_a_minus_is_wrong_since_it_was_read_below_zero(steps, shows, since, before):
    """It is told after several readings, of which the first showed the loss and not yet the minus."""

    def record(step):
        found = (Evidence("mistake", "", step, {MAXIMISED: 1.0}),) if step >= shows else ()
        return StepRecord(step, float(step), (Reading.run("loss", -0.3 if step >= since else 0.3),), evidence=found)

    assert told(WrongLoss(), map(record, steps)) == (since, before)


@pytest.mark.parametrize(("gone", "since", "before"), [(False, 513, 112), (True, 512, 127)])
def test_a_lost_connection_is_dated_by_the_last_reading_that_had_it(gone, since, before):
    """By that of all connections, or, where gradients are gone with it, by the more frequent one of gradients."""
    wired = {*range(1, 11), 100, 200, 300, 400 * (not gone), 513, 514, 515}

    def record(step):
        whole = [site for site in SITES if step < since or site != "b.weight"]
        states = {site: int(CONNECTED if site in whole else CONNECTED & ~Wiring.OWNED) for site in SITES}
        evidence = tuple(Evidence("connection", site, step, {"state": float(state)}) for site, state in states.items())
        norms = Reading.of(
            "parameter.gradient_norm", *zip(*((s, 1.0) for s in (whole if gone else SITES)), strict=True)
        )
        return StepRecord(
            step, float(step), (Reading.run("loss", 0.5), norms), evidence=evidence if step in wired else ()
        )

    steps = sorted({*wired, 384, 512} - {0})
    assert told(NotTraining(), map(record, steps)) == (since, before)


@pytest.mark.parametrize(("since", "words"), [(1, "ever came back"), (20, "comes back any more")])
@pytest.mark.parametrize("state", [Wiring.CALLED, Wiring.UNCALLED])
def test_what_had_a_gradient_is_not_said_never_to_have_had_one(since, words, state):
    """The graph was cut, or the call left out, while training."""

    def record(step):
        lost = step >= since
        states = {site: CONNECTED if site != "b.weight" or not lost else CONNECTED & ~Wiring.GRADIENT for site in SITES}
        states["b.weight"] |= state if lost else Wiring.CALLED
        evidence = tuple(Evidence("connection", site, step, {"state": float(code)}) for site, code in states.items())
        values = [1.0, None if lost else 1.0, 1.0]
        norms = Reading.of("parameter.gradient_norm", SITES, values)
        return StepRecord(step, float(step), (Reading.run("loss", 0.5), norms), evidence=evidence)

    judge = Judge([NotTraining()], strict=True)
    for step in range(1, 30):
        judge.check(record(step))
    (issue,) = judge.issues
    calls = "never calls" if since == 1 else "no longer calls"
    assert (words if state == Wiring.CALLED else calls) in issue.message
    assert (issue.layer, issue.step) == ("b.weight", since)


def test_rest_may_have_begun_in_all_steps_that_the_last_change_covers():
    """A reading that a parameter has changed is one of all steps since the reading before it."""

    def record(step):
        moved = Reading.of("parameter.changed", SITES, [1.0, float(step < 439), 1.0])
        whole = [
            Reading.of(f"parameter.{what}", SITES, [1.0] * 3)
            for what in ("trainable", "gradient_norm", "learning_rate")
        ]
        return StepRecord(step, float(step), (Reading.run("loss", 0.5), moved, *whole))

    assert told(Stagnation(), map(record, (*range(1, 11), 400, *range(438, 460)))) == (439, 37)


@pytest.mark.parametrize(("apart", "since", "before"), [(1, 203, 0), (16, 208, 15), (64, 256, 63)])
def test_a_gradient_that_is_zero_since_a_reading_may_have_been_so_after_the_one_before(apart, since, before):
    """It is dated by the first reading without it, not by the step after the last one with it."""

    def record(step):
        norms = Reading.of("parameter.gradient_norm", ("a.weight", "a.bias"), [float(step < 203), 1.0])
        whole = [
            Reading.of(f"parameter.{what}", norms.sites, [1.0] * 2)
            for what in ("trainable", "changed", "learning_rate")
        ]
        return StepRecord(step, float(step), (Reading.run("loss", 0.5), norms, *whole))

    assert told(Stagnation(), map(record, range(apart, 203 + 20 * apart, apart))) == (since, before)


@dataclass(frozen=True, kw_only=True)
class Dull(Rule):
    """Finds a rank below 1, for sure from a step on."""

    harms: int = 0
    patience: int = 2

    needs: ClassVar[tuple[str, ...]] = ("block.effective_rank",)

    def check(self, record, history):
        low = record.value("block.effective_rank") < 1
        found = Finding(IssueType.BOTTLENECK, Severity.HIGH, ("",), 0.0, 1.0, "", "", sure=history.seen >= self.harms)
        return (found,) if low else ()


@pytest.mark.parametrize("harms", [0, 550])
@pytest.mark.parametrize(("apart", "begin"), [(1, 203), (7, 203), (50, 337), (50, 350), (64, 450)])
def test_what_is_read_seldom_is_dated_by_its_own_readings_whenever_it_is_sure(apart, begin, harms):
    """The loss, which is read at every step, tells nothing of it; nor does it begin when it does harm."""

    def record(step):
        loss, rank = Reading.run("loss", 0.5), Reading.run("block.effective_rank", float(step < begin))
        return StepRecord(step, float(step), (loss, rank) if step % apart == 0 or step == 1 else (loss,))

    first = -(-begin // apart) * apart
    assert told(Dull(harms=harms), map(record, range(1, 1500))) == (first, apart - 1)
    assert told(Dull(harms=harms), (record(step) for step in range(begin, 1500) if step % apart == 0)) == (first, 0)


def test_what_holds_no_more_before_it_is_sure_is_dated_anew():
    """Only the last time that it began counts."""

    def record(step):
        return StepRecord(step, float(step), (Reading.run("block.effective_rank", float(30 <= step < 60)),))

    assert told(Dull(harms=100), map(record, range(1, 120))) == (60, 0)


@pytest.mark.parametrize(("mistake", "apart"), [(SOFTMAX_BEFORE_CE, 1), (SOFTMAX_BEFORE_CE, 25), (BROADCAST, 40)])
def test_a_wrong_loss_is_dated_by_the_last_look_at_a_loss_without_it(mistake, apart):
    """Where there is no mistake none is recorded, but what else is read of a loss is."""

    def record(step):
        facts = {"loss": {"known": 1.0}, **({"mistake": {mistake: 1.0}} if step >= 300 else {})}
        evidence = tuple(Evidence(kind, "", step, values) for kind, values in facts.items())
        looked = step == 1 or step % apart == 0
        return StepRecord(step, float(step), (Reading.run("loss", 0.5),), evidence=evidence if looked else ())

    first = -(-300 // apart) * apart
    assert told(WrongLoss(), map(record, range(1, 500))) == (first, apart - 1)


@pytest.mark.parametrize("apart", [1, 9])
def test_a_mode_is_dated_by_the_last_step_that_was_recorded(apart):
    """A model in training mode leaves no fact behind."""

    def record(step):
        asleep = (Evidence("mode", "drop", step, {"training_evaluation": 1.0}),) if step >= 203 else ()
        return StepRecord(step, float(step), (Reading.run("loss", 0.5),), evidence=asleep)

    first = -(-203 // apart) * apart
    assert told(WrongMode(), map(record, (1, *range(2 * apart, 400, apart)))) == (first, apart - 1)


def test_a_minus_that_was_always_there_is_dated_by_the_first_step():
    """It is reported once the loss has grown."""

    def record(step):
        facts = {"loss": {"over_constant": 0.1 * step}, "mistake": {MAXIMISED: 1.0}}
        evidence = tuple(Evidence(kind, "head", step, values) for kind, values in facts.items())
        return StepRecord(step, float(step), (Reading.run("loss", -0.1 * step),), evidence=evidence)

    assert told(WrongLoss(), map(record, range(1, 50))) == (1, 0)


def test_weights_frozen_at_zero_are_so_since_they_were_frozen():
    """Their size is read once, later than that, and they are reported later still."""

    def record(step):
        facts = [("connection", s, {"state": float(Wiring.CALLED if s == "b.weight" else CONNECTED)}) for s in SITES]
        facts += [("parameter", "b.weight", {"frozen_size": 0.0})] * (step == 8)
        evidence = tuple(Evidence(kind, site, step, values) for kind, site, values in facts)
        return StepRecord(step, float(step), (Reading.run("loss", 0.5),), evidence=evidence)

    assert told(LeftFrozen(), map(record, range(1, 40))) == (1, 0)
