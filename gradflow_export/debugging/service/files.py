"""The JSON files of a debugging session: four of them, bounded in size and number."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import number_to_json

_log = logging.getLogger("gradflow_export")

KINDS = ("history", "anomalies", "gradients", "memory")


class SessionFiles:
    """Collects entries and writes ``<folder>/<prefix>_<kind>_<timestamp>.json`` for each kind.

    Each file is a JSON list, oldest entry first. It is replaced as a whole, so that a reader never sees half of one.
    What does not fit into ``most_bytes`` is left out, oldest first. Sessions beyond ``keep`` are deleted, oldest first.

    Args:
        folder: Made where it is missing.
        prefix: First part of the names.
        timestamp: Tells the session from others; rises with time.
        keep: Sessions whose files are kept, this one included.
        most_bytes: Greatest size of one file.
        entries: Entries of each kind that are kept in memory.

    Raises:
        StorageError: The folder cannot be made or written to.
    """

    def __init__(self, folder: Path, prefix: str, timestamp: str, *, keep: int, most_bytes: int, entries: int) -> None:
        self._folder, self._prefix = folder, prefix
        self._keep, self._most = keep, most_bytes
        self._lines: dict[str, deque[str]] = {kind: deque(maxlen=entries) for kind in KINDS}
        self._failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError as error:
            raise StorageError(
                f"debug_output_dir must be a folder that can be made, got {str(folder)!r}: {error.strerror or error}; "
                "choose another, or save_debug_info=False."
            ) from error
        if not writable:
            raise StorageError(
                f"debug_output_dir must be writable, got {str(folder)!r}; choose another, or save_debug_info=False."
            )
        taken = {stamp for stamp, _ in self._sessions()}
        numbered = (f"{timestamp}_{n}" for n in range(2, 10_000))
        self._timestamp = timestamp if timestamp not in taken else next(s for s in numbered if s not in taken)

    @property
    def paths(self) -> dict[str, Path]:
        """The file of each kind, whether it is written already or not."""
        return {kind: self._folder / f"{self._prefix}_{kind}_{self._timestamp}.json" for kind in KINDS}

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Add one entry to a kind."""
        self._lines[kind].append(json.dumps(plain(entry), allow_nan=False))

    def write(self) -> None:
        """Write all files, and delete the oldest sessions; a failure is logged once and nothing is raised."""
        if self._failed:
            return
        try:
            for kind, path in self.paths.items():
                partial = path.with_suffix(".partial")
                partial.write_text(self._text(kind), encoding="utf-8")
                partial.replace(path)
            for _, files in sorted(self._sessions())[: -self._keep]:
                for path in files:
                    path.unlink(missing_ok=True)
        except OSError as error:
            self._failed = True
            _log.warning(
                "gradflow: debug files in %s cannot be written and are left out from now on: %s. Free some space or "
                "choose another debug_output_dir.",
                self._folder,
                error.strerror or error,
            )

    def _text(self, kind: str) -> str:
        kept: list[str] = []
        size = 4
        for line in reversed(self._lines[kind]):
            size += len(line.encode()) + 2
            if size > self._most:
                break
            kept.append(line)
        return "[\n" + ",\n".join(reversed(kept)) + "\n]\n"

    def _sessions(self) -> list[tuple[str, list[Path]]]:
        """Return the sessions in the folder with their files."""
        pattern = re.compile(re.escape(self._prefix) + rf"_(?:{'|'.join(KINDS)})_(\d{{8}}_\d{{6}}(?:_\d+)?)\.json")
        found: dict[str, list[Path]] = {}
        for path in self._folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match:
                found.setdefault(match[1], []).append(path)
        return list(found.items())


def plain(value: Any) -> Any:
    """Return a value ready for strict JSON: NaN and the infinities are strings, tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return number_to_json(value)
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)
