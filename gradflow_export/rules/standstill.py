"""Runs that get nowhere: weights that orbit, ROTATION, and losses that are the same for every batch, NOT_LEARNING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import OTHERS, fall, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import likely
from gradflow_export.rules.signals import solved, stuck


@dataclass(frozen=True, kw_only=True)
class Rotation(Rule):
    """Report limit cycles: weights that orbit in one plane, move downhill throughout, and do not converge.

    Rotation alone is not reported: momentum, noise and the path into many minima also rotate. But with a single loss, a
    path that returns to its start has gone uphill as much as downhill, so its work is not negative; and a spiral that
    shrinks converges. What remains are limit cycles of several losses, or batches in a cyclic order. A spiral that
    grows threefold within half a window has no center within it and is not detected here; its loss is reported instead.

    Source: Balduzzi et al. 2018, arXiv:1802.05642; Mescheder et al. 2018, arXiv:1801.04406.

    Attributes:
        winding: Minimum number of turns within the window.
        plane: Minimum fraction of the path's variance in one plane.
        growth: Minimum growth of the radius over the window; below it the spiral converges.
        work: Maximum work, where -1 is downhill throughout.
    """

    winding: float = 1.0
    plane: float = 0.8
    growth: float = 0.8
    work: float = -0.5
    patience: int = 2

    needs: ClassVar[tuple[str, ...]] = ("flow.winding",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the path that this record reports."""
        names = ("winding", "plane", "growth", "work")
        least, (turns, plane, growth, _), most = zip(*(likely(record, f"flow.{name}") for name in names), strict=True)
        limits = zip((*least[:3], -most[3]), (self.winding, self.plane, self.growth, -self.work), strict=True)
        if not all(value >= limit for value, limit in limits) or solved(history):
            return ()
        message = (
            f"limit cycle: the weights completed {number(turns)} orbits within the window, {number(100 * plane)} % "
            f"of their path in one plane, and their distance from its center grew {number(growth)}-fold: the "
            "players follow each other instead of converging."
        )
        advice = (
            "use different learning rates for the players (2 to 4 times higher for a discriminator), add a "
            "gradient penalty on real data (R1), average the weights (torch.optim.swa_utils.AveragedModel) or use "
            "an extragradient step; with a single loss, shuffle the batches."
        )
        severity = Severity.HIGH if growth >= 1.0 else Severity.MEDIUM
        return (Finding(IssueType.ROTATION, severity, _players(record), turns, self.winding, message, advice),)


def _players(record: StepRecord) -> tuple[str, ...]:
    """Return where each player begins, the one that moves most first; the whole model when there is only one."""
    known = {site: radius for site, radius in reading_of(record, "flow.radius").as_dict().items() if radius}
    return tuple(sorted(known, key=lambda site: (-known[site], site))) if len(known) > 1 else ("",)


@dataclass(frozen=True, kw_only=True)
class SameLoss(Rule):
    """Report losses that are the same for every batch, about where they began: the data do not count.

    Nothing has to be known of the loss. As long as a model says something of its samples, batches differ in their loss,
    by a few percent even if they are large. At the level of chance, such as ln 2 for pairs that are compared, all
    samples cost the same. Not judged are losses of which targets are known, those of several players, and loops whose
    gradients hardly turn, for their batches may be the same.

    Attributes:
        settle: Number of initial steps without a verdict.
        losses: Number of losses that are compared.
        scatter: Maximum standard deviation of these, as a fraction of their median.
        turns: Maximum median cosine of consecutive gradients.
        sure: Minimum z-score of a loss that falls.
    """

    settle: int = 200
    losses: int = 20
    scatter: float = 0.005
    turns: float = 0.95
    sure: float = 2.5
    patience: int = 2

    late: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", "gradient.cosine", "wiring.game")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last losses."""
        loss, cosines = history.run("loss"), history.run("gradient.cosine").values[-self.losses :]
        if history.seen < self.settle or not stuck(history, self.settle // 2) or len(cosines) < self.losses:
            return ()
        known = len(history.at_sites("loss.over_constant").steps) or history.run("loss.over_constant").count
        if known or record.get("optimizer.loss") is not None or history.run("wiring.game").last > 0:
            return ()
        level, scatter = median(lately := loss.values[-self.losses :]), float(np.std(lately))
        if fall(lately) >= self.sure or scatter > self.scatter * level or median(cosines) > self.turns:
            return ()
        message = (
            f"After {history.seen} steps the loss of every batch is {number(level)}, with a standard deviation of "
            f"{number(100 * scatter / level)} %, and began at {number(loss.first)}: it does not depend on the data."
        )
        advice = (
            "print the outputs for two different samples; if they are equal, check what reaches the model, its weight "
            "decay and clipping, and overfit a single batch; if not, check what the loss compares, and its temperature."
        )
        return (
            Finding(
                IssueType.NOT_LEARNING, Severity.MEDIUM, ("",), scatter / level, self.scatter, message, advice,
                cause="same loss", origin="same loss", follows_from=OTHERS,
            ),
        )  # fmt: skip
