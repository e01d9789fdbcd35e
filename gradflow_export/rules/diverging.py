"""A loss that rises far above where it began: DIVERGING."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import past
from gradflow_export.rules.history import History

_CAUSES = (
    IssueType.EXPLODING,
    IssueType.LEARNING_RATE,
    IssueType.NUMERICAL,
    IssueType.STALE_GRAD,
    IssueType.UNSTABLE,
    IssueType.WRONG_LOSS,
    IssueType.BAD_TARGETS,
    IssueType.POLICY_COLLAPSE,
)


@dataclass(frozen=True, kw_only=True)
class Diverging(Rule):
    """Find runs whose loss lies far above its first values and does not come back.

    Judged on the loss alone: all of the last ``lasting`` losses lie above ``factor`` times the greatest of the first
    ``begun``, and they do not fall.

    What it means depends on what the loss is measured against. Where the loss of the best constant answer is known, a
    loss of ``worse`` times that is not the data's doing. Where it is not, targets may have grown, as those of a value
    function do: only when steps are large against the weights (``large``) as well, or the loss left its first values by
    ``far``, is it more than a remark. Losses of several optimizers that take turns tell nothing by their size, nor do
    losses that go below 0.

    Attributes:
        factor: Least multiple of the greatest of the first losses.
        begun: How many losses count as the first.
        lasting: How many of the last losses must all lie above.
        worse: Least multiple of the best constant's loss.
        large: Least update to weight ratio of a large step.
        far: Multiple of the first losses that no change of the data brings about.
        patience: Few; the last losses are the patience.
    """

    factor: float = 3.0
    begun: int = 5
    lasting: int = 20
    worse: float = 2.0
    large: float = 1e-2
    far: float = 1e3
    patience: int = 2
    heal: int = 3

    name: ClassVar[str] = "diverging"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "learning_rate", "loss.over_constant", "loss.known", "update.ratio")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last losses against the first."""
        loss = history.run("loss")
        recent = loss.values[-self.lasting :]
        if loss.count < self.begun + self.lasting or loss.low <= 0 or not loss.last > self.factor * loss.first:
            return ()
        steps, every = loss.whole()
        began = float(every[: self.begun].max())
        now, before = median(recent[self.lasting // 2 :]), median(recent[: self.lasting // 2])
        if not (float(recent.min()) > self.factor * began and now >= 0.8 * before and math.isfinite(now)):
            return ()
        if record.get("optimizer.loss") is not None:
            return ()
        above = np.flatnonzero(every <= self.factor * began)
        since = int(steps[min(int(above[-1]) + 1, len(steps) - 1)])
        rate = history.run("learning_rate")
        lower = f" from {number(rate.last)} to {number(rate.last / 10)}" if rate.count else ""
        return (
            Finding(
                IssueType.DIVERGING,
                self._severity(history, now / began),
                ("",),
                now / began,
                self.factor,
                f"the loss rose from {number(began)} to {number(now)} and stays there: each of the last "
                f"{self.lasting} lies above {number(self.factor)} times the first ones.",
                f"lower the learning rate{lower}; where that does not help, look for a sign in the loss that is the "
                "wrong way round, and for weights that grow: weight_decay must not be negative.",
                since=since,
                follows_from=_CAUSES,
            ),
        )

    def _severity(self, history: History, times: float) -> Severity:
        sites = {*history.at_sites("loss.over_constant").sites, RUN_SITE}
        shares = [past(history, "loss.over_constant", site)[-3:] for site in sites]
        known = [median(values) for values in shares if len(values)]
        if known:
            return Severity.HIGH if min(known) >= self.worse else Severity.LOW
        ratios = history.run("update.ratio").values[-5:]
        if times >= self.far or (len(ratios) > 0 and median(ratios) >= self.large):
            return Severity.MEDIUM
        return Severity.LOW
