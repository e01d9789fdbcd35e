"""A least-recently-used cache with a budget in bytes, for tensors that never change once written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

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


def _size(value: Stored) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else 4 * len(value)
