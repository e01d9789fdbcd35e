"""Every value of a run as Parquet files beside it, and as an artifact: full resolution, whatever the rows show."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from gradflow_export.records.step_record import RunInfo, StepRecord, info_to_json, issue_to_json
from gradflow_export.storage.table import LongRows, PartWriter

_log = logging.getLogger("gradflow_export")

FOLDER = "gradflow"
MOST_BYTES = 1 << 30
"""What the files of one run may take on disk."""

KIND = "gradflow"
"""Type of the artifact."""


@final
class StepFiles:
    """Writes the records of one run into Parquet files, a new one after each upload; ``gradflow replay`` reads them.

    Rows are kept packed, and go to disk in groups. Until a run is known at most one group is kept.

    Args:
        info: What is known of the run.
    """

    def __init__(self, info: RunInfo | None) -> None:
        self._info = info
        self._rows = LongRows()
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._part: PartWriter | None = None
        self._issues: list[dict[str, Any]] = []
        self._parts, self._dropped, self._error = 0, 0, False
        self._unsent = False

    def begin(self, folder: Path) -> None:
        """Write into a folder from now on."""
        with self._lock:
            self._folder = folder

    def add(self, record: StepRecord) -> None:
        """Take in one record; a full or broken disk is said once, and ends it."""
        with self._lock:
            if self._error:
                return
            self._issues += [{"at": record.step, **issue_to_json(issue)} for issue in record.issues]
            self._unsent = True
            if self._rows.fits(record):
                self._rows.add(record)
            elif self._folder is None:
                self._dropped += 1
            else:
                self._try(self._write)
                self._rows.add(record)

    def upload(self, module: Any, run: Any, prefix: str) -> Callable[[], Any] | None:
        """Finish the file under way, and return what logs all files as a new version of the run's artifact.

        Args:
            module: wandb.
            run: A run of it.
            prefix: First part of the artifact's name.

        Returns:
            ``None`` where nothing is new, or nothing can be sent.
        """
        with self._lock:
            if not self._unsent or self._folder is None or not hasattr(run, "log_artifact"):
                return None
            self._unsent = False
            self._try(self._finish_part)
            folder = self._folder
            if self._parts == 0 or self._error:
                return None
        # A version of one artifact per upload, an artifact per session: the newest version holds the whole session.
        name = re.sub(r"[^\w.-]", "-", f"{prefix}-{run.id}-{self._session}")[:128]

        def log() -> None:
            artifact = module.Artifact(name, KIND, description="what gradflow recorded; `gradflow replay` reads it")
            for file in sorted(folder.iterdir()):  # add_dir() prints a line
                artifact.add_file(str(file))
            run.log_artifact(artifact)

        return log

    def close(self) -> None:
        """Finish the file under way."""
        with self._lock:
            if self._folder is not None and self._unsent:
                self._try(self._finish_part)

    @property
    def _session(self) -> str:
        return self._info.session if self._info else "0"

    def _write(self) -> None:
        assert self._folder is not None
        if self._part is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if sum(file.stat().st_size for file in self._folder.iterdir()) > MOST_BYTES:
                raise OSError(f"{MOST_BYTES >> 20} MB are written")
            if self._info is not None:
                (self._folder / "run.json").write_text(json.dumps(info_to_json(self._info)), encoding="utf-8")
            self._parts += 1
            self._part = PartWriter(self._folder / f"steps-{self._session}-{self._parts:04d}.parquet")
        self._part.write(self._rows)
        self._rows.clear()

    def _finish_part(self) -> None:
        if len(self._rows):
            self._write()
        if self._part is not None:
            part, self._part = self._part, None
            part.close()
        if self._issues and self._folder is not None:
            with (self._folder / "issues.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(issue, allow_nan=False) + "\n" for issue in self._issues)
            self._issues = []

    def _try(self, call: Callable[[], None]) -> None:
        if self._error:
            return
        try:
            call()
        except Exception as error:
            self._error = True
            self._rows.clear()
            if self._part is not None:
                self._part.abandon()
                self._part = None
            _log.warning(
                "gradflow: the Parquet files beside the W&B run are not continued (%s); rows, tables and the other "
                "writers go on",
                error,
            )
