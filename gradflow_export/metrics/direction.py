"""Whether the gradient keeps its direction from step to step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.metrics.arrays.sketch import mixed

TENSORS = 4
EXACT = 2**14
"""Entries of all gradients of an optimizer up to which all of them are compared."""
BUCKETS = 2**14
"""Signed sums by which longer ones are compared."""
COSINE_ERROR = BUCKETS**-0.5
"""Greatest standard error of the cosine of such sums, 0.0078; at a cosine of c it is ``1 - c^2`` times that."""
SEGMENTS, LENGTH = 16, 1024
"""Where sums cannot be made: pieces of the gradients, drawn over all entries, and entries of one."""

Floats = npt.NDArray[np.float64]


def evenly_chosen(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return at most ``TENSORS`` evenly spaced ones of the gradients; not empty unless they are."""
    return gradients[:: -(-len(gradients) // TENSORS) or 1]


@dataclass(frozen=True)
class Products:
    """What is known of two gradients of one optimizer.

    Attributes:
        terms: ``<a, b>``, ``||a||^2`` and ``||b||^2`` of pieces that were drawn evenly, which add up to those of the
            whole; one row where the whole was read or summed up. Shape: ``[pieces, 3]``.
        summed: Whether they are those of signed sums.
    """

    terms: Tensor | Floats
    summed: bool = False

    @property
    def exact(self) -> bool:
        """Whether every entry was multiplied."""
        return len(self.terms) == 1 and not self.summed


def gradient_pieces(gradients: Sequence[Tensor]) -> tuple[Tensor, Floats]:
    """Return all entries of the gradients, or pieces that are drawn over all of them, the same every time.

    An entry is drawn with the same probability whichever tensor it is in: places are drawn one in each of ``SEGMENTS``
    stretches of all entries, and the ``LENGTH`` entries around each are taken.

    Args:
        gradients: Dense, on one device, not empty. Shape of each: any.

    Returns:
        Float32 or float64, padded with 0, and what products of each piece count. Shape: ``[pieces, entries]`` and
        ``[pieces]``.
    """
    sizes = tuple([g.numel() for g in gradients])
    if sum(sizes) <= EXACT:
        flat = torch.cat([_flat(dense_entries(g)) for g in gradients])
        return (flat if flat.dtype is torch.float64 else flat.float())[None], np.ones(1)
    entries = {index: _flat(dense_entries(gradients[index])) for index in {place for place, _, _ in _drawn(sizes)}}
    pieces = [entries[place][start:end] for place, start, end in _drawn(sizes)]
    total = sum(len(entries[place]) if place in entries else size for place, size in enumerate(sizes))
    padded = [p if len(p) == LENGTH else torch.nn.functional.pad(p, (0, LENGTH - len(p))) for p in pieces]
    wide = torch.float64 if any(p.dtype is torch.float64 for p in padded) else torch.float32
    joined = torch.stack([p.to(wide) for p in padded])
    return joined, np.array([total / (len(pieces) * max(len(p), 1)) for p in pieces])


def _flat(entries: Tensor) -> Tensor:
    if not entries.is_contiguous() and entries.dim() == 4 and entries.is_contiguous(memory_format=torch.channels_last):
        entries = entries.permute(0, 2, 3, 1)
    return entries.reshape(-1)


@functools.lru_cache(maxsize=16)
def _drawn(sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return tensor, first and last entry of each piece."""
    ends = np.cumsum(sizes)
    shares = (mixed(np.arange(1, SEGMENTS + 1, dtype=np.uint64)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    places = np.minimum((np.arange(SEGMENTS) + shares) * (int(ends[-1]) / SEGMENTS), int(ends[-1]) - 1).astype(np.int64)
    tensors = np.searchsorted(ends, places, side="right")
    out = []
    for tensor, place in zip(tensors.tolist(), places.tolist(), strict=True):
        start = (place - (int(ends[tensor]) - sizes[tensor])) // LENGTH * LENGTH
        out.append((tensor, start, min(start + LENGTH, sizes[tensor])))
    return tuple(out)


def products(a: Tensor, b: Tensor, weights: Floats | None = None) -> Tensor:
    """Return ``<a, b>``, ``||a||^2`` and ``||b||^2`` of each row, in float64 so that no square overflows.

    Args:
        a: Shape: ``[pieces, n]``.
        b: Shape: ``[pieces, n]``.
        weights: What each row counts; 1 by default. Shape: ``[pieces]``.

    Returns:
        Shape: ``[pieces, 3]``. Those of the parts of a vector add up to those of the whole.
    """
    if a.is_cpu and b.is_cpu:  # read at every step: NumPy takes a fifth of the time of as many small tensor operations
        x, y = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
        rows = [np.einsum("ij,ij->i", one, other) for one, other in ((x, y), (x, x), (y, y))]
        scale = 1.0 if weights is None else weights[:, None]
        return torch.from_numpy(np.stack(rows, axis=1) * scale)
    a, b = a.double(), b.double()
    sums = torch.stack([(a * b).sum(dim=1), (a * a).sum(dim=1), (b * b).sum(dim=1)], dim=1)
    return sums if weights is None else sums * torch.from_numpy(weights).to(sums)[:, None]


def cosine_of(parts: Sequence[Products]) -> tuple[Tensor, Tensor] | tuple[float, float]:
    """Return the cosine of the gradients of all optimizers together, and its standard error.

    Args:
        parts: Not empty; the vectors are made of those of each.

    Returns:
        Numbers where all is on the host. The cosine is NaN when either vector is zero; the error is 0 where every entry
        was multiplied.

    Source: Cochran 1977, Sampling Techniques, section 6.3 (error of a ratio).
    """
    summed = any(part.summed for part in parts)
    here = [part.terms for part in parts if isinstance(part.terms, np.ndarray)]
    if len(here) == len(parts) and all(len(terms) == 1 for terms in here):  # nearly every step of nearly every run
        both, one, other = (sum(column) for column in zip(*(terms[0].tolist() for terms in here), strict=True))
        lengths = math.sqrt(one) * math.sqrt(other)
        value = math.nan if lengths == 0 else both / lengths
        return value, (1.0 - value * value) * COSINE_ERROR if summed else 0.0
    first = next(part.terms for part in parts if isinstance(part.terms, Tensor))
    every = [torch.as_tensor(part.terms).to(first) for part in parts]
    both, one, other = torch.cat(every).sum(dim=0)
    lengths = one.sqrt() * other.sqrt()
    cosine = both / lengths
    variance = (1.0 - cosine.square()).square() * (COSINE_ERROR**2 if summed else 0.0)
    for terms in every:
        if len(terms) > 1:
            left = terms[:, 0] / lengths - 0.5 * cosine * (terms[:, 1] / one + terms[:, 2] / other)
            variance = variance + left.var() * len(terms)
    return cosine, variance.sqrt()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors, NaN when either is zero. Shape: ``[n]``; scalar.

    >>> float(cosine(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])))
    1.0
    """
    found, _ = cosine_of([Products(products(a[None], b[None]))])
    return torch.as_tensor(found)


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
