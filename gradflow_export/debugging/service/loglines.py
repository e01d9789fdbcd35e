"""Log lines that are written by a thread of their own, so that a slow handler holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Any

MOST_WAITING = 1000
"""Lines that wait; when one more comes the oldest is left out."""

DRAIN_SECONDS = 5.0
"""Time for the lines that still wait at the end."""

LATE_SECONDS = 1.0
"""A line that is written later than this is counted as late."""

_GRACE = 1.0


class LogLines:
    """Writes log records in their order; what its handlers cannot keep up with is counted and said.

    Args:
        logger: Whose handlers write.
        most: How many lines may wait.
        drain: Seconds that :meth:`close` gives to those that still wait.
    """

    def __init__(self, logger: logging.Logger, *, most: int = MOST_WAITING, drain: float = DRAIN_SECONDS) -> None:
        self._logger, self._most, self._drain = logger, most, drain
        self._waiting: deque[tuple[float, logging.LogRecord]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends: float | None = None
        self._written = self._late = self._left_out = self._told = 0
        self._latest = 0.0

    def put(self, level: int, message: str, *args: Any) -> None:
        """Have a line written soon; this never waits for a handler. After :meth:`close` nothing is written."""
        if not self._logger.isEnabledFor(level):
            return
        record = self._logger.makeRecord(self._logger.name, level, __file__, 0, message, args, None)
        with self._changed:
            if self._ends is not None:
                return
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self._left_out += 1
            self._waiting.append((time.monotonic(), record))
            if self._thread is None:
                # A daemon: a handler that hangs is not to keep the process from ending.
                self._thread = threading.Thread(target=self._write, name="gradflow-logger-lines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def counts(self) -> dict[str, Any]:
        """Return ``written``, ``waiting``, ``left_out``, ``late`` (lines) and ``latest_seconds``, of one moment."""
        with self._changed:
            return {
                "written": self._written,
                "waiting": len(self._waiting),
                "left_out": self._left_out,
                "late": self._late,
                "latest_seconds": self._latest,
            }

    def close(self) -> None:
        """Write what still waits, for a limited time; what is left then is left out, counted and said."""
        with self._changed:
            if self._ends is None:
                self._ends = time.monotonic() + self._drain
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._drain + _GRACE)

    def reopen(self) -> None:
        """Write again after :meth:`close`; counts go on."""
        with self._changed:
            if self._ends is not None:
                self._ends, self._thread = None, None

    def _write(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._ends is not None or self._thread is not me)
                if self._thread is not me:  # reopened while a handler hung: another thread writes now
                    return
                if self._ends is not None and time.monotonic() >= self._ends:
                    self._left_out += len(self._waiting)
                    self._waiting.clear()
                over = not self._waiting
                untold = self._left_out - self._told if over or not self._told else 0
                self._told += untold
                said, record = (0.0, None) if over else self._waiting.popleft()
            if untold:
                self._say_left_out(untold)
            if record is not None:
                self._handle(record)
            with self._changed:
                if record is not None:
                    lateness = time.monotonic() - said
                    self._written += 1
                    self._late += lateness > LATE_SECONDS
                    self._latest = max(self._latest, lateness)
                elif self._ends is not None:
                    return

    def _say_left_out(self, count: int) -> None:
        message = (
            "gradflow: %d log lines were left out here, the oldest that waited: the handlers of %r are slower than the "
            "lines come. Use a faster handler, or logging.handlers.QueueHandler."
        )
        args = (count, self._logger.name)
        self._handle(self._logger.makeRecord(self._logger.name, logging.WARNING, __file__, 0, message, args, None))

    def _handle(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a handler that raises is its owner's affair, and the next line is due
            self._logger.handle(record)
