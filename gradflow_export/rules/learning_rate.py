"""Steps that are far too large or far too small for the loss: LEARNING_RATE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import fall, fell, none_better
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import first_step, margin, margins, steps_of_layers
from gradflow_export.rules.signals import AGAIN, converged, stuck, warms_up

_FLAT = (IssueType.VANISHING, IssueType.DEAD, IssueType.SATURATION, IssueType.WRONG_LOSS, IssueType.BAD_TARGETS)
"""What leaves a loss flat at any learning rate."""
_A_LIMIT = 0.05
"""Least norm that somebody would clip gradients to."""


@dataclass(frozen=True, kw_only=True)
class LearningRate(Rule):
    """Report learning rates at which the loss cannot fall: too large, too small, or decayed to nothing.

    Too large: single updates change a large part of the weights, and afterwards the loss is no lower than at first. Too
    small: even along the gradient, a tenth less loss would take ``steps`` steps, where ``L / (||g|| ||update||)`` is
    the number of steps to zero loss along the tangent; or updates are below ``timid`` of the weights, at a loss no
    better than a constant's, although consecutive gradients agree. In both cases the loss has not fallen, or hardly if
    nearly all gradients agree, and the learning rate is not rising (warm-up).

    Decayed: the rate has been below a thousandth of its maximum for longer than above, while the loss is still high; or
    for a third of that time, at more than half of the first loss, if the loss fell until the rate did.

    Source: update size, You et al. 2017, arXiv:1708.03888; tangent, Polyak 1987, Introduction to Optimization, 5.3.

    Attributes:
        replaced: Minimum update-to-weight ratio of an update that is too large.
        times: Minimum number of such updates among the last readings.
        gain: Minimum initial gain of the layers that are judged.
        steps: Minimum number of steps needed for a tenth less loss.
        timid: Update-to-weight ratio below which updates are too small if consecutive gradients agree.
        agree: Minimum typical cosine of consecutive gradients that counts as agreement.
        straight: Cosine from which on the loss may fall to ``hardly`` of its first value, and updates reach twice
            ``timid``.
        hardly: See ``straight``.
        settle: Number of steps before such small updates are judged.
        least: Minimum number of losses before anything is reported.
        fallen: Fraction of the first loss below which the loss has fallen.
        decayed: Fraction of the maximum learning rate that counts as nothing, and of a gradient that clipping leaves.
        nothing: Norm of a clipped gradient too small for any optimizer, Adam with its ``eps`` included.
    """

    replaced: float = 0.2
    times: int = 3
    gain: float = 0.1
    steps: float = 5_000.0
    timid: float = 1e-4
    agree: float = 0.3
    straight: float = 0.8
    hardly: float = 0.75
    settle: int = 80
    least: int = 20
    fallen: float = 0.95
    decayed: float = 1e-3
    nothing: float = 1e-6
    patience: int = 2

    name: ClassVar[str] = "learning-rate"
    needs: ClassVar[tuple[str, ...]] = ("update.ratio",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "learning_rate",
        "gradient.clip_scale",
        "parameter.update_ratio",
        "parameter.update_ratio_error",
        "parameter.initial_gain",
        "update.total_norm",
        "update.norm_error",
        "gradient.total_norm",
        "gradient.cosine",
        "gradient.cosine_error",
        "loss.over_constant",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the steps so far by what the loss did."""
        loss = history.run("loss")
        if loss.count < self.least or not np.isfinite(loss.values[-10:]).all():
            return ()
        _, past = loss.whole()
        # What comes after the first may be what too large a step did.
        first, now = min(median(past[:3]), loss.first), median(loss.values[-10:])
        if loss.low < 0 and not warms_up(history):  # its level has no zero to compare with
            return tuple(self._timid(record, history, first, now))
        if not (first > 0 and np.isfinite(first)):
            return ()
        found = (
            *self._large(history, first, now),
            *_clipped(record, history, self.decayed, self.nothing),
            *(() if converged(history) else self._small(record, history, first, now)),
        )
        return found[:1]

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether a rate that was too large is as it was, and the loss no better than at first.

        Steps become small where units have died of them.
        """
        loss, rate = history.run("loss"), history.run("learning_rate")
        if issue.cause != "too large" or not rate.count or rate.last < 0.5 * rate.high:
            return False
        now = median(loss.values[-10:])
        return not now < self.fallen * loss.first

    def _large(self, history: History, first: float, now: float) -> Iterable[Finding]:
        steps, ratios = steps_of_layers(history, self.gain)
        big = ratios >= self.replaced
        if int(big.sum()) < self.times or now < self.fallen * first:
            return
        rate, worst = history.run("learning_rate"), float(ratios[big].max())
        # Later steps may be those of a run that has exploded: the first one tells how much too large the rate is.
        begun = first_step(history, self.gain)
        begun = begun if begun >= self.replaced else float(ratios[int(np.argmax(big))])  # not where rates rose
        times = min(max(begun / 1e-2, 10.0), 1e3)
        lower = f" from {number(rate.high)} to about {number(rate.high / times)}" if rate.count else ""
        message = (
            f"{int(big.sum())} of {len(ratios)} measured steps changed the weights of half of the layers by more "
            f"than {number(100 * self.replaced)} % of their norm, up to {number(100 * worst)} %, and the loss went "
            f"from {number(first)} to {number(now)}."
        )
        advice = f"lower the learning rate{lower}; updates of about 0.1 % of the weight norm are usual."
        since = int(steps[int(np.argmax(big))])
        yield _rate_finding(Severity.HIGH, worst, self.replaced, message, advice, "too large", since)

    def _small(self, record: StepRecord, history: History, first: float, now: float) -> Iterable[Finding]:
        rate = history.run("learning_rate")
        if rate.count > 1 and rate.high > 0 and rate.last < self.decayed * rate.high:
            yield from self._decayed(record, history, first, now)
            return
        if warms_up(history):
            return
        updates, gradients = history.run("update.total_norm"), history.run("gradient.total_norm")
        norms = dict(zip(gradients.steps.tolist(), gradients.values.tolist(), strict=True))
        sizes = updates.values + margins(history, "update.total_norm")
        needed = [
            0.1 * now / (norms[step] * size)
            for step, size in zip(updates.steps.tolist(), sizes.tolist(), strict=True)
            if norms.get(step, 0.0) > 0 and size > 0
        ][-5:]
        if len(needed) < 5 or now < self.hardly * first:
            return
        if not min(needed) > self.steps or now < self.fallen * first:
            yield from self._timid(record, history, first, now)
            return
        if not float(record.value("update.ratio") or 0.0) + margin(record, "update.ratio") < 1e-4:
            return
        message = (
            f"at this step size, reducing the loss by a tenth takes at least {number(median(np.array(needed)))} "
            f"steps, even along the gradient; after {record.step} steps it went from {number(first)} to "
            f"{number(now)}, and a step changes the weights by "
            f"{number(100 * float(record.value('update.ratio') or 0.0))} % of their norm."
        )
        more = f" from {number(rate.last)}" if rate.count else ""
        advice = f"raise the learning rate{more} tenfold until the loss falls: 1e-3 is usual for Adam, 0.1 for SGD."
        whole, scale = record.value("gradient.norm_before_clip") or 0.0, record.value("gradient.clip_scale") or 1.0
        factor = record.value("gradient.loss_scale") or 1.0
        if min(needed) * scale < self.steps and factor > 1 and whole * scale * factor >= _A_LIMIT:
            advice = (
                "call scaler.unscale_(optimizer) before clip_grad_norm_: gradients were clipped while still "
                f"multiplied by the loss scale {number(factor)}, which reduces a norm of {number(whole)} to "
                f"{number(whole * scale)}."
            )
        elif min(needed) * scale < self.steps:  # it would be no small step if nothing were clipped
            advice = _limit(whole * scale, whole)
        found = _rate_finding(Severity.MEDIUM, min(needed), self.steps, message, advice, "too small", 1)
        yield replace(found, follows_from=_FLAT)

    def _timid(self, record: StepRecord, history: History, first: float, now: float) -> Iterable[Finding]:
        """Yield where gradients agree on a way down, at the level of a constant, and steps are too small to go it."""
        rate, ratio = history.run("learning_rate"), float(record.value("update.ratio") or 0.0)
        agreement = (history.run("gradient.cosine").values - margins(history, "gradient.cosine"))[-30:]
        ratio += margin(record, "update.ratio")
        if record.step < self.settle or not ratio < 2.0 * self.timid or len(agreement) < 20:
            return
        agree = median(np.asarray(agreement))
        known, signed = int(history.at_sites("loss.over_constant").present.sum()) > 2, history.run("loss").low < 0
        if (agree < self.straight or signed) and (fell(history) or ratio >= self.timid):
            return  # what all gradients agree on may move the loss a little
        flat = none_better(history, 0.9, 3) is not None if known else stuck(history, record.step, span=self.settle)
        if not agree >= self.agree or not (flat or (signed and not known)):
            return
        message = (
            f"a step changes the weights by {number(100 * ratio)} % of their norm; gradients of consecutive steps "
            f"agree (cosine {number(agree)}), and after {record.step} steps the loss only went from {number(first)} "
            f"to {number(now)}{', no better than a constant' if known else ''}."
        )
        more = f" from {number(rate.last)}" if rate.count else ""
        advice = (
            f"raise the learning rate{more} tenfold until the loss falls; the function passed to LambdaLR must "
            "return a factor, not the learning rate itself."
        )
        found = _rate_finding(Severity.MEDIUM, ratio, self.timid, message, advice, "too small", 1)
        yield replace(found, urgent=True, follows_from=_FLAT)  # what it was judged by are many gradients already

    def _cut_short(self, history: History) -> bool:
        """Whether the loss still fell against its noise where the rate was no less than a tenth of its greatest."""
        steps, rates = history.run("learning_rate").whole()
        at, losses = history.run("loss").whole()
        losses = losses[at <= steps[rates >= 0.1 * float(rates.max())][-1]]
        return fall(losses[len(losses) // 3 :]) >= 2.5

    def _decayed(self, record: StepRecord, history: History, first: float, now: float) -> Iterable[Finding]:
        rate = history.run("learning_rate")
        steps, values = rate.whole()
        low = values < self.decayed * rate.high
        since = int(steps[len(low) - int(np.argmin(low[::-1]))]) if low[-1:].all() and not low.all() else 0
        rest = record.step - since
        if not since or rest < max(since / 3, 50) or now < 0.2 * first:
            return
        if rest < since and (now < 0.5 * first or not self._cut_short(history)):
            return
        message = (
            f"the learning rate fell from {number(rate.high)} to {number(rate.last)} by step {since} and has stayed "
            f"there for {rest} steps, while the loss is still {number(now)} (initially {number(first)})."
        )
        advice = (
            "call scheduler.step() once per epoch if its arguments count epochs, or pass the number of steps: "
            "CosineAnnealingLR(optimizer, T_max=epochs * len(loader)); ReduceLROnPlateau needs mode='min' for a "
            "loss."
        )
        yield _rate_finding(
            Severity.MEDIUM, rate.last, rate.high * self.decayed, message, advice, "decayed", since, True
        )


@dataclass(frozen=True, kw_only=True)
class UnevenSteps(Rule):
    """Report trained layers that keep their initial weights while others change a thousand times as fast.

    A far too low learning rate of a group leaves random features. Even with all updates in one direction, such a layer
    would have changed by less than ``rest`` of its norm.

    Attributes:
        rest: Maximum change of such a layer since the first step, as a fraction of its norm.
        apart: Minimum ratio of the largest update-to-weight ratio to that of the layer.
        settle: Number of initial steps without a verdict.
        part: Minimum fraction of such parameters; some have no gradient by invariance.
    """

    rest: float = 3e-3
    apart: float = 1e3
    settle: int = 60
    part: float = 0.4
    patience: int = 2

    name: ClassVar[str] = "uneven-steps"
    needs: ClassVar[tuple[str, ...]] = ("parameter.update_ratio",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "learning_rate", "parameter.update_ratio")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the greatest of the last steps of each layer."""
        ratios = history.at_sites("parameter.update_ratio")
        if record.step < self.settle or len(ratios.sites) < 2 or len(ratios.steps) < 5 or warms_up(history):
            return ()
        told = np.where(ratios.present & np.isfinite(ratios.values), ratios.values, 0.0)
        most = told.astype(np.float64).max(axis=0)
        still = (most > 0) & (most * record.step < self.rest) & (most * self.apart < most.max())
        if still.mean() < self.part:
            return ()
        layers, worst = tuple(ratios.sites[index] for index in np.flatnonzero(still)), float(most[still].max())
        message = (
            f"a step changes {some(layers)} by at most {number(100 * worst)} % of their norm, and other layers by "
            f"{number(100 * float(most.max()))} %: after {record.step} steps they still have their initial weights."
        )
        advice = (
            "raise the learning rate of these layers tenfold until the loss falls; if they are a group of their own in "
            "optimizer.param_groups, use that of the others; if intended, freeze them."
        )
        return (
            Finding(
                IssueType.LEARNING_RATE,
                Severity.MEDIUM,
                layers,
                worst,
                self.rest / record.step,
                message,
                advice,
                origin="too small",
                follows_from=(*_FLAT, IssueType.BAD_INIT, IssueType.NOT_TRAINING, IssueType.STAGNATION),
            ),
        )


def _clipped(record: StepRecord, history: History, share: float, nothing: float) -> Iterable[Finding]:
    """Yield clipping that leaves less of the gradient than any optimizer can use."""
    scale, whole = history.run("gradient.clip_scale"), history.run("gradient.total_norm").last
    left, steps = scale.values[-AGAIN:], scale.steps[-AGAIN:]
    close = len(steps) == AGAIN and record.step == steps[-1] < steps[0] + AGAIN
    if close and 0.0 < float(left.max()) < share and whole * float(left[-1]) < nothing:  # 0: they were cleared
        message = (
            f"clipping reduces a gradient norm of {number(whole)} to {number(whole * float(left[-1]))} in each step."
        )
        advice = _limit(whole * float(left[-1]), whole)
        yield _rate_finding(Severity.MEDIUM, float(left[-1]), share, message, advice, "too small", int(steps[0]), True)


def _limit(left: float, whole: float) -> str:
    """Return what to do about gradients that are clipped too far."""
    return (
        f"raise the limit of clipping, which reduces a gradient norm of {number(whole)} to {number(left)}: "
        "clip_grad_norm_(model.parameters(), 1.0) is usual; then, if necessary, raise the learning rate."
    )


def _rate_finding(
    severity: Severity, value: float, most: float, message: str, advice: str, cause: str, since: int, many: bool = False
) -> Finding:
    """Return what is wrong with a learning rate; ``many``: it was judged by many losses already."""
    return Finding(
        IssueType.LEARNING_RATE, severity, ("",), value, most, message, advice, since=since, cause=cause, origin=cause,
        urgent=many,
    )  # fmt: skip
