"""Statistics of what a block sends forward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.algebra import eigenvectors, product, singular_values
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.norms import l2_norm, l2_norms

SPREAD_ROWS, SPREAD_FEATURES = 32, 64
RANK_ROWS, RANK_FEATURES = 256, 512
RANK_ENTRIES = 2**17
"""Entries of all blocks together that ranks are taken of; as many batches as are pooled lie in memory."""

RANK_ROUNDING = 1e-12
"""Share of the greatest squared singular value below which one is rounding."""


def output_rms(output: Tensor) -> Tensor:
    """Return ``(mean h^2)^(1/2)`` of a block's output.

    Args:
        output: Shape: any, not empty.

    Returns:
        Shape: scalar. Unit: activation.
    """
    held = local(output)
    return torch.div(l2_norm(held), math.sqrt(max(held.numel(), 1)))


def output_spreads(rows: Sequence[Tensor], sizes: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """Return how far apart different inputs still are after each block.

    Args:
        rows: Per block, samples and positions as rows; not empty. Shape of each: ``[rows, features]``.
        sizes: How many rows and features each output has, where these are some of them; all by default.

    Returns:
        Root mean square over features of the standard deviation over rows, ddof=0, and its standard error as a share of
        it, 0 where nothing was left out. Some of the rows lie nearer to their own mean than to that of all, which is
        made up for. Shape: ``[2, len(rows)]``. Unit: activation; share.

    Source: the forward correlation map of Schoenholz et al. 2017, arXiv:1611.01232, read off the network itself.
    """
    centred: list[Tensor]
    if len({(r.shape, r.dtype, r.device) for r in rows}) == 1:
        joined = torch.stack(list(rows))
        centred = list((joined - joined.mean(dim=1, keepdim=True)).unbind())
    else:
        centred = [r - r.mean(dim=0, keepdim=True) for r in rows]
    norms = l2_norms(centred)
    counts = [math.sqrt(max(c.numel(), 1)) for c in centred]
    spreads = norms / torch.tensor(counts, dtype=norms.dtype, device=norms.device)
    if sizes is None or all(tuple(r.shape) == tuple(size) for r, size in zip(rows, sizes, strict=True)):
        return torch.stack([spreads, torch.zeros_like(spreads)])
    nearer = [
        math.sqrt(len(r) / (len(r) - 1) * (size[0] - 1) / size[0]) if 1 < len(r) < size[0] else 1.0
        for r, size in zip(rows, sizes, strict=True)
    ]
    errors = [_spread_error(c, *size) for c, size in zip(centred, sizes, strict=True)]
    return torch.stack([spreads * spreads.new_tensor(nearer), torch.stack(errors).to(spreads)])


def _spread_error(centred: Tensor, rows: int, features: int) -> Tensor:
    """Return the standard error of a spread as a share of it, by how rows and features scatter. Shape: scalar.

    Source: Cochran 1977, Sampling Techniques, section 2.7.
    """
    squares = (centred.double() / centred.abs().amax().double().clamp_min(torch.finfo(torch.float64).tiny)).square()
    variance = squares.new_zeros(())
    for dim, whole in ((1, rows), (0, features)):
        means = squares.mean(dim=dim)
        if 1 < len(means) < whole:
            variance = variance + means.var() / len(means) * (1.0 - len(means) / whole)
    return torch.nan_to_num(0.5 * variance.sqrt() / squares.mean())


def rank_limits(blocks: int) -> tuple[int, int]:
    """Return how many rows and features of each block are kept for its ranks, twice as many features as rows.

    Args:
        blocks: At least 1; the more there are, the fewer entries of each.
    """
    features = min(max(math.isqrt(2 * RANK_ENTRIES // blocks), SPREAD_FEATURES), RANK_FEATURES)
    return min(features // 2, RANK_ROWS), features


def ranks(rows: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Return the effective and the stable rank of centred activations.

    Args:
        rows: Samples as rows. Shape: ``[rows, features]``.

    Returns:
        ``exp(H(sigma / sum sigma))`` and ``sum sigma^2 / max sigma^2``, both in ``[1, min(rows, features)]``; 0 when
        all rows are equal, NaN when any entry is not finite.

    Source: Roy and Vetterli 2007, EUSIPCO; Rudelson and Vershynin 2007, J. ACM 54.
    """
    matrix = np.array(rows, dtype=np.float64)
    if not np.isfinite(matrix).all():
        return math.nan, math.nan
    # Equal float64 rows may differ from their own mean by rounding, which is no direction.
    if (matrix == matrix[:1]).all():
        return 0.0, 0.0
    matrix -= matrix.mean(axis=0)
    spectrum = singular_values(matrix)
    greatest = float(spectrum.max(initial=0.0))
    return rank_of_spectrum(spectrum), float(np.square(spectrum / greatest).sum()) if greatest > 0 else 0.0


def rank_errors(rows: npt.NDArray[np.floating], left_out: Sequence[float]) -> tuple[float, float]:
    """Return the standard errors of both ranks as shares of them, by what each row and each feature adds to them.

    Args:
        rows: As for :func:`ranks`. Shape: ``[rows, features]``.
        left_out: Share of all rows, and of all features, that is not among them.

    Returns:
        0 where nothing was left out, all rows are equal, or any entry is not finite.

    Source: infinitesimal jackknife, Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, section 6.
    """
    matrix = np.array(rows, dtype=np.float64)
    if not any(left_out) or not np.isfinite(matrix).all() or (matrix == matrix[:1]).all():
        return 0.0, 0.0
    matrix -= matrix.mean(axis=0)
    matrix /= np.abs(matrix).max()
    wide = len(matrix) < matrix.shape[1]
    matrix = np.ascontiguousarray(matrix.T) if wide else matrix
    squares, vectors = eigenvectors(product(np.ascontiguousarray(matrix.T), matrix))
    kept = squares > RANK_ROUNDING * squares[-1]
    squares, vectors = squares[kept], np.ascontiguousarray(vectors[:, kept])
    sizes = np.sqrt(squares)
    shares = sizes / sizes.sum()
    logs = np.log(shares)
    # What one more of a row adds to the logarithm of either rank, by the parts of the squares that it has.
    slopes = np.stack(
        [((shares * logs).sum() - logs) / (2.0 * sizes * sizes.sum()), np.full(len(sizes), 1 / squares.sum())]
    )
    slopes[1, -1] -= 1.0 / squares[-1]
    variance = np.zeros(2)
    for parts, share in zip(
        (np.square(product(matrix, vectors)), np.square(vectors) * squares), left_out[:: 1 - 2 * wide], strict=True
    ):
        added = product(parts, np.ascontiguousarray(slopes.T))
        variance += share * np.square(added).sum(axis=0) * len(added) / max(len(added) - 1, 1)
    effective, stable = np.sqrt(variance).tolist()
    return effective, stable


def rank_of_spectrum(singular_values: npt.NDArray[np.float64]) -> float:
    """Return ``exp(H(p))`` with ``p = sigma / sum sigma``; 0 for an empty or all-zero spectrum."""
    total = float(singular_values.sum()) if singular_values.size else 0.0
    # Below this the "variance" is rounding of equal rows, not a direction.
    if total <= np.finfo(np.float64).tiny:
        return 0.0
    share = singular_values / total
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


def is_floating(output: object) -> bool:
    """Return whether this is a tensor with real or complex floating entries."""
    return isinstance(output, Tensor) and (output.is_floating_point() or torch.is_complex(output))
