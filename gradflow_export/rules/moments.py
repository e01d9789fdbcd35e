"""Warnings about the state of the optimizer: OPTIMIZER_STATE."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import off
from gradflow_export.rules.signals import solved


@dataclass(frozen=True, kw_only=True)
class EpsilonDominated(Rule):
    """Report Adam updates whose denominator is dominated by ``eps``, while the loss is not solved.

    Adam then behaves like gradient descent with momentum and the tiny learning rate ``lr / eps``. Causes are a loss
    that is scaled down by a constant, and half precision, where the square of a small gradient is 0. Small gradients at
    the end of a run are normal.

    Source: Kingma and Ba 2015, arXiv:1412.6980, section 2.

    Attributes:
        share: Minimum fraction of entries, in at least half of the parameters.
    """

    share: float = 0.9
    patience: int = 5

    name: ClassVar[str] = "epsilon dominated"
    needs: ClassVar[tuple[str, ...]] = ("parameter.epsilon_share",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the shares of this record."""
        reading = reading_of(record, "parameter.epsilon_share")
        least = reading.values - off(record, reading)
        shares = least[reading.present]
        if not shares.size or history.run("loss").count == 0 or solved(history) or median(shares) < self.share:
            return ()
        layers = only(reading, least >= self.share).sites
        message = (
            f"in {len(layers)} of {shares.size} parameters ({some(layers)}) eps dominates the denominator of Adam: "
            f"the root of the second moment is below eps in {number(100 * median(shares))} % of the entries."
        )
        advice = (
            "scale the loss up if it was scaled down (a mean over too many elements, a factor), use loss scaling "
            "in half precision, or lower eps: torch.optim.AdamW(..., eps=1e-15)."
        )
        return (
            Finding(
                IssueType.OPTIMIZER_STATE,
                Severity.MEDIUM,
                layers,
                median(shares),
                self.share,
                message,
                advice,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class LongMomentum(Rule):
    """Report momentum that averages over more steps than Adam's second moment, or over hundreds of steps.

    Adam divides the mean of the gradients by the root of their mean square. If the mean covers more steps than the
    square, ``beta1^2 >= beta2^(1/2)``, as with swapped betas, old gradients are divided by the size of new ones, and
    the condition of the convergence proof is violated. Momentum of ``1 - 1 / n`` makes an update n times as large and
    changes its direction only over some n steps.

    Source: Kingma and Ba 2015, arXiv:1412.6980, theorem 4.1.

    Attributes:
        steps: Minimum number of steps that is too many.
    """

    steps: float = 200.0
    patience: int = 2

    name: ClassVar[str] = "long momentum"
    needs: ClassVar[tuple[str, ...]] = ("parameter.momentum_steps",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the settings of this record."""
        reading = reading_of(record, "parameter.momentum_steps")
        squares = reading_of(record, "parameter.square_steps").as_dict()
        known = reading.present & np.isfinite(reading.values) & (reading.values >= 1.0)
        first = 1.0 - 1.0 / np.where(known, reading.values, 1.0).astype(np.float64)
        second = np.array([max(squares.get(site) or 1.0, 1.0) for site in reading.sites])
        swapped = known & (second > 1.0) & (first**2 >= np.sqrt(1.0 - 1.0 / np.where(second > 1.0, second, 2.0)))
        ill = only(reading, swapped | (known & (first >= 1.0 - 1.001 / self.steps)))
        if not ill.sites:
            return ()
        worst = float(ill.values.max())
        message = (
            f"momentum of {some(ill.sites)} averages over {number(worst)} steps"
            + (", more than the second moment that it is divided by" if swapped.any() else "")
            + ": updates follow outdated gradients."
        )
        advice = "use betas=(0.9, 0.999) with Adam, and momentum=0.9 with SGD."
        kind = IssueType.OPTIMIZER_STATE if (second > 1.0).any() else IssueType.LEARNING_RATE
        return (Finding(kind, Severity.MEDIUM, ("",), worst, self.steps, message, advice, cause="momentum"),)


@dataclass(frozen=True, kw_only=True)
class NewEachStep(Rule):
    """Report an optimizer that is made anew, or loses its state, before every step.

    Adam then moves each weight by the learning rate along the sign of a single gradient, and RMSprop by more: the
    averages that it divides by begin at 0. A state that was ever kept from one step to the next is none of this.

    Attributes:
        readings: Minimum number of readings.
        patience: One; several readings already require persistence.
    """

    readings: int = 5
    patience: int = 1

    name: ClassVar[str] = "new each step"
    needs: ClassVar[tuple[str, ...]] = ("parameter.state_kept",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.state_kept",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all readings so far."""
        kept = history.at_sites("parameter.state_kept")
        anew = (kept.present.sum(axis=0) >= self.readings) & (kept.high == 0.0)
        if not anew.any():
            return ()
        message = (
            f"the state of the optimizer for {some(tuple(compress(kept.sites, anew)))} begins anew at every step, "
            "reading after reading: nothing is averaged over steps."
        )
        advice = "create the optimizer once, before the loop, and neither clear nor replace optimizer.state in it."
        return (
            Finding(
                IssueType.OPTIMIZER_STATE, Severity.MEDIUM, ("",), 0.0, 1.0, message, advice, since=1,
                cause="new each step", origin="new each step",
            ),
        )  # fmt: skip
