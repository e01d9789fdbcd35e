"""What happened in a run so far, in a bounded amount of memory: for ``exporter.summary()`` and ``gradflow report``."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from gradflow_export.catalog import CATALOG
from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.patterns import FlowPatterns
from gradflow_export.records import (
    RUN_SITE,
    Issue,
    IssueType,
    RunInfo,
    StepRecord,
    info_to_json,
    issue_to_json,
    number_to_json,
)
from gradflow_export.stats import Welford, Window, spread_of

LOSSES = 5
"""Losses at either end whose median tells whether the loss fell."""

HEALED = 1000
"""Healed issues that are remembered, as many as the rules' judge remembers; the oldest go first."""

TREND_METRICS = ("loss", "gradient.total_norm", "update.total_norm")
TREND_WINDOW = 20
"""Readings over which a metric's spread and trend are told."""


class RunSummary:
    """Takes records one by one and keeps headline statistics and issues.

    Attributes:
        info: What was known at the start, ``None`` when nothing is.
        steps: Number of records.
        first: First recorded step, 0 when there is none.
        last: Last recorded step, 0 when there is none.
        left_out: Healed issues that are remembered no more.
        headline: Statistics of each headline metric that was recorded.
        flow: How the gradient flows through the model.
    """

    def __init__(self, info: RunInfo | None = None) -> None:
        self.info = info
        self.steps = self.first = self.last = self.left_out = 0
        self.headline: dict[str, Welford] = {}
        self.flow = FlowPatterns()
        self._windows = {name: Window(TREND_WINDOW) for name in TREND_METRICS}
        self._issues: dict[tuple[str, str, int], Issue] = {}
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=LOSSES)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        self.steps += 1
        self.first = self.first or record.step
        self.last = record.step
        for reading in record.readings:
            spec = CATALOG.get(reading.metric)
            if spec is not None and spec.headline and reading.sites == (RUN_SITE,) and reading.present[0]:
                self.headline.setdefault(reading.metric, Welford()).add(float(reading.values[0]))
        self.flow.add(record)
        for name, window in self._windows.items():
            value = record.value(name)
            if value is not None:
                window.add(record.step, value)
        loss = record.value("loss")
        if loss is not None and math.isfinite(loss):
            self._last_losses.append(loss)
            if len(self._first_losses) < LOSSES:
                self._first_losses.append(loss)
        for issue in record.issues:
            self._issues[issue.key] = issue
        if record.issues:
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest healed issues: one that comes and goes would otherwise take memory for as long as it does."""
        healed = [key for key, issue in self._issues.items() if not issue.open]
        for key in healed[: max(len(healed) - HEALED, 0)]:
            del self._issues[key]
            self.left_out += 1

    @property
    def issues(self) -> tuple[Issue, ...]:
        """Each issue once, as it stands now: open ones first, worst first, then by step."""
        return tuple(sorted(self._issues.values(), key=lambda i: (not i.open, -i.severity, i.step)))

    @property
    def verdict(self) -> str:
        """One line: healthy, or the worst open problem and how many there are."""
        if not self.steps:
            return "no step recorded yet"
        still = [issue for issue in self.issues if issue.open]
        if not still:
            healed = f" ({len(self._issues) + self.left_out} healed)" if self._issues else ""
            return f"healthy: no open problem in {self.steps} recorded steps{healed}{self._progress()}"
        worst = still[0]
        where = worst.layer or "the whole model"
        return f"{len(still)} problem{'s' * (len(still) > 1)}: {worst.issue_type} in {where} since step {worst.step}"

    def _progress(self) -> str:
        if self.steps < 2 * LOSSES or len(self._first_losses) < LOSSES:
            return ""
        first, last = median(self._first_losses), median(self._last_losses)
        went = "fell" if last < first else "has not fallen:"
        return f"; the loss {went} from {first:.4g} to {last:.4g}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for ``json.dumps(..., allow_nan=False)``; NaN and the infinities are strings."""
        return {
            "info": None if self.info is None else info_to_json(self.info),
            "verdict": self.verdict,
            "steps": {"count": self.steps, "first": self.first, "last": self.last},
            "headline": {
                name: {key: number_to_json(value) for key, value in statistics(seen).items()}
                | {"nonfinite": seen.nonfinite}
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
        }

    @property
    def _open_types(self) -> set[IssueType]:
        return {issue.issue_type for issue in self._issues.values() if issue.open}

    def as_text(self, title: str) -> str:
        """Return the summary as lines for a terminal.

        Args:
            title: First words of the first line, such as the log directory.
        """
        info = self.info
        model = f"  {info.model}, {info.parameters:,} parameters" if info and info.model else ""
        span = f"steps {self.first} to {self.last}, {self.steps} recorded" if self.steps else "no step recorded"
        lines = [f"{title}{model}", f"  {self.verdict}", f"  {span}"]
        width = max(22, *(len(name) + 1 for name in self.headline)) if self.headline else 0
        if self.headline:
            lines.append(f"  {'metric':<{width}}{'last':>12}{'mean':>12}{'min':>12}{'max':>12}  unit")
        for name, seen in sorted(self.headline.items()):
            numbers = "".join(f"{value:>12.4g}" for value in statistics(seen).values())
            extra = f"  ({seen.nonfinite} NaN or Inf)" if seen.nonfinite else ""
            lines.append(f"  {name:<{width}}{numbers}  {CATALOG[name].unit}{extra}")
        pattern = self.flow.pattern(self._open_types)
        if pattern is not None:
            lines.append(f"  gradient flow: {pattern}")
        for issue in self.issues:
            lines += issue_lines(issue)
        if self.left_out:
            lines.append(f"  {self.left_out} older issues that have gone again are left out")
        return "\n".join(lines)


def issue_lines(issue: Issue) -> list[str]:
    """Return an issue as lines for a terminal: what, where, since when, the numbers, what to do."""
    where, until = issue.layer or "the whole model", "" if issue.open else f", gone at step {issue.healed_step}"
    lines = [
        f"  [{issue.severity.name}] {issue.issue_type} in {where} since step {issue.step}{until}",
        f"    seen   {issue.message}",
        f"    value  {issue.value:.4g}, threshold {issue.threshold:.4g}",
    ]
    if len(issue.layers) > 1:
        lines.append(f"    layers {', '.join(issue.layers)}")
    return [*lines, f"    do     {issue.advice}"]


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
