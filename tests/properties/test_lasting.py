"""A verdict on the losses over time is the same whichever of the steps are read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow_export.checks.not_learning import NotLearning
from gradflow_export.records.evidence import Evidence
from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.diverging import Diverging
from gradflow_export.rules.judge import Judge

CHANCE, STEPS, DENSE = math.log(10), 800, 100
SPACINGS = (1, 4, 16, 32)
LOSSES = {
    "lost": lambda t: 1.05 * CHANCE,
    "harder": lambda t: 0.4 * CHANCE,
    "learned anew": lambda t: 1.2 * CHANCE * 0.97**t,
    "nothing": lambda t: 0.1,
}


def judged(losses, spacing):
    """Judge the losses that a budget leaves: the first steps, then of ``spacing`` steps one, with facts in between."""
    judge, facts_at = Judge([Diverging()], strict=True), 0
    for step, loss in enumerate(losses, 1):
        if step > DENSE and step % spacing:
            continue
        seen = {"over_constant": loss / CHANCE, "known": 1.0, "supervised": 1.0}
        facts = (Evidence("loss", "head", step, seen),) if step >= facts_at + 25 else ()
        facts_at = step if facts else facts_at
        judge.check(StepRecord(step, float(step), (Reading.run("loss", float(loss)),), evidence=facts))
    return judge.issues


def course(what, change, noise, seed, scale=1.0):
    """Return the losses of a classifier of ten classes that learns, and of what happens from a step on."""
    rng, steps = np.random.default_rng(seed), np.arange(STEPS)
    learned = np.maximum(CHANCE * 0.97**steps, 0.1)
    later = np.array([LOSSES[what](t) for t in np.maximum(steps - change, 0)])
    scatter = np.exp(rng.normal(0.0, noise, STEPS) - noise**2 / 2)
    return scale * np.where(steps < change, learned, later if what != "nothing" else learned) * scatter


SEEDS = {"seed": st.integers(0, 10**6), "change": st.integers(180, 320), "noise": st.floats(0.02, 0.3)}


@settings(max_examples=8, deadline=None)
@given(**SEEDS)
def test_learning_that_is_lost_is_the_same_verdict_at_every_spacing(seed, change, noise):
    """One open issue of MEDIUM or more, with the first step that was read after the change, or nearly."""
    losses = course("lost", change, noise, seed)
    for spacing in SPACINGS:
        (issue,) = judged(losses, spacing)
        assert issue.issue_type is IssueType.DIVERGING
        assert (issue.severity >= Severity.MEDIUM, issue.healed_step) == (True, None)
        assert change - 2 * spacing < issue.step <= change + max(3 * spacing, 5)


@pytest.mark.parametrize("what", ["harder", "learned anew", "nothing"])
@settings(max_examples=8, deadline=None)
@given(**SEEDS)
def test_what_is_no_loss_of_learning_is_none_at_any_spacing(what, seed, change, noise):
    """Fewer readings never make more of harder data, of new data that are learned, or of noise alone."""
    losses = course(what, change, noise, seed)
    assert all(issue.severity <= Severity.LOW for spacing in SPACINGS for issue in judged(losses, spacing))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.02, 0.8), slope=st.floats(0.0, 2e-3))
def test_noise_alone_is_never_more_than_a_remark(seed, noise, slope):
    """A loss that stays where it is, or falls slowly, however it scatters, and however few steps are read."""
    rng, steps = np.random.default_rng(seed), np.arange(STEPS)
    losses = CHANCE * np.exp(rng.normal(0.0, noise, STEPS) - slope * steps)
    for spacing in SPACINGS:
        assert all(issue.severity <= Severity.LOW for issue in judged(losses, spacing) if issue.cause != "never fell")


def of_a_term(share, spacing):
    """Judge one term of a loss whose other terms are unknown, read at the first steps and then at some."""
    judge = Judge([NotLearning()], strict=True)
    for step in range(1, STEPS):
        if step > DENSE and step % spacing:
            continue
        term = {"over_constant": share(step) + 0.01 * math.sin(2.4 * step), "known": 0.0, "sense": 0.2 * math.sin(step)}
        facts = (Evidence("loss", "decoder", step, term), Evidence("target", "decoder", step, {"dependence": 100.0}))
        chosen = facts if step % 5 == 0 or step > DENSE else ()
        judge.check(StepRecord(step, float(step), (Reading.run("loss", 1.0 / step),), evidence=chosen))
    return [issue.severity for issue in judge.issues]


@pytest.mark.parametrize("spacing", [5, 25, 50, 100, 200])
def test_a_term_that_stays_at_a_constants_is_one_at_every_spacing(spacing):
    """One that came down early is none, however few of the later readings there are, and however many early ones."""
    assert of_a_term(lambda step: 1.0, spacing) == [Severity.MEDIUM]
    assert of_a_term(lambda step: max(1.04 - step / 2000, 0.9), spacing) == []
