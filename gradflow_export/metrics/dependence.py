"""Whether something depends on the inputs at all: a kernel test that needs no model."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gradflow_export.stats import median

Floats = npt.NDArray[np.float64]
LEAST_ROWS = 16
MOST_ROWS = 256
_RANK = 1e-9


def dependence(x: Floats, y: Floats) -> float:
    """Return how surely the mean of ``y`` depends on ``x``, in standard deviations of chance.

    The statistic is ``sum_ij k(x_i, x_j) <y_i, y_j>`` with a Gaussian kernel of median width and centred ``y``; it is 0
    in expectation, but for a constant, if and only if the mean of ``y`` given ``x`` is constant. Mean and variance
    under all permutations of ``y`` are exact, so that no permutation is drawn.

    Args:
        x: Inputs, one row per sample. Shape: ``[n, features]``.
        y: What may depend on them. Shape: ``[n, outputs]``.

    Returns:
        A z-score, one-sided: about 0 for independent rows, above 5 for dependent ones; NaN for fewer than
        ``LEAST_ROWS`` rows, and where either is constant.

    Source: Bierens 1982, Journal of Econometrics 20; moments under permutation: Kazi-Aoual et al. 1995, Computational
        Statistics and Data Analysis 20.
    """
    n = len(x)
    if n < LEAST_ROWS:
        return math.nan
    spread = x.std(axis=0)
    x = (x - x.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    y = y - y.mean(axis=0)
    if x.size == 0 or not np.abs(y).max(initial=0.0) > 0:
        return math.nan
    squares = (x * x).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * x @ x.T, 0.0)
    width = median(distances[np.triu_indices(n, 1)])
    if not width > 0:
        return math.nan
    kernel = np.exp(-distances / width)
    kernel = kernel - kernel.mean(axis=0) - kernel.mean(axis=1)[:, None] + kernel.mean()
    return _permutation_z(kernel, y @ y.T)


def _permutation_z(a: Floats, b: Floats) -> float:
    """Return the z-score of ``sum a * b`` among all joint permutations of the rows and columns of ``b``.

    Args:
        a: Symmetric and doubly centred. Shape: ``[n, n]``.
        b: The same.
    """
    n = len(a)
    t_a, t_b = float(np.trace(a)), float(np.trace(b))
    t2_a, t2_b = float((a * a).sum()), float((b * b).sum())
    s2_a, s2_b = float((np.diag(a) ** 2).sum()), float((np.diag(b) ** 2).sum())
    mean = t_a * t_b / (n - 1)
    first = 2.0 * ((n - 1) * t2_a - t_a**2) * ((n - 1) * t2_b - t_b**2) / ((n - 1) ** 2 * (n + 1) * (n - 2))
    second = (n * (n + 1) * s2_a - (n - 1) * (t_a**2 + 2.0 * t2_a)) * (
        n * (n + 1) * s2_b - (n - 1) * (t_b**2 + 2.0 * t2_b)
    )
    variance = first + second / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))
    return (float((a * b).sum()) - mean) / math.sqrt(variance) if variance > 0 else math.nan


def unbent(x: Floats, y: Floats) -> float:
    """Return how surely what the best linear fit of ``y`` leaves still depends on ``x``.

    Args:
        x: Inputs. Shape: ``[n, features]``.
        y: Targets. Shape: ``[n, outputs]``.

    Returns:
        :func:`dependence` of the residuals; NaN where there are not twice as many rows as features.
    """
    if len(x) < 2 * (x.shape[1] + 1):
        return math.nan
    design = np.column_stack([np.ones(len(x)), x])
    residuals = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    if float(np.square(residuals).mean()) <= _RANK * float(np.square(y - y.mean(axis=0)).mean()):
        return math.nan
    return dependence(x, residuals)
