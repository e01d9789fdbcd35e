"""Which optimizers step together, and whether all of them have."""

from __future__ import annotations

import weakref

GONE = 20
"""Records in a row without an optimizer after which it is taken for one that is used no more."""


class Partners:
    """The optimizers that took part in a record, and those that have stepped for the next one.

    A record is complete when every optimizer that took part in the last ones has stepped once.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[object] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[object] = weakref.WeakSet()
        self._sole: weakref.ref[object] | None = None
        self._absent: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Whether any optimizer has stepped yet."""
        return self._sole is not None or bool(self._all)

    def is_sole(self, optimizer: object) -> bool:
        """Whether this is the only one there has been: the usual case, which is told without a look at sets."""
        return self._sole is not None and self._sole() is optimizer

    def has_stepped(self, optimizer: object) -> bool:
        """Whether this one has stepped for the record that is open."""
        return optimizer in self._stepped

    def step(self, optimizer: object) -> bool:
        """Note a step; True when the record is complete."""
        if self.is_sole(optimizer):
            return True
        self._sole = None
        self._stepped.add(optimizer)
        if optimizer not in self._all:
            self._all.add(optimizer)
            return False
        if not all(partner in self._stepped for partner in self._all):
            return False
        if len(self._all) == 1:
            self._sole = weakref.ref(optimizer)
        self._stepped.clear()
        self._absent.clear()
        return True

    def begin(self) -> None:
        """Begin a new record; what has long not stepped is waited for no more."""
        if self._sole is None and self._stepped:
            for optimizer in [partner for partner in self._all if partner not in self._stepped]:
                self._absent[optimizer] = self._absent.get(optimizer, 0) + 1
                if self._absent[optimizer] >= GONE:
                    self._all.discard(optimizer)
            self._stepped.clear()
