"""Whether something depends on the inputs at all: a kernel test that needs no model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.arrays.algebra import inverse, least_squares, product
from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]
LEAST_ROWS = 16
MOST_ROWS = 256
_RANK = 1e-9
_ALIKE = 1e-24
_NARROW = 8.0
_NEXT = 4.0
_CUT = 2.0
_RIDGES = (0.1, 1.0)


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
    x, y = _standardised(x), y - y.mean(axis=0)
    distances = _distances(x)
    width = _width(distances)
    if len(x) < LEAST_ROWS or not np.abs(y).max(initial=0.0) > 0 or not width > 0:
        return math.nan
    return _permutation_z(_centred(_gaussian(distances, width)), product(y, y.T))


def any_dependence(x: Floats, y: Floats) -> float:
    """Return how surely ``y`` depends on ``x`` in any of five ways, each of which sees what the others do not.

    One kernel cannot show that there is no dependence: a wide one does not resolve what changes quickly, and among many
    features none sees what only several of them tell together. So the test of :func:`dependence` is made with the
    median width, with an eighth of it, with that of next neighbours, and with kernels of products of two and of three
    different features (elementary symmetric polynomials of features that are cut at two standard deviations), in which
    a parity of three bits among twenty stands out by 5 with 256 rows.

    Args:
        x: Inputs, one row per sample. Shape: ``[n, features]``.
        y: What may depend on them. Shape: ``[n, outputs]``.

    Returns:
        The greatest z-score: below 3 for independent rows in 19 of 20 cases; NaN as :func:`dependence`.

    Source: Bierens 1982, Journal of Econometrics 20; kernels of interactions: Shawe-Taylor and Cristianini 2004, Kernel
        Methods for Pattern Analysis, section 9.2.
    """
    x, y = _standardised(x), y - y.mean(axis=0)
    distances = _distances(x)
    width = _width(distances)
    if len(x) < LEAST_ROWS or not np.abs(y).max(initial=0.0) > 0 or not width > 0:
        return math.nan
    # Where there are few features, next neighbours are much nearer than an eighth of the width.
    np.fill_diagonal(distances, np.inf)
    near = min(_NEXT * median(distances.min(axis=1)), width / _NARROW)
    np.fill_diagonal(distances, 0.0)
    targets = product(y, y.T)
    # One after the other, as each is as large as all that was read.
    gaussian = (_gaussian(distances, size) for size in (width, width / _NARROW, near) if size > 0)
    zs = [_permutation_z(_centred(kernel), targets) for kernel in itertools.chain(gaussian, _of_products(x))]
    return max((z for z in zs if not math.isnan(z)), default=math.nan)


def left_out(x: Floats, y: Floats) -> Floats | None:
    """Return what a fit in closed form on all other rows says of each row: what needs no training to be known.

    Kernel ridge regression with the sum of a linear and a Gaussian kernel, and by column the better of two ridges.

    Args:
        x: Inputs, one row per sample. Shape: ``[n, features]``.
        y: What may depend on them. Shape: ``[n, outputs]``.

    Returns:
        Predictions. Shape: ``[n, outputs]``; ``None`` where :func:`dependence` is NaN.

    Source: Golub, Heath and Wahba 1979, Technometrics 21: residuals of rows left out.

    >>> x = np.linspace(-1.0, 1.0, 64)[:, None]
    >>> bool(np.abs(left_out(x, x**2) - x**2).max() < 0.5)
    True
    """
    x, mean = _standardised(x), y.mean(axis=0)
    y = y - mean
    distances, size = _distances(x), float(np.square(y).sum())
    width = _width(distances)
    if len(x) < LEAST_ROWS or not size > 0 or not width > 0:
        return None
    kernel = _gaussian(distances, width) + product(x, x.T) / x.shape[1]
    every = (inverse(kernel + ridge * np.eye(len(x))) for ridge in _RIDGES)
    small, large = (product(solved, y) / np.diag(solved)[:, None] for solved in every)
    better = np.square(small).sum(axis=0) < np.square(large).sum(axis=0)
    return np.asarray(y - np.where(better, small, large) + mean)


def linear_dependence(x: Floats, y: Floats) -> float:
    """Return how surely any column of ``y`` follows linearly from ``x``, by the F-test of the multiple correlation.

    It takes as many rows as there are, so that it sees weak signals that :func:`any_dependence`, whose cost grows with
    the square of the rows, does not: a share of 2 % of the variance by 3 to 4 with 1 024 rows and 5 features.

    Args:
        x: Inputs, one row per sample. Shape: ``[n, features]``.
        y: What may depend on them. Shape: ``[n, outputs]``.

    Returns:
        A z-score, one-sided, of the greatest correlation; NaN where there are not twice as many rows as features.

    Source: Paulson 1942, Annals of Mathematical Statistics 13: F as a normal deviate.
    """
    x, y = _standardised(x), y - y.mean(axis=0)
    size = np.square(y).sum(axis=0)
    y, size = y[:, size > 0], size[size > 0]
    features, rest = x.shape[1], len(x) - 1 - x.shape[1]
    if not features or rest < max(features, LEAST_ROWS) or not size.size:
        return math.nan
    fitted = product(x, least_squares(x, y))
    share = min(float((np.square(fitted).sum(axis=0) / size).max()), 1.0 - _RANK)
    f = (share / features) / ((1.0 - share) / rest)
    a, b = 2.0 / (9.0 * features), 2.0 / (9.0 * rest)
    third = float(f) ** (1 / 3)
    return float(((1.0 - b) * third - (1.0 - a)) / math.sqrt(b * third**2 + a))


def _of_products(x: Floats) -> Iterator[Floats]:
    """Yield the kernels of products of two and of three different features, where there are as many."""
    cut = np.clip(x, -_CUT, _CUT)
    cut -= cut.mean(axis=0)
    square = cut * cut
    once, twice = product(cut, cut.T), product(square, square.T)
    if x.shape[1] > 1:
        yield (once**2 - twice) / 2.0
    if x.shape[1] > 2:
        # (once^3 - 3 once twice + 2 thrice) / 6 (Newton's identities), in one matrix.
        twice *= -3.0
        twice += once**2
        twice *= once
        cube = np.multiply(square, cut, out=square)
        twice += 2.0 * product(cube, cube.T)
        twice /= 6.0
        yield twice


def dependence_on_tokens(tokens: Floats, y: Floats, buckets: int) -> float:
    """Return how surely ``y`` depends on words: on which there are, and on what stands where.

    Args:
        tokens: Numbers of words, one row per sample. Shape: ``[n, length]``.
        y: What may depend on them. Shape: ``[n, outputs]``.
        buckets: Words are counted by their number modulo this.

    Returns:
        The greater of :func:`any_dependence` for the counts, and of two tests whose kernels are the number of places
        at which two rows agree, and its square.
    """
    counts = (tokens[:, :, None] % buckets == np.arange(buckets)).sum(axis=1).astype(np.float64)
    y = y - y.mean(axis=0)
    zs = [any_dependence(counts, y)]
    if len(tokens) >= LEAST_ROWS and np.abs(y).max(initial=0.0) > 0:
        agree = np.zeros((len(tokens), len(tokens)))
        for column in tokens[:, : 2 * buckets].T:
            agree += column[:, None] == column[None, :]
        targets = product(y, y.T)
        zs += [_permutation_z(_centred(kernel), targets) for kernel in (agree**2, agree)]
    return max((z for z in zs if not math.isnan(z)), default=math.nan)


def _standardised(x: Floats) -> Floats:
    x = x - x.mean(axis=0)
    spread = np.sqrt(np.einsum("ij,ij->j", x, x) / len(x))
    x = x[:, spread > 0]
    x /= spread[spread > 0]
    return x


def _distances(x: Floats) -> Floats:
    """Return the squared distances of all rows. Shape: ``[n, n]``."""
    squares = (x * x).sum(axis=1)
    distances = product(x, x.T)
    distances *= -2.0
    distances += squares[:, None]
    distances += squares[None, :]
    return np.maximum(distances, 0.0, out=distances)


def _width(distances: Floats) -> float:
    pairs = distances[np.tri(len(distances), k=-1, dtype=np.bool_)]
    return median(pairs) if pairs.size else 0.0


def _gaussian(distances: Floats, size: float) -> Floats:
    kernel = distances / -size
    return np.exp(kernel, out=kernel)


def _centred(kernel: Floats) -> Floats:
    """Return the kernel itself, which is changed."""
    whole, rows = kernel.mean(), kernel.mean(axis=1)[:, None]
    kernel -= kernel.mean(axis=0)
    kernel -= rows
    kernel += whole
    return kernel


def _dot(a: Floats, b: Floats) -> float:
    return float(np.einsum("ij,ij->", a, b))  # makes no product, and goes by no other thread


def _permutation_z(a: Floats, b: Floats) -> float:
    """Return the z-score of ``sum a * b`` among all joint permutations of the rows and columns of ``b``.

    Args:
        a: Symmetric and doubly centred. Shape: ``[n, n]``.
        b: The same.
    """
    n = len(a)
    t_a, t_b = float(np.trace(a)), float(np.trace(b))
    t2_a, t2_b = _dot(a, a), _dot(b, b)
    s2_a, s2_b = float((np.diag(a) ** 2).sum()), float((np.diag(b) ** 2).sum())
    mean = t_a * t_b / (n - 1)
    first = 2.0 * ((n - 1) * t2_a - t_a**2) * ((n - 1) * t2_b - t_b**2) / ((n - 1) ** 2 * (n + 1) * (n - 2))
    second = (n * (n + 1) * s2_a - (n - 1) * (t_a**2 + 2.0 * t2_a)) * (
        n * (n + 1) * s2_b - (n - 1) * (t_b**2 + 2.0 * t2_b)
    )
    variance = first + second / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))
    return (_dot(a, b) - mean) / math.sqrt(variance) if variance > 0 else math.nan


def unbent(x: Floats, y: Floats) -> float:
    """Return how surely what the best linear fit of ``y`` leaves still depends on ``x``.

    Args:
        x: Inputs. Shape: ``[n, features]``.
        y: Targets. Shape: ``[n, outputs]``.

    Returns:
        :func:`dependence` of the residuals; NaN where there are not twice as many rows as features, and where targets
        are all alike or a linear function of the inputs.
    """
    if len(x) < 2 * (x.shape[1] + 1):
        return math.nan
    design = np.column_stack([np.ones(len(x)), x])
    residuals = y - product(design, least_squares(design, y))
    spread = float(np.square(y - y.mean(axis=0)).mean())
    if spread <= _ALIKE * float(np.square(y).mean()) or float(np.square(residuals).mean()) <= _RANK * spread:
        return math.nan
    return dependence(x, residuals)
