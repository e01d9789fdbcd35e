"""A writer of TensorBoard event files: chunks for the GradFlow panel, a few scalars and histograms for stock pages."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.records.step_record import Gap, RunInfo, StepRecord
from gradflow_export.storage.event_chunks import DRAFTS, pack_end, pack_gap, pack_info
from gradflow_export.storage.event_codec import blob_event, frame, version_event
from gradflow_export.storage.event_packing import Packer
from gradflow_export.writers.journal import Journal
from gradflow_export.writers.open_issues import OpenIssues
from gradflow_export.writers.places import DraftFile, prepare_directory
from gradflow_export.writers.stock import StockPages

_log = logging.getLogger("gradflow_export")

_SHORTEST, _LONGEST, _SHARE = 2.0, 60.0, 1 / 20
_KEEP = 0.8  # a worker asks for it before


@final
class TensorBoardWriter:
    """Writes one event file per session, and keeps it open.

    Records are packed as they come and written as chunks, whose form :mod:`gradflow_export.storage.event_chunks`
    describes: when ``rows`` of them wait, when the flush interval is over, at once when a record carries an issue (at
    most every 2 s), when the phase changes, and on ``flush`` and ``close``. What waits for that is drafted within
    a second into a second file, which readers of ours look at, so that ``kill -9`` costs at most a second; ``close``
    removes it. A disk that is full or gone is waited for, and a file that was removed is begun anew; see
    :class:`~gradflow_export.writers.journal.Journal`.

    The file is our own: TensorBoard's ``EventFileWriter`` and torch's ``SummaryWriter`` are neither used nor patched,
    so tools that hook into them, such as wandb's ``sync_tensorboard``, see nothing of it.

    Args:
        logdir: Directory of the run; created when it does not exist.
        flush_seconds: Seconds between chunks; ``None`` grows with the run, from 2 s to 60 s (a twentieth of its age).
        rows: Greatest number of records in a chunk.
        clock: Seconds from any origin, for tests.

    Raises:
        StorageError: ``logdir`` cannot be written to.
        ArgumentError: ``flush_seconds`` is negative or ``rows`` below 1.
    """

    name = "tensorboard"

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        flush_seconds: float | None = None,
        rows: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rows < 1:
            raise ArgumentError(f"rows expects a number of records >= 1, got {rows}; leave it out for 256")
        if flush_seconds is not None and not flush_seconds >= 0:
            raise ArgumentError(
                f"flush_seconds expects seconds >= 0 or None, got {flush_seconds}; leave it out for 2 s to 60 s"
            )
        self._directory = prepare_directory(logdir, "TensorBoardWriter")
        self._fixed, self._rows, self._clock = flush_seconds, rows, clock
        self._stock = StockPages()
        self._kind, self._last, self._error = ("", 0), 0.0, ""
        self._missing: Gap | None = None
        self._frames = bytearray()
        self._urgent, self._alarmed = False, -math.inf
        self._issues = OpenIssues()
        self._opened = self._flushed = self._kept = self._clock()
        self._run: RunInfo | None = None
        self._packer = Packer("")
        self._second = self._step = 0
        self._journal: Journal | None = None
        self._drafts, self._outdated = DraftFile(self._directory), False
        self._lock = threading.Lock()  # a reader asks for a flush from a thread of its own

    @property
    def path(self) -> Path | None:
        """The event file; ``None`` before a run is opened."""
        return None if self._journal is None else self._journal.path

    @property
    def lost(self) -> Gap | None:
        """Steps that could not be written, ``None`` when there are none."""
        return None if self._journal is None else self._journal.lost

    def in_child(self) -> TensorBoardWriter:
        """Return the writer of a forked child, which writes to a file of its own.

        Raises:
            StorageError: The directory cannot be written to.
        """
        return TensorBoardWriter(self._directory, flush_seconds=self._fixed, rows=self._rows, clock=self._clock)

    def open(self, run: RunInfo) -> None:
        """Create the event file and describe the run in it.

        Raises:
            StorageError: One of this session exists already.
        """
        self._run, self._packer = run, Packer(run.session)
        self._drafts = DraftFile(self._directory / f"gradflow-{run.session}{DRAFTS}")
        self._journal = Journal(
            self.name,
            self._path_of,
            preamble=self._preamble,
            mark=lambda gap, number: frame(blob_event(pack_gap(run.session, gap, number), self._last)),
            exclusive=True,
            clock=self._clock,
        )
        self._journal.open()
        self._opened = self._flushed = self._kept = self._clock()

    def _path_of(self, number: int) -> Path:
        # Some readers never return to a file once they saw a later one, and the user's own file may lie beside ours.
        # TensorBoard's Python reader goes by name: the leading zero puts ours first. wandb's sync goes by
        # "tfevents.<seconds>.<this host>": no host name holds an @, so ours is not followed at all.
        assert self._run is not None
        self._second = max(int(time.time()), self._second + 1) if number else int(self._run.started)
        second, host = f"0{self._second:010d}", f"@{socket.gethostname()}"
        name = f"events.out.tfevents.{second}.{host}.{os.getpid()}.{self._run.session}.gradflow"
        return self._directory / name

    def _preamble(self, number: int) -> bytes:
        assert self._run is not None
        began = time.time() if number else self._run.started
        blobs = [pack_info(self._run, number), *self._packer.tables()]
        return b"".join(map(frame, (version_event(began), *(blob_event(blob, began) for blob in blobs))))

    def write(self, record: StepRecord) -> None:
        """Buffer one record, and write a chunk when one is due; ignored after ``close``.

        Raises:
            StorageError: No run was opened.
        """
        if self._journal is None:
            raise StorageError("TensorBoardWriter expects open(run) before write(record); call open first.")
        with self._lock:
            if self._journal.closed:
                return
            self._journal.retry()
            record = self._issues.completed(record, self._journal.lost)
            if self._journal.full:
                self._journal.lose(record.step)
                return
            if (record.phase, record.rank) != self._kind:
                self._flush()
                self._kind = record.phase, record.rank
            self._packer.add(record)
            self._last, self._step = record.wall_time, record.step
            self._frames += b"".join(map(frame, self._stock.events(record)))
            self._urgent = self._urgent or bool(record.issues)
            if self._due():
                self._flush()
            elif self._clock() - self._kept >= _KEEP:
                self._keep(self._journal)

    def flush(self) -> None:
        """Write what is buffered as one chunk; any thread may ask for it."""
        with self._lock:
            self._flush()

    def keep(self) -> None:
        """Hand what is buffered to the system, so that it outlives the process; any thread may ask for it."""
        with self._lock:
            if self._journal is not None and not self._journal.closed:
                self._keep(self._journal)

    def _keep(self, journal: Journal) -> None:
        self._kept = self._clock()
        journal.retry()
        if not journal.failing:
            self._clear_drafts()
            frames, self._frames = self._frames, bytearray()
            if frames:
                journal.append(bytes(frames))
            drafted = b"".join(frame(blob_event(blob, self._last)) for blob in self._packer.draft())
            if drafted:
                self._drafts.add(drafted)

    def _flush(self) -> None:
        if self._journal is None or self._journal.closed or not self._packer.rows:
            return
        frames, self._frames = self._frames, bytearray()
        self._urgent, self._flushed, steps = False, self._clock(), self._packer.steps
        frames += b"".join(frame(blob_event(blob, self._last)) for blob in self._packer.take())
        self._stock.describe_again()
        # One write for the whole chunk: a reader sees all of it or a truncated tail, and a full disk loses it whole.
        self._journal.append(bytes(frames), steps)
        self._outdated = True
        if not self._journal.failing:  # until then the drafts are all that is on disk
            self._clear_drafts()

    def _clear_drafts(self) -> None:
        if self._outdated:
            self._outdated = False
            self._drafts.clear()

    def ended_by(self, error: str, missing: Gap | None = None) -> None:
        """Have the file say which exception ended the run, and what was lost at its end; before :meth:`close`."""
        self._error, self._missing = error, missing

    def close(self) -> None:
        """Write what is buffered and close the file."""
        with self._lock:
            if self._journal is not None and not self._journal.closed:
                self._flush()
                lost = self._journal.lost
                self._journal.close(self._end(), self._missing)
                if not self._journal.failing and self._journal.lost == lost:  # else some of it stands nowhere else
                    self._drafts.close()
                elif self._journal.lost is not None and self._drafts.path is not None:
                    kept = "gradflow: those of them that %s holds can be read all the same; reports count the rest"
                    _log.warning(kept, self._drafts.path)

    def _end(self) -> bytes:
        assert self._run is not None
        return frame(blob_event(pack_end(self._run.session, self._step, self._error), self._last))

    def _due(self) -> bool:
        if self._packer.rows >= self._rows:
            return True
        now = self._clock()
        if self._urgent and now - self._alarmed >= _SHORTEST:
            self._alarmed = now
            return True
        interval = self._fixed
        if interval is None:
            interval = min(max((now - self._opened) * _SHARE, _SHORTEST), _LONGEST)
        return now - self._flushed >= interval
