"""What a debugger remembers: the last findings, and counts of all of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradflow_export.errors import ArgumentError, ArgumentTypeError

HISTORY = 100


@dataclass(frozen=True)
class DebugEntry:
    """One look of a debugger.

    Attributes:
        kind: Such as ``"tensor"``, ``"gradients"`` or ``"training step"``.
        name: What was looked at.
        anomalies: What was wrong, a few words each; empty when nothing was.
        step: The user's step, where one was given.
        time: Seconds since the epoch.
        details: More, by level: JSON-ready values and
        :class:`~gradflow_export.debugging.inspect.tensor_info.TensorInfo`.
    """

    kind: str
    name: str
    anomalies: tuple[str, ...] = ()
    step: int | None = None
    time: float = field(default_factory=time.time)
    details: Mapping[str, Any] = field(default_factory=dict)


class DebugHistory:
    """The last entries, and counts since the beginning or the last :meth:`clear`; safe to read from other threads.

    Args:
        size: How many entries are kept.
        counted: Names of counters beside ``anomalies``, the number of entries with one.

    Raises:
        ArgumentError: ``size`` is below 1.
        ArgumentTypeError: ``size`` is no whole number.
    """

    def __init__(self, size: int, counted: Iterable[str] = ()) -> None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentTypeError(f"history must be a number of entries, got {size!r}; for example history=100.")
        if size < 1:
            raise ArgumentError(f"history must be at least 1 entry, got {size}; the default is {HISTORY}.")
        self._lock = threading.Lock()
        self._entries: deque[DebugEntry] = deque(maxlen=size)
        self._counts = dict.fromkeys(("anomalies", *counted), 0)

    @property
    def entries(self) -> tuple[DebugEntry, ...]:
        """The entries kept, oldest first."""
        with self._lock:
            return tuple(self._entries)

    def add(self, entry: DebugEntry, counted: Iterable[str] = ()) -> None:
        """Keep an entry, and add one to some counters; readers see all of it or nothing."""
        with self._lock:
            self._entries.append(entry)
            for name in (*(["anomalies"] if entry.anomalies else []), *counted):
                self._counts[name] += 1

    def counts(self) -> dict[str, int]:
        """Return every counter and, as ``entries``, the number of entries kept, all of one moment."""
        with self._lock:
            return {**self._counts, "entries": len(self._entries)}

    def clear(self) -> None:
        """Forget the entries and begin to count anew."""
        with self._lock:
            self._entries.clear()
            self._counts = dict.fromkeys(self._counts, 0)
