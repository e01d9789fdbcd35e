"""What the worker remembers of single nodes: how often each changed, and which have unusually small gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WINDOW = 50
"""Measured updates over which the update frequency of a node is taken."""
ROWS = 512
"""Most nodes of one tensor that are distinguished; of more, evenly spaced ones."""
ALL = 256
"""Up to this many nodes of the whole model each have readings; of more, those that changed least often."""
FEW = 4
SMALL = 8
"""Most nodes of one tensor that are named for a small gradient."""

COLUMNS = ("gradient", "changed", "product", "d_square", "e_square")
DEVIATIONS, FACTOR = 6.0, 20.0


@dataclass(frozen=True)
class Part:
    """Where the nodes of one tensor lie in a sample.

    Attributes:
        site: Name of the tensor.
        rows: How many of its nodes are there.
        stride: Of how many rows of the tensor each is the first.
        vector: Whether the tensor is a scalar, which is its only node.
    """

    site: str
    rows: int
    stride: int
    vector: bool = False

    def name(self, row: int) -> str:
        """Return the name of a node."""
        return self.site if self.vector else f"{self.site}[{row * self.stride}]"


class NodeBook:
    """The last updates of each node, in bounded memory; used on the worker thread only."""

    def __init__(self) -> None:
        self._changed: dict[str, npt.NDArray[np.bool_]] = {}
        self._count: dict[str, int] = {}

    def take(self, parts: Sequence[Part], values: npt.NDArray[np.floating]) -> dict[str, dict[str, float]]:
        """Return the readings of single nodes.

        Args:
            parts: The tensors, in order.
            values: What each node did, in the columns ``COLUMNS``; NaN where it is not known. Shape:
                ``[nodes of all parts, 5]``.
        """
        rows = np.asarray(values, dtype=np.float64).reshape(-1, len(COLUMNS))
        every = len(rows) <= ALL
        out: dict[str, dict[str, float]] = {"node.update_frequency": {}, "node.effectiveness": {}, "node.small": {}}
        start = 0
        for part in parts:
            mine = rows[start : start + part.rows]
            start += part.rows
            often = self._frequencies(part, mine[:, 1] > 0)
            scores = effectiveness(mine)
            named = range(part.rows) if every else _least(often)
            for row in named:
                out["node.update_frequency"][part.name(row)] = float(often[row])
                if not math.isnan(scores[row]):
                    out["node.effectiveness"][part.name(row)] = float(scores[row])
            out["node.small"].update((part.name(row), share) for row, share in small(mine[:, 0]))
        return {metric: sites for metric, sites in out.items() if sites}

    def _frequencies(self, part: Part, changed: npt.NDArray[np.bool_]) -> Floats:
        """Return in which share of the last measured updates each node changed. Shape: ``[nodes]``."""
        known = self._changed.get(part.site)
        if known is None or known.shape[1] != part.rows:
            known = self._changed[part.site] = np.zeros((WINDOW, part.rows), dtype=np.bool_)
            self._count[part.site] = 0
        known[self._count[part.site] % WINDOW] = changed
        self._count[part.site] += 1
        return np.asarray(known.sum(axis=0) / min(self._count[part.site], WINDOW), dtype=np.float64)


def effectiveness(rows: Floats) -> Floats:
    """Return the score of each node's update as :func:`~gradflow_export.metrics.discrete.update_scores` has it.

    Args:
        rows: In the columns ``COLUMNS``. Shape: ``[nodes, 5]``.

    Returns:
        NaN where nothing was meant or what was meant is not known. Shape: ``[nodes]``, in [0, 1].
    """
    product, d_square, e_square = rows[:, 2], rows[:, 3], rows[:, 4]
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = product / np.sqrt(d_square) / np.sqrt(e_square)
        ratio = np.sqrt(d_square) / np.sqrt(e_square)
        score = np.clip(cosine, 0.0, 1.0) * np.minimum(ratio, 1 / ratio)
    return np.where(e_square > 0, np.where(d_square == 0, 0.0, score), math.nan)


def small(sizes: Floats) -> Iterator[tuple[int, float]]:
    """Yield the nodes whose gradient is unusually small for their tensor, and their share of the median, least first.

    Args:
        sizes: Gradient norm of each node; NaN where there is none. Shape: ``[nodes]``.

    Source: modified z-score with the median absolute deviation, Iglewicz and Hoaglin 1993.
    """
    if len(sizes) < 3 or not np.isfinite(sizes).all():
        return
    centre = float(np.median(sizes))
    if centre <= 0:
        return
    with np.errstate(divide="ignore"):
        logs = np.log(sizes) - math.log(centre)
    spread = 1.4826 * float(np.median(np.abs(logs)))
    limit = -max(DEVIATIONS * spread, math.log(FACTOR))
    for row in np.argsort(logs, kind="stable")[:SMALL]:
        if logs[row] < limit:
            yield int(row), float(sizes[row]) / centre


def _least(often: Floats) -> list[int]:
    """Return the nodes that were updated least often, and not always."""
    return [int(row) for row in np.argsort(often, kind="stable")[:FEW] if often[row] < 1.0]
