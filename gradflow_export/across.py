"""How the readings of several ranks become one: sums of squares over shards, means over batches, gaps of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradflow_export.assemble import Column
from gradflow_export.catalog import spec
from gradflow_export.records import Reading
from gradflow_export.taps.shards import Layout

Floats = npt.NDArray[np.float64]
Columns = dict[str, Column]

ORIGINS = ("origin.input", "origin.weights", "origin.forward", "origin.loss", "origin.backward")
_FORWARD = ORIGINS[:3]
_EVIDENCE = ("loss", "block.output_rms", "block.gradient_norm")


@dataclass(frozen=True)
class Part:
    """What one rank tells of one step.

    Attributes:
        columns: Its values by metric.
        sizes: Entries of each shard that it speaks for, by parameter; of the others it holds a replica.
    """

    columns: Columns
    sizes: Mapping[str, int] = field(default_factory=dict)


def part_of(columns: Columns, layouts: Sequence[Layout]) -> Part:
    """Return what a rank tells the first one: what is joined over ranks, and of parameters the shards it speaks for."""
    sizes: dict[str, int] = {}
    for layout in layouts:
        told_here = zip(layout.where.tolist(), layout.counted.tolist(), layout.sizes.tolist(), strict=True)
        sizes.update((layout.sites[place], size) for place, counted, size in told_here if counted)
    told: Columns = {}
    for metric, column in columns.items():
        kind = spec(metric)
        if metric in ORIGINS or (kind.across != "first" and (kind.kind != "parameter" or kind.across == "gap")):
            told[metric] = column
        elif kind.across != "first" and sizes:
            mine = Column(column.sites)
            mine.values[:] = column.values
            mine.present[:] = column.present & np.array([site in sizes for site in column.sites])
            told[metric] = mine
    return Part(told, sizes)


def shards_of(layouts: Sequence[Layout]) -> dict[str, int]:
    """Return into how many parts each parameter is split that lies on more than one rank."""
    return {
        layout.sites[place]: parts
        for layout in layouts
        for place, parts in zip(layout.where.tolist(), layout.parts.tolist(), strict=True)
        if parts > 1
    }


class Joiner:
    """Joins the parts of all ranks of a step; lives on rank 0's worker.

    A sum over shards of which one is missing would be wrong, so that metric is left out of the record. Means over
    batches are taken over those that have arrived.

    Args:
        ranks: Processes of the job.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = self._batches = ranks
        self._alike: set[str] = set()

    def join(self, own: Part, layouts: Sequence[Layout], others: Mapping[int, Part]) -> list[Reading]:
        """Change rank 0's columns into those of the whole job.

        Args:
            own: Rank 0's own part; its columns are changed.
            layouts: How its parameters lie.
            others: The parts that arrived, by rank.

        Returns:
            What only several ranks together can tell.
        """
        columns, split = own.columns, shards_of(layouts)
        if layouts:  # known once an optimizer has stepped: the model may have been split up after watch()
            self._batches = layouts[0].batches
        extra = self._origin(columns, others)
        for metric in list(columns):
            kind = spec(metric)
            if kind.across == "first":
                continue
            if kind.across == "gap":
                self._gaps(columns, metric, others.values())
            elif kind.kind == "parameter":
                if split and not _join_shards(columns[metric], metric, kind.across, own, split, others.values()):
                    del columns[metric]
            elif kind.across == "root":
                if split and len(others) < self._ranks - 1:
                    del columns[metric]
                elif split:
                    self._join_batches(columns[metric], metric, "root", others.values())
            else:
                self._join_batches(columns[metric], metric, kind.across, others.values())
        return extra

    def _join_batches(self, column: Column, metric: str, across: str, others: Iterable[Part]) -> None:
        rows = [(column.values, column.present), *_aligned(column, metric, others)]
        values = np.stack([row for row, _ in rows])
        present = np.stack([here for _, here in rows])
        count = present.sum(axis=0)
        some = np.maximum(count, 1)
        filled = np.where(present, values, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            if across == "units":
                # Ranks with different batches have the same units, alive when they are on any; else each has its own.
                across = "min" if self._batches == self._ranks else "mean"
            if across in {"max", "min"}:
                reduce, none = (np.maximum, -math.inf) if across == "max" else (np.minimum, math.inf)
                joined = reduce.reduce(np.where(present, values, none), axis=0)
            elif across in {"mean", "batch mean"}:
                joined = filled.sum(axis=0) / some / (self._batches if across == "batch mean" else 1)
            else:
                whole = _root(filled)
                joined = whole if across == "root" else whole / np.sqrt(some)
                joined = joined / math.sqrt(self._batches) if across == "batch root" else joined
        column.present = count > 0
        column.values = np.where(column.present, joined, 0.0)

    def _gaps(self, columns: Columns, metric: str, others: Iterable[Part]) -> None:
        own = columns.pop(metric)
        greatest, compared = np.zeros(len(own.sites)), np.zeros(len(own.sites), dtype=np.bool_)
        for values, present in _aligned(own, metric, others):
            both = own.present & present
            size = np.maximum(np.abs(values), np.abs(own.values))
            with np.errstate(invalid="ignore"):
                gap = np.divide(np.abs(values - own.values), size, out=np.zeros_like(size), where=size > 0)
            gap[np.isnan(values) & np.isnan(own.values)] = 0.0
            gap[np.isnan(values) ^ np.isnan(own.values)] = math.inf
            greatest, compared = np.where(both, np.maximum(greatest, gap), greatest), compared | both
        self._alike.update(own.sites[place] for place in np.flatnonzero(compared & (greatest == 0)))
        known = compared & np.array([site in self._alike for site in own.sites], dtype=np.bool_)
        if known.any():
            columns[metric] = column = Column(own.sites)
            column.values, column.present = np.where(known, greatest, 0.0), known

    @staticmethod
    def _origin(columns: Columns, others: Mapping[int, Part]) -> list[Reading]:
        """Find the first rank where NaN or Inf can have begun, and take its word for the place."""
        parts = {0: columns, **{rank: part.columns for rank, part in sorted(others.items())}}
        for known in (_FORWARD, _EVIDENCE):
            for rank, told in parts.items():
                if not any(_speaks(told.get(metric), metric) for metric in known):
                    continue
                if any(metric in told for metric in ORIGINS):
                    for metric in ORIGINS:
                        columns.pop(metric, None)
                    columns.update({metric: told[metric] for metric in ORIGINS if metric in told})
                return [Reading.run("origin.rank", float(rank))]
        return []


def _speaks(column: Column | None, metric: str) -> bool:
    return column is not None and (metric in ORIGINS or not np.isfinite(column.values[column.present]).all())


def _aligned(column: Column, metric: str, others: Iterable[Part]) -> list[tuple[Floats, npt.NDArray[np.bool_]]]:
    """Return values and presence of the other parts at the sites of a column."""
    out = []
    for part in others:
        theirs = part.columns.get(metric)
        if theirs is None:
            continue
        if theirs.sites == column.sites:
            out.append((theirs.values, theirs.present))
            continue
        places = {site: place for place, site in enumerate(theirs.sites)}
        values, present = np.zeros(len(column.sites)), np.zeros(len(column.sites), dtype=np.bool_)
        for index, site in enumerate(column.sites):
            if site in places:
                values[index], present[index] = theirs.values[places[site]], theirs.present[places[site]]
        out.append((values, present))
    return out


def _root(values: Floats) -> Floats:
    """Return ``(sum_r v_r^2)^(1/2)`` over the first axis without overflow. Shape: ``[ranks, sites]`` to ``[sites]``."""
    greatest = np.abs(values).max(axis=0)
    usable = np.isfinite(greatest) & (greatest > 0)
    scaled = np.divide(values, greatest, out=np.zeros_like(values), where=usable)
    whole: Floats = np.where(usable, greatest * np.sqrt(np.square(scaled).sum(axis=0)), greatest)
    return whole


def _join_shards(
    column: Column, metric: str, across: str, own: Part, split: Mapping[str, int], others: Iterable[Part]
) -> bool:
    """Join the shards of each split parameter; False when one is missing."""
    telling = [part for part in others if metric in part.columns]
    parts = np.array([split.get(site, 1) for site in column.sites])
    sizes = np.array([[part.sizes.get(site, -1) for site in column.sites] for part in (own, *telling)])
    wanted = column.present & (parts > 1)
    counted = sizes >= 0
    counted[0] = True
    if (counted.sum(axis=0) < parts)[wanted].any():
        return False
    rows = [(column.values, column.present), *_aligned(column, metric, telling)]
    # A shard without entries has nothing to tell, which is all that there is to know of it.
    here = np.stack([present for _, present in rows]) & counted
    values = np.where(here, np.stack([row for row, _ in rows]), 0.0)
    weights = np.where(here, np.maximum(sizes, 0), 0).astype(np.float64)
    shares = weights / np.maximum(weights.sum(axis=0), 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        if across == "root":
            whole = _root(values)
        elif across == "sum":
            whole = values.sum(axis=0)
        elif across == "max":
            whole = np.where(here, values, -math.inf).max(axis=0)
        elif across == "rms":
            whole = _root(values * np.sqrt(shares))
        else:
            whole = (values * shares).sum(axis=0)
    column.values = np.where(wanted, whole, column.values)
    return True
