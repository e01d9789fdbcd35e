"""What every writer is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gradflow_export.records.step_record import RunInfo, StepRecord


@runtime_checkable
class Writer(Protocol):
    """Takes records to one place.

    A missing package raises :class:`~gradflow_export.errors.MissingPackageError` when the writer is constructed, an
    unusable place raises :class:`~gradflow_export.errors.StorageError` then. After that ``write`` may raise: the
    exporter reports it once and disables this writer; training and the other writers go on.
    """

    @property
    def name(self) -> str:
        """Short name for messages."""

    def open(self, run: RunInfo) -> None:
        """Begin a run; called once, before the first ``write``."""

    def write(self, record: StepRecord) -> None:
        """Take in one record; called once per record, in order, from one thread."""

    def flush(self) -> None:
        """Make what was written readable by others; called now and then, from the same thread."""

    def close(self) -> None:
        """Finish; calling it again does nothing."""


class NoWriter:
    """Stands in for a writer of another package that could not be made, so that the run goes on.

    Args:
        name: Of the other.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, run: RunInfo) -> None:
        """Do nothing."""

    def write(self, record: StepRecord) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
