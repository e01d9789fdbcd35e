"""How inputs are scaled, and how heavy the classes of a loss are: what a few rows of a batch show by themselves."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.arrays.algebra import product, singular_values
from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]
SLIVER = 1e-3
"""Part of the spread of all inputs within which the middle half of a feature lies, where that is squeezed."""
BETWEEN = 0.01
"""Part of all inputs that may lie between those that are squeezed and those that set the scale."""
FEW = 16
"""Fewest rows of which quartiles are taken."""
WEIGHED = 256
"""Fewest labels whose frequency is laid beside the weights of their classes."""
NEIGHBOURS, FEWEST, TINY = 256, 32, 1e-12
"""Points whose neighbours are looked for, fewest whose dimension is known, and what counts as the same place."""
FAR = 8.0
"""Weight of a class that is not frequent beside all others together, at which it alone counts."""


def input_statistics(x: Floats) -> dict[str, float]:
    """Return metrics of what enters a model, by name; none where no row is finite.

    Args:
        x: Inputs, one row per sample. Shape: ``[n, features]``.
    """
    finite = x[np.isfinite(x).all(axis=1)]
    if not len(finite):
        return {}
    sizes = np.sqrt(np.square(finite).mean(axis=0))
    used = sizes[sizes > 0]
    ordered, n = np.sort(finite, axis=0), len(finite)
    middle = ordered[(3 * n) // 4] - ordered[n // 4]
    squeezed = (middle > 0) & (middle < SLIVER * finite.std())
    beyond = np.abs(finite - median(finite.ravel())) / max(float(finite.std()), 1e-300)
    gradual = float(((beyond > 10 * SLIVER) & (beyond < 1.0)).mean()) > BETWEEN  # as pictures have edges
    return {
        "input.rms": float(np.sqrt(np.square(finite).mean())),
        "input.mean": float(finite.mean()),
        "input.std": float(finite.std()),
        "input.max": float(np.abs(finite).max()),
        "input.feature_ratio": float(used.max() / median(used)) if len(used) else 1.0,
        "input.constant_share": float((finite == finite[:1]).all(axis=0).mean()) if len(finite) > 1 else 0.0,
        "input.whole_share": float(np.isclose(finite, np.round(finite), rtol=1e-5, atol=0.0).mean()),
        "input.squeezed_share": float(squeezed.mean()) if n >= FEW and not gradual else 0.0,
    }


def directions(y: Floats, most: float = 0.8) -> int:
    """Return in how many directions targets vary: as many outputs as a model needs at least to come near them.

    Targets on a curved surface need as many numbers as the surface has dimensions, which are counted from two on.

    Args:
        y: Targets, one row per sample. Shape: ``[n, outputs]``.
        most: Part of their variance that these directions hold.

    >>> directions(np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, 6.0, 0.1]]))
    1
    """
    parts = np.square(singular_values(y - y.mean(axis=0))).cumsum()
    straight = int((parts < most * parts[-1]).sum()) + 1 if parts[-1] > 0 else 0
    return straight if straight < 3 else round(min(float(straight), max(2.0, dimension(y))))


def dimension(y: Floats) -> float:
    """Return the dimension of the surface that points lie on, by how much farther the second neighbour is.

    Args:
        y: Points, of which the first 256 are read. Shape: ``[n, numbers]``.

    Returns:
        About ``d`` with an error of ``d / sqrt(n)``, less for many dimensions; infinite for fewer than 32 points.

    Source: Facco et al. 2017, Scientific Reports 7: TwoNN, its maximum likelihood.
    """
    y = y[:NEIGHBOURS]
    squares = np.square(y).sum(axis=1)
    apart = np.maximum(squares[:, None] + squares - 2.0 * product(y, y.T), 0.0)
    np.fill_diagonal(apart, np.inf)
    first, second = np.partition(apart, 1, axis=1)[:, :2].T if len(y) > 2 else np.zeros((2, 0))
    here = first > TINY * squares.max(initial=0.0)
    farther = np.log(second[here] / first[here]).sum()
    return 2.0 * int(here.sum()) / float(farther) if here.sum() >= FEWEST and farther > 0 else math.inf


def heavy_class(often: Floats, weights: Floats) -> tuple[Literal["turned", "far"], float] | None:
    """Return what is odd about the weights of classes beside their frequency.

    Args:
        often: How often each class was seen. Shape: ``[classes]``.
        weights: Of each class in the loss. Shape: ``[classes]``.

    Returns:
        ``"turned"`` where weights are frequencies, and the rarest's weight beside the most frequent's; ``"far"`` where
        one class that is not frequent outweighs all others, and how far; ``None`` where neither is.
    """
    here = (often >= 4) & (weights > 0)
    if often.sum() < WEIGHED or here.sum() < 2:
        return None
    heavy = often * weights
    first = int(heavy.argmax())
    rest = float(heavy.sum() - heavy[first])
    if heavy[first] >= FAR * rest and 2 * often[first] < often.sum():
        return "far", float(heavy[first]) / rest
    much, weigh = np.log(often[here]), np.log(weights[here])
    much, weigh = much - much.mean(), weigh - weigh.mean()
    slope = float(much @ weigh / (much @ much)) if np.ptp(much) > math.log(3.0) else 0.0
    follows = 0.67 < slope < 1.5 and float(np.square(weigh - slope * much).sum()) < 0.1 * float(weigh @ weigh)
    rare, usual = here.nonzero()[0][[much.argmin(), much.argmax()]]
    return ("turned", float(weights[rare] / weights[usual])) if follows else None


def interleaved(x: Floats, channels: int) -> float:
    """Return how surely numbers that lie as many places apart as there are channels are more alike than others.

    In memory in which each channel lies by itself, neighbours are most alike. If every third number is, the channels of
    a pixel lie side by side, and were taken for neighbours of one channel.

    Args:
        x: Successive numbers of images, a row each. Shape: ``[n, numbers]``.
        channels: How many channels the images are said to have, two at least.

    Returns:
        Least z-score, over the images, by which the mean difference at this distance and at twice this is below those
        at the distances beside it; 0 for too few images or numbers.
    """
    most = 2 * channels + 1
    if len(x) < FEW or x.shape[1] <= 2 * most:
        return 0.0
    far = {lag: np.abs(x[:, lag:] - x[:, :-lag]).mean(axis=1) for lag in range(1, most + 1)}
    beside = [(channels, lag) for lag in range(1, channels + 2) if lag != channels]
    apart = [far[other] - far[lag] for lag, other in (*beside, (2 * channels, most - 2), (2 * channels, most))]
    return min(float(a.mean() / max(a.std() / math.sqrt(len(x)), TINY)) for a in apart)
