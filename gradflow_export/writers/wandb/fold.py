"""How values of ours get into the rows that the user logs to a W&B run, and into no others."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

_log = logging.getLogger("gradflow_export")

Row = dict[str, Any]

SINCE = "since_last"
"""First part of the keys that say what happened since the last row: extremes, and the worst layer."""

WORST = f"{SINCE}/worst_layer"
_EXTREMES: tuple[tuple[str, str, Callable[..., float]], ...] = (
    ("loss", f"{SINCE}/loss_max", max),
    ("gradient.total_norm", f"{SINCE}/gradient_norm_max", max),
    ("gradient.total_norm", f"{SINCE}/gradient_norm_min", min),
)

HOOK = "_partial_history_callback"
"""The method of a W&B run that every way of logging goes through; without it ``run.log`` and ``wandb.log`` are used."""


@final
class Span:
    """Extremes over some rows, of which NaN is the worst, and the layer farthest from what is good."""

    KEYS = (*(key for _, key, _ in _EXTREMES), WORST)

    def __init__(self) -> None:
        self._extremes: dict[str, float] = {}
        self._worst: tuple[float, str] | None = None

    def add(self, row: Mapping[str, Any], worst: tuple[float, str] | None) -> None:
        """Take in one row, and how bad its worst layer is and which one that is."""
        for name, key, better in _EXTREMES:
            if name in row:
                self._take(key, row[name], better)
        self._judge(worst)

    def join(self, other: Span) -> None:
        """Take in another span."""
        for _, key, better in _EXTREMES:
            if key in other._extremes:
                self._take(key, other._extremes[key], better)
        self._judge(other._worst)

    def values(self) -> Row:
        """Return what a row of W&B holds of this span."""
        return {**self._extremes, **({WORST: self._worst[1]} if self._worst else {})}

    def _take(self, key: str, value: float, better: Callable[..., float]) -> None:
        known = self._extremes.get(key)
        if known is None or math.isnan(value):
            self._extremes[key] = value
        elif not math.isnan(known):
            self._extremes[key] = better(known, value)

    def _judge(self, worst: tuple[float, str] | None) -> None:
        if worst is not None and (self._worst is None or worst[0] > self._worst[0]):
            self._worst = worst


class Source(Protocol):
    """What a fold asks for values."""

    def take(self, row: int) -> Row:
        """Return what is new since the last row, or, within one row, since the last piece of it."""


@final
class Fold:
    """Adds the newest values of ours to each row that the user logs to a run; a row of its own is never made.

    W&B drops a row whose step is behind the run's, so that a row of ours, in between or at the end, costs rows of a
    user who passes ``step=``, then or after a resume. It therefore stands in the place of the method of the run that
    all logging goes through: what the user logs goes on unchanged but for our keys. A row that W&B will drop, an empty
    one, and one of a forked child get none.

    Args:
        run: A W&B run.
        call: The method whose place it takes.
    """

    def __init__(self, run: Any, call: Callable[..., Any]) -> None:
        self._call, self._pid = call, os.getpid()
        self._row = int(getattr(run, "starting_step", 0) or 0)
        self._steps = getattr(getattr(run, "settings", None), "mode", None) != "shared"  # W&B leaves step= out there
        self._lock = threading.Lock()
        self._open = self._told = False
        self.sources: dict[str, Source] = {}

    @classmethod
    def on(cls, module: Any, run: Any) -> Fold:
        """Return the fold of a run; there is one at most."""
        name = HOOK if callable(getattr(run, HOOK, None)) else "log"
        present = getattr(run, name)
        if isinstance(present, cls):
            return present
        fold = cls(run, present)
        if name == "log" and getattr(getattr(module, "log", None), "__self__", None) is run:
            module.log = fold
        setattr(run, name, fold)
        return fold

    def __call__(self, data: Any, *more: Any, **named: Any) -> Any:
        """Log a row of the user's, with ours in it."""
        try:
            step, commit = (*more, *(named.get(name) for name in ("step", "commit")[len(more) :]))[:2]
            data = self._joined(data, step if self._steps else None, commit)
        except Exception:
            if not self._told:
                self._told = True
                _log.warning("gradflow: a row of yours goes to W&B without our values", exc_info=True)
        return self._call(data, *more, **named)

    def complete(self) -> None:
        """Add the newest values to the row that the user began and W&B still keeps open, if there is one."""
        with self._lock:
            if not self._open or os.getpid() != self._pid:
                return
            ours = {key: value for source in self.sources.values() for key, value in source.take(self._row).items()}
        if ours:
            self._call(ours, step=None, commit=False)

    def _joined(self, data: Any, step: int | None, commit: bool | None) -> Any:
        if not isinstance(data, Mapping) or not data or os.getpid() != self._pid:
            return data
        with self._lock:
            if step is not None and step < self._row:  # W&B will drop it
                return data
            self._row = self._row if step is None else step
            ours: Row = {}
            for source in self.sources.values():
                ours.update(source.take(self._row))
            self._open = commit is False or (commit is None and step is not None)
            self._row += not self._open
        return {**ours, **data} if ours else data
