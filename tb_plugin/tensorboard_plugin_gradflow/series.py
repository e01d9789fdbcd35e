"""One metric over time, decimated to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.chunks import ABSENT_BITS
from gradflow_export.errors import nearest
from gradflow_export.records import RUN_SITE
from tensorboard_plugin_gradflow.data import Tables, describe, site_tables, value_chunks
from tensorboard_plugin_gradflow.decimate import REDUCERS, Columns, column_width, neutral_value
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.source import Source
from tensorboard_plugin_gradflow.wire import encode_series

MOST_COLUMNS = 8192
DEFAULT_COLUMNS = 1024
_JOINED_BYTES = 2**16


@dataclass(frozen=True)
class Query:
    """Which part of which metric is asked for.

    Attributes:
        metric: A run-level or per-site metric.
        first: First step wanted, ``None`` for the beginning.
        last: Last step wanted, ``None`` for the end.
        columns: About how many columns are wanted at most.
        reducers: Words of ``REDUCERS``; one block of values is returned for each.
        sites: Sites wanted, in this order; empty for all.
        phase: Phase wanted; ``""`` for training, or the first by name where the metric was never read in training.
    """

    metric: str
    first: int | None = None
    last: int | None = None
    columns: int = DEFAULT_COLUMNS
    reducers: tuple[str, ...] = ("extreme",)
    sites: tuple[str, ...] = ()
    phase: str = ""

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise RequestError(400, f"Expected first <= last; got first={self.first}, last={self.last}.")
        if not 1 <= self.columns <= MOST_COLUMNS:
            raise RequestError(400, f"Expected columns between 1 and {MOST_COLUMNS}; got {self.columns}.")
        for word in self.reducers:
            if word not in REDUCERS:
                raise RequestError(400, f"Expected reduce to be a list of {sorted(REDUCERS)}; got {word!r}.")


@dataclass(frozen=True)
class _Clock:
    """The steps of one or more chunks that still count, and when they were."""

    rows: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    wall: npt.NDArray[np.float64]


class _Rows(NamedTuple):
    """What one chunk, or several joined, adds to the columns: ``there`` says where each of its sites belongs."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    there: npt.NDArray[np.int64]


def read_series(source: Source, run: str, query: Query) -> bytes:
    """Return one metric of one run in the binary form of ``wire.py``.

    Args:
        source: Where to read.
        run: TensorBoard's name of the run.
        query: Which part.

    Raises:
        RequestError: The run, the metric or a site is unknown.
    """
    index = source.index(run)
    tables = site_tables(source, index)
    everywhere = value_chunks(index, tables, query.metric)
    pairs = [pair for pair in one_phase(everywhere, query.phase) if _overlaps(*pair, query)]
    sites = _chosen_sites(pairs, tables, query)
    clocks = _read_clocks(source, index, pairs, query)
    pairs = [(session, chunk) for session, chunk in pairs if _clock_key(session, chunk) in clocks]
    columns = _empty_columns(list(clocks.values()), query, len(sites))
    for steps, values, there in _joined(_rows(source, run, pairs, clocks, tables, sites, query.metric)):
        columns.add(steps, np.ascontiguousarray(values), there)
    spec = describe(query.metric)
    header = {
        "v": FORMAT,
        "run": run,
        "metric": query.metric,
        "sites": list(sites),
        "columns": len(columns),
        "width": columns.width,
        "most": int(columns.readings.max(initial=0)),
        "reducers": list(query.reducers),
    }
    facts = [columns.first, columns.last, columns.wall, columns.readings]
    blocks = [columns.reduce(word, neutral_value(spec)) for word in query.reducers]
    return encode_series(header, [fact.astype(np.float64) for fact in facts], blocks)


def one_phase(pairs: Sequence[tuple[Session, Chunk]], wanted: str = "") -> list[tuple[Session, Chunk]]:
    """Keep the phase wanted; without one the training phase, or the first by name where there is none.

    Args:
        pairs: Chunks of one metric; not empty.
        wanted: A phase word, or ``""``.

    Raises:
        RequestError: The metric was never read in the phase wanted.
    """
    phases = [session.phase_of(chunk) for session, chunk in pairs]
    chosen = wanted or min(phases, key=lambda phase: (phase != "train", phase))
    if chosen not in phases:
        raise RequestError(404, f"Expected a phase of {sorted(set(phases))}; got {wanted!r}.")
    return [pair for pair, phase in zip(pairs, phases, strict=True) if phase == chosen]


def _overlaps(session: Session, chunk: Chunk, query: Query) -> bool:
    first, last = int(chunk.content["first"]), min(int(chunk.content["last"]), session.cut - 1)
    too_late = query.last is not None and first > query.last
    too_early = query.first is not None and last < query.first
    return first < session.cut and not too_late and not too_early


def _clock_key(session: Session, chunk: Chunk) -> tuple[str, str]:
    return session.name, str(chunk.content["clock"])


def _read_clocks(
    source: Source, index: RunIndex, pairs: Sequence[tuple[Session, Chunk]], query: Query
) -> dict[tuple[str, str], _Clock]:
    wanted: dict[str, tuple[str, str]] = {}
    chunks, cuts = [], {}
    for session, chunk in pairs:
        key = _clock_key(session, chunk)
        steps, wall = session.chunks.get(key[1]), session.chunks.get(key[1].replace("steps/", "wall/", 1))
        if steps is None or wall is None or key in cuts:
            continue
        cuts[key] = session.cut
        for part in (steps, wall):
            wanted[part.tag] = key
            chunks.append(part)
    found: dict[tuple[str, str], dict[str, npt.NDArray[np.float64]]] = {}
    for chunk, stored in source.read(index.run, chunks):
        if isinstance(stored, np.ndarray):
            found.setdefault(wanted[chunk.tag], {})[chunk.parts.name] = stored
    return {key: _valid_rows(both, cuts[key], query) for key, both in found.items() if len(both) == 2}


def _valid_rows(both: dict[str, npt.NDArray[np.float64]], cut: int, query: Query) -> _Clock:
    steps = both["steps"].astype(np.int64)
    valid = steps < cut
    if query.first is not None:
        valid &= steps >= query.first
    if query.last is not None:
        valid &= steps <= query.last
    rows = np.flatnonzero(valid)
    return _Clock(rows, steps[rows], both["wall"][rows])


def _empty_columns(clocks: Sequence[_Clock], query: Query, sites: int) -> Columns:
    steps = np.concatenate([np.empty(0, np.int64), *(clock.steps for clock in clocks)])
    wall = np.concatenate([np.empty(0, np.float64), *(clock.wall for clock in clocks)])
    steps, where = np.unique(steps, return_index=True)
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    first = first if query.first is None else query.first
    last = last if query.last is None else query.last
    width = column_width(first, last, query.columns)
    return Columns(steps, wall[where], width, sites, means="mean" in query.reducers)


def _rows(
    source: Source,
    run: str,
    pairs: Sequence[tuple[Session, Chunk]],
    clocks: dict[tuple[str, str], _Clock],
    tables: Tables,
    sites: Sequence[str],
    metric: str,
) -> Iterator[_Rows]:
    """Yield the rows of every chunk that count, with the sites wanted."""
    position = {site: number for number, site in enumerate(sites)}
    places: dict[tuple[str, ...], tuple[list[int], npt.NDArray[np.int64]]] = {}
    session_of = {chunk.tag: session for session, chunk in pairs}
    for chunk, stored in source.read(run, [chunk for _, chunk in pairs]):
        session = session_of[chunk.tag]
        clock = clocks[_clock_key(session, chunk)]
        names = tables.get((session.name, int(chunk.content["sites"])), ())
        if not isinstance(stored, np.ndarray) or stored.ndim != 2 or stored.shape[1] != len(names):
            continue
        values, steps = np.asarray(stored, dtype=np.float32), clock.steps
        values = values if len(steps) == len(values) else values[clock.rows]
        if chunk.content["metric"] == "run":
            values = values[:, [names.index(metric)]]
            read = values.view(np.uint32)[:, 0] != ABSENT_BITS
            values, steps, names = values[read], steps[read], (RUN_SITE,)
        if names not in places:
            here = [number for number, name in enumerate(names) if name in position]
            places[names] = here, np.array([position[names[number]] for number in here], dtype=np.int64)
        here, there = places[names]
        if len(steps):
            yield _Rows(steps, values if len(here) == len(names) else values[:, here], there)


def _joined(parts: Iterable[_Rows]) -> Iterator[_Rows]:
    """Join the rows of small chunks where they follow each other: what is done per chunk outweighs few numbers."""
    kept: list[_Rows] = []
    size = 0
    for part in parts:
        follows = kept and part.there is kept[-1].there and part.steps[0] > kept[-1].steps[-1]
        if kept and (not follows or size >= _JOINED_BYTES):
            yield _join(kept)
            kept, size = [], 0
        kept.append(part)
        size += part.values.nbytes
    if kept:
        yield _join(kept)


def _join(parts: Sequence[_Rows]) -> _Rows:
    if len(parts) == 1:
        return parts[0]
    steps, values = (
        np.concatenate(items) for items in zip(*((part.steps, part.values) for part in parts), strict=True)
    )
    return _Rows(steps, values, parts[0].there)


def _chosen_sites(pairs: Sequence[tuple[Session, Chunk]], tables: Tables, query: Query) -> tuple[str, ...]:
    """Return the sites wanted, or all of them in the order of the newest table, earlier ones after."""
    known: dict[str, None] = {}
    for session, chunk in reversed(pairs):
        names = tables.get((session.name, int(chunk.content["sites"])), ())
        known.update(dict.fromkeys((RUN_SITE,) if chunk.content["metric"] == "run" else names))
    for site in query.sites:
        if pairs and site not in known:
            raise RequestError(404, f"Metric {query.metric!r} has no site {site!r}{nearest(site, known)}")
    return query.sites or tuple(known)
