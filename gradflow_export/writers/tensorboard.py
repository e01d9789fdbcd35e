"""A writer of TensorBoard event files: chunks for the GradFlow panel, a few scalars and histograms for stock pages."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from gradflow_export.chunks import Packer, pack_info
from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.framing import blob_event, frame, version_event
from gradflow_export.records import RunInfo, StepRecord
from gradflow_export.writers.places import AppendFile, prepare_directory
from gradflow_export.writers.stock import StockPages

_SHORTEST, _LONGEST, _SHARE = 2.0, 60.0, 1 / 20


@final
class TensorBoardWriter:
    """Writes one event file per session, and keeps it open.

    Records are packed as they come and written as chunks, whose form :mod:`gradflow_export.chunks` describes: when
    ``rows`` of them wait, when the flush interval is over, at once when a record carries an issue (at most every 2 s),
    when the phase changes, and on ``flush`` and ``close``. After ``kill -9`` the loss is at most the flush interval.

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
        self._kind, self._last = ("", 0), 0.0
        self._frames = bytearray()
        self._urgent, self._alarmed = False, -math.inf
        self._opened = self._flushed = self._clock()
        self._packer: Packer | None = None
        self._file: AppendFile | None = None
        self._lock = threading.Lock()  # a reader asks for a flush from a thread of its own

    @property
    def path(self) -> Path | None:
        """The event file; ``None`` before a run is opened."""
        return None if self._file is None else self._file.path

    def open(self, run: RunInfo) -> None:
        """Create the event file and describe the run in it.

        Raises:
            StorageError: The file cannot be created, or one of this session exists already.
            OSError: The disk is full.
        """
        # Some readers never return to a file once they saw a later one, and the user's own file may lie beside ours.
        # TensorBoard's Python reader goes by name: the leading zero puts ours first. wandb's sync goes by
        # "tfevents.<seconds>.<this host>": no host name holds an @, so ours is not followed at all.
        second, host = f"0{int(run.started):010d}", f"@{socket.gethostname()}"
        name = f"events.out.tfevents.{second}.{host}.{os.getpid()}.{run.session}.gradflow"
        self._file = AppendFile(self._directory / name, fresh=True)
        self._packer = Packer(run.session)
        head = (version_event(run.started), blob_event(pack_info(run), run.started))
        self._file.append(b"".join(map(frame, head)))
        self._opened = self._flushed = self._clock()

    def write(self, record: StepRecord) -> None:
        """Buffer one record, and write a chunk when one is due; ignored after ``close`` and after a failure.

        Raises:
            OSError: The disk is full or gone. Chunks written before stay readable, and the writer is closed for good.
            StorageError: No run was opened.
        """
        if self._file is None or self._packer is None:
            raise StorageError("TensorBoardWriter expects open(run) before write(record); call open first.")
        with self._lock:
            if self._file.closed:
                return
            if (record.phase, record.rank) != self._kind:
                self._flush()
                self._kind = record.phase, record.rank
            self._packer.add(record)
            self._last = record.wall_time
            self._frames += b"".join(map(frame, self._stock.events(record)))
            self._urgent = self._urgent or bool(record.issues)
            if self._due():
                self._flush()

    def flush(self) -> None:
        """Write what is buffered as one chunk; any thread may ask for it.

        Raises:
            OSError: As for ``write``.
        """
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._file is None or self._packer is None or self._file.closed or not self._packer.rows:
            return
        frames, self._frames = self._frames, bytearray()
        self._urgent, self._flushed = False, self._clock()
        frames += b"".join(frame(blob_event(blob, self._last)) for blob in self._packer.take())
        # One write for the whole chunk: a reader sees all of it or a truncated tail, and a full disk loses it whole.
        self._file.append(bytes(frames))

    def close(self) -> None:
        """Write what is buffered and close the file.

        Raises:
            OSError: As for ``write``.
        """
        with self._lock:
            try:
                self._flush()
            finally:
                if self._file is not None:
                    self._file.close()

    def _due(self) -> bool:
        if self._packer is not None and self._packer.rows >= self._rows:
            return True
        now = self._clock()
        if self._urgent and now - self._alarmed >= _SHORTEST:
            self._alarmed = now
            return True
        interval = self._fixed
        if interval is None:
            interval = min(max((now - self._opened) * _SHARE, _SHORTEST), _LONGEST)
        return now - self._flushed >= interval
