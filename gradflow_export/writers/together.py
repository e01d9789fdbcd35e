"""The writers of one run: each gets every record, and one that fails keeps nothing from the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gradflow_export.records.step_record import Gap, RunInfo, StepRecord
from gradflow_export.writers.base import Writer

_log = logging.getLogger("gradflow_export")


class WriterSet:
    """Tells several writers the same; one that raises is reported once and disabled.

    Args:
        writers: Not opened yet.

    Attributes:
        all: All of them, in order.
        error: What the first that was disabled raised.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self.all = tuple(writers)
        self.error: Exception | None = None
        self._working = list(writers)
        self._reasons: dict[str, str] = {}
        self._missed: dict[str, Gap] = {}

    @property
    def working(self) -> tuple[Writer, ...]:
        """Those that were not disabled."""
        return tuple(self._working)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of those that were disabled."""
        return tuple(writer.name for writer in self.all if writer not in self._working)

    @property
    def lost(self) -> Mapping[str, Gap]:
        """Recorded steps that are not in what a writer left behind, by the writer's name."""
        told = ((writer.name, getattr(writer, "lost", None)) for writer in self.all)
        return {**self._missed, **{name: gap for name, gap in told if gap is not None}}

    def open(self, info: RunInfo | None) -> None:
        """Begin a run."""
        for writer in self.all:
            self._tell(writer, "open", info)

    def write(self, record: StepRecord) -> None:
        """Hand over one record."""
        for writer in self.all:
            if writer in self._working:
                self._tell(writer, "write", record)
            elif writer.name in self._reasons:
                self._miss(writer.name, record.step)

    def keep(self) -> None:
        """Have what writers hold outlive the process."""
        for writer in [writer for writer in self._working if hasattr(writer, "keep")]:
            self._tell(writer, "keep")

    def flush(self) -> None:
        """Have what writers hold become readable."""
        for writer in list(self._working):
            self._tell(writer, "flush")

    def close(self, error: str = "", missing: Gap | None = None) -> None:
        """Finish.

        Args:
            error: The exception that ended the run, with its step, for writers that keep it.
            missing: Steps that were lost after the last record, for the same.
        """
        ended = error or missing is not None
        for writer in [writer for writer in self._working if ended and hasattr(writer, "ended_by")]:
            self._tell(writer, "ended_by", error, missing)
        for writer in list(self._working):
            self._tell(writer, "close")

    def _tell(self, writer: Writer, what: str, *args: Any) -> None:
        """Call one method of a writer; on an error disable the writer."""
        try:
            getattr(writer, what)(*args)
        except Exception as error:
            self.error = self.error or error
            if writer in self._working:
                self._working.remove(writer)
            _log.warning(
                "gradflow: the %s writer failed in %s() and is disabled; training and the other writers go on: %r",
                writer.name,
                what,
                error,
            )
            self._reasons.setdefault(writer.name, f"disabled after {error!r}")
            if what == "write":
                self._miss(writer.name, args[0].step)
            if what != "close":
                self._tell(writer, "close")

    def _miss(self, name: str, step: int) -> None:
        self._missed[name] = Gap(step, step, 1, self._reasons[name]).after(self._missed.get(name))
