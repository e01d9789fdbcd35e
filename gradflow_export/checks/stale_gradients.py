"""Gradients that are not cleared, STALE_GRAD, and gradients that are cleared too early, NOT_TRAINING."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, NamedTuple

import numpy as np

from gradflow_export.records.step_record import BoolArray, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.history import History, SiteSeries
from gradflow_export.rules.signals import begun


class _Left(NamedTuple):
    """Where gradients were left over, how large at most, in how many steps of how many, and since which."""

    names: tuple[str, ...]
    worst: float
    times: int
    looks: int
    since: int


@dataclass(frozen=True, kw_only=True)
class StaleGradient(Check):
    """Report optimizers whose updates include gradients of earlier steps, or of earlier calls of a closure.

    Not reported: accumulation over micro-batches, which clears once per step; and gradients from the backward pass of
    another optimizer's loss that are cleared before their own pass.

    Why it is bad:
        Each update uses the sum of all gradients so far. Old batches are counted once for every later step, and the
        step size grows without bound.

    Example:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    Use instead:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    Not reported:
        Accumulation over micro-batches that is cleared once per step; gradients from the loss of another optimizer that
        are cleared before their own pass.

    Attributes:
        readings: Minimum number of steps with such a gradient, among the last 16 that were read; three consecutive
            steps are enough if no earlier step had one.
        share: Minimum fraction of them.
        patience: One; ``readings`` already requires persistence.
    """

    readings: int = 4
    share: float = 0.45
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.STALE_GRAD,)
    evidence: ClassVar[tuple[str, ...]] = ("parameter.stale_gradient",)
    remembers: ClassVar[tuple[str, ...]] = tuple(f"parameter.{name}_gradient" for name in ("stale", "kept", "foreign"))

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the followed parameters of this record and of those before it."""
        return (*self._sums(history), *self._of_others(record, history))

    def _of_others(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        foreign = history.at_sites("parameter.foreign_gradient")
        left = self._left(foreign, foreign.present)
        if left is None or not record.facts.get("parameter.foreign_gradient"):
            return ()
        return (
            Finding(
                IssueType.STALE_GRAD,
                Severity.MEDIUM,
                left.names,
                left.worst,
                0.0,
                f"before its own backward pass, .grad of {some(left.names)} still held gradients from the loss of "
                f"another optimizer, {number(left.worst)} times as large as the gradient used in this step, in "
                f"{left.times} of {left.looks} steps: the gradients of two losses are mixed.",
                f"call zero_grad() of the optimizer that holds {left.names[0]} directly before its own "
                "loss.backward(), or freeze it, requires_grad_(False), during the backward pass of the other loss.",
                since=left.since,
                cause="left by another loss",
                origin="left by another loss",
            ),
        )

    def _sums(self, history: History) -> tuple[Finding, ...]:
        stale, kept = (history.at_sites(f"parameter.{name}_gradient") for name in ("stale", "kept"))
        if stale.values.shape != kept.values.shape:
            return ()
        # The first step after a pause of the instrument has nothing before it that could be left over.
        told = stale.present & kept.present & (kept.values > 0) & np.isfinite(stale.values)
        left = self._left(stale, told)
        if left is None:
            return ()
        everywhere = set(left.names).issuperset(stale.sites[index] for index in np.flatnonzero(told.any(axis=0)))
        return (
            Finding(
                IssueType.STALE_GRAD,
                Severity.HIGH if everywhere else Severity.MEDIUM,
                ("",) if everywhere else left.names,
                left.worst,
                0.0,
                f"before the backward pass, .grad of {some(left.names)} held gradients of earlier steps, "
                f"{number(left.worst)} times as large as the one used in this step, in {left.times} of {left.looks} "
                "steps: the update uses a sum over steps.",
                "call zero_grad() once per step, before loss.backward(), on the optimizer or model that "
                f"holds {left.names[0]}; for accumulation call it after each optimizer.step(), with a closure as its "
                "first line.",
                since=left.since,
            ),
        )

    def _left(self, series: SiteSeries, told: BoolArray) -> _Left | None:
        """Return where something was left in the newest reading and in many before, of those that tell."""
        left = told & np.isfinite(series.values) & (series.values > 0)
        times, looks = left.sum(axis=0), told.sum(axis=0)
        now = begun(series.steps, left) < len(left)
        looks = np.where(now, times, looks)
        found = left[-1:].any(axis=0) & (now | (times >= self.readings)) & (times >= self.share * looks)
        if not found.any():
            return None
        return _Left(
            tuple(compress(series.sites, found)),
            float(series.values[-1][found].max()),
            int(times[found].max()),
            int(looks[found].max()),
            int(series.steps[int(np.argmax(left[:, found].any(axis=1)))]),
        )


@dataclass(frozen=True, kw_only=True)
class ClearedGradients(Check):
    """Report gradients that are computed but cleared before the optimizer steps.

    Why it is bad:
        The optimizer steps without a gradient. The loss is computed and propagated back in vain, and no weight changes.

    Example:
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()

    Use instead:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    Not reported:
        A gradient was present at any of the followed parameters in one of the last four readings.

    Attributes:
        readings: Minimum number of consecutive readings.
        patience: One; ``readings`` already requires persistence.
    """

    readings: int = 4
    patience: int = 1
    heal: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("parameter.kept_gradient",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.kept_gradient",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the followed parameters of this record and of those before it."""
        kept = history.at_sites("parameter.kept_gradient")
        if len(kept.steps) < self.readings:
            return ()
        values, present = kept.values[-self.readings :], kept.present[-self.readings :]
        gone = present.all(axis=0) & (values == 0).all(axis=0)
        if not gone.any() or (present & ~gone).any():
            return ()
        return (
            Finding(
                IssueType.NOT_TRAINING,
                Severity.CRITICAL,
                ("",),
                0.0,
                0.0,
                f"gradients reached {some(tuple(compress(kept.sites, gone)))} in each of {self.readings} steps and "
                "were gone when the optimizer stepped: they are cleared between backward() and step().",
                "clear gradients before the backward pass, not after it: optimizer.zero_grad(); loss.backward(); "
                "optimizer.step().",
                since=int(kept.steps[-self.readings]),
                cause="cleared before the step",
                origin="cleared before the step",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class DroppedGradients(Check):
    """Report micro-batches whose gradients are cleared before the optimizer steps, so that only the last one is used.

    Their losses are divided by their number, which shows that the gradients should be accumulated. But each pass finds
    cleared gradients, and the optimizer uses only the gradient of the last pass.

    Why it is bad:
        Of eight batches, seven are computed in vain, and the gradient of the remaining one is divided by eight.

    Example:
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / 8).backward()
            if (i + 1) % 8 == 0:
                optimizer.step()

    Use instead:
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / 8).backward()
            if (i + 1) % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()

    Not reported:
        Losses that are not divided by the number of passes; gradients that are accumulated elsewhere, clipped, or
        divided by the loss scale; weights that change between the passes; steps with a closure.

    Attributes:
        readings: Minimum number of consecutive steps.
        patience: One; ``readings`` already requires persistence.
    """

    readings: int = 4
    patience: int = 1
    heal: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("parameter.dropped_gradient",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.dropped_gradient",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the followed parameters of this record and of those before it."""
        dropped = history.at_sites("parameter.dropped_gradient")
        if len(dropped.steps) < self.readings:
            return ()
        values, present = dropped.values[-self.readings :], dropped.present[-self.readings :]
        if not present.any(axis=1).all() or not (values[present] > 0).all():
            return ()
        count = float(values[present].max())
        return (
            Finding(
                IssueType.NOT_TRAINING,
                Severity.MEDIUM,
                ("",),
                count,
                0.0,
                f"the losses of {number(count + 1)} micro-batches are divided by their number, and the gradients of "
                f"{number(count)} of them are cleared before the optimizer steps: only the last micro-batch is used.",
                "call optimizer.zero_grad() after each optimizer.step(), not before each backward().",
                since=int(dropped.steps[-self.readings]),
                cause="micro-batches thrown away",
                origin="micro-batches thrown away",
            ),
        )
