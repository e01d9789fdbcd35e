"""Weights that are pulled to 0 faster than they learn: LEARNING_RATE."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, BoolArray, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import constant_level, fall, none_better, past, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import agreement
from gradflow_export.rules.signals import solved, stuck


@dataclass(frozen=True, kw_only=True)
class WeightDecay(Rule):
    """Report runs that learn little, in which most of the weights lose half of their norm within a few hundred steps.

    Learning changes weights in both directions; only decay shrinks all of them together, and this fast only if decay
    dominates the updates. With a usual decay, a weight without a gradient takes ten thousand steps to halve. Not judged
    are weights that started too small or too large for their number of inputs, and embeddings, which have no such
    number. Nor are runs whose gradient vanished over the depth at the first step: any decay outweighs such a gradient,
    and Adam, where the decay is part of the gradient, then moves the weights by the whole learning rate.

    A decay that is added to the gradient outweighs it if ``||decay * weight||`` is ``most`` of the norm of the gradient
    or more, in half of the weights. If these have shrunk to ``smaller``, and gradients of a long window
    nevertheless agree (``lasting``), decay alone holds the weights back, and how much is learned does not count.

    If the loss of the best constant prediction is not known, the loss must be at its initial level or rise beyond its
    own noise. If the weights are nearly 0, it may fall a little. A penalty on the weights may be part of the loss, and
    fall with them: what is known of the rest then counts.

    Attributes:
        shrunk: Fraction of its initial norm to which a weight has shrunk.
        steps: Number of steps within which it does.
        whole: Fraction of its norm at which a weight has not begun to shrink.
        share: Fraction of the weights that is exceeded: learning alone may shrink the last of two.
        usual: Minimum and maximum initial gain of the weights that are judged.
        level: Minimum loss, as a fraction of that of the best constant prediction.
        gone: Fraction of its norm at which a weight counts as nearly 0.
        rests: Fraction of its value a third into the run above which a loss above 0 has hardly fallen since.
        sure: Minimum z-score of a rising loss.
        most: Minimum ratio of added decay to gradient.
        smaller: Maximum fraction of its initial norm to which half of the weights have shrunk under such a decay.
        lasting: Minimum mean cosine between gradients.
        faded: Depth gain of the first step below which the gradient had vanished before any decay.
        patience: In losses, which are read at every step; a few noisy ones in a row are no standstill.
    """

    shrunk: float = 0.5
    steps: int = 500
    whole: float = 0.99
    share: float = 0.5
    usual: tuple[float, float] = (0.1, 4.0)
    level: float = 0.6
    gone: float = 0.05
    rests: float = 0.9
    sure: float = 3.0
    most: float = 0.4
    smaller: float = 0.75
    lasting: float = 0.1
    faded: float = 1e-4
    patience: int = 15
    heal: int = 1000

    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "loss.over_constant",
        "gain.depth",
        "parameter.weight_norm",
        "parameter.initial_gain",
        "parameter.row_parting",
        "parameter.added_decay",
        "parameter.gradient_norm",
        "gradient.coherence",
        "gradient.coherence_error",
        "gradient.cosine",
        "gradient.cosine_error",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last sizes of the weights that were read."""
        sizes, gains = history.at_sites("parameter.weight_norm"), history.at_sites("parameter.initial_gain")
        tables = history.at_sites("parameter.row_parting").sites
        columns = _judged(sizes.sites, tables, gains.sites, gains.first.tobytes(), *self.usual)
        near = sizes.steps >= record.step - self.steps
        if not columns.any() or not near.any():
            return ()
        norms = np.where(sizes.present, sizes.values, 0.0)[near][:, columns].astype(np.float64)
        first = sizes.first[columns] if history.seen <= self.steps else norms[0]
        now, begun = norms[-1], np.fmax(np.maximum.reduce(norms), first)
        told = sizes.present[-1, columns] & (begun > 0) & np.isfinite(now)
        left = np.where(told, now / np.where(told, begun, 1.0), 1.0)
        share, typical = float(np.count_nonzero(left <= self.shrunk) / len(left)), median(left)
        held = typical <= self.smaller and agreement(history) >= self.lasting and self._held(history)
        held &= not solved(history)  # then little of the gradient is left
        if (share <= self.share and not held) or history.run("gain.depth").first < math.log(self.faded):
            return ()  # at nearly every record; what follows takes longer
        whole = np.flatnonzero((norms >= self.whole * begun).mean(axis=1) > 0.5)  # of most weights
        last, since = sizes.steps[near][[whole[-1], whole[-1] + 1] if len(whole) else [0, 0]].tolist()
        level = constant_level(history)
        loss = history.run("loss")
        losses = loss.whole()[1]
        rises = fall(-losses[len(losses) // 3 :]) >= self.sure
        nothing = not math.isnan(level) or rises or stuck(history, span=100)
        sites = (*history.at_sites("loss.over_constant").sites, RUN_SITE)
        shares = [values for site in sites if len(values := past(history, "loss.over_constant", site))]
        # A penalty that falls with the weights may be part of the loss, or most of it.
        if typical <= self.gone or (shares and math.isnan(level)):
            late = losses[len(losses) // 3 :]
            rests = loss.low > 0 and median(late[-10:]) > self.rests * median(late[:10])
            falls = typical > self.gone and any(fall(values) >= 2.5 for values in shares)
            nothing = none_better(history, self.level, 3) is not None and not falls if shares else rises or rests
            level = math.nan
        elif still_falls(history) and not held:
            return ()
        if not held and (median(loss.values[-20:]) < self.level * level or not nothing):
            return ()
        return (
            Finding(
                IssueType.LEARNING_RATE,
                Severity.MEDIUM,
                ("",),
                typical,
                self.shrunk,
                f"the weights shrink: typically {number(typical)} of their norm is left after "
                f"{min(self.steps, history.seen)} steps, and {number(100 * share)} % of them lost half of it or more. "
                f"Weight decay pulls them faster than they learn{', and as hard as their gradient' if held else ''}.",
                "lower weight_decay: 0.01 is usual for AdamW, 1e-4 for SGD and Adam; or lower the factor of a "
                "weight penalty in the loss.",
                since=since,
                before=since - last - 1 if len(whole) else None,
                cause="weights decay",
                origin="weights decay",
                follows_from=(IssueType.BAD_INIT, IssueType.DATA_SCALE),
            ),
        )

    def _held(self, history: History) -> bool:
        """Whether the decay that is added to gradients is as large as these, though they do not turn."""
        decays, sizes, norms = (
            history.at_sites(f"parameter.{n}") for n in ("added_decay", "weight_norm", "gradient_norm")
        )
        if not len(decays.steps) or not norms.sites:
            return False
        size, norm = (
            dict(zip(s.sites, np.median(s.values[-5:], axis=0).tolist(), strict=True)) for s in (sizes, norms)
        )
        shares = [
            decay * size[site] / norm[site]
            for site, decay in zip(decays.sites, decays.values[-1].tolist(), strict=True)
            if size.get(site) and norm.get(site)
        ]
        return bool(shares) and median(np.array(shares)) >= self.most


@functools.lru_cache(maxsize=8)
def _judged(
    sites: tuple[str, ...], tables: tuple[str, ...], layers: tuple[str, ...], gains: bytes, low: float, high: float
) -> BoolArray:
    """Return which weights began with a usual gain, that of a layer or the rows of a table: it hardly changes."""
    known = dict.fromkeys(tables, low) | dict(zip(layers, np.frombuffer(gains, np.float32).tolist(), strict=True))
    return np.array([low <= known.get(site, 0.0) <= high for site in sites], dtype=np.bool_)
