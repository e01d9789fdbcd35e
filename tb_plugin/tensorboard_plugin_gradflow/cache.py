"""What is kept between requests: tensors, which never change once written, and for a moment what a run holds."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorboard_plugin_gradflow.index import RunIndex

Stored = npt.NDArray[Any] | str


class TensorCache:
    """Keeps the tensors that were used last, up to a number of bytes; safe to use from several threads.

    Args:
        budget: Bytes kept at most. A tensor larger than this is passed through and not kept.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._items: OrderedDict[Hashable, Stored] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes kept now."""
        return self._used

    def get(self, key: Hashable) -> Stored | None:
        """Return what is kept under ``key`` and mark it as used, or ``None``."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def put(self, key: Hashable, value: Stored) -> None:
        """Keep ``value``, dropping what was used longest ago until the budget holds."""
        size = _size(value)
        with self._lock:
            if key in self._items:
                self._used -= _size(self._items.pop(key))
            if size > self._budget:
                return
            self._items[key] = value
            self._used += size
            while self._used > self._budget:
                self._used -= _size(self._items.popitem(last=False)[1])


class IndexCache:
    """Keeps the indexes of runs for a moment, so that the requests of one gesture list the tensors once.

    A client that was shown something new must not be given older data afterwards, which it would take for the new.
    So the list of runs is never taken from here, what it finds replaces what is kept, and of two listings the later
    one counts: hold ``listing`` from before the question until what was found is put.

    Args:
        seconds: How long an index may be used; longer than clients take between two looks at the list of runs.
        tensors: How many tensors the kept indexes describe at most, all together, but for a run that holds more alone.

    Attributes:
        listing: Held by who lists tensors.
    """

    def __init__(self, seconds: float = 5.0, tensors: int = 2**15) -> None:
        self.listing = threading.Lock()
        self._seconds = seconds
        self._budget = tensors
        self._items: OrderedDict[Hashable, tuple[float, RunIndex]] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """How many tensors the kept indexes describe."""
        return self._used

    def get(self, key: Hashable) -> RunIndex | None:
        """Return what is kept under ``key``, or ``None`` where there is nothing or nothing of late."""
        with self._lock:
            until, index = self._items.get(key, (0.0, None))
            return index if time.monotonic() < until else None

    def put(self, key: Hashable, index: RunIndex) -> None:
        """Keep ``index``, dropping what was put longest ago until the budget holds."""
        with self._lock:
            if key in self._items:
                self._used -= self._items.pop(key)[1].tensors
            self._items[key] = time.monotonic() + self._seconds, index
            self._used += index.tensors
            while self._used > self._budget and len(self._items) > 1:
                self._used -= self._items.popitem(last=False)[1][1].tensors


class Remembered:
    """Keeps what was put last under so many keys; safe to use from several threads.

    Args:
        most: How many.
    """

    def __init__(self, most: int = 2048) -> None:
        self._most = most
        self._items: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """Return what is kept under ``key``, ``None`` where nothing is."""
        with self._lock:
            return self._items.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        """Keep ``value``, and forget what was put longest ago where there are too many."""
        with self._lock:
            self._items[key] = value
            while len(self._items) > self._most:
                self._items.popitem(last=False)


class Damage:
    """Which parts of which runs could not be understood; safe to use from several threads.

    Args:
        most: How many parts are remembered of one run, and how many runs; beyond that they are not counted.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._found: dict[Hashable, set[Hashable]] = {}
        self._lock = threading.Lock()

    def add(self, run: Hashable, part: Hashable) -> None:
        """Count a part of a run, once however often it is met."""
        with self._lock:
            if run in self._found or len(self._found) < self._most:
                parts = self._found.setdefault(run, set())
                if len(parts) < self._most:
                    parts.add(part)

    def count(self, run: Hashable) -> int:
        """Return how many parts of a run were counted."""
        with self._lock:
            return len(self._found.get(run, ()))


def _size(value: Stored) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else 4 * len(value)
