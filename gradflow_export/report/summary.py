"""What happened in a run so far, in a bounded amount of memory: for ``exporter.summary()`` and ``gradflow report``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.causes import Group, groups, in_order
from gradflow_export.records.ignored import ignored_in
from gradflow_export.records.lost import LostSteps, StoredLost
from gradflow_export.records.statistics import Welford, Window, spread_of
from gradflow_export.records.step_record import (
    Gap,
    Issue,
    IssueType,
    RunInfo,
    Severity,
    StepRecord,
    info_to_json,
    issue_to_json,
    number_to_json,
)
from gradflow_export.records.verdict import JUDGED, Course, Verdict, problem, verdict
from gradflow_export.report.flow_pattern import FlowPatterns
from gradflow_export.report.text import as_lines, statistics
from gradflow_export.report.trace import Trace

if TYPE_CHECKING:
    from gradflow_export.storage.earlier import Earlier

HEALED = 1000
"""Healed issues that are remembered, as many as the rules' judge remembers; the oldest go first."""

_HEADLINES = frozenset(name for name, spec in CATALOG.items() if spec.headline)

TREND_WINDOW = 20
"""Readings over which a metric's spread and trend are computed."""


class RunSummary:
    """Takes records one by one and keeps headline statistics and issues.

    Attributes:
        info: What was known at the start, ``None`` when nothing is.
        course: How far the run came, and how its loss went.
        first: First recorded step of the run, 0 when there is none.
        resumed: First steps of the sessions after the first, rising.
        earlier: What earlier sessions of the run left open, if their records are not here.
        left_out: Healed issues that are remembered no more.
        passed: Steps of earlier sessions of which there is no record and none was lost; why is not stored.
        headline: Statistics of each headline metric that was recorded.
        read: The last step at which each of them was.
        flow: How the gradient flows through the model.
        trace: The loss over all steps.
        unread: Why nothing can have been recorded, empty where something can.
    """

    def __init__(self, info: RunInfo | None = None) -> None:
        self.info = info
        self.course, self.first, self.left_out, self.passed = Course(), 0, 0, 0
        self.resumed: tuple[int, ...] = ()
        self.earlier: tuple[Issue, ...] = ()
        self.spacing = 1.0
        self.headline: dict[str, Welford] = {}
        self.read: dict[str, int] = {}
        self.flow = FlowPatterns()
        self._stored = StoredLost()
        self._known: LostSteps | None = None
        self._begun, self._gaps = 0, tuple[Gap, ...]()
        self._windows = {name: Window(TREND_WINDOW) for name in JUDGED}
        self._issues: dict[tuple[str, str, int], Issue] = {}
        self._ignored: dict[tuple[str, str, int], Issue] = {}
        self._seen: dict[tuple[str, str, int], int] = {}
        self._same: dict[tuple[str, str, int], tuple[str, str, int]] = {}
        self.trace, self.unread = Trace(), ""
        self._elapsed = self._own = 0.0
        self._trained: tuple[int, int] | None = None

    def recall(self, before: Earlier, done: int) -> None:
        """Take in what earlier sessions left, and what lies between them and this one; before the first record.

        Args:
            before: What they left.
            done: Steps that were completed before this session.
        """
        self.earlier = tuple(issue for issue, _ in before.issues)
        self._begun, self.course.before, self._gaps = before.first, before.records, tuple(before.gaps)
        if before.records:
            missing = sum(gap.steps for gap in before.gaps)
            self.passed = max(done + 1 - before.first - before.records - missing, 0)
        for step, loss in before.losses:
            self.course.ends.add(loss, step)
            self.trace.add(step, loss)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        share, seconds = record.value("overhead"), record.value("runtime.step_time")
        if share is not None and seconds is not None:
            seconds *= max(record.step - self.last, 1)  # both are of all steps since the record before
            self._elapsed, self._own = self._elapsed + seconds, self._own + share * seconds
        self.first = self.first or self._begun or record.step
        self.course.add(record)
        self._stored.add(record)
        self._trained = _trained(record) or self._trained
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
            self.trace.add(record.step, loss)
        for issue in record.issues:
            self._take(issue, record.step)
        for meant in ignored_in(record):
            self._ignored.pop(meant.key, None)
            self._ignored[meant.key] = meant
        if record.issues or record.notes:
            self._forget()

    def _take(self, issue: Issue, step: int) -> None:
        """Keep an issue; one that an earlier session left open, and that the next one reports again, is one issue."""
        key = self._same.get(issue.key, issue.key)
        if issue.open and key not in self._issues:
            begun = max((first for first in self.resumed if first <= step), default=0)
            alike = (known.key for known in self._issues.values() if known.open and known.key[:2] == key[:2])
            key = next((known for known in alike if self._seen[known] < begun), key)
            self._same |= {issue.key: key} if key != issue.key else {}
        self._issues[key] = issue if key == issue.key else replace(issue, step=key[2])
        self._seen[key] = step

    def _forget(self) -> None:
        """Drop the oldest healed issues: one that comes and goes would otherwise take memory for as long as it does."""
        healed = [key for key, issue in self._issues.items() if not issue.open]
        for key in healed[: max(len(healed) - HEALED, 0)]:
            del self._issues[key], self._seen[key]
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
        """What was lost: as the records tell, until something that knows more about steps sets it."""
        stored = self._stored.lost_steps
        known = stored if self._known is None else replace(self._known, disabled=stored.disabled, unseen=stored.unseen)
        return known.joined(self._gaps) if self._gaps else known

    @lost_steps.setter
    def lost_steps(self, known: LostSteps) -> None:
        self._known = known

    @property
    def steps(self) -> int:
        """Number of records, those of the sessions that this one continues included; 0 before it has one."""
        return self.course.steps and self.course.before + self.course.steps

    @property
    def rank(self) -> int:
        """Rank of the process."""
        return 0 if self.info is None else self.info.rank

    @property
    def last(self) -> int:
        """Last recorded step, 0 when there is none."""
        return self.course.last

    @property
    def loss(self) -> tuple[float, float] | None:
        """The first and the last loss, as :class:`~gradflow_export.records.statistics.Ends` defines them."""
        return self.course.loss

    @property
    def overhead(self) -> float | None:
        """Our own share of the training thread's time from the first record to the last; ``None`` where unknown.

        All steps count, those without a record too, each by how long it took: the mean of ``overhead`` over records
        would be that of the dense start, where a budget records few steps after it.
        """
        return self._own / self._elapsed if self._elapsed > 0 else None

    @property
    def judged(self) -> Verdict:
        """The worst open problems and how many causes there are, or how the loss went; and what was lost."""
        if not self.steps and self.unread:
            return Verdict("none", self.unread)
        every = self.groups
        still = [group.head for group in every if group.head.open and group.head.severity > Severity.INFO]
        latest = max(self.resumed, default=0)
        now = [issue for issue in still if self._seen[issue.key] >= latest]
        before = [issue for issue in still if self._seen[issue.key] < latest]
        reported = {issue.key[:2] for issue in self._issues.values()}
        left = [each.head for each in groups(self.earlier) if each.head.key[:2] not in reported]
        return verdict(
            self.course,
            [self._named(issue) for issue in now],
            worst=max((issue.severity for issue in now), default=Severity.INFO),
            earlier=[self._named(issue) for issue in (*before, *left)],
            healed=sum(not group.head.open for group in every) + self.left_out,
            lost=self.lost_steps.phrase,
        )

    @property
    def verdict(self) -> str:
        """The same on one line. A run whose loss has not fallen, or hardly, is not called healthy."""
        return str(self.judged)

    def _named(self, issue: Issue) -> str:
        return problem(issue, stepped=self.course.stepped)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for ``json.dumps(..., allow_nan=False)``; NaN and the infinities are strings."""
        return {
            "info": None if self.info is None else info_to_json(self.info),
            "verdict": self.verdict,
            "steps": {"count": self.steps, "first": self.first, "last": self.last}
            if self.course.stepped
            else {"count": 0, "first": 0, "last": 0},  # records of backward passes alone are of no step
            "lost": {name: dict(getattr(self.lost_steps, name)) for name in ("dropped", "unwritten", "disabled")},
            "loss": None
            if self.loss is None
            else {"first": self.loss[0], "last": self.loss[1], "last_step": self.course.loss_read},
            "overhead": self.overhead,
            "headline": {
                name: {key: number_to_json(value) for key, value in statistics(seen).items()}
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

    @property
    def _open_types(self) -> set[IssueType]:
        return {issue.issue_type for issue in self._issues.values() if issue.open}

    def as_text(self, title: str) -> str:
        """Return the summary as lines for a terminal.

        Args:
            title: First words of the first line, such as the log directory.
        """
        return "\n".join(as_lines(self, title))

    @property
    def flow_pattern(self) -> str | None:
        """How the gradient flows through the model, in words; ``None`` where that is not known."""
        return self.flow.pattern(self._open_types)

    @property
    def trained(self) -> tuple[int, int] | None:
        """How many entries of parameters train now, and how many there are; ``None`` where that was not read."""
        return self._trained


def _trained(record: StepRecord) -> tuple[int, int] | None:
    """Return how many entries of parameters train, and how many there are, where that was read."""
    trains, sizes = record.metrics.get("parameter.trainable"), record.metrics.get("parameter.numel")
    if trains is None or sizes is None or trains.sites != sizes.sites:
        return None
    return int(sizes.values[trains.values > 0].sum(dtype=np.float64)), int(sizes.values.sum(dtype=np.float64))


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
