"""A writer that keeps records in memory: for notebooks and for tests."""

from __future__ import annotations

from collections import deque
from typing import final

from gradflow_export.errors import ArgumentError
from gradflow_export.records import RunInfo, StepRecord


@final
class MemoryWriter:
    """Keeps the records, or the last ``maxlen`` of them.

    Args:
        maxlen: How many records to keep; ``None`` keeps all, which grows with the run.

    Attributes:
        info: The run, once it was opened.
        closed: Whether ``close`` was called.

    Raises:
        ArgumentError: ``maxlen`` is below 1.
    """

    name = "memory"

    def __init__(self, maxlen: int | None = None) -> None:
        if maxlen is not None and maxlen < 1:
            raise ArgumentError(f"maxlen expects a number of records >= 1 or None, got {maxlen}; pass None to keep all")
        self._records: deque[StepRecord] = deque(maxlen=maxlen)
        self.info: RunInfo | None = None
        self.closed = False

    @property
    def records(self) -> list[StepRecord]:
        """The records kept, oldest first; a new list."""
        return list(self._records)

    def in_child(self) -> MemoryWriter:
        """Return the writer of a forked child: this one, with the records of before."""
        return self

    def open(self, run: RunInfo) -> None:
        """Begin a run."""
        self.info, self.closed = run, False

    def write(self, record: StepRecord) -> None:
        """Keep one record."""
        if not self.closed:
            self._records.append(record)

    def flush(self) -> None:
        """Do nothing: records are readable at once."""

    def close(self) -> None:
        """Take in no more; the records stay."""
        self.closed = True
