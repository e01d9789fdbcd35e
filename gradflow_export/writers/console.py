"""A writer that prints: one line per issue, and now and then a line of headline numbers."""

from __future__ import annotations

import sys
from typing import TextIO, final

from gradflow_export.errors import ArgumentError
from gradflow_export.records.causes import with_causes
from gradflow_export.records.step_record import Issue, RunInfo, StepRecord

_HEADLINES = (
    ("loss", "loss"),
    ("alignment.accuracy", "accuracy"),
    ("gradient.total_norm", "gradient norm"),
    ("gain.depth", "depth gain"),
    ("update.ratio", "update ratio"),
    ("learning_rate", "lr"),
    ("runtime.throughput", "steps/s"),
    ("overhead", "overhead"),
)


@final
class ConsoleWriter:
    """Prints issues when they open and heal, and a line of headline numbers every few seconds of the run.

    Args:
        stream: Where to print; ``None`` is whatever ``sys.stderr`` is at that moment, so that redirection works.
        every: Seconds of the records' own clock between headline lines; 0 prints one per record.

    Raises:
        ArgumentError: ``every`` is negative or NaN.
    """

    name = "console"

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        if not every >= 0:
            raise ArgumentError(f"every expects seconds >= 0, got {every}; pass 0 for a line per record")
        self._stream = stream
        self._every = float(every)
        self._printed: float | None = None
        self._last_step = 0
        self._found = 0
        self._open: dict[tuple[str, str, int], Issue] = {}
        self._closed = False

    def in_child(self) -> ConsoleWriter:
        """Return the writer of a forked child: this one, for the stream is shared."""
        return self

    def open(self, run: RunInfo) -> None:
        """Print which model is watched."""
        world = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        self._print(f"watching {run.model or 'a model'}, {run.parameters:,} parameters{world}")

    def write(self, record: StepRecord) -> None:
        """Print the record's issues, and its headline numbers when they are due."""
        if self._closed:
            return
        self._last_step = record.step
        for issue in record.issues:
            self._count(issue)
        causes = {issue.key: issue.explained_by for issue in with_causes(self._open.values())}
        for issue in record.issues:
            self._print(_issue_line(issue, causes.get(issue.key)))
        if self._printed is None or not 0 <= record.wall_time - self._printed < self._every:
            self._printed = record.wall_time
            self._print(_headline(record))

    def flush(self) -> None:
        """Flush the stream."""
        if not self._closed:
            self._target.flush()

    def close(self) -> None:
        """Print how many issues there were; the stream stays open, for it is the user's."""
        if self._closed:
            return
        self._closed = True
        found = f"issues: {self._found}, still open: {len(self._open)}" if self._found else "no issues"
        self._print(f"closed after step {self._last_step}; {found}")

    def _count(self, issue: Issue) -> None:
        if not issue.open:
            self._open.pop(issue.key, None)
        else:
            self._found += issue.key not in self._open
            self._open[issue.key] = issue

    @property
    def _target(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _print(self, line: str) -> None:
        self._target.write(f"gradflow: {line}\n")


def _issue_line(issue: Issue, cause: tuple[str, str, int] | None) -> str:
    if issue.open and cause is not None:
        where = f"{issue.layer or 'whole model'}{f' (+{more} more)' if (more := len(issue.layers) - 1) else ''}"
        return f"also seen: {issue.issue_type} in {where} since step {issue.step}, which {cause[0]} explains"
    line = " ".join(str(issue).split())
    return line if issue.open else f"healed {line}"


def _headline(record: StepRecord) -> str:
    phase = "" if record.phase == "train" else f" ({record.phase})"
    known = ((label, record.value(metric)) for metric, label in _HEADLINES)
    parts = [f"{label} {value:.4g}" for label, value in known if value is not None]
    return "  ".join([f"step {record.step}{phase}", *parts])
