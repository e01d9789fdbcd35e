"""A log file that gets over a full disk, a broken one, and its own removal."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import Gap
from gradflow_export.writers.places import AppendFile

_log = logging.getLogger("gradflow_export")

HELD_BYTES = 8 << 20
"""What waits for a disk that cannot be written to; beyond that records are lost and counted."""

FIRST_SECONDS, MOST_SECONDS = 0.5, 30.0
"""Between attempts: doubled from the first to the most."""

MOST_SAID = 10
"""Failures in one run that are reported as they come and go."""

Steps = tuple[int, int, int]
"""First step, last step and number of records."""


class Journal:
    """A file of one session to which entries are appended, each whole or not at all.

    An entry that cannot be written waits, and is tried again with growing pauses: on the same file, on the same path
    opened anew, and where the file was removed on a new one. What exceeds the memory for that is lost, and an entry
    says which steps are missing once writing works again. Nothing raises but what is wrong from the start.

    Args:
        writer: Name of the writer, for messages.
        path_of: Returns the path of the n-th file of the session; the same one again where its form allows.
        preamble: Returns what the n-th file begins with, so that readers understand all that follows.
        mark: Returns the entry that reports the n-th gap.
        exclusive: Whether nobody else appends to these files.
        clock: Seconds from any origin.

    Attributes:
        path: The file written to, ``None`` before :meth:`open`.
        lost: Steps that were lost so far.
        failing: Whether the last attempt failed.
        closed: Whether nothing will be written any more.
    """

    def __init__(
        self,
        writer: str,
        path_of: Callable[[int], Path],
        *,
        preamble: Callable[[int], bytes],
        mark: Callable[[Gap, int], bytes],
        exclusive: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path: Path | None = None
        self.lost: Gap | None = None
        self.failing = self.closed = False
        self._writer, self._path_of, self._preamble, self._mark = writer, path_of, preamble, mark
        self._exclusive, self._clock = exclusive, clock
        self._file: AppendFile | None = None
        self._known: AppendFile | None = None  # the file of before, closed, whose path is tried again
        self._files = self._gaps = self._failures = 0
        self._held: deque[tuple[bytes, Steps | None]] = deque()
        self._held_bytes = 0
        self._gap: Gap | None = None  # behind what waits
        self._removed: Gap | None = None  # before what waits: it went with a file that was removed
        self._written: Gap | None = None  # what would be missing without the file
        self._marked: Gap | None = None  # what the file says is missing
        self._reason, self._pause, self._again_at = "", FIRST_SECONDS, 0.0

    @property
    def full(self) -> bool:
        """Whether what comes now is to be lost: the disk fails and no more can wait."""
        return self.failing and (self._gap is not None or self._held_bytes >= HELD_BYTES)

    def open(self) -> None:
        """Begin the first file.

        Raises:
            StorageError: It exists though it must not.
        """
        try:
            self._begin()
        except FileExistsError as error:
            raise StorageError(
                f"expected to create {str(error.filename)!r}, got: {error.strerror}; give each session and each "
                "writer a file of its own in a directory that can be written to."
            ) from error
        except OSError as error:
            self._failed(error)

    def append(self, data: bytes, steps: Steps | None = None) -> None:
        """Write an entry, or keep it until it can be written.

        Args:
            data: Readable on its own after what was appended before.
            steps: Those of the records in it.
        """
        if self.closed:
            return
        self._held.append((data, steps))
        self._held_bytes += len(data)
        if not self.failing or self._clock() >= self._again_at:
            self._pump()

    def lose(self, step: int) -> None:
        """Count a record that is handed over while the journal is full."""
        self._miss(Gap(step, step, 1, self._reason))

    def retry(self) -> None:
        """Try again to write what waits, when it is time for that."""
        if self.failing and not self.closed and self._clock() >= self._again_at:
            self._pump()

    def close(self, end: bytes = b"", missing: Gap | None = None) -> None:
        """Try once more to write what waits, and close the file; calling it again does nothing.

        Args:
            end: The last entry, left out where the one before it could not be written.
            missing: Steps that were never handed over, of which an entry before it tells.
        """
        if self.closed:
            return
        if self.failing:
            self._pump()
        self.closed = True
        for _, steps in self._held:
            if steps is not None:
                self._miss(Gap(*steps, self._reason))
        self._held.clear()
        if self.failing and self.lost is not None:
            _log.warning("gradflow: the %s writer could not write %s", self._writer, self.lost)
            # A disk without room for what waits may have some for a word of what is missing.
            self._failures = MOST_SAID + 1
            self._pump()
        if self._file is not None:
            if self._file.gone:  # nobody wants a new one for what is over
                self._went()
            with contextlib.suppress(OSError):  # without an end a reader knows no less than that
                if not (self.failing or self._file.gone):
                    self._tell(self._file, missing)
                    self._file.append(end)
            self._file.close()

    def _pump(self) -> None:
        """Write all that waits, and what is missing behind it."""
        try:
            file = self._ready()
            missing = self._removed
            self._tell(file, missing)
            self._removed = None
            while self._held:
                data, steps = self._held[0]
                file.append(data)
                self._held.popleft()
                self._held_bytes -= len(data)
                if steps is not None:
                    self._written = Gap(*steps, "").after(self._written)
            if self._gap is not None:
                self._tell(file, self._gap)
                missing, self._gap = self._gap.after(missing), None
        except OSError as error:
            self._failed(error)
            return
        if self.failing:
            self.failing, self._pause = False, FIRST_SECONDS
            if self._failures <= MOST_SAID:
                what = "nothing is missing" if missing is None else f"missing are {missing}"
                _log.warning("gradflow: the %s writer writes again to %s; %s", self._writer, self.path, what)

    def _tell(self, file: AppendFile, missing: Gap | None) -> None:
        if missing is not None:
            file.append(self._mark(missing, self._gaps))
            self._gaps, self._marked = self._gaps + 1, missing.after(self._marked)

    def _failed(self, error: OSError) -> None:
        self._reason = error.strerror or str(error)
        if not self.failing:
            self.failing = True
            self._failures += 1
            if self._failures <= MOST_SAID:
                _log.warning(
                    "gradflow: the %s writer cannot write to %s: %s. It keeps what fits into %d MB and tries again; "
                    "training and the other writers go on",
                    self._writer,
                    self.path or error.filename,
                    self._reason,
                    HELD_BYTES >> 20,
                )
        elif self._file is not None:  # the file may be of a disk that was taken out: from now on its path is tried
            self._known, self._file = self._file, None
            self._known.close()
        self._again_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, MOST_SECONDS)

    def _ready(self) -> AppendFile:
        """Return the open file: the one of before where it is still there, else a new one."""
        if self._file is not None and self._file.gone:
            self._begin_anew(self._file)
        if self._file is None and self._known is not None:
            try:
                self._file = self._known.reopened(exclusive=self._exclusive)
            except (FileNotFoundError, NotADirectoryError):
                self._begin_anew(self._known)
            self._known = None
        return self._begin() if self._file is None else self._file

    def _begin(self) -> AppendFile:
        path = self._path_of(self._files)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = AppendFile(path, fresh=self._exclusive)
        try:
            file.append(self._preamble(self._files))
        except OSError:
            file.close()
            if self._exclusive:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        self.path, self._file, self._files = path, file, self._files + 1
        return file

    def _begin_anew(self, file: AppendFile) -> None:
        file.close()
        _log.warning("gradflow: %s was removed; the %s writer begins a new file", file.path, self._writer)
        self._went()
        self._file = None

    def _went(self) -> None:
        """Count what went with a file that was removed."""
        if self._marked is not None:
            self._removed = self._marked.after(self._removed)
        if self._written is not None:
            gap = replace(self._written, reason="the file was removed")
            self._removed, self.lost = gap.after(self._removed), gap.after(self.lost)
        self._written = self._marked = None

    def _miss(self, gap: Gap) -> None:
        self._gap, self.lost = gap.after(self._gap), gap.after(self.lost)
