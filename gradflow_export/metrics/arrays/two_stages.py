"""Standard errors of what some sequences of a batch say, and some states of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]


def error_of_exponent(logs: Floats, scatter: Floats, batch: int, run: float) -> float:
    """Return the standard error of the mean exponent of some sequences, run for some of their steps.

    Args:
        logs: Exponent of each sequence. Shape: ``[n]``.
        scatter: Variance of its steps over their number. Shape: ``[n]``.
        batch: Of how many sequences these are some.
        run: Share of the steps that were run; at least 1 for all.

    Source: Cochran 1977, Sampling Techniques, section 10.3: sampling in two stages.
    """
    if not np.isfinite(logs).all():
        return 0.0
    count, within = len(logs), float(scatter.mean())
    taken = count / max(batch, count)
    # Few sequences may be alike by chance: no mean of steps that scatter is closer to others than these tell.
    between = max(float(logs.var(ddof=1)) if count > 1 else 0.0, within)
    return math.sqrt(((1.0 - taken) * between + taken * max(1.0 - run, 0.0) * within) / count)


def error_of_states(values: Floats, owners: Sequence[tuple[int, int]], whole: int, batch: int) -> float:
    """Return the standard error of the median of states of some sequences, as a share of it.

    Args:
        values: One for each state; a single NaN where one is not finite. Shape: ``[n]``.
        owners: The sequence of each.
        whole: How many states these sequences have.
        batch: Of how many sequences these are some.

    Source: Cochran 1977, Sampling Techniques, section 10.3: sampling in two stages.
    """
    error, centre = error_of_median(values, whole), median(values) if len(values) else math.nan
    every = sorted(set(owners))
    if len(every) >= batch or len(values) < max(len(owners), 2) or not centre > 0:
        return error
    own = [median(np.array([v for v, owner in zip(values, owners, strict=True) if owner == one])) for one in every]
    # Of a single sequence nothing shows how far others are from it, but how far its states are from each other.
    apart = np.array(own) if len(own) > 1 else values
    between = float(apart.std(ddof=1)) * math.sqrt((1.0 - len(every) / batch) / len(every))
    return math.hypot(error, between / centre)


def error_of_median(values: Floats, whole: int) -> float:
    """Return the standard error of the median of a sample, as a share of it; 0 where it is no sample.

    Args:
        values: The sample. Shape: ``[n]``.
        whole: How many there are of which it was taken.

    Source: Kendall and Stuart 1977, The Advanced Theory of Statistics, section 10.10: ``(pi / 2)^(1/2) s / n^(1/2)``
    for a normal population; Cochran 1977, Sampling Techniques, section 2.6, for a finite one.
    """
    centre = median(values) if len(values) else math.nan
    if len(values) >= whole or len(values) < 2 or not centre > 0:
        return 0.0
    spread = float(values.std(ddof=1)) * math.sqrt((1.0 - len(values) / whole) / len(values))
    return math.sqrt(0.5 * math.pi) * spread / centre
