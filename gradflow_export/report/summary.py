"""What happened in a run so far, in a bounded amount of memory: for ``exporter.summary()`` and ``gradflow report``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.causes import Group, groups, in_order
from gradflow_export.records.ignored import ignored_in
from gradflow_export.records.lost import LostSteps, StoredLost
from gradflow_export.records.statistics import Ends, Welford, Window, spread_of
from gradflow_export.records.step_record import (
    Issue,
    IssueType,
    RunInfo,
    StepRecord,
    info_to_json,
    issue_to_json,
    number_to_json,
    passes_alone,
)
from gradflow_export.report.flow_pattern import FlowPatterns
from gradflow_export.report.trace import Trace

NAMED = 3
"""Open problems that the verdict names."""
HARDLY = 0.97
"""Fraction of the first loss at or above which a loss hardly fell."""
HEALED = 1000
"""Healed issues that are remembered, as many as the rules' judge remembers; the oldest go first."""

_HEADLINES = frozenset(name for name, spec in CATALOG.items() if spec.headline)

TREND_METRICS = ("loss", "gradient.total_norm", "update.total_norm")
SHORT = 1000
"""Steps up to which the dense start has much to do with the share of the time that watching took."""
TREND_WINDOW = 20
"""Readings over which a metric's spread and trend are computed."""


class RunSummary:
    """Takes records one by one and keeps headline statistics and issues.

    Attributes:
        info: What was known at the start, ``None`` when nothing is.
        steps: Number of records.
        first: First recorded step, 0 when there is none.
        last: Last recorded step, 0 when there is none.
        loss_read: Last step whose loss was read, 0 when there is none.
        left_out: Healed issues that are remembered no more.
        headline: Statistics of each headline metric that was recorded.
        read: The last step at which each of them was.
        flow: How the gradient flows through the model.
        trace: The loss over all steps.
        stepped: Whether there is a record of more than backward passes that led to no optimizer step.
        unread: Why nothing can have been recorded, empty where something can.
    """

    def __init__(self, info: RunInfo | None = None) -> None:
        self.info = info
        self.steps = self.first = self.last = self.left_out = 0
        self.spacing = 1.0
        self.headline: dict[str, Welford] = {}
        self.read: dict[str, int] = {}
        self.flow = FlowPatterns()
        self._stored = StoredLost()
        self._known: LostSteps | None = None
        self._windows = {name: Window(TREND_WINDOW) for name in TREND_METRICS}
        self._issues: dict[tuple[str, str, int], Issue] = {}
        self._ignored: dict[tuple[str, str, int], Issue] = {}
        self._loss, self.loss_read, self.trace = Ends(), 0, Trace()
        self.stepped, self.unread = False, ""
        self._players: set[str] = set()
        self._elapsed = self._own = 0.0
        self._trained: tuple[int, int] | None = None

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        self.steps += 1
        share, seconds = record.value("overhead"), record.value("runtime.step_time")
        if share is not None and seconds is not None:
            seconds *= max(record.step - self.last, 1)  # both are of all steps since the record before
            self._elapsed, self._own = self._elapsed + seconds, self._own + share * seconds
        self.first = self.first or record.step
        self.last = record.step
        self._stored.add(record)
        self._trained = _trained(record) or self._trained
        self.stepped |= not passes_alone(record)
        self._players |= _own_losses(record)
        self.spacing = max(self.spacing, record.value("schedule.spacing") or 1.0)
        for metric, reading in record.metrics.items():
            if metric in _HEADLINES and reading.number is not None:
                seen = self.headline.get(metric) or self.headline.setdefault(metric, Welford())
                seen.add(reading.number)
                self.read[metric] = record.step
        self.flow.add(record)
        for name, window in self._windows.items():
            value = record.value(name)
            if value is not None:
                window.add(record.step, value)
        loss = record.value("loss")
        if loss is not None:
            self._loss.add(loss)
            self.loss_read = record.step
            self.trace.add(record.step, loss)
        for issue in record.issues:
            self._issues[issue.key] = issue
        for meant in ignored_in(record):
            self._ignored.pop(meant.key, None)
            self._ignored[meant.key] = meant
        if record.issues or record.notes:
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest healed issues: one that comes and goes would otherwise take memory for as long as it does."""
        healed = [key for key, issue in self._issues.items() if not issue.open]
        for key in healed[: max(len(healed) - HEALED, 0)]:
            del self._issues[key]
            self.left_out += 1
        for key in list(self._ignored)[: max(len(self._ignored) - HEALED, 0)]:
            del self._ignored[key]

    @property
    def ignored(self) -> tuple[Issue, ...]:
        """What would be issues, had the user not chosen to ignore them: of each the latest state, newest last."""
        return tuple(self._ignored.values())

    @property
    def issues(self) -> tuple[Issue, ...]:
        """Each issue once, as it stands now: open ones first, worst first, causes before what they explain."""
        return in_order(self._issues.values())

    @property
    def groups(self) -> tuple[Group, ...]:
        """The issues that no other one explains, each with its consequences: open ones first, worst first."""
        return groups(self._issues.values())

    @property
    def lost_steps(self) -> LostSteps:
        """What was lost: as the records tell, until something that knows better sets it."""
        return self._stored.lost_steps if self._known is None else self._known

    @lost_steps.setter
    def lost_steps(self, known: LostSteps) -> None:
        self._known = known

    @property
    def loss(self) -> tuple[float, float] | None:
        """The first and the last loss, as :class:`~gradflow_export.records.statistics.Ends` defines them."""
        return self._loss.values

    @property
    def overhead(self) -> float | None:
        """Our own share of the training thread's time from the first record to the last; ``None`` where unknown.

        All steps count, those without a record too, each by how long it took: the mean of ``overhead`` over records
        would be that of the dense start, where a budget records few steps after it.
        """
        return self._own / self._elapsed if self._elapsed > 0 else None

    @property
    def verdict(self) -> str:
        """One line: the worst open problems and how many causes there are, or that there is none; and what was lost.

        A run whose loss has not fallen, or hardly, is not called healthy.
        """
        lost = f"; {self.lost_steps.phrase}" if self.lost_steps else ""
        if not self.steps:
            return self.unread or f"no step recorded yet{lost}"
        every = self.groups
        still = [group.head for group in every if group.head.open]
        if not still:
            healed = f" ({len(every) + self.left_out} healed)" if every else ""
            said = f"in {'the ' * bool(lost)}{self.steps} recorded step{'s' * (self.steps > 1)}{lost}"
            if self.headline.keys().isdisjoint(TREND_METRICS):
                return f"no verdict: neither loss nor gradients nor updates were read {said}"
            return f"{'' if self._stands else 'healthy: '}no open problem {said}{healed}{self._progress()}"
        named = "; ".join(self._named(issue) for issue in still[:NAMED])
        more = f"; and {len(still) - NAMED} more" if len(still) > NAMED else ""
        return f"{len(still)} problem{'s' * (len(still) > 1)}: {named}{more}{lost}"

    def _named(self, issue: Issue) -> str:
        since = f" since step {issue.step}" if self.stepped else ""
        return f"{issue.issue_type} in {issue.layer or 'the whole model'}{since}"

    @property
    def _stands(self) -> bool:
        """Whether there is one loss, and it has not fallen, or hardly."""
        if self.loss is None or len(self._players) > 1:
            return False
        first, last = self.loss
        return not last < first * (HARDLY if first > 0 else 1.0)

    def _progress(self) -> str:
        if "loss" not in self.headline:
            return "; no loss was recorded"
        if self.loss is None or len(self._players) > 1:
            return ""
        first, last = self.loss
        went = "fell" if not self._stands else "hardly fell:" if last < first else "has not fallen:"
        read = f", read up to step {self.loss_read}" if self.loss_read < self.last else ""
        return f"; the loss {went} from {first:.4g} to {last:.4g}{read}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for ``json.dumps(..., allow_nan=False)``; NaN and the infinities are strings."""
        return {
            "info": None if self.info is None else info_to_json(self.info),
            "verdict": self.verdict,
            "steps": {"count": self.steps, "first": self.first, "last": self.last},
            "lost": {"dropped": dict(self.lost_steps.dropped), "unwritten": dict(self.lost_steps.unwritten)},
            "loss": None
            if self.loss is None
            else {"first": self.loss[0], "last": self.loss[1], "last_step": self.loss_read},
            "overhead": self.overhead,
            "headline": {
                name: {key: number_to_json(value) for key, value in self._row(name, seen).items()}
                | {"nonfinite": seen.nonfinite, "last_step": self.read[name]}
                for name, seen in sorted(self.headline.items())
            },
            "trends": {
                name: {key: number_to_json(value) for key, value in vars(spread_of(w.steps, w.values)).items()}
                for name, w in self._windows.items()
                if len(w)
            },
            "flow": self.flow.as_dict(self._open_types),
            "issues": [issue_to_json(issue) for issue in self.issues],
            "issues_left_out": self.left_out,
            "ignored": [issue_to_json(issue) for issue in self.ignored],
        }

    def _row(self, name: str, seen: Welford) -> dict[str, float]:
        """Return the statistics of a headline metric; the last loss is that of the verdict, unless it is not finite."""
        out = statistics(seen)
        if name == "loss" and self.loss is not None and math.isfinite(seen.last):
            out["last"] = self.loss[1]
        return out

    @property
    def _open_types(self) -> set[IssueType]:
        return {issue.issue_type for issue in self._issues.values() if issue.open}

    def as_text(self, title: str) -> str:
        """Return the summary as lines for a terminal.

        Args:
            title: First words of the first line, such as the log directory.
        """
        info = self.info
        model = f"  {info.model}, {info.size}{self._now_trained(info)}" if info and info.model else ""
        span = f"steps {self.first} to {self.last}, {self.steps} recorded" if self.steps else "no step recorded"
        if self.steps and not self.stepped:
            span = "no optimizer step was seen"
        if self.spacing > 1:
            span += f"; to keep to the budget, at times one of {self.spacing:.0f}"
        if self.overhead is not None:
            span += f"; overhead {self.overhead:.1%} of the time of all steps"
            span += " (the first 100 are recorded densely)" if self.last <= SHORT else ""
        lines = [f"{title}{model}", f"  {self.verdict}", f"  {span}"]
        width = max(22, *(len(name) + 1 for name in self.headline)) if self.headline else 0
        if self.headline:
            lines.append(f"  {'metric':<{width}}{'last':>12}{'mean':>12}{'min':>12}{'max':>12}  unit")
        for name, seen in sorted(self.headline.items()):
            numbers = "".join(f"{value:>12.4g}" for value in self._row(name, seen).values())
            extra = f"  ({seen.nonfinite} NaN or Inf)" if seen.nonfinite else ""
            extra += self._seldom(name, seen)
            lines.append(f"  {name:<{width}}{numbers}  {CATALOG[name].unit}{extra}")
        pattern = self.flow.pattern(self._open_types)
        if pattern is not None:
            lines.append(f"  gradient flow: {pattern}")
        for group in self.groups:
            lines += issue_lines(group.head, group.also)
        if self.left_out:
            lines.append(f"  {self.left_out} older healed issues are not listed")
        for issue in self.ignored:
            until = "" if issue.open else f", healed at step {issue.healed_step}"
            where = f"{issue.layer or 'the whole model'}{f' and {n} more' if (n := len(issue.layers) - 1) else ''}"
            lines.append(f"  ignored  {issue.issue_type} in {where} since step {issue.step}{until}")
        return "\n".join(lines)

    def _now_trained(self, info: RunInfo) -> str:
        """Say how many parameters train now, where it is another number than when watching began."""
        trained, entries = self._trained or (info.parameters, info.entries)
        return f"; at the end {trained:,} train" if entries == info.entries and trained != info.parameters else ""

    def _seldom(self, name: str, seen: Welford) -> str:
        """Say of which steps a row is, where that is less than half of them or not up to the last."""
        count, last = seen.count + seen.nonfinite, self.read[name]
        said = [f"read at {count} of {self.steps} steps"] if 2 * count < self.steps else []
        said += [f"last read at step {last}"] if last < max(self.read.values()) else []
        return f"  ({', '.join(said)})" if said else ""


def _own_losses(record: StepRecord) -> set[str]:
    """Return the optimizers that show that they have losses of their own: each alone, or with another one's beside."""
    seen = record.metrics.get("optimizer.loss")
    if seen is None:
        return set()
    sites = [site for site, there in zip(seen.sites, seen.present, strict=True) if there]
    return set(sites) if len(sites) == 1 or len(np.unique(seen.values[seen.present])) > 1 else set()


def _trained(record: StepRecord) -> tuple[int, int] | None:
    """Return how many entries of parameters train, and how many there are, where that was read."""
    trains, sizes = record.metrics.get("parameter.trainable"), record.metrics.get("parameter.numel")
    if trains is None or sizes is None or trains.sites != sizes.sites:
        return None
    return int(sizes.values[trains.values > 0].sum(dtype=np.float64)), int(sizes.values.sum(dtype=np.float64))


def issue_lines(issue: Issue, also: str = "") -> list[str]:
    """Return an issue as lines for a terminal: what, where, since when, the numbers, its consequences, what to do.

    Args:
        issue: What is wrong.
        also: What it explains, in words.
    """
    where, until = issue.layer or "the whole model", "" if issue.open else f", healed at step {issue.healed_step}"
    lines = [
        f"  [{issue.severity.name}] {issue.issue_type} in {where} since step {issue.step}{until}",
        f"    evidence {issue.message}",
        f"    value    {issue.value:.4g}, threshold {issue.threshold:.4g}",
    ]
    if len(issue.layers) > 1:
        lines.append(f"    layers   {', '.join(issue.layers)}")
    if also:
        lines.append(f"    also     {also}")
    return [*lines, f"    fix      {issue.advice}"]


def statistics(seen: Welford) -> dict[str, float]:
    """Return last, mean, least and greatest of the finite numbers; NaN where there was none."""
    if not seen.count:
        return {"last": seen.last, "mean": math.nan, "min": math.nan, "max": math.nan}
    return {"last": seen.last, "mean": seen.mean, "min": seen.low, "max": seen.high}


def write_json(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write a summary as JSON.

    Args:
        path: A file name ending in ``.json``.
        summary: JSON-ready values, without bare NaN.

    Raises:
        ArgumentError: The path does not end in ``.json``.
        StorageError: The file cannot be written.
    """
    target = Path(path)
    if target.suffix != ".json":
        raise ArgumentError(f"save expects a path ending in .json, got {str(path)!r}.")
    try:
        target.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"save cannot write {str(path)!r}: {error.strerror or error}; choose another.") from error
