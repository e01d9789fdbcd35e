"""One metric over time, decimated to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import nearest
from gradflow_export.records.step_record import RUN_SITE
from gradflow_export.storage.event_chunks import ABSENT_BITS
from tensorboard_plugin_gradflow.data import all_issues, describe, site_tables, value_chunks
from tensorboard_plugin_gradflow.decimate import REDUCERS, Columns, column_width, neutral_value
from tensorboard_plugin_gradflow.derived import compute
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.metadata import FORMAT
from tensorboard_plugin_gradflow.rows import Rows
from tensorboard_plugin_gradflow.source import Source, Tables
from tensorboard_plugin_gradflow.wire import encode_series

MOST_COLUMNS = 8192
DEFAULT_COLUMNS = 1024
DEFAULT_AROUND, MOST_AROUND = 20, 100
MOST_BEFORE = 16
MOST_CELLS = 5_000_000
"""Columns times rows: what is collected for each takes up to 21 bytes. Columns get wider where there would be more."""
MOST_ANSWER = 64 * 2**20
_MOST_ORIGINS = 64
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
        rows: How sites are joined.
        around: A step and a number of readings on either side of it, which are wanted one by one; ``None`` for columns.
        before: How many readings before ``first`` are wanted as well, however far back they lie: the newest of them is
            what holds at ``first``.
    """

    metric: str
    first: int | None = None
    last: int | None = None
    columns: int = DEFAULT_COLUMNS
    reducers: tuple[str, ...] = ("extreme",)
    sites: tuple[str, ...] = ()
    phase: str = ""
    rows: Rows = field(default_factory=Rows)
    around: tuple[int, int] | None = None
    before: int = 0

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise RequestError(400, f"Expected first <= last; got first={self.first}, last={self.last}.")
        if not 1 <= self.columns <= MOST_COLUMNS:
            raise RequestError(400, f"Expected columns between 1 and {MOST_COLUMNS}; got {self.columns}.")
        if not 0 <= self.before <= MOST_BEFORE:
            raise RequestError(400, f"Expected before between 0 and {MOST_BEFORE}; got {self.before}.")
        for word in self.reducers:
            if word not in REDUCERS:
                raise RequestError(400, f"Expected reduce to be a list of {sorted(REDUCERS)}; got {word[:40]!r}.")
        for what, several in (("reduce", self.reducers), ("site", self.sites)):
            if len(set(several)) != len(several):
                raise RequestError(400, f"Expected each {what} once; got one of them more often.")


@dataclass(frozen=True)
class _Clock:
    """The steps of one or more chunks that still count, when they were, and how many there are in all."""

    rows: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    wall: npt.NDArray[np.float64]
    total: int


class _Rows(NamedTuple):
    """What one chunk, or several joined, adds to the columns: ``there`` says where each of its sites belongs."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    there: npt.NDArray[np.int64]


def read_series(source: Source, run: str, query: Query) -> bytearray:
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
    pairs = _wanted(one_phase(everywhere, query.phase), query)
    sites = chosen_sites(pairs, tables, query)
    edges = query.rows.edges(len(sites))
    clocks = _read_clocks(source, index, pairs, query)
    if query.around is not None:
        query, clocks = _one_by_one(clocks, query, query.around)
    pairs = [(session, chunk) for session, chunk in pairs if _clock_key(session, chunk) in clocks]
    columns = _empty_columns(list(clocks.values()), query, len(edges) - 1)
    places = {site: int(row) for site, row in zip(sites, np.searchsorted(edges, range(len(sites)), "right") - 1)}  # noqa: B905
    places = {site: row for site, row in places.items() if 0 <= row < len(edges) - 1}
    for steps, values, there in _joined(_rows(source, run, pairs, clocks, tables, places, query.metric)):
        columns.add(steps, np.ascontiguousarray(values), there)
    spec = describe(query.metric)
    header: dict[str, Any] = {
        "v": FORMAT,
        "run": run,
        "metric": query.metric,
        "sites": list(sites),
        "columns": len(columns),
        "width": columns.width,
        "most": int(columns.readings.max(initial=0)),
        "reducers": list(query.reducers),
    }
    if query.rows.joins:
        joined = np.diff(edges)
        header["rows"] = [list(row) for row in zip(edges[:-1].tolist(), joined.tolist(), strict=True)]
        header["most_sites"] = int(joined.max(initial=0))
    if query.around is not None:
        at = np.flatnonzero(columns.first == query.around[0])
        header |= {"origin": _origin(source, index, sites, query.around[0]), "at": int(at[0]) if len(at) else None}
    facts = [columns.first, columns.last, columns.wall, columns.readings]
    blocks = [columns.parts(word, neutral_value(spec)) for word in query.reducers]
    return encode_series(header, [fact.astype(np.float64) for fact in facts], blocks, len(edges) - 1)


def _one_by_one(
    clocks: Mapping[tuple[str, str], _Clock], query: Query, around: tuple[int, int]
) -> tuple[Query, dict[tuple[str, str], _Clock]]:
    """Return the query for some readings on either side of a step, and the clocks without all others."""
    step, count = around
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(clock.steps for clock in clocks.values())]))
    place = int(np.searchsorted(steps, step))
    behind = place + (place < len(steps) and bool(steps[place] == step))
    chosen = steps[max(0, place - count) : behind + count]
    first, last = (int(chosen[0]), int(chosen[-1])) if len(chosen) else (step, step)
    kept = {}
    for key, clock in clocks.items():
        inside = (clock.steps >= first) & (clock.steps <= last)
        if inside.any():
            kept[key] = _Clock(clock.rows[inside], clock.steps[inside], clock.wall[inside], clock.total)
    return replace(query, first=first, last=last), kept


def _origin(source: Source, index: RunIndex, sites: Sequence[str], step: int) -> list[str]:
    """Return the sites at or inside the layers of the issues that began at a step."""
    begun = (layer for issue in all_issues(source, index) if issue["step"] == step for layer in issue["layers"])
    layers = list(islice(dict.fromkeys(begun), _MOST_ORIGINS))
    inside = tuple(f"{layer}." for layer in layers)
    return [site for site in sites if site in layers or site.startswith(inside)]


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


def _wanted(pairs: Sequence[tuple[Session, Chunk]], query: Query) -> list[tuple[Session, Chunk]]:
    """Return the chunks that hold what is asked for, those of readings before it included."""
    chosen = {chunk.tag for session, chunk in pairs if _overlaps(session, chunk, query)}
    earlier = [
        (session, chunk)
        for session, chunk in pairs
        if query.first is not None and int(chunk.content["first"]) < min(query.first, session.cut)
    ]
    found = 0
    for session, chunk in sorted(earlier, key=lambda pair: int(pair[1].content["last"]), reverse=True):
        if found >= query.before:
            break
        chosen.add(chunk.tag)
        # How many rows of a chunk lie before the first step, or before its session's cut, its clock alone knows.
        whole = int(chunk.content["last"]) < min(query.first or 0, session.cut)
        found += int(chunk.content["rows"]) if whole else 0
    return [pair for pair in pairs if pair[1].tag in chosen]


def _overlaps(session: Session, chunk: Chunk, query: Query) -> bool:
    first, last = int(chunk.content["first"]), min(int(chunk.content["last"]), session.cut - 1)
    too_late = query.last is not None and first > query.last
    too_early = query.first is not None and last < query.first
    return first < session.cut and not too_late and not too_early


def _clock_key(session: Session, chunk: Chunk) -> tuple[str, str]:
    return session.name, chunk.content["clock"]


def _read_clocks(
    source: Source, index: RunIndex, pairs: Sequence[tuple[Session, Chunk]], query: Query
) -> dict[tuple[str, str], _Clock]:
    wanted: dict[str, tuple[str, str]] = {}
    chunks, cuts = [], {}
    for session, chunk in pairs:
        key = _clock_key(session, chunk)
        steps, wall = session.clock_of(chunk), session.chunks.get(key[1].replace("steps/", "wall/", 1))
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
    whole = {
        key: both
        for key, both in found.items()
        if both.keys() == {"steps", "wall"} and len(both["steps"]) == len(both["wall"])
    }
    first = query.first
    if first is not None and query.before:
        earlier = [both["steps"][both["steps"] < min(first, cuts[key])] for key, both in whole.items()]
        led = np.unique(np.concatenate([np.empty(0), *earlier]))[-query.before :]
        first = int(led[0]) if len(led) else first
    clocks = {key: _valid_rows(both, cuts[key], replace(query, first=first)) for key, both in whole.items()}
    return {key: clock for key, clock in clocks.items() if len(clock.rows)}


def _valid_rows(both: dict[str, npt.NDArray[np.float64]], cut: int, query: Query) -> _Clock:
    steps = both["steps"].astype(np.int64)
    valid = steps < cut
    if query.first is not None:
        valid &= steps >= query.first
    if query.last is not None:
        valid &= steps <= query.last
    rows = np.flatnonzero(valid)
    return _Clock(rows, steps[rows], both["wall"][rows], len(steps))


def _empty_columns(clocks: Sequence[_Clock], query: Query, sites: int) -> Columns:
    steps = np.concatenate([np.empty(0, np.int64), *(clock.steps for clock in clocks)])
    wall = np.concatenate([np.empty(0, np.float64), *(clock.wall for clock in clocks)])
    steps, where = np.unique(steps, return_index=True)
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 0)
    first = first if query.first is None else query.first
    last = last if query.last is None else query.last
    # A column more than wanted may come of the alignment.
    most = min(MOST_CELLS, MOST_ANSWER // (4 * len(query.reducers))) // max(1, sites)
    width = 1 if query.around is not None else column_width(first, last, max(1, min(query.columns, most - 1)))
    return Columns(steps, wall[where], width, sites, means="mean" in query.reducers)


def _rows(
    source: Source,
    run: str,
    pairs: Sequence[tuple[Session, Chunk]],
    clocks: dict[tuple[str, str], _Clock],
    tables: Tables,
    position: Mapping[str, int],
    metric: str,
) -> Iterator[_Rows]:
    """Yield the rows of every chunk that count, with the sites wanted, in the order of where they belong."""
    places: dict[tuple[str, ...], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    session_of = {chunk.tag: session for session, chunk in pairs}
    for chunk, stored in source.read(run, [chunk for _, chunk in pairs], tables):
        session = session_of[chunk.tag]
        clock = clocks[_clock_key(session, chunk)]
        names = tables.get((session.name, chunk.content["sites"]), ())
        if not isinstance(stored, np.ndarray) or stored.shape != (clock.total, len(names)):
            source.hurt(run, chunk.tag)
            continue
        values, steps = np.asarray(stored, dtype=np.float32), clock.steps
        values = compute(metric, values if len(steps) == len(values) else values[clock.rows])
        if chunk.content["metric"] == "run":
            values = values[:, [names.index(metric)]]
            read = values.view(np.uint32)[:, 0] != ABSENT_BITS
            values, steps, names = values[read], steps[read], (RUN_SITE,)
        if names not in places:
            here = np.array([number for number, name in enumerate(names) if name in position], dtype=np.int64)
            there = np.array([position[names[number]] for number in here], dtype=np.int64)
            order = np.argsort(there, kind="stable")
            places[names] = here[order], there[order]
        here, there = places[names]
        if len(steps):
            as_stored = len(here) == len(names) and bool((np.diff(here) == 1).all())
            yield _Rows(steps, values if as_stored else values[:, here], there)


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


def chosen_sites(pairs: Sequence[tuple[Session, Chunk]], tables: Tables, query: Query) -> tuple[str, ...]:
    """Return the sites wanted, or all of them in the order of the newest table, earlier ones after.

    Args:
        pairs: Chunks of one metric in one phase.
        tables: The site tables of their run.
        query: Which sites.

    Raises:
        RequestError: A site is unknown.
    """
    known: dict[str, None] = {}
    for session, chunk in reversed(pairs):
        names = tables.get((session.name, chunk.content["sites"]), ())
        known.update(dict.fromkeys((RUN_SITE,) if chunk.content["metric"] == "run" else names))
    for site in query.sites:
        if pairs and site not in known:
            raise RequestError(404, f"Metric {query.metric!r} has no site {site!r}{nearest(site, known)}")
    return query.sites or tuple(known)
