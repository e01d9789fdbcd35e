"""Many steps drawn as one column: nothing that stands out is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.records.catalog import MetricSpec
from gradflow_export.storage.event_chunks import ABSENT_BITS, MISSING_BITS, NAN_BITS

REDUCERS = frozenset({"extreme", "min", "max", "mean"})

_NAN, _PLUS, _MINUS, _NUMBER = 1, 2, 4, 8
_PART_CELLS = 2**18
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
        self._ids, starts, self.readings = np.unique(steps // width, return_index=True, return_counts=True)
        ends = np.append(starts, len(steps)).astype(np.int64)[1:] - 1
        self.first, self.last, self.wall = steps[starts], steps[ends], wall[ends]
        shape = (len(self._ids), sites)
        self._low = np.full(shape, np.inf, dtype=np.float32)
        self._high = np.full(shape, -np.inf, dtype=np.float32)
        self._flags = np.zeros(shape, dtype=np.uint8)
        self._sum = np.zeros(shape if means else (0, 0), dtype=np.float64)
        self._count = np.zeros(shape if means else (0, 0), dtype=np.uint32)
        self._means = means

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, steps: Steps, stored: Floats, sites: npt.NDArray[np.int64]) -> None:
        """Take in the rows of one chunk.

        Args:
            steps: Rising. Shape: ``[rows]``.
            stored: Values as they are stored, *missing* in its NaN payload. Shape: ``[rows, len(sites)]``.
            sites: Where each column of ``stored`` belongs; several that belong together follow each other, in rising
                order.
        """
        if not len(steps) or not len(sites):
            return
        ids, starts = np.unique(steps // self.width, return_index=True)
        joined = np.diff(sites, prepend=-1) != 0
        firsts = None if joined.all() else np.flatnonzero(joined)
        cell = np.ix_(np.searchsorted(self._ids, ids), sites if firsts is None else sites[firsts])

        def fold(how: np.ufunc, values: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
            folded = _fold(how, values, starts, dtype)
            return folded if firsts is None else how.reduceat(folded, firsts, axis=1, dtype=dtype)

        # NaN and the infinities come through to the extremes, so that these tell whether all is finite.
        low, high, total = fold(np.minimum, stored), fold(np.maximum, stored), stored
        if np.isfinite(low).all() and np.isfinite(high).all():
            self._flags[cell] |= np.uint8(_NUMBER)
            if self._means:
                here = np.diff(starts, append=len(steps))[:, None]
                here = here if firsts is None else here * np.diff(firsts, append=len(sites))
                self._count[cell] += here.astype(np.uint32)
        else:
            finite = np.isfinite(stored)
            lows, highs, total = (np.where(finite, stored, np.float32(fill)) for fill in (np.inf, -np.inf, 0.0))
            low, high = fold(np.minimum, lows), fold(np.maximum, highs)
            bits = stored.view(np.uint32)
            arrived_nan = np.isnan(stored) & (bits != MISSING_BITS) & (bits != ABSENT_BITS)
            flags = arrived_nan * _NAN + (stored == np.inf) * _PLUS + (stored == -np.inf) * _MINUS + finite * _NUMBER
            self._flags[cell] |= fold(np.bitwise_or, flags.astype(np.uint8))
            if self._means:
                self._count[cell] += fold(np.add, finite, np.uint32)
        self._low[cell] = np.minimum(self._low[cell], low)
        self._high[cell] = np.maximum(self._high[cell], high)
        if self._means:
            self._sum[cell] += fold(np.add, total, np.float64)

    def reduce(self, how: str, neutral: float | None, part: slice = slice(None)) -> Floats:
        """Return one value per column and site.

        NaN in a column makes it NaN whatever the reduction; infinities count as the numbers they are; *missing* does
        not count, and a column where nothing arrived is *missing*.

        Args:
            how: One of ``REDUCERS``.
            neutral: See :func:`neutral_value`.
            part: Which columns.

        Returns:
            Values in their stored form. Shape: ``[columns, sites]``.
        """
        flags = self._flags[part]
        plus, minus, numbers = (flags & _PLUS) > 0, (flags & _MINUS) > 0, (flags & _NUMBER) > 0
        low = np.where(minus, np.float32(-np.inf), np.where(numbers, self._low[part], np.float32(np.inf)))
        high = np.where(plus, np.float32(np.inf), np.where(numbers, self._high[part], np.float32(-np.inf)))
        if how == "min":
            out = low
        elif how == "max":
            out = high
        elif how == "mean":
            out = self._mean(part, plus, minus)
        else:
            out = self._extreme(low, high, neutral)
        out = out.astype(np.float32)
        bits = out.view(np.uint32)
        bits[np.isnan(out) | ((flags & _NAN) > 0)] = NAN_BITS
        bits[flags == 0] = MISSING_BITS
        return out

    def parts(self, how: str, neutral: float | None) -> Iterator[tuple[slice, Floats]]:
        """Yield what :meth:`reduce` returns, some columns at a time: what it takes beside is then small."""
        size = max(1, _PART_CELLS // max(1, self._low.shape[1]))
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            yield part, self.reduce(how, neutral, part)

    def _mean(self, part: slice, plus: npt.NDArray[np.bool_], minus: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        total = self._sum[part].copy()
        total[plus] = np.inf
        total[minus] = -np.inf
        total[plus & minus] = np.nan
        mean: npt.NDArray[np.float64] = total / np.maximum(self._count[part], 1)
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
