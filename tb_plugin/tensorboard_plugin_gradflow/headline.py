"""What stands beside the verdict: the first and the last loss, and how many steps were lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from gradflow_export.chunks import ABSENT_BITS, MISSING_BITS
from gradflow_export.stats import ENDS, Ends
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.sound import is_names, is_whole
from tensorboard_plugin_gradflow.source import Source

Pairs = Iterable[tuple[Session, Chunk]]


def headline(source: Source, index: RunIndex, losses: Pairs, dropped: Pairs) -> dict[str, Any]:
    """Return the first and the last loss, as ``gradflow report`` tells them, and the steps that were lost.

    Args:
        source: Where to read.
        index: The run.
        losses: The chunks that hold the loss, oldest first.
        dropped: Those that hold ``runtime.dropped``, which begins at 0 in each session.
    """
    return {"loss": _ends(source, index, list(losses)), "lost": _lost(source, index, list(dropped))}


def _ends(source: Source, index: RunIndex, pairs: list[tuple[Session, Chunk]]) -> dict[str, float] | None:
    """Read as many chunks from either end as it takes."""
    ends, enough = Ends(), 2 * ENDS
    found: list[float] = []
    rest = deque(pairs)
    while rest and len(found) < enough:
        found += _finite(_values(source, index, *rest.popleft(), "loss"))
    tail: list[float] = []
    while rest and len(tail) < ENDS:
        tail = _finite(_values(source, index, *rest.pop(), "loss")) + tail
    for value in found + tail:
        ends.add(value)
    return None if ends.values is None else dict(zip(("first", "last"), ends.values, strict=True))


def _lost(source: Source, index: RunIndex, pairs: list[tuple[Session, Chunk]]) -> int:
    """Add up what was lost in each session: steps without a record, and records that could not be written."""
    newest = {session.name: (session, chunk) for session, chunk in pairs}
    total = sum(max(_values(source, index, *pair, "runtime.dropped"), default=0.0) for pair in newest.values())
    for session in index.sessions:
        for _, gap in source.read_json(index.run, session.of_kind("gap")):
            if isinstance(gap, dict) and is_whole(gap.get("first")) and is_whole(gap.get("steps")):
                total += gap["steps"] if gap["first"] < session.cut else 0
    return int(total)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if np.isfinite(value)]


def _values(source: Source, index: RunIndex, session: Session, chunk: Chunk, metric: str) -> list[float]:
    """Return the readings of a run-level metric in one chunk that still count."""
    clock = session.clock_of(chunk)
    tables = [part for part in session.of_kind("sites") if int(part.parts.part) == chunk.content["sites"]]
    names = next((names for _, names in source.read_json(index.run, tables) if is_names(names)), [])
    arrays = {} if clock is None else {part.tag: stored for part, stored in source.read(index.run, [clock, chunk])}
    steps, stored = arrays.get(clock.tag if clock else ""), arrays.get(chunk.tag)
    if not isinstance(steps, np.ndarray) or not isinstance(stored, np.ndarray) or metric not in names:
        return []
    if stored.ndim != 2 or stored.shape != (len(steps), len(names)):
        return []
    column = np.ascontiguousarray(np.asarray(stored, dtype=np.float32)[:, names.index(metric)])
    there = ~np.isin(column.view(np.uint32), (ABSENT_BITS, MISSING_BITS)) & (steps < session.cut)
    return [float(value) for value in column[there]]
