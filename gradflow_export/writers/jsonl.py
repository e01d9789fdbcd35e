"""A writer of JSON lines: for scripts, jq and pandas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from gradflow_export.errors import StorageError
from gradflow_export.lines import LineEncoder
from gradflow_export.records import RunInfo, StepRecord
from gradflow_export.writers.places import AppendFile, prepare_directory


@final
class JsonlWriter:
    """Writes one JSON object per line, each line as soon as it is known; see :mod:`gradflow_export.lines`.

    What was written is readable after ``kill -9``: at most the last line is cut short, and readers skip it.

    Args:
        path: A file that ends in ``.jsonl``, which is appended to, or a directory, in which each session gets the file
            ``gradflow-<session>.jsonl``.

    Raises:
        StorageError: The place cannot be written to.
    """

    name = "jsonl"

    def __init__(self, path: str | os.PathLike[str]) -> None:
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
        self._file: AppendFile | None = None

    @property
    def path(self) -> Path | None:
        """The file written to; ``None`` before a run is opened in a directory."""
        return self._path

    def open(self, run: RunInfo) -> None:
        """Open the file and write the run's description as the first line of its session."""
        if self._path is None:
            self._path = self._directory / f"gradflow-{run.session}.jsonl"
        self._file = AppendFile(self._path, fresh=False)
        self._file.append(self._encoder.run(run))

    def write(self, record: StepRecord) -> None:
        """Write one record; ignored after ``close`` and after a failure.

        Raises:
            OSError: The disk is full or gone; the file keeps every line written before, and is closed for good.
            StorageError: No run was opened.
        """
        if self._file is None:
            raise StorageError("JsonlWriter expects open(run) before write(record); call open first.")
        if not self._file.closed:
            self._file.append(self._encoder.record(record))

    def flush(self) -> None:
        """Do nothing: each line was handed to the system when it was written."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
