"""Whether the gradient keeps its direction from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.norms import dense_entries
from gradflow_export.metrics.samples import even_sample

TENSORS = 4
ENTRIES = 1024


def evenly_chosen(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return at most ``TENSORS`` evenly spaced ones of the gradients; not empty unless they are."""
    return gradients[:: -(-len(gradients) // TENSORS) or 1]


def gradient_sample(chosen: Sequence[Tensor]) -> Tensor:
    """Return at most ``ENTRIES`` evenly spaced entries of each tensor, joined.

    Args:
        chosen: Dense gradients on one device, not empty.

    Returns:
        Shape: ``[entries]``, float32 or float64.
    """
    flat = torch.cat([even_sample(dense_entries(g), ENTRIES) for g in chosen])
    return flat if flat.dtype is torch.float64 else flat.float()


def products(a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a, b>``, ``||a||^2`` and ``||b||^2``, in float64 so that no square overflows.

    Args:
        a: Shape: ``[n]``.
        b: Shape: ``[n]``.

    Returns:
        Shape: ``[3]``. Those of the parts of a vector add up to those of the whole.
    """
    if a.is_cpu and b.is_cpu:  # read at every step: NumPy takes a fifth of the time of as many small tensor operations
        x, y = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
        return torch.tensor([x @ y, x @ x, y @ y], dtype=torch.float64)
    a, b = a.double(), b.double()
    return torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])


def cosine_of(sums: Tensor) -> Tensor:
    """Return ``<a, b> / (||a|| ||b||)`` from :func:`products`, NaN when either is zero. Shape: ``[3]``; scalar."""
    return torch.div(sums[0], sums[1].sqrt() * sums[2].sqrt())


def cosine_of_host(parts: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return :func:`cosine_of` of the sum of products on the host. Shape of each: ``[3]``."""
    both, one, other = (sum(values) for values in zip(*(part.tolist() for part in parts), strict=True))
    lengths = math.sqrt(one) * math.sqrt(other)
    return math.nan if lengths == 0 else both / lengths


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors, NaN when either is zero. Shape: ``[n]``; scalar."""
    return cosine_of(products(a, b))


def coherence(gradients: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return how well gradients agree in direction.

    Args:
        gradients: Shape: ``[n, entries]``; rows that are 0 or not finite are left out.

    Returns:
        Mean resultant length ``R = ||mean of g / ||g||||`` and mean pairwise cosine ``(n R^2 - 1) / (n - 1)``; NaN with
        fewer than two gradients. 1 is aligned, 0 random, below 0 a zigzag.

    Source: Mardia and Jupp 2000, Directional Statistics, section 9.2.
    """
    usable = gradients[np.isfinite(gradients).all(axis=1)]
    greatest = np.abs(usable).max(axis=1, initial=0.0)
    usable = usable[greatest > 0] / greatest[greatest > 0, None]
    n = len(usable)
    if n < 2:
        return math.nan, math.nan
    units = usable / np.linalg.norm(usable, axis=1, keepdims=True)
    length = min(float(np.linalg.norm(units.mean(axis=0))), 1.0)
    return length, (n * length**2 - 1.0) / (n - 1.0)
