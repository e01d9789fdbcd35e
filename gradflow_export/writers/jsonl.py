"""A writer of JSON lines: for scripts, jq and pandas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import Gap, RunInfo, StepRecord
from gradflow_export.storage.jsonl import LineEncoder
from gradflow_export.writers.journal import Journal
from gradflow_export.writers.open_issues import OpenIssues
from gradflow_export.writers.places import prepare_directory


@final
class JsonlWriter:
    """Writes one JSON object per line, each line as soon as it is known; see :mod:`gradflow_export.storage.jsonl`.

    What was written is readable after ``kill -9``: at most the last line is cut short, and readers skip it. A disk that
    is full or gone is waited for, and a file that was removed is begun anew; see
    :class:`~gradflow_export.writers.journal.Journal`.

    Args:
        path: A file that ends in ``.jsonl``, which is appended to, or a directory, in which each session gets the file
            ``gradflow-<session>.jsonl``.

    Raises:
        StorageError: The place cannot be written to.
    """

    name = "jsonl"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._given = path
        wanted = Path(path)
        named = wanted.suffix == ".jsonl"
        self._directory = prepare_directory(os.path.dirname(path) or "." if named else path, "JsonlWriter")  # noqa: PTH120 - Path folds the // of an address
        self._path = wanted if named else None
        if named and wanted.exists() and not (wanted.is_file() and os.access(wanted, os.W_OK)):
            raise StorageError(
                f"JsonlWriter expects a file it can append to, got {str(wanted)!r}, which is a directory or read-only; "
                "pass another path."
            )
        self._encoder = LineEncoder()
        self._last, self._error, self._issues = 0, "", OpenIssues()
        self._missing: Gap | None = None
        self._journal: Journal | None = None

    @property
    def path(self) -> Path | None:
        """The file written to; ``None`` before a run is opened in a directory."""
        return self._path

    @property
    def lost(self) -> Gap | None:
        """Steps that could not be written, ``None`` when there are none."""
        return None if self._journal is None else self._journal.lost

    def in_child(self) -> JsonlWriter:
        """Return the writer of a forked child: in a directory it has a file of its own, a named one is shared.

        Raises:
            StorageError: The place cannot be written to.
        """
        return JsonlWriter(self._given)

    def open(self, run: RunInfo) -> None:
        """Open the file and write the run's description as the first line of its session."""
        path = self._path = self._path or self._directory / f"gradflow-{run.session}.jsonl"
        encoder = self._encoder = LineEncoder(run.session)
        self._journal = Journal(
            self.name,
            lambda _number: path,
            preamble=lambda _number: encoder.run(run),
            mark=lambda gap, _number: encoder.gap(gap),
            exclusive=False,
        )
        self._journal.open()

    def write(self, record: StepRecord) -> None:
        """Write one record, or keep it until the disk can be written to again; ignored after ``close``.

        Raises:
            StorageError: No run was opened.
        """
        journal = self._journal
        if journal is None:
            raise StorageError("JsonlWriter expects open(run) before write(record); call open first.")
        journal.retry()
        record = self._issues.completed(record, journal.lost)
        if journal.full:
            journal.lose(record.step)
        elif not journal.closed:
            self._last = record.step
            journal.append(self._encoder.record(record), (record.step, record.step, 1))

    def keep(self) -> None:
        """Try again to write what waits for the disk: each line was handed to the system when it was written."""
        if self._journal is not None:
            self._journal.retry()

    flush = keep

    def ended_by(self, error: str, missing: Gap | None = None) -> None:
        """Have the file say which exception ended the run, and what was lost at its end; before :meth:`close`."""
        self._error, self._missing = error, missing

    def close(self) -> None:
        """Close the file."""
        if self._journal is not None:
            self._journal.close(self._encoder.end(self._last, self._error), self._missing)
