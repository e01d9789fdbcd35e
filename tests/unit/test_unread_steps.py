"""What may have begun in steps that nobody read is dated so, also where it shows in seldom readings or in two only."""

import pytest

from gradflow_export.checks.parameters.not_training import NotTraining
from gradflow_export.checks.wrong_loss import WrongLoss
from gradflow_export.records.evidence import Evidence, Wiring
from gradflow_export.records.loss_mistakes import MAXIMISED
from gradflow_export.records.step_record import Reading, StepRecord
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
