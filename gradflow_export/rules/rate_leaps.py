"""Learning rates that rise at once above all earlier ones, and losses with them: LEARNING_RATE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import fall
from gradflow_export.rules.history import History
from gradflow_export.rules.learning_rate import rate_finding, stay
from gradflow_export.rules.signals import AGAIN


@dataclass(frozen=True, kw_only=True)
class RateLeap(Rule):
    """Report learning rates that rise at once to several times all earlier ones, with losses that lie higher since.

    Either the last few losses lie above all recent ones, and are twice as high; or, ``later`` steps and more after the
    rise, the losses since, without the first of many, lie above those just before it, beyond their noise.

    Attributes:
        leap: Minimum fraction of the last learning rate that counts as the same.
        jump: Highest earlier learning rate, as a fraction of the last one.
        later: Number of losses since the rise of which the first third is left out.
        higher: Minimum ratio of their medians.
        sure: Minimum z-score.
    """

    leap: float = 0.5
    jump: float = 0.35
    later: int = 16
    higher: float = 1.25
    sure: float = 3.0

    name: ClassVar[str] = "rate-leap"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "learning_rate")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the losses before and after the last rise."""
        rate, loss = history.run("learning_rate"), history.run("loss")
        if not rate.low <= self.jump * rate.last or loss.low <= 0:  # nearly all runs end here
            return ()
        steps, rates = rate.all()
        lower = np.flatnonzero(rates < self.leap * rate.last)
        start = int(lower[-1]) + 1 if len(lower) else 0
        if not AGAIN <= start <= len(rates) - AGAIN:
            return ()
        since, old = int(steps[start]), float(rates[:start].max())
        before, after = loss.values[loss.steps <= since], loss.values[loss.steps > since]
        if old > self.jump * rate.last or min(len(after), len(before) / 5) < AGAIN:
            return ()
        sudden, late = after[-AGAIN:], after[len(after) // 3 if len(after) >= self.later else 0 :]
        recent = before[-2 * len(late) :]
        level, now = median(recent), median(sudden)
        leapt = float(sudden.min()) > float(before[-2 * self.later :].max()) and now > 2.0 * level
        lasts = loss.steps[-1] >= since + 2 * self.later and median(late) > self.higher * level
        if not (leapt or (lasts and fall(-np.concatenate((recent, late)), len(recent)) >= self.sure)):
            return ()
        message = (
            f"the learning rate rose from {number(old)} to {number(rate.last)} at step {since}, and the losses since "
            f"lie above those before: {number(now)}, after {number(level)}."
        )
        severity = Severity.HIGH if leapt else Severity.MEDIUM
        found = rate_finding(severity, rate.last / old, 1 / self.jump, message, stay(old), "too large", since)
        return (replace(found, urgent=True),)
