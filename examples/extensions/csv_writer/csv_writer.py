"""A writer of one's own: step, loss and issues as a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path


class CsvWriter:
    """Writes ``records.csv`` into the folder of the run.

    Args:
        logdir: The folder.
    """

    name = "csv"

    def __init__(self, logdir):
        self._path = Path(logdir) / "records.csv"
        self._file = None

    def open(self, run):
        """Begin a run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(["step", "loss", "issues"])

    def write(self, record):
        """Write one record."""
        loss = record.value("loss")
        self._rows.writerow([record.step, loss, " ".join(str(issue.issue_type) for issue in record.issues)])

    def flush(self):
        """Make what was written readable by others."""
        if self._file is not None:
            self._file.flush()

    def close(self):
        """Finish; calling it again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
