"""Many steps drawn as one column: nothing that stands out is lost."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.catalog import MetricSpec
from gradflow_export.chunks import ABSENT_BITS, MISSING_BITS, NAN_BITS

REDUCERS = frozenset({"extreme", "min", "max", "mean"})

_NAN, _PLUS, _MINUS = 1, 2, 4
_WIDE = 16

Floats = npt.NDArray[np.float32]
Steps = npt.NDArray[np.int64]


def neutral_value(spec: MetricSpec) -> float | None:
    """Return the value that an extreme is counted away from on a log scale, ``None`` when size alone counts.

    Args:
        spec: A metric; one drawn on a log scale with two marks, such as the gains 0.5 and 2, is balanced between them.
    """
    if spec.scale == "log" and len(spec.marks) == 2:
        return math.sqrt(spec.marks[0] * spec.marks[1])
    return None


def column_width(first: int, last: int, columns: int) -> int:
    """Return how many steps one column covers so that at most ``columns`` + 1 columns cover ``first`` to ``last``."""
    return max(1, -(-(last - first + 1) // columns))


class Columns:
    """Collects rows into columns; a column covers the steps ``[i * width, (i + 1) * width)``.

    Columns are aligned to multiples of their width, so that a run that grows does not change what is drawn already.

    Args:
        steps: Every step of the result, rising.
        wall: Seconds since the epoch. Shape: as ``steps``.
        width: Steps per column.
        sites: How many sites.
        means: Whether ``reduce("mean")`` will be asked for; summing takes as long as all else.
    """

    def __init__(
        self, steps: Steps, wall: npt.NDArray[np.float64], width: int, sites: int, *, means: bool = True
    ) -> None:
        self.width = width
        self._means = means
        self._ids, starts, self.readings = np.unique(steps // width, return_index=True, return_counts=True)
        ends = np.append(starts, len(steps)).astype(np.int64)[1:] - 1
        self.first, self.last, self.wall = steps[starts], steps[ends], wall[ends]
        shape = (len(self._ids), sites)
        self._low = np.full(shape, np.inf, dtype=np.float32)
        self._high = np.full(shape, -np.inf, dtype=np.float32)
        self._sum = np.zeros(shape, dtype=np.float64)
        self._count = np.zeros(shape, dtype=np.int64)
        self._flags = np.zeros(shape, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, steps: Steps, stored: Floats, sites: npt.NDArray[np.int64]) -> None:
        """Take in the rows of one chunk.

        Args:
            steps: Rising. Shape: ``[rows]``.
            stored: Values as they are stored, *missing* in its NaN payload. Shape: ``[rows, len(sites)]``.
            sites: Where each column of ``stored`` belongs.
        """
        if not len(steps) or not len(sites):
            return
        ids, starts = np.unique(steps // self.width, return_index=True)
        cell = np.ix_(np.searchsorted(self._ids, ids), sites)
        # NaN and the infinities come through to the extremes, so that these tell whether all is finite.
        low, high, total = _fold(np.minimum, stored, starts), _fold(np.maximum, stored, starts), stored
        if np.isfinite(low).all() and np.isfinite(high).all():
            self._count[cell] += np.diff(starts, append=len(steps))[:, None]
        else:
            finite = np.isfinite(stored)
            lows, highs, total = (np.where(finite, stored, np.float32(fill)) for fill in (np.inf, -np.inf, 0.0))
            low, high = _fold(np.minimum, lows, starts), _fold(np.maximum, highs, starts)
            bits = stored.view(np.uint32)
            arrived_nan = np.isnan(stored) & (bits != MISSING_BITS) & (bits != ABSENT_BITS)
            flags = arrived_nan * _NAN + (stored == np.inf) * _PLUS + (stored == -np.inf) * _MINUS
            self._count[cell] += _fold(np.add, finite, starts, np.int64)
            self._flags[cell] |= _fold(np.bitwise_or, flags.astype(np.uint8), starts)
        self._low[cell] = np.minimum(self._low[cell], low)
        self._high[cell] = np.maximum(self._high[cell], high)
        if self._means:
            self._sum[cell] += _fold(np.add, total, starts, np.float64)

    def reduce(self, how: str, neutral: float | None) -> Floats:
        """Return one value per column and site.

        NaN in a column makes it NaN whatever the reduction; infinities count as the numbers they are; *missing* does
        not count, and a column where nothing arrived is *missing*.

        Args:
            how: One of ``REDUCERS``.
            neutral: See :func:`neutral_value`.

        Returns:
            Values in their stored form. Shape: ``[columns, sites]``.
        """
        plus, minus = (self._flags & _PLUS) > 0, (self._flags & _MINUS) > 0
        low = np.where(minus, np.float32(-np.inf), np.where(self._count == 0, np.float32(np.inf), self._low))
        high = np.where(plus, np.float32(np.inf), np.where(self._count == 0, np.float32(-np.inf), self._high))
        if how == "min":
            out = low
        elif how == "max":
            out = high
        elif how == "mean":
            out = self._mean(plus, minus)
        else:
            out = self._extreme(low, high, neutral)
        out = out.astype(np.float32)
        bits = out.view(np.uint32)
        bits[np.isnan(out) | ((self._flags & _NAN) > 0)] = NAN_BITS
        bits[(self._count == 0) & (self._flags == 0)] = MISSING_BITS
        return out

    def _mean(self, plus: npt.NDArray[np.bool_], minus: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        total = self._sum.copy()
        total[plus] = np.inf
        total[minus] = -np.inf
        total[plus & minus] = np.nan
        mean: npt.NDArray[np.float64] = total / np.maximum(self._count, 1)
        return mean

    @staticmethod
    def _extreme(low: Floats, high: Floats, neutral: float | None) -> Floats:
        low_wide, high_wide = low.astype(np.float64), high.astype(np.float64)
        with np.errstate(invalid="ignore"):
            if neutral is None:
                take_high = np.abs(high_wide) >= np.abs(low_wide)
            else:
                take_high = high_wide * low_wide >= neutral * neutral
        # An infinity is further out than any number, 0 on a log scale included.
        take_high = (take_high | np.isposinf(high)) & ~(np.isneginf(low) & ~np.isposinf(high))
        return np.where(take_high, high, low)


def _fold(
    how: np.ufunc, rows: npt.NDArray[Any], starts: npt.NDArray[np.int64], dtype: npt.DTypeLike | None = None
) -> npt.NDArray[Any]:
    """Return ``how.reduceat(rows, starts, axis=0)``, which takes two to four times as long where rows are wide.

    Args:
        how: The operation.
        rows: Shape: ``[rows, sites]``.
        starts: Where each group of rows begins, the first at 0. Rising.
        dtype: Of the result; that of ``rows`` when left out.
    """
    if len(starts) == len(rows):
        return rows if dtype is None else rows.astype(dtype)
    if rows.shape[1] < _WIDE:
        return how.reduceat(rows, starts, axis=0, dtype=dtype)
    out = np.empty((len(starts), rows.shape[1]), dtype or rows.dtype)
    edges = [*starts.tolist(), len(rows)]
    for group, (begin, end) in enumerate(pairwise(edges)):
        how.reduce(rows[begin:end], axis=0, dtype=dtype, out=out[group])
    return out
