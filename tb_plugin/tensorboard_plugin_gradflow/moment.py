"""The values of several metrics at one step, exactly as written: what the health table shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradflow_export.records.step_record import RUN_SITE
from gradflow_export.storage.event_chunks import ABSENT_BITS, MISSING_BITS
from tensorboard_plugin_gradflow.data import site_tables, value_chunks
from tensorboard_plugin_gradflow.derived import compute
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.series import one_phase
from tensorboard_plugin_gradflow.sound import as_number
from tensorboard_plugin_gradflow.source import Source, Tables

MOST_METRICS = 16


def read_moment(source: Source, run: str, step: int | None, metrics: Sequence[str], phase: str = "") -> dict[str, Any]:
    """Return the last reading of each metric at or before a step.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        step: The step; ``None`` for the last one.
        metrics: Names of metrics that the run holds.
        phase: Phase wanted; a metric that was never read in it has no step. ``""`` for that which /series shows.

    Raises:
        RequestError: The run or a metric is unknown, or there are too many metrics.
    """
    if not 1 <= len(metrics) <= MOST_METRICS:
        raise RequestError(400, f"Expected 1 to {MOST_METRICS} arguments 'metric'; got {len(metrics)}.")
    index = source.index(run)
    tables = site_tables(source, index)
    until = index.last_step if step is None else step
    found = {metric: _last_reading(source, index, tables, metric, until, phase) for metric in metrics}
    return {"v": FORMAT, "run": run, "step": until, "metrics": found}


def _last_reading(
    source: Source, index: RunIndex, tables: Tables, metric: str, step: int, phase: str
) -> dict[str, Any]:
    pairs = value_chunks(index, tables, metric)
    if phase:
        pairs = [(session, chunk) for session, chunk in pairs if session.phase_of(chunk) == phase]
    else:
        pairs = one_phase(pairs)
    pairs = [pair for pair in pairs if _begins_by(*pair, step)]
    for session, chunk in sorted(pairs, key=lambda pair: int(pair[1].content["first"]), reverse=True):
        found = _reading_in(source, index, session, chunk, tables, metric, step)
        if found is not None:
            return found
    return {"step": None, "sites": [], "values": []}


def _begins_by(session: Session, chunk: Chunk, step: int) -> bool:
    return int(chunk.content["first"]) <= min(step, session.cut - 1)


def _reading_in(
    source: Source, index: RunIndex, session: Session, chunk: Chunk, tables: Tables, metric: str, step: int
) -> dict[str, Any] | None:
    """Return the last reading of one chunk that still counts, ``None`` when it has none or cannot be read."""
    clock = session.clock_of(chunk)
    arrays = (
        {} if clock is None else {part.tag: stored for part, stored in source.read(index.run, [clock, chunk], tables)}
    )
    steps, stored = arrays.get(clock.tag if clock else ""), arrays.get(chunk.tag)
    names = tables.get((session.name, int(chunk.content["sites"])), ())
    if not isinstance(steps, np.ndarray) or not isinstance(stored, np.ndarray):
        return None
    if stored.ndim != 2 or stored.shape != (len(steps), len(names)):
        return None
    values = compute(metric, np.asarray(stored, dtype=np.float32))
    counts = steps <= min(step, session.cut - 1)
    if chunk.content["metric"] == "run":
        values, names = values[:, [names.index(metric)]], (RUN_SITE,)
        counts = counts & (np.ascontiguousarray(values).view(np.uint32)[:, 0] != ABSENT_BITS)
    rows = np.flatnonzero(counts)
    if not len(rows):
        return None
    row = np.ascontiguousarray(values[rows[-1]])
    missing = row.view(np.uint32) == MISSING_BITS
    out = [None if gone else as_number(value) for value, gone in zip(row.tolist(), missing, strict=True)]
    return {"step": int(steps[rows[-1]]), "sites": list(names), "values": out}
