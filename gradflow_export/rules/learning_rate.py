"""Steps that are far too large or far too small for the loss: LEARNING_RATE."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import answered, fall, fell, none_better
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import agreement, first_step, margin, margins, steps_of_layers
from gradflow_export.rules.signals import AGAIN, converged, solved, stuck, warms_up

_FLAT = (IssueType.VANISHING, IssueType.DEAD, IssueType.SATURATION, IssueType.WRONG_LOSS, IssueType.BAD_TARGETS)
"""What leaves a loss flat at any learning rate."""
RISING = 2.5
"""Least z-score of a loss that rises over the whole run: longer steps would make that worse."""
_WARM = 5.0
"""How many times as long the steps become of an optimizer that warms up by itself (RAdam from step 80 on)."""
_A_LIMIT = 0.05
"""Least norm that somebody would clip gradients to."""


@dataclass(frozen=True, kw_only=True)
class LearningRate(Rule):
    """Report learning rates at which the loss cannot fall: too large, too small, or decayed to nothing.

    Too large: single updates change a large part of the weights, and afterwards the loss is no lower than at first, or
    above ``halfway`` of it if it has been ``leap`` times as high. A loss that is so high and still rises after an
    update as large as the weights themselves is reported at once.

    Too small: all steps together would move the weights by less than ``travel`` of their norm, although they lead the
    same way, and the learning rate is not rising (warm-up); steps that lengthen by themselves (RAdam) count fivefold.
    Gradients of a long window agree (``agree``), by ``ahead`` times the movement of the weights or more: nothing that
    the weights did has changed what is asked of them; and the loss was always above ``halfway`` of its first value, or
    at updates below ``timid`` no better than a constant's. Or even along the gradient, a tenth less loss would take
    ``steps`` steps, where ``L / (||g|| ||update||)`` is the number of steps to zero loss along the tangent.

    Where clipping leaves less than ``tight`` of the gradient and limits updates, it is named; Adam and others undo it.

    Decayed: the rate has been below a thousandth of its maximum for longer than above, the loss is still high and falls
    no further; or for a third of that time, at more than half of the first loss, if it fell until the rate did.

    Source: update size, You et al. 2017, arXiv:1708.03888; tangent, Polyak 1987, Introduction to Optimization, 5.3.

    Attributes:
        replaced: Minimum update-to-weight ratio of an update that is too large.
        times: Minimum number of such updates among the last readings.
        gain: Minimum initial gain of the layers that are judged.
        steps: Minimum number of steps needed for a tenth less loss.
        travel: Maximum movement of the weights if all steps lead one way, as a fraction of their norm.
        timid: Update-to-weight ratio below which updates are too small if gradients agree a little; at five times that
            and above, what is reported is a remark.
        agree: Minimum mean cosine of gradients that counts as agreement.
        ahead: Minimum ratio of that cosine to the movement of the weights over the whole run.
        halfway: Minimum fraction of the first loss while gradients keep one direction, or after such a leap.
        leap: Minimum multiple of the first loss of a leap that no batch explains.
        settle: Number of steps before agreement is judged.
        patient: Number of steps before one direction is judged.
        tight: Fraction of the gradient below which clipping may be the cause.
        least: Minimum number of losses before anything is reported.
        fallen: Fraction of the first loss below which the loss has fallen.
        decayed: Fraction of the maximum learning rate that counts as nothing, and of a gradient that clipping leaves.
        nothing: Norm of a clipped gradient too small for any optimizer, Adam with its ``eps`` included.
    """

    replaced: float = 0.2
    times: int = 3
    gain: float = 0.1
    steps: float = 5_000.0
    travel: float = 0.3
    timid: float = 1e-4
    agree: float = 0.15
    ahead: float = 2.0
    halfway: float = 0.5
    leap: float = 10.0
    settle: int = 80
    patient: int = 100
    tight: float = 0.1
    least: int = 20
    fallen: float = 0.95
    decayed: float = 1e-3
    nothing: float = 1e-6
    patience: int = 2

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
        "gradient.coherence",
        "gradient.coherence_error",
        "loss.over_constant",
        "parameter.momentum_steps",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the steps so far by what the loss did."""
        loss = history.run("loss")
        if loss.count < self.least or not np.isfinite(loss.values[-10:]).all():
            return (
                tuple(self._large(history, loss.first, loss.last))
                if loss.last >= loss.high > self.leap * loss.first
                else ()
            )
        past, lately = loss.whole()[1], int(np.clip((loss.steps > record.step - history.seen / 4).sum(), 3, 10))
        # What comes after the first may be what too large a step did.
        first, now = min(loss.first, median(past[:3])), median(loss.values[-lately:])
        if loss.low < 0:  # its level has no zero to compare with
            return tuple(self._short(record, history, first, now))
        done = converged(history) or answered(history) or fall(-past) >= RISING
        slow = () if done else (self._decayed, self._short)
        too_slow = (each for rule in slow for each in rule(record, history, first, now))
        return (*self._large(history, first, now), *too_slow)[:1]

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether a rate that was too large is as it was, and the loss no better than at first; or clipping is.

        Steps become small where units have died of them. Of clipping, steps in a row may not have been read.
        """
        if issue.cause == "too small":
            return _nothing_left(history, self.decayed, self.nothing) > 0
        loss, rate = history.run("loss"), history.run("learning_rate")
        if not rate.count or rate.last < 0.5 * rate.high:
            return False
        return not median(loss.values[-10:]) < self._level(history, loss.first)

    def _level(self, history: History, first: float) -> float:
        """Return the loss below which large steps did no harm: a lower one where they had it leap."""
        return (self.halfway if history.run("loss").high > self.leap * first else self.fallen) * first

    def _large(self, history: History, first: float, now: float) -> Iterable[Finding]:
        steps, ratios = steps_of_layers(history, self.gain)
        big, rate, worst = ratios >= self.replaced, history.run("learning_rate"), float(ratios.max(initial=0.0))
        high, several = history.run("loss").high, int(big.sum()) >= self.times
        if now < self._level(history, first) or not (
            worst >= 1.0 if history.run("loss").count < self.least else several
        ):
            return
        # Later steps may be those of a run that has exploded: the first one tells how much too large the rate is.
        begun = first_step(history, self.gain)
        begun = begun if begun >= self.replaced else float(ratios[int(np.argmax(big))])  # not where rates rose
        lower = rate.high / min(max(begun / 1e-2, 10.0), 1e3)
        over = f" over {number(high)}" if high > max(now, self.leap * first) else ""
        message = (
            f"{int(big.sum())} of {len(ratios)} measured steps changed the weights of half of the layers by more "
            f"than {number(100 * self.replaced)} % of their norm, up to {number(100 * worst)} %, and the loss went "
            f"from {number(first)}{over} to {number(now)}."
        )
        to = f" from {number(rate.high)} to about {number(lower)}" if rate.count else ""
        advice = f"lower the learning rate{to}; updates of about 0.1 % of the weight norm are usual."
        yield _rate_finding(
            Severity.HIGH, worst, self.replaced, message, advice, "too large", int(steps[int(np.argmax(big))])
        )

    def _short(self, record: StepRecord, history: History, first: float, now: float) -> Iterable[Finding]:
        """Yield steps that lead nowhere because they are far too short, be it by what clipping leaves."""
        rate, ratio, since = history.run("learning_rate"), _length(record, history), 1
        later = ratio * (_WARM if _lengthen(history) else 1.0)
        if rate.last < self.decayed * rate.high or warms_up(history) or not 0 < later * history.seen < self.travel:
            return
        agree = self._agreement(record, history, later, first, now)
        why = f"and gradients of different steps agree (mean cosine {number(agree)})" if agree else ""
        why = why or (self._too_many(history, first, now) if later < self.timid else "")
        clipped = _nothing_left(history, self.decayed, self.nothing)
        if record.step < clipped + AGAIN:  # in each of these steps
            why, agree, since = "because clipping reduces the gradients to next to nothing", 1.0, clipped
        message = (
            f"a step changes the weights by {number(100 * ratio)} % of their norm, {why}; after {history.seen} steps "
            f"the loss went from {number(first)} to {number(now)}."
        )
        if 0.0 < (left := record.value("gradient.clip_scale") or 0.0) < self.tight:
            message += f" Clipping leaves {number(100 * left)} % of the gradient."
        # A plateau that plain gradient descent leaves late may look like agreement, at steps of a usual size.
        found = _rate_finding(
            Severity.MEDIUM if ratio < 5 * self.timid else Severity.LOW, ratio, self.timid, message,
            self._longer(record, history), "too small", since, agree > 0,
        )  # fmt: skip
        yield from [replace(found, follows_from=(*_FLAT, IssueType.BAD_INIT))] if why else ()

    def _too_many(self, history: History, first: float, now: float) -> str:
        """Return how many steps a tenth less loss would take where these are far too many, else nothing."""
        updates, gradients = history.run("update.total_norm"), history.run("gradient.total_norm")
        norms = dict(zip(gradients.steps.tolist(), gradients.values.tolist(), strict=True))
        sizes = updates.values + margins(history, "update.total_norm")
        needed = [
            0.1 * now / (norms[step] * size)
            for step, size in zip(updates.steps.tolist(), sizes.tolist(), strict=True)
            if norms.get(step, 0.0) > 0 and size > 0
        ][-5:]
        if len(needed) < 5 or not min(needed) > self.steps or now < self.fallen * first:
            return ""
        return f"so that a tenth less loss takes at least {number(median(np.array(needed)))} steps along the gradient"

    def _agreement(self, record: StepRecord, history: History, ratio: float, first: float, now: float) -> float:
        """Return the mean cosine of gradients where it shows that longer steps would lead the same way, else 0."""
        agree, signed, rate = agreement(history), history.run("loss").low < 0, history.run("learning_rate")
        if history.seen < self.settle or not agree >= self.agree:
            return 0.0
        known = int(history.at_sites("loss.over_constant").present.sum()) > 2
        flat = none_better(history, 0.9, 3) if known else signed or stuck(history, self.settle) or None
        timid = ratio < self.timid and flat is not None and not fell(history)
        # Steps that are too short do not drive a loss far above where it began, nor had they ever brought it far down.
        low = min(now, *map(median, np.array_split(history.run("loss").whole()[1], 8)))
        near = not signed and self.halfway * first < low <= now < first / self.halfway
        lasts = near and agree >= self.ahead * ratio * history.seen
        rises = rate.last > 1.05 * rate.values[-30:].min(initial=math.inf)
        return agree if timid or (lasts and not rises and history.seen >= self.patient) else 0.0

    def _longer(self, record: StepRecord, history: History) -> str:
        """Return what makes steps longer: the limit of clipping where they are what it leaves, else the rate."""
        rate, whole, scale, factor, size = (
            record.value(name) or 0.0 for name in ("learning_rate", "gradient.norm_before_clip", "gradient.clip_scale",
            "gradient.loss_scale", "update.total_norm")
        )  # fmt: skip
        longest = 1.1 * rate * float(history.at_sites("parameter.momentum_steps").values.max(initial=1.0))
        if not 0.0 < scale < self.tight or (size > longest * whole * scale and whole * scale >= self.nothing):
            return (
                f"raise the learning rate{f' from {number(rate)}' if rate else ''} tenfold until the loss falls: 1e-3 "
                "is usual for Adam, 0.1 for SGD (if it rises, check the sign of the update); or undo what scales the "
                "loss down (a mean over all entries, distillation without T ** 2); LambdaLR multiplies by its result."
            )
        if factor > 1 and whole * scale * factor >= _A_LIMIT:
            return (
                "call scaler.unscale_(optimizer) before clip_grad_norm_: gradients were clipped while still "
                f"multiplied by the loss scale {number(factor)}, which reduces a norm of {number(whole)} to "
                f"{number(whole * scale)}."
            )
        return (
            f"raise the limit of clipping, which reduces a gradient norm of {number(whole)} to {number(whole * scale)}"
            ": clip_grad_norm_(model.parameters(), 1.0) is usual; then, if necessary, raise the learning rate."
        )

    def _cut_short(self, history: History) -> bool:
        """Whether the loss still fell against its noise where the rate was no less than a tenth of its greatest."""
        steps, rates = history.run("learning_rate").whole()
        at, losses = history.run("loss").whole()
        losses = losses[at <= steps[rates >= 0.1 * float(rates.max())][-1]]
        return fall(losses[len(losses) // 3 :]) >= 2.5

    def _decayed(self, record: StepRecord, history: History, first: float, now: float) -> Iterable[Finding]:
        rate = history.run("learning_rate")
        steps, values = rate.whole()
        low = values < (limit := self.decayed * rate.high)
        since = int(steps[len(low) - int(np.argmin(low[::-1]))]) if low[-1:].all() and not low.all() else 0
        rest = record.step - since
        if not since or rest < max((since - history.begun) / 3, 50) or now < 0.2 * first:
            return
        at, losses = history.run("loss").all()  # it falls further after a range test
        falls = now < 0.9 * median(losses[(at >= since) & (at <= since + rest / 3)])
        if falls or (rest < since - history.begun and (now < 0.5 * first or not self._cut_short(history))):
            return
        yield _rate_finding(
            Severity.MEDIUM,
            rate.last,
            limit,
            f"the learning rate fell from {number(rate.high)} to under {number(limit)} by step {since}; {rest} steps "
            f"later it is {number(rate.last)}, and the loss is still {number(now)} (initially {number(first)}).",
            "call scheduler.step() once per epoch if its arguments count epochs, or pass the number of steps: "
            "CosineAnnealingLR(optimizer, T_max=epochs * len(loader)); ReduceLROnPlateau needs mode='min' for a loss.",
            "decayed",
            since,
            True,
        )


def _length(record: StepRecord, history: History) -> float:
    """Return the update-to-weight ratio of this step, or of a mean one where a rate has decayed."""
    ratio, sizes = float(record.value("update.ratio") or 0.0), history.run("update.total_norm").whole()[1]
    sizes = sizes[np.isfinite(sizes)]
    longer = float(sizes.mean() / sizes[-1]) if len(sizes) and sizes[-1] > 0 else 1.0
    return (ratio + margin(record, "update.ratio")) * max(longer, 1.0)


def _lengthen(history: History) -> bool:
    """Whether, at a rate that never rose, each of the last steps is longer than those of half as many steps ago.

    The optimizer warms up by itself; the lengths of a small batch's steps scatter, and rise by chance.
    """
    (steps, sizes), rate = history.run("update.total_norm").all(), history.run("learning_rate")
    early = sizes[steps <= (history.begun + median(steps[-5:].astype(np.float64))) / 2][-5:]
    return len(early) == 5 and sizes[-5:].min() > 1.1 * early.max() and not rate.last > 1.05 * rate.low


def _nothing_left(history: History, share: float, norm: float) -> int:
    """Return the first of the last steps whose clipping was read, where it left next to nothing in all, else 0.

    Args:
        history: Of the gradients before clipping.
        share: Of them that counts as nothing.
        norm: The greatest that does.
    """
    clip, whole = history.run("gradient.clip_scale"), history.run("gradient.total_norm").last
    left = 0.0 < clip.values[-AGAIN:].max(initial=0.0) < share and whole * clip.last < norm
    return int(clip.steps[-AGAIN]) if left and clip.count >= AGAIN else 0


@dataclass(frozen=True, kw_only=True)
class UnevenSteps(Rule):
    """Report trained layers that keep their initial weights while others change hundreds of times as fast.

    A far too low learning rate of a group leaves random features. Even if all updates were as large as the greatest
    since the first step and led one way, such a layer would have changed by less than ``rest`` of its norm. A vector
    next to 0 changes by much of itself however short its steps are, so others count by their size as well.

    Attributes:
        rest: Maximum change of such a layer since the first step, as a fraction of its norm.
        apart: Minimum ratio of the largest update-to-weight ratio to that of the layer.
        longer: Minimum ratio of the update with that ratio to that of the layer.
        settle: Number of initial steps without a verdict.
        part: Minimum fraction of such parameters; some have no gradient by invariance.
    """

    rest: float = 1e-2
    apart: float = 300.0
    longer: float = 10.0
    settle: int = 60
    part: float = 0.4
    patience: int = 2

    needs: ClassVar[tuple[str, ...]] = ("parameter.update_ratio",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "learning_rate", "parameter.update_ratio", "parameter.update_norm")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the greatest of all steps of each layer by the greatest of the last ones."""
        ratios, moves = (history.at_sites(f"parameter.update_{name}") for name in ("ratio", "norm"))
        known = len(ratios.steps) >= 5 and moves.sites == ratios.sites
        if history.seen < self.settle or not known or warms_up(history):
            return ()
        told = np.where(ratios.present & np.isfinite(ratios.values), ratios.values, 0.0)
        lately, most = told.astype(np.float64).max(axis=0), ratios.high.astype(np.float64)
        length = moves.values.max(axis=0)
        still = (most > 0) & (most * history.seen < self.rest)
        fast = lately[length > self.longer * length[still].max(initial=0.0)].max(initial=0.0)
        still &= (most * self.apart < fast) & (not solved(history))
        if still.mean() < self.part:
            return ()
        layers, worst = tuple(ratios.sites[index] for index in np.flatnonzero(still)), float(most[still].max())
        return (
            Finding(
                IssueType.LEARNING_RATE,
                Severity.MEDIUM,
                layers,
                worst,
                self.rest / history.seen,
                f"a step changes {some(layers)} by at most {number(100 * worst)} % of their norm, and other layers by "
                f"{number(100 * float(fast))} %: after {history.seen} steps they still have their initial "
                "weights.",
                "raise the learning rate of these layers tenfold until the loss falls; if they are a group of their "
                "own in optimizer.param_groups, use that of the others; if intended, freeze them.",
                origin="too small",
                follows_from=(*_FLAT, IssueType.BAD_INIT, IssueType.NOT_TRAINING, IssueType.STAGNATION),
            ),
        )


def _rate_finding(
    severity: Severity, value: float, most: float, message: str, advice: str, cause: str, since: int, many: bool = False
) -> Finding:
    """Return what is wrong with a learning rate; ``many``: it was judged by many losses already."""
    return Finding(
        IssueType.LEARNING_RATE, severity, ("",), value, most, message, advice, since=since, cause=cause, origin=cause,
        urgent=many,
    )  # fmt: skip
