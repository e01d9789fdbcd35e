"""Totals over parameters and nodes of what the discrete instrument read at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradflow_export.records.step_record import Reading, to_float32

Floats = npt.NDArray[np.float64]


class Column(Protocol):
    """Values of one metric at its sites; what is not present is missing."""

    sites: tuple[str, ...]
    values: Floats
    present: npt.NDArray[np.bool_]


def discrete_totals(columns: Mapping[str, Column]) -> Iterator[Reading]:
    """Yield run-level readings: means over parameters and nodes, each weighted by what it stands for.

    Args:
        columns: Per-site values by metric.
    """
    numel, intended = columns.get("parameter.numel"), columns.get("parameter.intended_share")
    lost, score = columns.get("parameter.lost_share"), columns.get("parameter.update_effectiveness")
    change, master = columns.get("parameter.change_norm"), columns.get("parameter.master")
    grids, between = columns.get("parameter.grid"), columns.get("parameter.between")
    # Who declares a grid asks about what lies on it, and not about the layers beside it.
    asked = grids.present if grids is not None and grids.present.any() else None
    if change is not None:
        norms = change.values[change.present if asked is None else change.present & asked]
        yield Reading.run("update.change_norm", float(np.linalg.norm(norms)))
    if numel is not None and intended is not None and lost is not None and score is not None and master is not None:
        # What rounding takes from a copy of float32 weights is not lost, only late.
        entries = np.where(master.values > 0, 0.0, numel.values)
        entries = entries if asked is None else np.where(asked, entries, 0.0)
        late = entries if between is None else np.where(between.values > 0, 0.0, entries)
        of_lost, of_score = (columns.get(f"parameter.{n}_error") for n in ("lost_share", "update_effectiveness"))
        yield from _weighted("update.lost_share", lost, intended.values * late, of_lost)
        yield from _weighted("update.effectiveness", score, entries, of_score)
    yield from _nodes(columns)


def _nodes(columns: Mapping[str, Column]) -> Iterator[Reading]:
    count = columns.get("node.count")
    if count is None:
        return
    for name in ("phase", "magnitude"):
        for what in ("gradient", "change"):
            column = columns.get(f"node.{name}_{what}")
            if column is not None:
                yield from _weighted(f"{name}.{what}", column, count.values)
    changed = columns["node.changed_share"]
    yield Reading.run("update.changed_nodes", float((changed.values * count.values)[changed.present].sum()))


def _weighted(metric: str, column: Column, weights: Floats, errors: Column | None = None) -> Iterator[Reading]:
    here = column.present & (weights > 0)
    if here.any():
        yield Reading.run(metric, float(np.average(column.values[here], weights=weights[here])))
    if here.any() and errors is not None:
        known = here & errors.present
        error = float(np.linalg.norm((weights * errors.values)[known])) / float(weights[here].sum())
        yield Reading.run(f"{metric}_error", error)


def rate_effectiveness(columns: Mapping[str, Column]) -> Iterator[Reading]:
    """Yield ``||update|| / (lr ||g||)`` where all three are known and neither factor is 0.

    Args:
        columns: Per-site values by metric.
    """
    known = [columns.get(f"parameter.{name}") for name in ("update_norm", "learning_rate", "gradient_norm")]
    update, rate, norm = known
    if update is None or rate is None or norm is None or not update.sites == rate.sites == norm.sites:
        return
    with np.errstate(invalid="ignore", over="ignore"):
        scale = rate.values * norm.values
    usable = update.present & rate.present & norm.present & (scale > 0) & np.isfinite(scale)
    ratios = np.divide(update.values, scale, out=np.zeros_like(scale), where=usable)
    yield Reading.owned("parameter.rate_effectiveness", update.sites, to_float32(ratios), usable)
