"""Gradients and losses over time: UNSTABLE, LOSS_SPIKE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import median, theil_sen_bounds
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import Floats, falls_again, is_another_loss
from gradflow_export.rules.history import History, RunSeries
from gradflow_export.rules.sampled import margins

RESOLUTION = 1e-7
"""Share of the greatest loss below which a loss is rounding: a cross-entropy ends at 0 or at this, by the processor."""


def residuals(logs: Floats, width: int = 9) -> Floats:
    """Return each value minus the median of the ``width`` values centred on it.

    A trend, however steep, leaves nothing; one value that stands out leaves its height.

    Args:
        logs: Finite values in order. Shape: ``[n]``.
        width: Odd number of values.

    Returns:
        Shape: ``[max(n - width + 1, 0)]``; the first belongs to ``logs[width // 2]``.
    """
    if len(logs) < width:
        return np.zeros(0, dtype=np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(logs, width)
    half = width // 2
    return np.asarray(logs[half : len(logs) - half] - np.sort(windows, axis=1)[:, half], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Unstable(Rule):
    """Report gradient norms that jump again and again, or updates that overshoot from side to side of a valley.

    Jumps are measured against a rolling median, because healthy fast convergence alone gives a high coefficient of
    variation. A jump must also exceed the usual norm, not only neighbors near 0, and stand out from the usual scatter.
    Not counted: norms far below the largest of the run, which are noise of a solved problem; jumps at a loss below
    ``solved`` of the first, because a margin loss gives solved batches no gradient; and jumps up to the initial
    gradient norm, which a rare class or a second task can cause, unless the norms in between are close to 0.

    Overshooting is reported only if the loss rises as well, above its first value or for ``lasting`` readings. At the
    edge of stability, with Adam, and in adversarial training, gradients reverse and grow at times without a lasting
    rise of the loss. While less than ``undone`` of what was learned is lost it is LOW: most such runs come down again.

    Source: stability limit of gradient descent, lr * lambda_max < 2: consecutive gradients reverse while their norm and
    the loss grow (Theil-Sen slope above 0 with 95 % confidence, because alternating batches oscillate by themselves).
    Edge of stability: Cohen et al. 2021, arXiv:2103.00065.

    Attributes:
        leap: Factor above the rolling median that counts as a jump.
        times: Minimum number of jumps in the window.
        turn: Median cosine of consecutive gradients that counts as reversal.
        relevant: Minimum fraction of the largest norm of the run.
        solved: Fraction of the first loss below which a batch counts as solved.
        beyond: Minimum multiple of the second largest of the first ten norms; a jump by ``steep`` always counts.
        steep: Factor above the rolling median.
        deviations: Minimum distance in robust standard deviations of the residual of the rolling median.
        lasting: Number of readings over which gradients reverse and grow, if the loss stays below its first value.
        undone: Minimum fraction of the way from the first loss to the lowest that the loss has gone back.
        patience: Long enough for a single jump of the loss that recovers by itself.
    """

    leap: float = 20.0
    times: int = 2
    turn: float = -0.5
    relevant: float = 1e-3
    solved: float = 0.1
    beyond: float = 3.0
    steep: float = 1000.0
    deviations: float = 4.0
    lasting: int = 20
    undone: float = 0.3
    patience: int = 4
    heal: int = 10

    needs: ClassVar[tuple[str, ...]] = ("gradient.total_norm", "gradient.cosine")
    remembers: ClassVar[tuple[str, ...]] = (
        "gradient.total_norm",
        "gradient.cosine",
        "gradient.cosine_error",
        "learning_rate",
        "loss",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the norms and cosines of the last steps."""
        norms = history.run("gradient.total_norm")
        values, steps = norms.values, norms.steps
        usable = (values > 0) & (values < math.inf)
        values, steps = values[usable][-64:], steps[usable][-64:]
        if len(values) < 10:
            return ()
        turned = (history.run("gradient.cosine").values[-max(self.lasting, 10) :] < self.turn).any()
        found = self._leaps(values, steps, norms.high, history)
        return found or (self._turns(values, steps, norms.high, history) if turned else ())

    def _leaps(
        self, values: Floats, steps: npt.NDArray[np.int64], greatest: float, history: History
    ) -> tuple[Finding, ...]:
        if np.maximum.reduce(values) < self.leap * np.minimum.reduce(values):
            return ()
        logs, judged = np.log(values), slice(4, len(values) - 4)
        scatter = residuals(logs)
        left = np.minimum(scatter, logs[judged] - median(logs))  # of the usual norm, not of neighbours near 0 alone
        least = max(math.log(self.leap), self.deviations * 1.4826 * median(np.abs(scatter)))
        where = np.flatnonzero((left > least) & (values[judged] > self.relevant * greatest))
        loss = history.run("loss")
        solved = loss.steps[(loss.values < self.solved * loss.first) & (loss.low >= 0)]
        where = where[~np.isin(steps[judged][where], solved)]
        _, every = history.run("gradient.total_norm").whole()
        # The second greatest, because one of the first batches may be an outlier itself.
        begun = float(np.sort(every[:10][np.isfinite(every[:10])])[-2:][:1].sum())
        where = where[(values[judged][where] > self.beyond * begun) | (left[where] > math.log(self.steep))]
        if len(where) < self.times:
            return ()
        times, first = math.exp(float(left[where].max())), int(steps[judged][where[0]])
        return (
            Finding(
                IssueType.UNSTABLE,
                Severity.HIGH,
                ("",),
                times,
                self.leap,
                f"the gradient norm jumped to up to {number(times)} times that of neighboring steps, {len(where)} "
                f"times within {len(values)} steps.",
                "check for outliers in the samples or labels of the batches of steps "
                f"{', '.join(map(str, steps[judged][where][:4]))}, use a loss that limits their effect "
                "(F.huber_loss), and clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
                since=first,
                cause="leaps",
            ),
        )

    def _turns(
        self, values: Floats, steps: npt.NDArray[np.int64], greatest: float, history: History
    ) -> tuple[Finding, ...]:
        loss = history.run("loss")
        now = median(loss.values[-3:])
        lost = loss.count == 0 or now >= loss.first
        undone = lost or now - loss.low >= self.undone * (loss.first - loss.low)
        span = 10 if lost else self.lasting
        cosines = history.run("gradient.cosine").values[-span:]
        turn = median((history.run("gradient.cosine").values + margins(history, "gradient.cosine"))[-span:])
        if min(len(cosines), len(values)) < span or values[-1] < self.relevant * greatest or not turn < self.turn:
            return ()
        _, growth, _ = theil_sen_bounds(steps[-span:].astype(np.float64), np.log(values[-span:]))
        if not growth > 0 or not _rises(history, int(steps[-span])):
            return ()
        rate = history.run("learning_rate")
        halve = f" from {number(rate.last)} to {number(rate.last / 2)}" if rate.count else ""
        return (
            Finding(
                IssueType.UNSTABLE,
                Severity.HIGH if undone else Severity.LOW,
                ("",),
                turn,
                self.turn,
                f"consecutive gradients point in opposite directions (median cosine {number(turn)} over {span} "
                f"steps) while they grow from {number(values[-span])} to {number(values[-1])}, and the loss rises: "
                "each step jumps across the valley.",
                f"halve the learning rate{halve}: it is above the stability limit 2 / lambda_max.",
                since=int(steps[-span:][np.argmax(cosines < self.turn)]),
                cause="turns",
            ),
        )


def _rises(history: History, since: int) -> bool:
    """Whether the loss rose since a step with 95 % confidence; True when it was not read."""
    loss = history.run("loss")
    recent = (loss.steps >= since) & np.isfinite(loss.values)
    if int(recent.sum()) < 3:
        return True
    _, least, _ = theil_sen_bounds(loss.steps[recent].astype(np.float64), loss.values[recent])
    return least > 0


@dataclass(frozen=True, kw_only=True)
class LossSpike(Rule):
    """Report a loss far above its usual variation.

    Losses that do not go below 0 are compared on a logarithmic scale, others by differences. If ``regular`` earlier
    losses jumped nearly as far and recovered, for example because a batch sometimes holds a rare kind of sample, only a
    loss ten times the usual one is reported. A loss that the run has had before is reported as LOW: harder data may
    follow easier ones, or a target network may have been updated. A loss of other predictions, as after a pretraining,
    begins anew.

    The issue lasts while the loss is closer to the spike than to its previous level and does not fall again.

    Source: modified z-score with the median absolute deviation, Iglewicz and Hoaglin 1993.

    Attributes:
        deviations: Robust standard deviations above the median of the window.
        factor: Factor above the largest of the last ten losses, and of all that are remembered, whatever their scatter.
        relevant: Minimum fraction of the first loss, for losses that do not go below 0.
        unseen: Minimum multiple of the largest loss so far for more than LOW, for losses that do not go below 0.
        ranges: The same for other losses: distance above the largest, as a multiple of the range of all losses so far.
        few: Number of losses up to which a loss may be the first of a rare kind, and is LOW.
        least: Minimum number of earlier losses.
        floor: Minimum robust deviation of the logarithm.
        regular: Minimum number of earlier jumps for a run whose data cause them.
        near: Minimum height of such a jump over its neighbors, as a fraction of the newest, in logarithms.
    """

    deviations: float = 6.0
    factor: float = 3.0
    relevant: float = 0.05
    unseen: float = 3.0
    ranges: float = 1.0
    few: int = 20
    least: int = 6
    floor: float = 0.1
    regular: int = 2
    near: float = 0.7
    patience: int = 1
    heal: int = 2
    cooldown: int = 5

    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "learning_rate", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest loss against those before it."""
        loss = history.run("loss")
        past, now = loss.values[-11:-1], loss.last
        past = past[np.isfinite(past)]
        if len(past) < self.least or not math.isfinite(now) or now <= past.max() or is_another_loss(history):
            return ()  # no limit is below the greatest
        usual = median(past)
        limit = self._positive_limit(past, loss.first, _greatest(loss)) if loss.low >= 0 else self._signed_limit(past)
        if not now > limit or (loss.low >= 0 and now <= 10 * usual and self._leaps(loss.values[:-1], now / usual)):
            return ()
        rate = history.run("learning_rate")
        moved = rate.count > 1 and rate.values[-2] < rate.last
        advice = (
            f"the learning rate rose from {number(float(rate.values[-2]))} to {number(rate.last)} at this step: let "
            "it rise more slowly, and less far."
            if moved
            else f"if it falls back at once, check the batch of step {self._begun(loss)} for outliers in samples or "
            "labels, and clip with torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); if it stays up, check what "
            "changed at this step: source, order, units or labels of the data, weights of the loss, a checkpoint."
        )
        return (
            Finding(
                IssueType.LOSS_SPIKE,
                self._severity(loss, now, usual),
                ("",),
                now,
                limit,
                f"the loss jumped to {number(now)}; the previous {len(past)} losses were about {number(usual)}, at "
                f"most {number(float(past.max()))}.",
                advice,
            ),
        )

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether most of what the loss had gained before it leapt is still lost, and it falls no more."""
        loss = history.run("loss")
        steps, every = loss.all()
        before, now = every[steps < issue.step][-10:], loss.values[loss.steps >= issue.step][-5:]
        before, now = before[np.isfinite(before)], now[np.isfinite(now)]
        usual = median(before)
        lost = 2 * median(now) > usual + (loss.first if loss.first > usual else issue.value)
        return lost and not falls_again(history, issue.step, alike=math.inf)

    def _begun(self, loss: RunSeries) -> int:
        """Return the step of the first of the last losses that is out of range: an update made of it raises others."""
        values = loss.values[-11:]
        early = values[np.isfinite(values)][: self.least]
        most = self.factor * early.max() if loss.low >= 0 else 2 * early.max() - early.min()
        inside = np.flatnonzero(~(values > most))[-1:].sum()
        return int(loss.steps[-11:][min(inside + 1, len(values) - 1)])

    def _severity(self, loss: RunSeries, now: float, usual: float) -> Severity:
        greatest = _greatest(loss)
        far = self.unseen * greatest if loss.low >= 0 else greatest + self.ranges * (greatest - loss.low)
        if now <= far or now < loss.high or loss.count <= self.few:
            return Severity.LOW
        return Severity.HIGH if loss.low >= 0 and now > 10 * usual else Severity.MEDIUM

    def _leaps(self, past: Floats, height: float) -> bool:
        """Whether a run has leapt nearly as high several times before, and come back."""
        past = past[np.isfinite(past)]
        return int((residuals(_logs(past, float(past.max()))) >= self.near * math.log(height)).sum()) >= self.regular

    def _positive_limit(self, past: Floats, first: float, greatest: float) -> float:
        logs = _logs(past, greatest)
        centre = median(logs)
        spread = max(1.4826 * median(np.abs(logs - centre)), self.floor)
        # A loss that falls by orders of magnitude scatters widely in logarithms; far above all its past it has leapt.
        far = min(math.exp(min(centre + self.deviations * spread, 700.0)), self.factor * greatest)
        return max(far, self.factor * float(past.max()), self.relevant * first)

    def _signed_limit(self, past: Floats) -> float:
        top, width = float(past.max()), float(past.max() - past.min())
        centre = median(past)
        spread = max(1.4826 * median(np.abs(past - centre)), self.floor * abs(centre))
        return top + max(self.deviations * spread, self.factor * width)


def _logs(past: Floats, greatest: float) -> Floats:
    """Return logarithms of losses that do not go below 0: whether one is 0 or next to it is a matter of rounding."""
    return np.log(np.maximum(past, max(RESOLUTION * greatest, np.finfo(np.float64).tiny)))


def _greatest(loss: RunSeries) -> float:
    past = loss.values[:-1]
    return float(past[np.isfinite(past)].max(initial=loss.first))
