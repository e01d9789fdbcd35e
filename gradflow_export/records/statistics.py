"""Streaming and robust statistics over floats (floor 0: numpy only)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class Welford:
    """Running count, mean, variance, least and greatest of the finite numbers seen.

    Source: Welford 1962, Technometrics 4(3). Non-finite numbers are counted in ``nonfinite`` and left out.
    """

    count: int = 0
    mean: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0
    last: float = math.nan
    _sum_of_squares: float = 0.0

    def add(self, value: float) -> None:
        """Take in one number."""
        self.last = value
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._sum_of_squares += delta * (value - self.mean)
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def std(self) -> float:
        """Standard deviation with ddof=1; 0 for fewer than two numbers."""
        return math.sqrt(self._sum_of_squares / (self.count - 1)) if self.count > 1 else 0.0


class Window:
    """The last ``size`` (step, value) pairs of one series."""

    def __init__(self, size: int) -> None:
        self._pairs: deque[tuple[int, float]] = deque(maxlen=size)

    def add(self, step: int, value: float) -> None:
        """Append one pair; the oldest goes when the window is full."""
        self._pairs.append((step, value))

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps, oldest first. Shape: ``[len(self)]``."""
        return np.array([step for step, _ in self._pairs], dtype=np.int64)

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """Values, oldest first. Shape: ``[len(self)]``."""
        return np.array([value for _, value in self._pairs], dtype=np.float64)


FEW = 16
"""Numbers up to which Python sorts them itself."""


def median(values: npt.NDArray[np.floating]) -> float:
    """Return what ``numpy.median`` does, which loads ``numpy.ma`` at its first call: a megabyte.

    Args:
        values: Shape: any.

    Returns:
        NaN when one of them is, or when there is none.
    """
    if values.size > FEW:
        half = values.size // 2
        places = [half - 1 + values.size % 2, half, values.size - 1]
        low, high, last = np.partition(values, places, axis=None)[places].tolist()  # NaN is last
        middle = [] if math.isnan(last) else [low, high][values.size % 2 :]
    else:  # NumPy's code is slow where it was not used for a while, and rules ask for medians of a few at each record
        few = sorted(values.ravel().tolist())
        middle = [] if True in map(math.isnan, few) else few[(len(few) - 1) // 2 : len(few) // 2 + 1]
    return 0.5 * (middle[0] + middle[-1]) if len(middle) == 2 else float(middle[0]) if middle else math.nan


def distinct(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Return what ``numpy.unique`` does; asked for counts too, it does not load ``numpy.ma``.

    Args:
        values: Shape: any.

    Returns:
        Each of them once, in order.
    """
    found: npt.NDArray[np.floating] = np.unique(values, return_counts=True)[0]
    return found


def first_of_each(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """Return the places of rows that no earlier row equals; ten times as fast as ``numpy.unique`` along an axis.

    Args:
        rows: Shape: ``[n, k]``, ``k`` above 0.

    >>> first_of_each(np.array([[1.0, 0.0], [1.0, -0.0], [2.0, 0.0]])).tolist()
    [0, 2]
    """
    plain, size = (rows + 0.0).tobytes(), rows.itemsize * rows.shape[1]  # -0.0 is 0.0
    known: dict[bytes, int] = {}
    for index in range(len(rows)):
        known.setdefault(plain[index * size : (index + 1) * size], index)
    return np.array([*known.values()], dtype=np.int64)


def theil_sen(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    """Median of the slopes between all pairs of points; unmoved by up to 29 % outliers.

    Args:
        x: Positions. Shape: ``[n]``.
        y: Values; NaN and Inf are left out. Shape: ``[n]``.

    Returns:
        The slope in units of y per x; NaN with fewer than two different positions of finite values.

    Source: Theil 1950; Sen 1968, JASA 63.

    >>> float(theil_sen(np.arange(5.0), np.array([0.0, 2.0, 4.0, 6.0, 99.0])))
    2.0
    """
    slopes = pair_slopes(x, y)
    return median(slopes)


def theil_sen_bounds(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], z: float = 1.959964
) -> tuple[float, float, float]:
    """Theil-Sen slope with its confidence bounds.

    Args:
        x: Positions. Shape: ``[n]``.
        y: Values; NaN and Inf are left out. Shape: ``[n]``.
        z: Normal quantile of the wanted confidence; 1.96 gives 95 %.

    Returns:
        ``(slope, low, high)``; NaN with fewer than two different positions of finite values.

    Source: Sen 1968, JASA 63, without the correction for ties.
    """
    slopes = np.sort(pair_slopes(x, y))
    n, pairs = int(np.isfinite(y).sum()), len(slopes)
    if pairs == 0:
        return math.nan, math.nan, math.nan
    sigma = math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)
    low = min(max(round((pairs - z * sigma) / 2.0) - 1, 0), pairs - 1)
    high = min(round((pairs + z * sigma) / 2.0), pairs - 1)
    return median(slopes), float(slopes[low]), float(slopes[high])


def pair_slopes(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the slope between every pair of finite points with different x. Shape: ``[<= n (n - 1) / 2]``."""
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    first, second = np.triu_indices(len(x), k=1)
    run, rise = x[second] - x[first], y[second] - y[first]
    return np.asarray(rise[run != 0] / run[run != 0], dtype=np.float64)


@dataclass(frozen=True)
class Spread:
    """How a series moved over a window of steps.

    Attributes:
        count: Finite values in the window.
        variance: With ddof=1; NaN below two values.
        cv: Coefficient of variation, standard deviation over mean magnitude. It cannot exceed ``sqrt(count)``, so that
            what it says of a few steps is little (Katsnelson and Kotz 1957).
        change_rate: Mean of ``|x_t - x_{t-1}| / |x_{t-1}|`` where the earlier value is not 0; NaN when all are.
        trend: Theil-Sen slope of ``ln x`` per step; NaN unless all values are above 0.
    """

    count: int
    variance: float
    cv: float
    change_rate: float
    trend: float


def spread_of(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Spread:
    """Return how a series moved over a window.

    Args:
        steps: Steps, rising. Shape: ``[n]``.
        values: Shape: ``[n]``; NaN and Inf are left out.
    """
    finite = np.isfinite(values)
    x, y = steps[finite].astype(np.float64), values[finite]
    if len(y) < 2:
        return Spread(len(y), math.nan, math.nan, math.nan, math.nan)
    variance, mean = float(y.var(ddof=1)), abs(float(y.mean()))
    base = np.abs(y[:-1])
    rates = np.abs(np.diff(y))[base > 0] / base[base > 0]
    return Spread(
        len(y),
        variance,
        math.sqrt(variance) / mean if mean > 0 else math.nan,
        float(rates.mean()) if rates.size else math.nan,
        theil_sen(x, np.log(y)) if (y > 0).all() else math.nan,
    )


def root_of_squares(norms: npt.NDArray[np.float64]) -> float:
    """Return ``(sum n^2)^(1/2)`` without overflow or underflow; NaN or Inf when a norm is. Shape of norms: ``[n]``."""
    greatest = float(np.maximum.reduce(norms)) if norms.size else 0.0
    if greatest == 0.0 or not math.isfinite(greatest):
        return greatest
    return greatest * math.sqrt(float(np.add.reduce(np.square(norms / greatest))))


ENDS = 5
"""Readings at either end whose median counts."""
BEYOND = 2.0
"""Ranges of the readings before by which new ones lie above all of these where the level is another one by now."""


class Ends:
    """The first and the last value of a noisy series: the medians of the first and of the last five finite readings.

    The panel, the report and the command line mean this by the first and the last loss, so that one odd batch does not
    matter and all of them say the same.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=2 * ENDS)
        self._steps: deque[int] = deque(maxlen=ENDS)

    def add(self, value: float, step: int = 0) -> None:
        """Take in the next reading, which was made at a step; NaN and the infinities are left out."""
        if math.isfinite(value):
            self._seen += 1
            self._last.append(value)
            self._steps.append(step)
            if len(self._first) < ENDS:
                self._first.append(value)

    @property
    def span(self) -> tuple[int, int]:
        """First and last step of the last readings; 0 and 0 before there is one."""
        return (self._steps[0], self._steps[-1]) if self._steps else (0, 0)

    @property
    def values(self) -> tuple[float, float] | None:
        """The first and the last value; ``None`` before ten readings, when they would share some."""
        if self._seen < 2 * ENDS:
            return None
        return sorted(self._first)[ENDS // 2], sorted([*self._last][-ENDS:])[ENDS // 2]

    @property
    def leap(self) -> float | None:
        """The newest value where it, or the last two, lie far above those before: too few for the median to show it."""
        last = [*self._last]
        for new in range(1, ENDS // 2 + 1) if self.values else ():
            before, top = last[:-new], max(last[:-new])
            if min(last[-new:]) - top > BEYOND * (top - min(before)):
                return last[-1]
        return None
