"""A loss that leaves a level it had reached, for longer than ever before, or rises above where it began: DIVERGING."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import (
    GROWN,
    OTHERS,
    Floats,
    constant_level,
    fall,
    falls_again,
    fell,
    growth_of_targets,
    lowest_median,
    none_better,
    past,
    still_falls,
    supervised,
)
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import settled

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
_LOADED = (
    "whether training was resumed with all that was saved (model.load_state_dict(checkpoint['model']), the same of the "
    "optimizer and of the scheduler)"
)
_SLIGHT = 0.03
"""Share of what was learned that losses near 0 may vary by."""
_ABOVE = "above its first values"
_APART = "loss falls as errors rise"
_FLAT = "never fell"
_RATE = "too large"
_WATCHED: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "the learning rate and its scheduler",
        "input.rms": "the size of the inputs",
        "input.std": "the spread of the inputs",
        "target.rms": "the size of the targets",
        "target.uniform_share": "the share of batches with one target",
        "loss.samples": "the number of predictions in a batch",
    }
)
"""What is compared before and after a rise."""


@dataclass(frozen=True, kw_only=True)
class Diverging(Rule):
    """Report losses that leave a level they had reached, or rise far above where they began, and stay there.

    Risen: the loss was about A up to some step and has been about B since, in between the lowest level and the last
    one. B is at least ``times`` A, and takes back ``part`` of what had been gained; a loss that had gained less
    than ``learned`` of its first values must be above ``factor`` times the largest of them. The losses since lie above
    those at A beyond their own noise, for ``lasting`` steps and for longer than they ever were up there before: data
    of several kinds that take turns are regular.

    The rise is a remark (LOW) as long as harder data, a stronger regularization or a changed weight of a term may
    explain it. It is more if it has lasted for ``away`` steps and half as long as it took to get there, does not fall,
    and every loss whose targets and predictions are known is back near that of the best constant prediction
    (``forgotten``): with merely harder data, part of what was learned remains, or the new data are learned. A rise is a
    remark if targets had grown before, as bootstrapped values. One within ``span`` losses of a resumption began there.

    Above ``factor`` times the first losses it is more if it is ``worse`` times that of the best constant prediction,
    which data cannot explain. If that is not known, the targets may have grown, as with a value function, and the
    updates must be large relative to the weights (``large``), or the loss ``far`` times its initial values. Losses of
    several optimizers in turn, of a player of a game, and those that go below 0, are not comparable and not judged. A
    rise that came with a learning rate of several times all earlier ones is LEARNING_RATE.

    Apart: the loss falls, while the prediction error in it rises to ``far_off`` times that of the best constant
    prediction, and to as many times its initial value. Targets that a model computes, such as those of a teacher, are
    not judged: the loss may not contain their error yet.

    Flat: after ``settle`` steps the losses of the later half are where they began, nothing is known to have been
    learned, and they do not fall beyond their noise. This is NOT_LEARNING, whatever the loss measures: a remark,
    because a model may begin trained, or more if targets are data and the loss lies above all of its first values.
    The number of steps between two readings only matters for how soon a rise is seen: levels are medians of readings,
    durations are steps, and fewer readings must lie apart more clearly.

    Attributes:
        span: Number of losses whose median is the level at some step.
        before: Number of losses at the level that was left.
        begun: Number of losses that count as the first.
        lasting: Minimum number of steps since the rise.
        times: Minimum ratio of both levels.
        part: Minimum fraction of what had been gained that is lost.
        learned: Minimum fraction of the first losses that counts as gained.
        factor: Minimum multiple of the largest of the first losses, for a loss that had gained nothing.
        sure: Minimum z-score of the losses since the rise against those before.
        apart: Minimum z-score if each of them lies above each of those before: few losses reach no more.
        worse: Minimum multiple of the loss of the best constant prediction.
        large: Minimum update-to-weight ratio of a large update.
        far_off: Minimum multiple of the error of the best constant prediction and of the first, while the loss falls.
        far: Multiple of the first losses that a change of the data cannot explain.
        forgotten: Minimum fraction of the loss of the best constant prediction at which most that was learned is lost.
        nothing: Minimum fraction at which nothing of it is left, and the severity is HIGH.
        away: Minimum number of steps for which it is lost.
        jump: Maximum fraction of a learning rate that the highest one before it was, for a leap.
        settle: Number of steps without a verdict on losses that are where they began.
        level: Fraction of the first losses below which a loss has fallen.
        patience: Low, because the rule itself looks at the last losses.
    """

    span: int = 5
    before: int = 60
    begun: int = 5
    lasting: int = 20
    times: float = 1.5
    part: float = 0.2
    learned: float = 0.3
    factor: float = 3.0
    sure: float = 4.0
    apart: float = 2.5
    worse: float = 2.0
    large: float = 1e-2
    far_off: float = 10.0
    far: float = 1e3
    forgotten: float = 0.7
    nothing: float = 0.9
    away: int = 100
    jump: float = 0.35
    settle: int = 250
    level: float = 0.97
    patience: int = 2

    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "loss.over_constant",
        "loss.known",
        "loss.supervised",
        "update.ratio",
        "wiring.game",
        *_WATCHED,
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last losses against the lowest and the first."""
        if record.get("optimizer.loss") is not None or history.run("wiring.game").last > 0:
            return ()
        return self._risen(history) or self._apart(history) or self._flat(record, history)

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether the loss is still nearer to its new level: one batch that is answered well is no end of it."""
        recent = history.run("loss").values[-2 * self.span :]
        return issue.cause != _APART and not median(recent) <= issue.threshold

    def _risen(self, history: History) -> tuple[Finding, ...]:
        loss, most = history.run("loss"), self.span // 2 + 1  # their median is above what most of them are above
        if loss.count < self.begun + self.lasting or not (
            0 <= self.times * loss.low < loss.values[-most:].min() < math.inf
        ):
            return ()
        steps, every = loss.all()
        every = np.fmin(np.abs(every), loss.high)  # one that is not finite counts as the highest
        windows = every[np.arange(len(every) - self.span + 1)[:, None] + np.arange(self.span)]
        windows.sort(axis=1)
        levels = windows[:, self.span // 2]
        best, now = float(levels.min()), float(levels[-1])
        if not now > self.times * best:  # nearly all records end here
            return ()
        start, began = min(median(every[:3]), loss.first), float(every[: self.begun].max())
        gained, line = start - best, max(math.sqrt(best * now), best + self.part * (start - best) / 2)
        low = np.flatnonzero(levels <= line)
        left = int(low[-1]) + int(np.flatnonzero(every[low[-1] :][: self.span] <= line)[-1]) + 1
        resumed = int(np.searchsorted(steps, history.begun, side="right"))
        left = resumed if resumed and abs(resumed - left) <= self.span else left
        before, after = every[max(low[0], left - self.before) : left], every[left:]
        after = after[-max(len(before) // 2, 1) :]
        was, since = median(before[-2 * self.span :]), int(steps[min(left, len(steps) - 1)])
        learned, n = gained >= self.learned * start, int(steps[-1]) - since
        rate, old = history.run("learning_rate"), _leapt(history, int(steps[left - len(before)]), self.jump)
        least = was + self.part * gained if learned else self.factor * began
        apart = self.apart if after.min(initial=math.inf) > before.max() else self.sure
        if (
            not (start > 0 and now > max(least if old == 0 else was, self.times * was))
            or n < max(self.lasting, np.diff(steps[low + self.span // 2])[np.diff(low) > 1].max(initial=0))
            or fall(-np.concatenate((before, after)), len(before)) < apart
        ):
            return ()
        severity, over = self._severity(history, since, now / began), now / constant_level(history)
        quiet, risen = (left, left) if left == resumed else _onset(every, levels, left, len(before), _SLIGHT * gained)
        was, since, last = median(every[:quiet][-2 * self.span :]), int(steps[risen]), int(steps[quiet - 1])
        known = f", {number(over)} times that of the best constant prediction" if over > 0 else ""
        lost = f"{number(100 * min((now - was) / gained, 1.0))} % of what was learned is lost" if learned else _ABOVE
        message = (
            f"the loss was about {number(was)} up to step {last}, and since step {since}"
            f"{', when training was resumed,' if left == resumed else ''} it has "
            f"{'risen to' if risen < left else 'been'} about {number(now)} ({int(steps[-1]) - since} steps){known}"
        )
        lower = f"lower the learning rate from {number(rate.last)} to {number(rate.last / 10)}; " if rate.count else ""
        finding = Finding(
            IssueType.DIVERGING,
            severity,
            ("",),
            now,
            (was + now) / 2,
            f"{message}: {lost}.",
            f"check what changed between steps {last} and {since}: {_changed(history, since)}"
            if learned
            else f"{lower}if that does not help, check the sign of each term of the loss, and look for growing "
            "weights: weight_decay must not be negative.",
            since=since,
            before=since - 1 - last if risen < left else None,
            cause=_LOST,
            urgent=True,  # based on many readings already
            follows_from=_CAUSES,
            origin=_LOST if learned else _ABOVE,
        )
        if old > 0:
            finding = replace(
                finding,
                issue_type=IssueType.LEARNING_RATE,
                severity=Severity.HIGH if now > 2 * was else Severity.MEDIUM,
                message=f"the learning rate rose from {number(old)} to {number(rate.last)}, and {message}.",
                advice=f"keep the learning rate at {number(old)} or below; a decaying schedule multiplies it by a "
                "factor below 1: StepLR(optimizer, step_size, gamma=0.1), lr * 0.1 ** (epoch // 30).",
                cause=_RATE,
                follows_from=(),
                origin=_RATE,
            )
        return (finding,)

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

    def _flat(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Find losses that after hundreds of steps are where they began."""
        if history.seen < self.settle or history.run("loss").low <= 0:
            return ()
        steps, every = history.run("loss").all()
        count = record.step - int(steps[0]) + 1
        first = max(median(every[: self.begun]), history.run("loss").first)
        later = every[steps > record.step - count / 2]
        data = not growth_of_targets(history)[1] >= GROWN
        flat = data and len(later) >= self.begun and self.level * first < median(later)
        learned = flat and any(
            median(past(history, "loss.over_constant", site)[-3:]) < self.level
            or past(history, "target.uniform_share", site)[-1:].sum() > 0.5  # a batch of one kind, as of players
            for site in history.at_sites("loss.over_constant").sites
        )
        if learned or not flat or fell(history) or still_falls(history) or settled(history):
            return ()
        now, above = median(later), lowest_median(later) > every[: self.begun].max()
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.MEDIUM if above and supervised(history) else Severity.LOW,
                ("",),
                now,
                self.level * first,
                f"After {count} steps the loss is {number(now)}, and it began at {number(first)}: it has not "
                "fallen beyond its own noise.",
                "overfit a single batch first: if its loss does not reach 0, the graph, the learning rate or the scale "
                "of the loss (a temperature, a mean over classes) is at fault, otherwise dropout or the data.",
                cause=_FLAT,
                origin=_FLAT,
                follows_from=OTHERS,
            ),
        )

    def _severity(self, history: History, since: int, times: float) -> Severity:
        share, known = _share(history, since), history.at_sites("loss.known")
        before, now = growth_of_targets(history, since)
        if before**2 >= GROWN <= now <= self.far_off:
            return Severity.LOW
        whole = supervised(history) and bool((known.values[known.present] > 0).all())
        long = history.run("loss").steps[-1] - since >= max(self.away, (since - history.run("loss").whole()[0][0]) / 2)
        if whole and long and share >= self.forgotten and not falls_again(history, since):
            return Severity.HIGH if share >= self.nothing else Severity.MEDIUM
        if times < self.factor:
            return Severity.LOW
        if none_better(history, 0.0, 1) is not None:
            return Severity.HIGH if share >= self.worse else Severity.LOW
        large = median(history.run("update.ratio").values[-5:]) >= self.large
        return Severity.MEDIUM if times >= self.far or large else Severity.LOW


def _onset(every: Floats, levels: Floats, left: int, before: int, slight: float) -> tuple[int, int]:
    """Return how many losses lie before a rise, and before where it shows; it may begin slowly, long before it is sure.

    Args:
        every: Losses, oldest first. Shape: ``[n]``.
        levels: Their running medians; the first belongs to the first losses. Shape: ``[n - span + 1]``.
        left: Place of the first loss that is surely risen.
        before: Half as many as are looked at before it, and how many around the lowest level tell how it varies.
        slight: Rise that is none, however small the losses are.
    """
    span, low = len(every) - len(levels) + 1, int(levels.argmin())
    rest = levels[max(low - before // 2, 0) : low + before // 2 + 1]
    usual = median(rest[rest <= 1.5 * levels[low]])
    begin = max(left - 2 * before, 0)
    ends = [
        last + int(np.flatnonzero(every[last:][:span] <= level)[-1]) + 1
        for level in (usual, max(1.5 * usual, usual + slight))
        for last in (np.flatnonzero(levels[begin : max(left - span // 2, 1)] <= level)[-1:] + begin).tolist()
    ]
    return (min(ends), ends[-1]) if len(ends) == 2 and ends[-1] < left else (left, left)


def _changed(history: History, since: int) -> str:
    """Return what else was read to change at a step, or what to look for if nothing was."""
    found = [_LOADED] if since == history.begun + 1 else []
    for metric, what in _WATCHED.items():
        run, sites = history.run(metric), history.at_sites(metric)
        steps, values = run.all() if run.count else (sites.steps, sites.values[:, :1].ravel())
        old, new = values[steps < since][-1:].tolist(), values[steps >= since][-1:].tolist()
        if old and new and not 0.8 * old[0] <= new[0] <= 1.25 * old[0]:
            found.append(f"{what} ({number(old[0])} before, {number(new[0])} now)")
    seen = f"{', '.join(found)}; also " if found else ""
    return (
        f"{seen}the pairing of inputs and targets (order, shard, class indices), units, train or eval mode, "
        "weights copied into the model (a checkpoint, a moving average); restore the weights from before."
    )


def _leapt(history: History, begin: int, jump: float) -> float:
    """Return the highest learning rate before it rose to several times that since a step; 0 where it did not.

    In a warm-up, over which the losses of a value function grow, the rise takes longer than what came before.
    """
    steps, rates = history.run("learning_rate").all()
    lower = np.flatnonzero(rates <= jump * rates[-1:])
    start = int(lower[-1]) if len(lower) else 0
    if not len(lower) or steps[start] < begin or rates[: start + 1].max() > jump * rates[-1]:
        return 0.0
    warm = steps[-1] + history.begun > 2 * steps[start] and rates[-1] > 1.1 * rates[start + 1]
    return 0.0 if warm else float(rates[: start + 1].max())


def _share(history: History, since: int) -> float:
    """Return what the loss is at least against the best constant's since a step; NaN where that is not known."""
    (steps, every), level = history.run("loss").all(), constant_level(history)
    if level > 0:
        return lowest_median(every[steps >= since]) / level
    sites = history.at_sites("loss.over_constant").sites or (RUN_SITE,)
    return float(np.min([lowest_median(past(history, "loss.over_constant", site, since)) for site in sites]))
