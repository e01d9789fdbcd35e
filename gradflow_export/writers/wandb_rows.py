"""How rows get into a W&B run beside the user's own ``run.log`` calls, without a row of either being lost."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from gradflow_export.writers.wandb_module import parameters

_log = logging.getLogger("gradflow_export")

Row = dict[str, Any]

PATIENCE = 10
"""Failures in a row after which nothing more is sent to a run."""


@final
class RowQueue:
    """Rows that wait, oldest first; beyond ``limit`` two neighbours become one, so that the whole run stays covered.

    Args:
        limit: Greatest number of rows that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: deque[Row] = deque()
        self.merged = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: Row) -> None:
        """Take in one row."""
        self._rows.append(row)
        if len(self._rows) > self._limit:
            rows = list(self._rows)
            pairs = zip(rows[0::2], rows[1::2], strict=False)
            rest = rows[-1:] if len(rows) % 2 else []
            self._rows = deque([*(merge(older, newer) for older, newer in pairs), *rest])
            self.merged += len(rows) - len(self._rows)

    def take(self) -> Row:
        """Give the oldest row."""
        return self._rows.popleft()


def merge(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Row:
    """Return one row for two: the newer values, but NaN and Inf of either, and what only the older had."""
    out = {**older, **newer}
    for key, value in older.items():
        if isinstance(value, float) and not math.isfinite(value):
            new = newer.get(key)
            if not (isinstance(new, float) and not math.isfinite(new)):
                out[key] = value
    return out


@final
class RideRows:
    """Sends the rows of one prefix to one run.

    W&B drops a row whose step is not ahead of the last one, and merges rows of one step. So a row of ours never moves
    the step: it goes out with ``commit=False`` and rides on the user's next row, at most one of ours per W&B step; the
    rest waits. What is left goes out in the run's early teardown, where no row of the user's can follow. All calls are
    safe from any thread, and none raises. A run whose ``log`` knows no ``commit`` gets every row at once,
    at its own step.

    Args:
        run: A W&B run.
        prefix: First part of every key.
        limit: Greatest number of rows that wait.
        own: Send every row as a row of its own, at once: for a run in which nobody passes ``step=``.

    Attributes:
        run: The run.
        prefix: First part of every key.
        used: Whether a writer sends rows through this object.
        ended: Whether the run takes no more rows.
        refused: Whether it was given up because it refused them.
        before_end: Called when the run ends, before the rows that wait go out.
    """

    def __init__(self, run: Any, prefix: str, *, limit: int, own: bool = False) -> None:
        self.run, self.prefix = run, prefix
        self.used, self.ended, self.refused = True, False, False
        self.before_end: Callable[[], None] | None = None
        self._takes = parameters(run.log)
        # Without commit= nothing can ride; the modules that lack it drop no row, whatever its step.
        self._commits = "commit" in self._takes
        self._own = own or not self._commits or getattr(getattr(run, "settings", None), "mode", "") == "shared"
        self._queue = RowQueue(limit)
        self._lock = threading.RLock()
        self._carries: int | None = None
        self._defined: set[str] = set()
        self._failures, self._told, self._merging = 0, False, False
        self._pid = os.getpid()
        self.hooked = self._hook()

    @classmethod
    def of(cls, run: Any, prefix: str, *, limit: int, own: bool = False) -> RideRows:
        """Return rows for a run, under a prefix that no other exporter uses in it.

        Args:
            run: A W&B run.
            prefix: Wanted first part of every key; when it is in use, ``_2``, ``_3`` ... is added.
            limit: As for the class.
            own: As for the class.
        """
        hooks = tuple(getattr(run, "_teardown_hooks", ()))
        owners = (getattr(getattr(hook, "call", None), "__self__", None) for hook in hooks)
        known = {rows.prefix: rows for rows in owners if isinstance(rows, cls)}
        number, name = 1, prefix
        while name in known and known[name].used:
            number += 1
            name = f"{prefix}_{number}"
        if name != prefix:
            _log.warning("gradflow: another exporter writes to this W&B run; keys of this one begin with %s/", name)
        if name in known:
            known[name].used = True
            return known[name]
        return cls(run, name, limit=limit, own=own)

    @property
    def waiting(self) -> int:
        """Number of rows that wait."""
        return len(self._queue)

    def put(self, row: Row) -> None:
        """Take in one row, and send what can be sent now."""
        with self._lock:
            if not self.ended:
                self._queue.put(row)
                self.pump()
                if self._queue.merged and not self._merging:
                    self._merging = True
                    _log.warning(
                        "gradflow: so many rows wait for run.log() calls of yours to ride on that neighbours become "
                        "one; WandbWriter(rows='own') sends each at once, if you never pass step= to log()"
                    )

    def pump(self) -> None:
        """Send what can be sent now without touching a row of the user's."""
        with self._lock:
            while len(self._queue) and not self.ended:
                if self._own:
                    self._send(self._queue.take())
                    continue
                step = self._step()
                if step is None or step == self._carries:
                    return
                self._send(self._queue.take(), commit=False)
                # Read again: the user may have committed in between, and then the row lies in a later step.
                after = self._step()
                self._carries = step if after is None else after

    def add(self, values: Row, step: int) -> None:
        """Add values to the W&B step that is open now; for keys that :meth:`put` never sends, for it takes no lock.

        Args:
            values: What to add.
            step: Where it belongs in a run whose ``log`` knows no ``commit``.
        """
        self._send(values, **({"commit": False} if self._commits else {"step": step}))

    def finish(self) -> None:
        """Send everything; rows of the user's that pass ``step=`` may be dropped by W&B after this."""
        with self._lock:
            self.pump()
            while len(self._queue) and not self.ended:
                step = self._step() if self._carries is not None else None
                if step is not None and step == self._carries:
                    self.try_to("a row", lambda: self.run.log({}))  # closes the step that holds a row of ours
                self._carries = None
                self._send(self._queue.take())

    def try_to(self, what: str, call: Callable[[], Any]) -> bool:
        """Call something of wandb; say the first failure, and give the run up after many in a row.

        Returns:
            Whether it succeeded.
        """
        if self.ended:
            return False
        try:
            call()
        except Exception as error:
            if self.ended:  # by another thread, meanwhile
                return False
            self._failures += 1
            if not self._told:
                self._told = True
                _log.warning("gradflow: W&B refused %s; training and the other writers go on: %r", what, error)
            if self._failures >= PATIENCE:
                self.ended = self.refused = True
                _log.warning("gradflow: W&B refused %d calls in a row; nothing more is sent to this run", PATIENCE)
            return False
        self._failures = 0
        return True

    def _send(self, row: Row, **how: Any) -> None:
        new = [key for key in row if key not in self._defined]
        if new:
            self._defined.update(new)
            self.try_to("the definition of metrics", lambda: self._define(new))
        if not self._commits:
            step = how.get("step", row.get(f"{self.prefix}/step"))
            how = {"step": step} if "step" in self._takes else {}
        self.try_to("a row", lambda: self.run.log(row, **how))

    def _define(self, keys: list[str]) -> None:
        if not hasattr(self.run, "define_metric"):
            return
        # Exact names only: of two overlapping globs, the user's or a framework's "*" among them, W&B picks at random.
        axis = f"{self.prefix}/step"
        for key in keys:
            if key == axis:
                self.run.define_metric(key, hidden=True)
            else:
                self.run.define_metric(key, step_metric=axis, step_sync=False)

    def _step(self) -> int | None:
        got: list[int] = []
        self.try_to("a question for its step", lambda: got.append(int(self.run.step)))
        return got[0] if got else None

    def _hook(self) -> bool:
        # A script that ends without finish() gets no teardown hook; registered after wandb's own, this comes before it.
        atexit.register(self.end)
        try:
            from wandb.sdk.wandb_run import TeardownHook, TeardownStage  # noqa: PLC0415 - not public, may be gone

            self.run._teardown_hooks.append(TeardownHook(self.end, TeardownStage.EARLY))  # noqa: SLF001 - no public one
        except Exception:
            return False
        return True

    def end(self) -> None:
        """Send everything, for the run ends now; calling it again does nothing."""
        if self.ended or os.getpid() != self._pid:  # a fork: the run belongs to the parent
            return
        atexit.unregister(self.end)
        try:
            if self.before_end is not None:
                self.before_end()
        except Exception:
            _log.warning("gradflow: the last rows could not be made for W&B", exc_info=True)
        self.finish()
        self.ended = True
