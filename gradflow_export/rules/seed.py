"""Fixed thresholds as often used: literal, dependent on the loss scale, and only applied if a user sets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from gradflow_export.records.step_record import BoolArray, IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import off
from gradflow_export.rules.signals import owner

_CLIP = "lower the learning rate or clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."


class _Said(NamedTuple):
    """What is said of parameters beyond a threshold; ``message`` has places for them, the worst value and the limit."""

    issue_type: IssueType
    severity: Severity
    message: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class _Fixed(Rule):
    """A fixed threshold.

    Attributes:
        threshold: Greatest allowed value.
    """

    threshold: float
    patience: int = 1

    fixed: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _OfParameters(_Fixed):
    """A fixed threshold of the one metric in ``needs``, a number of each parameter or layer; see :class:`_Fixed`.

    Frozen parameters are left out by those that remember ``parameter.trainable``.
    """

    heal: int = 1
    cooldown: int = 0

    by_layer: ClassVar[bool] = True
    least: ClassVar[bool] = False
    """Whether it is the least allowed value, and not the greatest."""
    said: ClassVar[_Said]

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare every value with the threshold."""
        reading = reading_of(record, self.needs[0])
        far = off(record, reading)
        beyond = reading.values + far < self.threshold if self.least else reading.values - far > self.threshold
        if "parameter.trainable" in self.remembers:
            beyond &= ~_frozen(record, reading, history)
        ill = self._at_fault(only(reading, beyond & np.isfinite(reading.values)), reading)
        if not ill.sites:
            return ()
        order = np.argsort(ill.values, kind="stable")
        order = order if self.least else order[::-1]
        layers, value = tuple(ill.sites[index] for index in order), float(ill.values[order[0]])
        kind, severity, message, advice = self.said
        message = message.format(
            layers=some(layers), value=number(value), percent=number(100 * value), limit=number(self.threshold)
        )
        return (Finding(kind, severity, layers, value, self.threshold, message, advice),)

    def _at_fault(self, ill: Reading, reading: Reading) -> Reading:
        """Return what of the values beyond the threshold is not meant to be there."""
        return ill


@dataclass(frozen=True, kw_only=True)
class FixedExploding(_OfParameters):
    """Report parameters whose gradient norm is above a fixed threshold.

    Attributes:
        threshold: Maximum gradient norm.
    """

    threshold: float = 10.0

    needs: ClassVar[tuple[str, ...]] = ("parameter.gradient_norm",)
    said: ClassVar[_Said] = _Said(
        IssueType.EXPLODING, Severity.HIGH, "the gradient norm of {layers} is up to {value}, above {limit}.", _CLIP
    )


@dataclass(frozen=True, kw_only=True)
class FixedVanishing(_OfParameters):
    """Report parameters whose gradient norm is below a fixed threshold.

    Parameters without a gradient, frozen parameters, and gradients that are zero by invariance are excluded: for the
    last, the other parameters of the module have a gradient ``invariant`` times as large.

    Attributes:
        threshold: Minimum gradient norm.
        invariant: See above.
    """

    threshold: float = 1e-6
    invariant: float = 1e4

    needs: ClassVar[tuple[str, ...]] = ("parameter.gradient_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    least: ClassVar[bool] = True
    said: ClassVar[_Said] = _Said(
        IssueType.VANISHING,
        Severity.HIGH,
        "the gradient norm of {layers} is as low as {value}, below {limit}.",
        "add skip connections or normalization before these layers; check that the loss is not scaled down.",
    )

    def _at_fault(self, ill: Reading, reading: Reading) -> Reading:
        loudest: dict[str, float] = {}
        loud = only(reading, (reading.values >= self.threshold) & np.isfinite(reading.values))
        for site, value in zip(loud.sites, loud.values.tolist(), strict=True):
            loudest[owner(site)] = max(loudest.get(owner(site), 0.0), value)
        beside = np.array([loudest.get(owner(site), -1.0) for site in ill.sites])
        return only(ill, self.invariant * ill.values.astype(np.float64) >= beside)


@dataclass(frozen=True, kw_only=True)
class FixedStagnation(_OfParameters):
    """Report trainable parameters whose update norm is below a fixed threshold.

    Attributes:
        threshold: Least allowed norm of an update.
    """

    threshold: float = 1e-8

    needs: ClassVar[tuple[str, ...]] = ("parameter.update_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    least: ClassVar[bool] = True
    said: ClassVar[_Said] = _Said(
        IssueType.STAGNATION,
        Severity.MEDIUM,
        "{layers} changed by {value}, less than {limit}.",
        "check that the learning rate is above 0 and that the parameters have a gradient.",
    )


@dataclass(frozen=True, kw_only=True)
class FixedDead(_OfParameters):
    """Report trainable parameters with more than a fixed fraction of zero gradient entries.

    Attributes:
        threshold: Greatest allowed share.
    """

    threshold: float = 0.9
    cooldown: int = 20

    needs: ClassVar[tuple[str, ...]] = ("parameter.zero_share",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.trainable",)
    said: ClassVar[_Said] = _Said(
        IssueType.DEAD,
        Severity.MEDIUM,
        "up to {percent} % of the gradient entries of {layers} are zero.",
        "check for dead ReLU units (nn.LeakyReLU(0.01)); zero rows are normal in an embedding, for entries "
        "that were not looked up.",
    )


@dataclass(frozen=True, kw_only=True)
class FixedDiversity(_OfParameters):
    """Report layers whose head diversity is below a given threshold.

    Attributes:
        threshold: Least diversity.
    """

    threshold: float = 0.3
    patience: int = 3
    heal: int = 3
    cooldown: int = 20

    name: ClassVar[str] = "fixed-head-diversity"
    needs: ClassVar[tuple[str, ...]] = ("attention.diversity",)
    least: ClassVar[bool] = True
    said: ClassVar[_Said] = _Said(
        IssueType.HEAD_REDUNDANCY,
        Severity.MEDIUM,
        "the head diversity of {layers} is as low as {value}; the threshold given is {limit}.",
        "try fewer heads in these layers: if the loss is the same, the other heads were redundant.",
    )


@dataclass(frozen=True, kw_only=True)
class FixedSpike(_Fixed):
    """Report a loss that exceeds the previous one by a fixed factor.

    Attributes:
        threshold: Greatest allowed factor.
    """

    threshold: float = 2.0
    heal: int = 1
    cooldown: int = 0

    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the newest loss with the one before."""
        last = history.run("loss").values[-2:]
        if len(last) < 2 or not np.isfinite(last).all() or last[0] <= 0 or not last[1] > self.threshold * last[0]:
            return ()
        factor = float(last[1] / last[0])
        return (
            Finding(
                IssueType.LOSS_SPIKE, Severity.MEDIUM, ("",), factor, self.threshold,
                f"the loss went from {number(float(last[0]))} to {number(float(last[1]))}, {number(factor)} times as "
                "much.",
                f"check the batch of step {record.step} for outliers; {_CLIP}",
            ),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FixedMemory(_Fixed):
    """Report a process that uses more memory than a fixed number of MB.

    Attributes:
        threshold: Greatest allowed resident memory in MB.
    """

    threshold: float = 1000.0

    needs: ClassVar[tuple[str, ...]] = ("runtime.rss",)
    quiet: ClassVar[bool] = False

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the resident memory with the threshold."""
        used = record.value("runtime.rss")
        if used is None or not used > self.threshold:
            return ()
        return (
            Finding(
                IssueType.MEMORY_USAGE, Severity.MEDIUM, ("",), used, self.threshold,
                f"resident memory is {number(used)} MB, above {number(self.threshold)} MB.",
                "load less data at a time, use fewer workers, or raise memory_usage_threshold.",
            ),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FixedUnstable(_Fixed):
    """Report a gradient norm whose coefficient of variation is above a fixed threshold.

    Over n steps the coefficient cannot exceed ``sqrt(n)``: 3 cannot be reached in fewer than 10.

    Source: Katsnelson and Kotz 1957, on the bound.

    Attributes:
        threshold: Maximum standard deviation (ddof=1) over mean.
        window: Number of steps used.
    """

    threshold: float = 3.0
    window: int = 20

    needs: ClassVar[tuple[str, ...]] = ("gradient.total_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("gradient.total_norm",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare the variation of the last norms with the threshold."""
        norms = history.run("gradient.total_norm").values[-self.window :]
        if len(norms) < 2 or not np.isfinite(norms).all() or float(norms.mean()) == 0.0:
            return ()
        variation = float(norms.std(ddof=1) / norms.mean())
        if not variation > self.threshold:
            return ()
        return (
            Finding(
                IssueType.UNSTABLE, Severity.MEDIUM, ("",), variation, self.threshold,
                f"the gradient norm varies by {number(variation)} times its mean over {len(norms)} steps.", _CLIP,
            ),
        )  # fmt: skip


def _frozen(record: StepRecord, reading: Reading, history: History) -> BoolArray:
    """Return which sites of a reading are frozen, as far as is known. Shape: ``[len(reading.sites)]``.

    A frozen parameter whose gradient is zeroed in place reads as nothing but zeros, and whether it is frozen is read
    more rarely: until then nothing is said of such parameters.
    """
    known = history.at_sites("parameter.trainable")
    if not len(known.steps):
        return np.zeros(len(reading.sites), dtype=np.bool_)
    unsure: BoolArray = (reading.values == 0.0) & bool(known.steps[-1] != record.step)
    frozen = dict(zip(known.sites, known.present[-1] & (known.values[-1] == 0.0), strict=True))
    return unsure | np.array([frozen.get(site, False) for site in reading.sites], dtype=np.bool_)


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
