"""What goes into a W&B run: values within rows of the user's, its summary, or rows of our own where that is safe."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from gradflow_export.writers.wandb import private as wandb_private
from gradflow_export.writers.wandb.fold import Fold, Row, Span
from gradflow_export.writers.wandb.module import parameters

_log = logging.getLogger("gradflow_export")

PATIENCE = 10
"""Failures in a row after which nothing more is sent to a run."""

LIVE_SECONDS, HINT_SECONDS = 15.0, 60.0
"""How long no row of the user's must have come before the summary is brought up to date, and before that is said."""

FIRST = "first step"
"""Column of the first step that a row of a table covers; ``step`` is the last."""

_ASK_SECONDS = 0.004
_PLAIN = (float, int, str)


@final
class RowQueue:
    """Rows of a run, oldest first; beyond ``limit`` two neighbours become one, so that the whole run stays covered.

    Args:
        limit: Greatest number of rows that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: deque[Row] = deque()
        self._each, self._filled = 1, 1

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: Row) -> None:
        """Take in one row; once neighbours were joined, as many of the newer ones become one too."""
        if self._filled < self._each:
            self._rows[-1] = merge(self._rows[-1], row)
            self._filled += 1
            return
        self._rows.append(row)
        self._filled = 1
        if len(self._rows) > self._limit:
            rows = list(self._rows)
            pairs = zip(rows[0::2], rows[1::2], strict=False)
            rest = rows[-1:] if len(rows) % 2 else []
            self._rows = deque([*(merge(older, newer) for older, newer in pairs), *rest])
            self._filled += 0 if rest else self._each
            self._each *= 2

    def take(self) -> Row:
        """Give the oldest row."""
        return self._rows.popleft()

    def rows(self) -> list[Row]:
        """Return all rows."""
        return list(self._rows)


def merge(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Row:
    """Return one row for two: the newer values, but NaN and Inf of either, and what only the older had."""
    out = {**older, **newer, **({FIRST: older[FIRST]} if FIRST in older else {})}
    for key, value in older.items():
        if isinstance(value, float) and not math.isfinite(value):
            new = newer.get(key)
            if not (isinstance(new, float) and not math.isfinite(new)):
                out[key] = value
    return out


@final
class Rows:
    """Sends the values of one prefix to one run; all calls are safe from any thread, and none raises.

    The newest values go out within the next row that the user logs (see :class:`Fold`), with the extremes since the
    last one. What no row took stands in the run's summary at the end, and while it lives where the user logs nothing.
    A run whose ``log`` knows no ``commit`` drops no row, whatever its step, and gets every row at once, at its step.

    Args:
        module: wandb, or a module like it.
        run: A run of it.
        prefix: First part of every key.
        own: Send every row as a row of its own, at once: for a run in which nobody passes ``step=``.

    Attributes:
        run: The run.
        prefix: First part of every key.
        own: Whether every row is one of its own.
        used: Whether a writer sends values through this object.
        ended: Whether the run takes nothing more.
        refused: Whether it was given up because it refused them.
        before_end: Called when the run ends.
        ask: Called when a row was taken, for the values to be renewed before the next.
    """

    def __init__(self, module: Any, run: Any, prefix: str, *, own: bool = False) -> None:
        self.run, self.prefix = run, prefix
        self.used, self.ended, self.refused = True, False, False
        self.before_end: Callable[[], None] | None = None
        self.ask: Callable[[], None] | None = None
        self._takes = parameters(run.log)
        self._commits = "commit" in self._takes
        self.own = own or not self._commits
        self._lock = threading.Lock()
        self._pending: Row = {}
        self._waiting, self._carried, self._row = Span(), Span(), -1
        self._latest: Row = {}
        self._defined: set[str] = set()
        self._failures, self._told = 0, False
        self._asked = 0.0
        self._taken, self._shown = time.monotonic(), time.monotonic()
        self.carried = False
        self._pid = os.getpid()
        # A script that ends without finish() gets no teardown hook; registered after wandb's own, this comes before it.
        atexit.register(self.end)
        self.hooked = wandb_private.before_end(run, self.end)
        if self._commits:
            wandb_private.leave_out_of_recap(run, prefix)
        self._fold: Fold | None = None
        if not self.own:
            self._fold = Fold.on(module, run)
            self._fold.sources[prefix] = self

    @classmethod
    def of(cls, module: Any, run: Any, prefix: str, *, own: bool = False) -> Rows:
        """Return rows for a run, under a prefix that no other exporter uses in it.

        Args:
            module: wandb, or a module like it.
            run: A run of it.
            prefix: Wanted first part of every key; when it is in use, ``_2``, ``_3`` ... is added.
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
        return cls(module, run, name, own=own)

    def put(self, row: Row, worst: tuple[float, str] | None = None) -> None:
        """Take in the values of a step.

        Args:
            row: Values by key without the prefix; what was there before stays until a row took it. ``None`` takes a
                value back: W&B leaves the last one in the summary otherwise, whatever a row says.
            worst: How bad the worst layer is, and its name.
        """
        if self.ended:
            return
        gone = [key for key, value in row.items() if value is None]
        row = {key: value for key, value in row.items() if value is not None}
        self._define(row)
        with self._lock:
            self._latest.update({key: value for key, value in row.items() if isinstance(value, _PLAIN)})
            self._latest.update(dict.fromkeys(gone))
            self._pending.update(row)
            for key in gone:
                self._pending.pop(key, None)
            self._waiting.add(row, worst)
        if self.own:
            self._send(self.take(self._row + 1), row["step"])
        else:
            self._keep_alive()
        if gone:
            self.summarise(dict.fromkeys(gone))

    def add(self, values: Row, step: int) -> None:
        """Add values such as tables: to the next row, or as a row of their own where rows are our own."""
        if self.ended:
            return
        self._define(values)
        if self.own:
            self._send(self._named({"step": step, **values}), step)
        else:
            with self._lock:
                self._pending.update(values)

    def take(self, row: int) -> Row:
        """Return what is new since the last row; a part of the interface of :class:`Fold`."""
        with self._lock:
            if not self._pending:
                return {}
            if row != self._row:
                self._row, self._carried = row, Span()
            self._carried.join(self._waiting)
            values, self._pending, self._waiting = self._pending, {}, Span()
            values.update(self._carried.values())
            self._latest.update(self._since(self._carried))
        self.carried, now = True, time.monotonic()
        self._taken = now
        if self.ask is not None and now - self._asked > _ASK_SECONDS:
            self._asked = now
            self.ask()
        return self._named(values)

    def conclude(self, values: Row) -> None:
        """Put the newest values, and these, into the run's summary."""
        with self._lock:
            latest = {**self._latest, **self._since(self._waiting), **values}
        if self._fold is not None:  # or the row that is open would put its older values over these
            self.try_to("values within your open row", self._fold.complete)
        self.summarise(latest)

    def summarise(self, values: Row) -> bool:
        """Put values into the run's summary, where it has one."""
        summary = getattr(self.run, "summary", None)
        if summary is None:
            return False
        # wandb makes null of NaN here, though not in rows, and in the summary that it keeps of rows it is this text.
        told = {
            key: "NaN" if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()
        }
        return self.try_to("values for its summary", lambda: summary.update(self._named(told)))

    def summary(self, name: str) -> Any:
        """Return a value of the run's summary; ``None`` where there is none."""
        got: list[Any] = []
        self.try_to("a question for its summary", lambda: got.append(self.run.summary.get(f"{self.prefix}/{name}")))
        return got[0] if got else None

    def left(self) -> tuple[list[str], int]:
        """Return the keys of numbers that an earlier session of the run left in its summary, and their step."""
        found: dict[str, Any] = {}
        if getattr(self.run, "resumed", False):
            self.try_to("a question for its summary", lambda: found.update(dict(self.run.summary)))
        start = f"{self.prefix}/"
        ours = {key.removeprefix(start): value for key, value in found.items() if str(key).startswith(start)}
        step = ours.pop("step", None)
        numbers = [key for key, value in ours.items() if isinstance(value, (int, float)) or value == "NaN"]
        return (numbers, int(step)) if isinstance(step, (int, float)) else ([], 0)

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

    def end(self) -> None:
        """Say all that is left to say, for the run ends now; calling it again does nothing."""
        if self.ended or os.getpid() != self._pid:  # a fork: the run belongs to the parent
            return
        atexit.unregister(self.end)
        try:
            if self.before_end is not None:
                self.before_end()
        except Exception:
            _log.warning("gradflow: the last values could not be made for W&B", exc_info=True)
        self.ended = True

    def _keep_alive(self) -> None:
        """Show the newest values in the summary while no row of the user's takes them; say so once."""
        now = time.monotonic()
        if now - self._taken < LIVE_SECONDS or now - self._shown < LIVE_SECONDS:
            return
        self._shown = now
        with self._lock:
            latest = dict(self._latest)
        self.summarise(latest)
        if not self.carried and now - self._taken >= HINT_SECONDS:
            self.carried = True
            _log.warning(
                "gradflow: nothing was logged to this W&B run for %.0f s; until you call run.log(), its summary shows "
                "the newest values. WandbWriter(rows='own') draws curves in a run that nobody passes step= to",
                now - self._taken,
            )

    def _since(self, span: Span) -> Row:
        """Return a span's values; what an earlier one had and this one has not is taken back."""
        values = span.values()
        return {**dict.fromkeys(key for key in Span.KEYS if key in self._latest), **values} if values else {}

    def _named(self, values: Row) -> Row:
        return {f"{self.prefix}/{key}": value for key, value in values.items()}

    def _send(self, row: Row, step: int) -> None:
        how = {"step": step} if not self._commits and "step" in self._takes else {}
        self.try_to("a row", lambda: self.run.log(row, **how))

    def _define(self, row: Mapping[str, Any]) -> None:
        new = [key for key in row if key not in self._defined]
        if not new or not hasattr(self.run, "define_metric"):
            return
        if not self._defined:
            new += [key for key in Span.KEYS if key not in new]
        self._defined.update(new)
        self.try_to("the definition of metrics", lambda: self._define_each(new))

    def _define_each(self, keys: list[str]) -> None:
        # Exact names only: of two overlapping globs, the user's or a framework's "*" among them, W&B picks at random.
        axis = f"{self.prefix}/step"
        for key in keys:
            if key == "step":
                self.run.define_metric(axis, hidden=True)
            else:
                self.run.define_metric(f"{self.prefix}/{key}", step_metric=axis, step_sync=False)
