"""DIVERGING: a loss that leaves its first values for good, whatever raised it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradflow_export.records.evidence import Evidence
from gradflow_export.records.step_record import Reading, Severity, StepRecord
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
    """Beside a constant answer it is a fault, beside nothing a remark: targets of a value function grow too."""
    (known,) = issues(GROWING, constant=9.0, ratio=1e-3)
    (grown,) = issues(GROWING, constant=0.4, ratio=0.05)
    (unknown,) = issues(GROWING, ratio=1e-3)
    assert [i.severity for i in (known, grown, unknown)] == [Severity.HIGH, Severity.LOW, Severity.LOW]


@pytest.mark.parametrize(
    "losses",
    [
        [*[1.0] * 30, *[80.0] * 8, *[1.0] * 60],
        [1.0 + 0.01 * t for t in range(120)],
        [*[9.0] * 3, *[0.5] * 60, *[8.0] * 60],
        [t - 5.0 for t in range(160)],
        [0.0, *GROWING],
        [*GROWING[:40], *[math.nan] * 60],
    ],
    ids=["comes back", "rises a little", "back where it was", "below zero", "begins at zero", "not finite"],
)
def test_other_courses_are_not_told(losses):
    """A peak, a slow rise, harder data, a loss without a zero, one that began solved, NaN: others tell of these."""
    assert not issues(losses, ratio=0.05)


def below_zero(losses, known):
    """Judge a run whose loss is known as a whole, or in parts, by its losses."""
    judge = Judge([Diverging()], strict=True)
    for step, loss in enumerate(losses, 1):
        facts = (Evidence("loss", "head", step, {"over_constant": 1.5, "known": known}),) if step % 10 == 1 else ()
        judge.check(StepRecord(step, float(step), (Reading.run("loss", loss),), evidence=facts))
    return judge.issues
