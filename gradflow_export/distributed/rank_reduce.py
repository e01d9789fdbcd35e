"""How the readings of several ranks become one: sums of squares over shards, means over batches, gaps of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.distributed.rank_shares import (
    ADD,
    GREATEST,
    LEAST,
    MAX,
    MIN,
    NEUTRAL,
    ROOT,
    Field,
    Floats,
    Schemas,
    Share,
    Sites,
    Told,
)
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.records.catalog import spec
from gradflow_export.records.column import Column
from gradflow_export.records.step_record import Reading

Columns = dict[str, Column]
Booleans = npt.NDArray[np.bool_]

ORIGINS = ("origin.input", "origin.weights", "origin.forward", "origin.loss", "origin.backward")
_FORWARD, _EVIDENCE = "forward", "evidence"
_SPEAK = MappingProxyType({_FORWARD: ORIGINS[:3], _EVIDENCE: ("loss", "block.output_rms", "block.gradient_norm")})
"""What shows that NaN or Inf was on a rank, the strongest evidence first."""

_PIECES = " pieces"
_LOW, _NAN = " low", " nan"
"""Endings of the fields that a metric has beside its own: shards that report it; its least value; how often NaN."""

_BATCHES = MappingProxyType(
    {"max": MAX, "min": MIN, "mean": ADD, "batch mean": ADD, "root": ROOT, "batch root": ROOT, "rms": ROOT}
)
_SHARDS = MappingProxyType({"root": ROOT, "sum": ADD, "max": MAX, "rms": ROOT, "mean": ADD})
_BY_ENTRIES = frozenset(("rms", "mean"))


class _Split(NamedTuple):
    """How the parameters of a step lie, over the sites of a column.

    Attributes:
        sizes: Entries of the shard this rank speaks for, -1 where it speaks for none. Shape: ``[sites]``.
        parts: Into how many shards a parameter is split. Shape: ``[sites]``.
    """

    sizes: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]


class Joiner:
    """Brings the columns of one rank into a form that adds up, and makes of the sum the columns of the job.

    A sum over shards of which one is missing would be wrong, so that metric is left out of the record. Means over
    batches are taken over those that have arrived.

    Args:
        rank: Of this process.
        ranks: Processes of the job.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = self._batches = ranks
        self._schemas = Schemas()
        self._alike: set[str] = set()

    def share(self, columns: Columns, layouts: Sequence[Layout]) -> Share:
        """Return what this rank reports of a step.

        Args:
            columns: Its values by metric.
            layouts: How its parameters lie, by optimizer.
        """
        if layouts:  # known once an optimizer has stepped: the model may have been split up after watch()
            self._batches = layouts[0].batches
        rows: list[tuple[Field, Floats, Floats]] = []
        lies: dict[Sites, _Split] = {}
        speaks = any((layout.counted & (layout.parts > 1)).any() for layout in layouts)
        for metric, column in columns.items():
            kind = spec(metric)
            if kind.across == "first":
                continue
            if kind.across == "gap":
                rows.extend(_extremes(metric, column))
            elif kind.kind != "parameter":
                if kind.across != "root" or speaks:
                    rows.append(self._batch(metric, column, kind.across))
            elif speaks:
                split = lies.get(column.sites) or _split(column.sites, layouts)
                lies[column.sites] = split
                rows.extend(_shard(metric, column, kind.across, split))
        rows.sort(key=lambda row: row[0].operation)
        schema = self._schemas.of([each for each, _, _ in rows])
        values = np.concatenate([row for _, row, _ in rows]) if rows else np.empty(0)
        weights = np.concatenate([row for _, _, row in rows]) if rows else np.empty(0)
        return Share(schema, values, weights, 1 << self._rank, self._first(columns))

    def _first(self, columns: Columns) -> dict[str, tuple[int, Told]]:
        """Return what this rank knows of the place where NaN or Inf began, by the kind of evidence it has."""
        kinds = [kind for kind, metrics in _SPEAK.items() if any(_speaks(columns.get(m), m) for m in metrics)]
        if not kinds:
            return {}
        known = {m: columns[m] for m in ORIGINS if m in columns}
        told = {m: (c.sites, c.values.tolist(), c.present.tolist()) for m, c in known.items()}
        return dict.fromkeys(kinds, (self._rank, told))

    def _batch(self, metric: str, column: Column, across: str) -> tuple[Field, Floats, Floats]:
        operation = _BATCHES.get(across, MIN if self._units_are_shared else ADD)
        values = np.abs(column.values) if operation == ROOT else column.values
        weights = column.present.astype(np.float64)
        return Field(operation, metric, column.sites), np.where(column.present, values, NEUTRAL[operation]), weights

    @property
    def _units_are_shared(self) -> bool:
        """Whether the ranks have the same units, alive when they are on any rank; otherwise each has its own."""
        return self._batches == self._ranks

    def finish(self, columns: Columns, layouts: Sequence[Layout], whole: Share) -> list[Reading]:
        """Change rank 0's columns into those of the whole job.

        Args:
            columns: Rank 0's own.
            layouts: How its parameters lie.
            whole: What all ranks that were heard report, this one among them.

        Returns:
            What only several ranks together can tell.
        """
        extra = _origin(columns, whole)
        complete = whole.ranks.bit_count() == self._ranks
        split = any((layout.parts > 1).any() for layout in layouts)
        for metric in list(columns):
            kind = spec(metric)
            if kind.across == "first":
                continue
            if kind.across == "gap":
                self._gaps(columns, metric, whole)
            elif kind.kind == "parameter":
                if split and not _finish_shards(columns[metric], metric, kind.across, whole, layouts):
                    del columns[metric]
            elif kind.across == "root" and split and not complete:
                del columns[metric]
            elif kind.across != "root" or split:
                self._finish_batches(columns[metric], metric, kind.across, whole)
        return extra

    def _finish_batches(self, column: Column, metric: str, across: str, whole: Share) -> None:
        values, weights = _at(column.sites, metric, whole)
        count = np.maximum(weights, 1.0)
        if across == "units":
            across = "min" if self._units_are_shared else "mean"
        if across in {"mean", "batch mean"}:
            values = values / count
        elif across in {"rms", "batch root"}:
            values = values / np.sqrt(count)
        if across == "batch mean":
            values = values / self._batches
        elif across == "batch root":
            values = values / math.sqrt(self._batches)
        column.present = weights > 0
        column.values = np.where(column.present, values, 0.0)

    def _gaps(self, columns: Columns, metric: str, whole: Share) -> None:
        own = columns.pop(metric)
        mine = np.isnan(own.values)
        most, count = _at(own.sites, metric, whole)
        least, _ = _at(own.sites, metric + _LOW, whole)
        broken, _ = _at(own.sites, metric + _NAN, whole)
        others, broken = count - own.present, broken - (mine & own.present)
        with np.errstate(invalid="ignore"):
            gaps = [np.where(own.values == far, 0.0, _relative(own.values, far)) for far in (most, least)]
            greatest = np.where(mine, np.where(broken < others, np.inf, 0.0), np.maximum(*gaps))
        greatest[~mine & (broken > 0)] = np.inf
        compared = own.present & (others > 0)
        self._alike.update(own.sites[place] for place in np.flatnonzero(compared & (greatest == 0)))
        known = compared & np.array([site in self._alike for site in own.sites], dtype=np.bool_)
        if known.any():
            columns[metric] = column = Column(own.sites)
            column.values, column.present = np.where(known, greatest, 0.0), known


def _relative(one: Floats, other: Floats) -> Floats:
    size = np.maximum(np.abs(one), np.abs(other))
    return np.divide(np.abs(one - other), size, out=np.zeros_like(size), where=size > 0)


def _extremes(metric: str, column: Column) -> list[tuple[Field, Floats, Floats]]:
    weights = column.present.astype(np.float64)
    usable = column.present & ~np.isnan(column.values)
    broken = (column.present & np.isnan(column.values)).astype(np.float64)
    ends = ((GREATEST, metric), (LEAST, metric + _LOW))
    rows = [
        (Field(operation, name, column.sites), np.where(usable, column.values, NEUTRAL[operation]), weights)
        for operation, name in ends
    ]
    return [*rows, (Field(ADD, metric + _NAN, column.sites), broken, weights)]


def _split(sites: Sites, layouts: Sequence[Layout]) -> _Split:
    sizes, parts = np.full(len(sites), -1, dtype=np.int64), np.ones(len(sites), dtype=np.int64)
    for layout in layouts:
        if layout.sites is sites or layout.sites == sites:
            into, here = layout.where, np.ones(len(layout.where), dtype=np.bool_)
        else:
            places = {site: place for place, site in enumerate(sites)}
            into = np.array([places.get(layout.sites[place], -1) for place in layout.where.tolist()], dtype=np.int64)
            here = into >= 0
        parts[into[here]] = layout.parts[here]
        mine = here & layout.counted
        sizes[into[mine]] = layout.sizes[mine]
    return _Split(sizes, parts)


def _shard(metric: str, column: Column, across: str, split: _Split) -> list[tuple[Field, Floats, Floats]]:
    operation, counted = _SHARDS[across], (split.sizes >= 0).astype(np.float64)
    here = column.present & (split.sizes >= 0)
    if across not in _BY_ENTRIES:
        # A shard without entries has nothing to report, which is all that there is to know of it: it counts.
        values = np.abs(column.values) if operation == ROOT else column.values
        return [(Field(operation, metric, column.sites), np.where(here, values, NEUTRAL[operation]), counted)]
    entries = np.where(here, split.sizes, 0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.abs(column.values) * np.sqrt(entries) if operation == ROOT else column.values * entries
    return [
        (Field(operation, metric, column.sites), np.where(here, values, 0.0), entries),
        (Field(ADD, metric + _PIECES, column.sites), counted, counted),
    ]


def _finish_shards(column: Column, metric: str, across: str, whole: Share, layouts: Sequence[Layout]) -> bool:
    """Join the shards of each split parameter; False when one is missing."""
    wanted = column.present & ((parts := _split(column.sites, layouts).parts) > 1)
    values, weights = _at(column.sites, metric, whole)
    by_entries = across in _BY_ENTRIES
    pieces = _at(column.sites, metric + _PIECES, whole)[1] if by_entries else weights
    if (pieces < parts)[wanted].any():
        return False
    if by_entries:
        entries = np.maximum(weights, 1.0)
        values = values / (np.sqrt(entries) if across == "rms" else entries)
    column.values = np.where(wanted, values, column.values)
    return True


def _at(sites: Sites, metric: str, whole: Share) -> tuple[Floats, Floats]:
    """Return values and weights of a metric at some sites, 0 where no rank reports. Shape of both: ``[sites]``."""
    found = whole.get(metric)
    if found is None:
        return np.zeros(len(sites)), np.zeros(len(sites))
    known, values, weights = found
    if known.sites is sites or known.sites == sites:
        return values, weights
    places = {site: place for place, site in enumerate(known.sites)}
    into = np.array([places.get(site, -1) for site in sites], dtype=np.int64)
    return np.where(into >= 0, values[into], 0.0), np.where(into >= 0, weights[into], 0.0)


def _origin(columns: Columns, whole: Share) -> list[Reading]:
    """Find the first rank where NaN or Inf can have begun, and take its word for the place."""
    for kind in _SPEAK:
        if kind not in whole.first:
            continue
        rank, told = whole.first[kind]
        if told:
            for metric in ORIGINS:
                columns.pop(metric, None)
            for metric, (sites, values, present) in told.items():
                column = columns[metric] = Column(tuple(sites))
                column.values, column.present = np.array(values, dtype=np.float64), np.array(present, dtype=np.bool_)
        return [Reading.run("origin.rank", float(rank))]
    return []


def _speaks(column: Column | None, metric: str) -> bool:
    return column is not None and (metric in ORIGINS or not np.isfinite(column.values[column.present]).all())
