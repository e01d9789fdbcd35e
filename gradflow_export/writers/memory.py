"""A writer that keeps records in memory: for notebooks and for tests."""

from __future__ import annotations

import sys
from collections import deque
from typing import final

import numpy as np

from gradflow_export.errors import ArgumentError
from gradflow_export.records.step_record import RunInfo, StepRecord

MEASURED_EVERY = 8
"""Of so many records one is measured; those between are taken for like it."""


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
        self._measured = self._measured_bytes = self._written = 0

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
            if self._written % MEASURED_EVERY == 0:
                self._measured, self._measured_bytes = self._measured + 1, self._measured_bytes + _size(record)
            self._written += 1

    @property
    def kept_bytes(self) -> int:
        """About how much memory the records take."""
        return len(self._records) * self._measured_bytes // max(self._measured, 1)

    def flush(self) -> None:
        """Do nothing: records are readable at once."""

    def close(self) -> None:
        """Take in no more; the records stay."""
        self.closed = True


def _size(record: StepRecord) -> int:
    """Return about how many bytes a record takes; what records share, such as names of sites, is left out."""
    total = sys.getsizeof(record.__dict__) + sys.getsizeof(record.readings) + 64
    for each in (*record.readings, *record.histograms):
        arrays = [value for value in each.__dict__.values() if isinstance(value, (bytes, np.ndarray))]
        total += sys.getsizeof(each) + sys.getsizeof(each.__dict__) + sum(map(sys.getsizeof, arrays))
    return total
