"""Fixed thresholds as they are often used: literal, loss-scale dependent, and only reported when asked for by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import owner

_CLIP = "lower the learning rate or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."


@dataclass(frozen=True, kw_only=True)
class FixedExploding(Rule):
    """Find parameters whose gradient norm lies above a fixed number.

    Attributes:
        threshold: Greatest allowed norm.
    """

    threshold: float = 10.0
    patience: int = 1
    heal: int = 1
    cooldown: int = 0

    name: ClassVar[str] = "fixed-exploding"
    needs: ClassVar[tuple[str, ...]] = ("parameter.gradient_norm",)
    by_layer: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare every norm with the threshold."""
        reading = record.get("parameter.gradient_norm")
        if reading is None:
            return ()
        over = _where(reading, reading.values > self.threshold)
        if over.size == 0:
            return ()
        layers, value = _worst_first(reading, over, largest=True)
        message = f"the gradient norm of {some(layers)} is up to {number(value)}, above {number(self.threshold)}."
        return (Finding(IssueType.EXPLODING, Severity.HIGH, layers, value, self.threshold, message, _CLIP),)


@dataclass(frozen=True, kw_only=True)
class FixedVanishing(Rule):
    """Find parameters whose gradient norm lies below a fixed number.

    Parameters without a gradient are left out, frozen ones, and those that are zero by invariance: their module's other
    parameters have a gradient ``invariant`` times as large.

    Attributes:
        threshold: Least allowed norm.
        invariant: See above.
    """

    threshold: float = 1e-6
    invariant: float = 1e4
    patience: int = 1
    heal: int = 1
    cooldown: int = 0

    name: ClassVar[str] = "fixed-vanishing"
    needs: ClassVar[tuple[str, ...]] = ("parameter.gradient_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    by_layer: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare every norm with the threshold."""
        reading = record.get("parameter.gradient_norm")
        if reading is None:
            return ()
        under = _where(reading, (reading.values < self.threshold) & ~_frozen(record, reading, history))
        if under.size == 0:
            return ()
        loudest: dict[str, float] = {}
        for index in _where(reading, reading.values >= self.threshold):
            module = owner(reading.sites[index])
            loudest[module] = max(loudest.get(module, 0.0), float(reading.values[index]))
        kept = [
            index
            for index in under
            if self.invariant * float(reading.values[index]) >= loudest.get(owner(reading.sites[index]), -1.0)
        ]
        if not kept:
            return ()
        layers, value = _worst_first(reading, np.array(kept), largest=False)
        message = f"the gradient norm of {some(layers)} is as low as {number(value)}, below {number(self.threshold)}."
        advice = "add skip connections or normalisation before these layers; check that the loss is not scaled down."
        return (Finding(IssueType.VANISHING, Severity.HIGH, layers, value, self.threshold, message, advice),)


@dataclass(frozen=True, kw_only=True)
class FixedStagnation(Rule):
    """Find parameters, frozen ones left out, whose update norm lies below a fixed number.

    Attributes:
        threshold: Least allowed norm of an update.
    """

    threshold: float = 1e-8
    patience: int = 1
    heal: int = 1
    cooldown: int = 0

    name: ClassVar[str] = "fixed-stagnation"
    needs: ClassVar[tuple[str, ...]] = ("parameter.update_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    by_layer: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare every update with the threshold."""
        reading = record.get("parameter.update_norm")
        if reading is None:
            return ()
        under = _where(reading, (reading.values < self.threshold) & ~_frozen(record, reading, history))
        if under.size == 0:
            return ()
        layers, value = _worst_first(reading, under, largest=False)
        message = f"{some(layers)} changed by {number(value)}, less than {number(self.threshold)}."
        advice = "check that the learning rate is above 0 and that the parameters have a gradient."
        return (Finding(IssueType.STAGNATION, Severity.MEDIUM, layers, value, self.threshold, message, advice),)


@dataclass(frozen=True, kw_only=True)
class FixedSpike(Rule):
    """Find a loss that exceeds the one before by a fixed factor.

    Attributes:
        threshold: Greatest allowed factor.
    """

    threshold: float = 2.0
    patience: int = 1
    heal: int = 1
    cooldown: int = 0

    name: ClassVar[str] = "fixed-spike"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the newest loss with the one before."""
        last = history.run("loss").values[-2:]
        if len(last) < 2 or not np.isfinite(last).all() or last[0] <= 0 or not last[1] > self.threshold * last[0]:
            return ()
        factor = float(last[1] / last[0])
        message = (
            f"the loss went from {number(float(last[0]))} to {number(float(last[1]))}, {number(factor)} times as much."
        )
        advice = f"look at the batch of step {record.step} for outliers; {_CLIP}"
        return (Finding(IssueType.LOSS_SPIKE, Severity.MEDIUM, ("",), factor, self.threshold, message, advice),)


@dataclass(frozen=True, kw_only=True)
class FixedMemory(Rule):
    """Find a process that uses more memory than a fixed number of MB.

    Attributes:
        threshold: Greatest allowed resident memory in MB.
    """

    threshold: float = 1000.0
    patience: int = 1
    heal: int = 3

    name: ClassVar[str] = "fixed-memory"
    needs: ClassVar[tuple[str, ...]] = ("runtime.rss",)
    fixed: ClassVar[bool] = True
    quiet: ClassVar[bool] = False

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the resident memory with the threshold."""
        used = record.value("runtime.rss")
        if used is None or not used > self.threshold:
            return ()
        message = f"resident memory is {number(used)} MB, above {number(self.threshold)} MB."
        advice = "load less data at once, use fewer workers, or raise memory_usage_threshold."
        return (Finding(IssueType.MEMORY_USAGE, Severity.MEDIUM, ("",), used, self.threshold, message, advice),)


@dataclass(frozen=True, kw_only=True)
class FixedDead(Rule):
    """Find parameters, frozen ones left out, with more than a fixed share of zero gradient entries.

    Attributes:
        threshold: Greatest allowed share.
    """

    threshold: float = 0.9
    patience: int = 1
    heal: int = 1

    name: ClassVar[str] = "fixed-dead"
    needs: ClassVar[tuple[str, ...]] = ("parameter.zero_share",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    by_layer: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare every share with the threshold."""
        reading = record.get("parameter.zero_share")
        if reading is None:
            return ()
        over = _where(reading, (reading.values > self.threshold) & ~_frozen(record, reading, history))
        if over.size == 0:
            return ()
        layers, value = _worst_first(reading, over, largest=True)
        message = f"up to {number(100 * value)} % of the gradient entries of {some(layers)} are zero."
        advice = (
            "check for dead ReLU units (nn.LeakyReLU(0.01)); rows of an embedding that were not looked up are normal."
        )
        return (Finding(IssueType.DEAD, Severity.MEDIUM, layers, value, self.threshold, message, advice),)


@dataclass(frozen=True, kw_only=True)
class FixedUnstable(Rule):
    """Find a gradient norm whose coefficient of variation lies above a fixed number.

    Over n steps the coefficient cannot exceed ``sqrt(n)``: 3 cannot be reached in fewer than 10.

    Source: Katsnelson and Kotz 1957, on the bound.

    Attributes:
        threshold: Greatest allowed standard deviation (ddof=1) over mean.
        window: Steps looked at.
    """

    threshold: float = 3.0
    window: int = 20
    patience: int = 1
    heal: int = 3

    name: ClassVar[str] = "fixed-unstable"
    needs: ClassVar[tuple[str, ...]] = ("gradient.total_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("gradient.total_norm",)
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the variation of the last norms with the threshold."""
        norms = history.run("gradient.total_norm").values[-self.window :]
        if len(norms) < 2 or not np.isfinite(norms).all() or float(norms.mean()) == 0.0:
            return ()
        variation = float(norms.std(ddof=1) / norms.mean())
        if not (math.isfinite(variation) and variation > self.threshold):
            return ()
        message = f"the gradient norm varies by {number(variation)} times its mean over {len(norms)} steps."
        return (Finding(IssueType.UNSTABLE, Severity.MEDIUM, ("",), variation, self.threshold, message, _CLIP),)


def _where(reading: Reading, hit: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(reading.present & hit & np.isfinite(reading.values))


def _frozen(record: StepRecord, reading: Reading, history: History) -> npt.NDArray[np.bool_]:
    """Return which sites of a reading are frozen, as far as is known. Shape: ``[len(reading.sites)]``.

    A frozen parameter whose gradient is zeroed in place reads as nothing but zeros, and whether it is frozen is read
    more rarely: until then nothing is said of such parameters.
    """
    known = history.at_sites("parameter.trainable")
    if not len(known.steps):
        return np.zeros(len(reading.sites), dtype=np.bool_)
    unsure: npt.NDArray[np.bool_] = (reading.values == 0.0) & bool(known.steps[-1] != record.step)
    frozen = dict(zip(known.sites, known.present[-1] & (known.values[-1] == 0.0), strict=True))
    return unsure | np.array([frozen.get(site, False) for site in reading.sites], dtype=np.bool_)


def _worst_first(reading: Reading, where: npt.NDArray[np.int64], *, largest: bool) -> tuple[tuple[str, ...], float]:
    """Return the sites with the worst first and its value."""
    order = np.argsort(reading.values[where], kind="stable")
    order = where[order[::-1] if largest else order]
    return tuple(reading.sites[index] for index in order), float(reading.values[order[0]])


FIXED: Mapping[str, Callable[..., Rule]] = MappingProxyType(
    {
        "gradient_explosion_threshold": FixedExploding,
        "gradient_vanishing_threshold": FixedVanishing,
        "parameter_stagnation_threshold": FixedStagnation,
        "loss_spike_threshold": FixedSpike,
        "memory_usage_threshold": FixedMemory,
        "dead_threshold": FixedDead,
        "unstable_cv_threshold": FixedUnstable,
    }
)
"""The rule of each threshold, which it takes by the name ``threshold``; read-only."""
