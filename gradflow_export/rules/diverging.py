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
    """Report runs whose loss rose far above its initial values, or lost what was learned, and does not recover.

    Above: all of the last ``lasting`` losses are above ``factor`` times the largest of the first ``begun``, and
    they do not fall. If the loss of the best constant prediction is known, a loss of ``worse`` times that cannot be
    explained by the data. If it is not known, the targets may have grown, as with a value function: the issue is then
    more than a remark only if the updates are large relative to the weights (``large``), or the loss is ``far`` times
    its initial values. Losses of several optimizers in turn, and losses that go below 0, are not comparable and not
    judged.

    Apart: the loss falls, while the prediction error in it rises to ``far_off`` times that of the best constant
    prediction, and to as many times its initial value. Targets that a model computes, such as those of a teacher, are
    not judged: the loss may not contain their error yet.

    Lost: the level since some step is above the midpoint between the first losses and the best lasting ones, for
    half as long as it took to get there; they do not fall; and every loss whose targets and predictions are known is
    back near that of the best constant prediction. With merely harder data, part of what was learned remains, or the
    new data are learned.

    Attributes:
        factor: Minimum multiple of the largest of the first losses.
        begun: Number of losses that count as the first.
        lasting: Number of last losses that must all be above.
        worse: Minimum multiple of the loss of the best constant prediction.
        large: Minimum update-to-weight ratio of a large update.
        far_off: Minimum multiple of the error of the best constant prediction, and of the first error, while the loss
            falls.
        far: Multiple of the first losses that a change of the data cannot explain.
        forgotten: Minimum fraction of the loss of the best constant prediction at which most that was learned is lost.
        nothing: Minimum fraction at which nothing of it is left, and the severity is HIGH.
        back: Fraction below which it has been learned again.
        deviations: Minimum improvement, in robust standard deviations of the level of the best losses.
        away: Minimum number of steps for which the loss is lost.
        patience: Low, because the rule itself looks at the last losses.
    """

    factor: float = 3.0
    begun: int = 5
    lasting: int = 20
    worse: float = 2.0
    large: float = 1e-2
    far_off: float = 10.0
    far: float = 1e3
    forgotten: float = 0.7
    nothing: float = 0.9
    back: float = 0.5
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
        return issue.cause == _LOST and self._forgot(history, self.back) is not None

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
        if loss.count < self.begun + self.lasting or not loss.last < loss.first or not supervised(history):
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
        share = self._forgot(history, self.forgotten)
        steps, every = loss.whole()
        if share is None or len(every) < self.begun + self.lasting or not np.isfinite(every).all():
            return ()
        span = self.lasting // 2
        windows = np.lib.stride_tricks.sliding_window_view(every, span)
        levels = np.sort(windows, axis=1)[:, (span - 1) // 2 : span // 2 + 1].mean(axis=1)  # medians
        place, start = int(np.argmin(levels)), min(median(every[:3]), loss.first)
        best = float(levels[place])
        middle, noise = (start + best) / 2, 1.4826 * median(np.abs(windows[place] - best))
        last = int(np.flatnonzero(levels <= middle)[-1:].sum())  # a lucky batch later on is no level
        left = last + int(np.flatnonzero(windows[last] <= middle)[-1:].sum()) + 1
        away, since = every[left:], int(steps[min(left, len(steps) - 1)])
        if start - best < max(self.deviations * noise / math.sqrt(span), 0.3 * start) or len(away) < 3:
            return ()
        if steps[-1] - since < max(self.away, since / 2) or falls_again(history, since):
            return ()
        now = median(loss.values[loss.steps >= since][-self.lasting // 2 :])
        return (
            Finding(
                IssueType.DIVERGING,
                Severity.HIGH if share >= self.nothing else Severity.MEDIUM,
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

    def _forgot(self, history: History, least: float) -> float | None:
        """Return the least loss against the best constant, where every one is at ``least`` or above; else ``None``."""
        known = history.at_sites("loss.known")
        if not supervised(history) or not bool((known.values[known.present] > 0).all()):
            return None
        level = median(history.run("loss").values[-10:]) / constant_level(history)
        return none_better(history, least, 1 if level >= least else 2)  # one batch may be an odd one

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
