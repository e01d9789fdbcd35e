"""A loss that rises far above where it began, or loses what it had gained: DIVERGING."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import constant_level, falls_again, fell, none_better, past, supervised
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


_LOST = "learning lost"
_APART = "loss falls as errors rise"


@dataclass(frozen=True, kw_only=True)
class Diverging(Rule):
    """Find runs whose loss lies far above its first values, or whose learning is lost, and does not come back.

    Above: judged on the loss alone, all of the last ``lasting`` losses lie above ``factor`` times the greatest of the
    first ``begun``, and they do not fall.

    What it means depends on what the loss is measured against. Where the loss of the best constant prediction is known, a
    loss of ``worse`` times that is not the data's doing. Where it is not, targets may have grown, as those of a value
    function do: only when steps are large against the weights (``large``) as well, or the loss left its first values by
    ``far``, is it more than a remark. Losses of several optimizers that take turns tell nothing by their size, nor do
    losses that go below 0.

    Apart: the loss falls, and what is known of it as an error of answers rises to ``far_off`` times that of the best
    constant prediction, and as many times what it was.

    Lost: all losses since some step lie above the middle between the first ones and the best that lasted, for half as
    long as it took to get there, they do not fall, and every loss, of known answers to known questions, is
    back at that of the best constant prediction. Harder data leave something of what was learned, or are learned in turn.

    Attributes:
        factor: Least multiple of the greatest of the first losses.
        begun: How many losses count as the first.
        lasting: How many of the last losses must all lie above.
        worse: Least multiple of the best constant's loss.
        large: Least update to weight ratio of a large step.
        far_off: Least multiple of the best constant's loss, and of the first error, at which a falling loss is none.
        far: Multiple of the first losses that no change of the data brings about.
        forgotten: Least share of the best constant's loss at which nothing of what was learned is left.
        deviations: Least gain, in robust standard deviations of the losses around the best ones.
        away: Fewest steps for which a loss is lost.
        patience: Few; the last losses are the patience.
    """

    factor: float = 3.0
    begun: int = 5
    lasting: int = 20
    worse: float = 2.0
    large: float = 1e-2
    far_off: float = 10.0
    far: float = 1e3
    forgotten: float = 0.9
    deviations: float = 6.0
    away: int = 100
    patience: int = 2

    name: ClassVar[str] = "diverging"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "learning_rate",
        "loss.over_constant",
        "loss.known",
        "loss.supervised",
        "update.ratio",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last losses against the first, and against the best."""
        if record.get("optimizer.loss") is not None:
            return ()
        return self._above(history) or self._lost(history) or self._apart(history)

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether what was learned is still lost: one batch that is answered well is no end of it."""
        return issue.cause == _LOST and self._forgot(history) is not None

    def _above(self, history: History) -> tuple[Finding, ...]:
        loss = history.run("loss")
        recent = loss.values[-self.lasting :]
        if loss.count < self.begun + self.lasting or loss.low <= 0 or not loss.last > self.factor * loss.first:
            return ()
        steps, every = loss.whole()
        began = float(every[: self.begun].max())
        now, before = median(recent[self.lasting // 2 :]), median(recent[: self.lasting // 2])
        if not (float(recent.min()) > self.factor * began and now >= 0.8 * before and math.isfinite(now)):
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
                f"{self.lasting} losses is above {number(self.factor)} times the first ones.",
                f"lower the learning rate{lower}; if that does not help, check the sign of each term of the loss, "
                "and look for growing weights: weight_decay must not be negative.",
                since=since,
                follows_from=_CAUSES,
            ),
        )

    def _apart(self, history: History) -> tuple[Finding, ...]:
        """Find losses that fall although the error of the answers in them rises."""
        loss, errors = history.run("loss"), history.at_sites("loss.over_constant")
        if loss.count < self.begun + self.lasting or not loss.last < loss.first:
            return ()
        error, first = none_better(history, self.far_off, self.begun), float(errors.first.max(initial=1.0))
        if error is None or not error > self.far_off * first or not fell(history):
            return ()
        return (
            Finding(
                IssueType.DIVERGING,
                Severity.HIGH,
                ("",),
                error,
                self.far_off,
                f"the loss falls, from {number(loss.first)} to {number(loss.last)}, while the prediction error in "
                f"it rises, to {number(error)} times that of the best constant prediction.",
                "look for a term of the loss with the wrong sign: a term that is subtracted is maximized; a "
                "penalty is added, loss = criterion(outputs, targets) + weight * outputs.pow(2).mean().",
                cause=_APART,
                follows_from=_CAUSES,
                origin=_APART,
            ),
        )

    def _lost(self, history: History) -> tuple[Finding, ...]:
        loss = history.run("loss")
        # Nearly all runs end here.
        if loss.count < self.begun + self.lasting or loss.low < 0 or not 2 * loss.last > loss.first + loss.low:
            return ()
        share = self._forgot(history)
        steps, every = loss.whole()
        if share is None or len(every) < self.begun + self.lasting or not np.isfinite(every).all():
            return ()
        span = self.lasting // 2
        windows = np.lib.stride_tricks.sliding_window_view(every, span)
        levels = np.sort(windows, axis=1)[:, (span - 1) // 2 : span // 2 + 1].mean(axis=1)  # medians
        place, start = int(np.argmin(levels)), min(median(every[:3]), loss.first)
        best = float(levels[place])
        middle, noise = (start + best) / 2, 1.4826 * median(np.abs(windows[place] - best))
        left = int(np.flatnonzero(every <= middle)[-1:].sum()) + 1
        away, since = every[left:], int(steps[min(left, len(steps) - 1)])
        if start - best < max(self.deviations * noise, 0.3 * start) or len(away) < 3:
            return ()
        if steps[-1] - since < max(self.away, since / 2) or falls_again(history, since):
            return ()
        now = median(loss.values[loss.steps >= since][-self.lasting // 2 :])
        return (
            Finding(
                IssueType.DIVERGING,
                Severity.HIGH,
                ("",),
                share,
                self.forgotten,
                f"the loss had fallen from {number(start)} to {number(best)}, and since step {since} it is "
                f"{number(now)}, {number(share)} times that of the best constant prediction: what was learned is "
                "lost.",
                f"check what changed between steps {int(steps[left - 1])} and {since}: the pairing of inputs and "
                f"targets (order, shard, class indices), {self._rate(history, since)}train or eval mode, a loaded "
                "checkpoint; restore the weights from before.",
                since=since,
                cause=_LOST,
                urgent=True,
                follows_from=_CAUSES,
                origin=_LOST,
            ),
        )

    def _forgot(self, history: History) -> float | None:
        """Return the least loss against the best constant, where every one is no better than that; else ``None``."""
        known = history.at_sites("loss.known")
        if not supervised(history) or not bool((known.values[known.present] > 0).all()):
            return None
        level = median(history.run("loss").values[-10:]) / constant_level(history)
        return none_better(history, self.forgotten, 1 if level >= self.forgotten else 2)  # one batch may be an odd one

    def _rate(self, history: History, since: int) -> str:
        """Return what to say of a learning rate that changed while the loss was lost, with a comma."""
        steps, rates = history.run("learning_rate").whole()
        before = rates[steps < since][-1:].tolist()
        if not before or 0.8 * before[0] <= rates[-1] <= 1.25 * before[0]:
            return ""
        return f"the learning rate and its scheduler ({number(before[0])} before, {number(float(rates[-1]))} now), "

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
