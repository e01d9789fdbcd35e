"""Statistics of what a block sends forward."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.norms import l2_norms

SAMPLE_ROWS = 256
SAMPLE_FEATURES = 512


def output_rms(output: Tensor) -> Tensor:
    """Return ``(mean h^2)^(1/2)`` of a block's output.

    Args:
        output: Shape: any, not empty.

    Returns:
        Shape: scalar. Unit: activation.
    """
    return torch.div(l2_norms([output])[0], math.sqrt(max(output.numel(), 1)))


def output_spread(rows: Tensor) -> Tensor:
    """Return how far apart different inputs still are after this block.

    Args:
        rows: Samples and positions as rows. Shape: ``[rows, features]``.

    Returns:
        Root mean square over features of the standard deviation over rows, ddof=0. Shape: scalar. Unit: activation.

    Source: the forward correlation map of Schoenholz et al. 2017, arXiv:1611.01232, read off the network itself.
    """
    centred = rows - rows.mean(dim=0, keepdim=True)
    return torch.div(l2_norms([centred])[0], math.sqrt(max(centred.numel(), 1)))


def effective_rank(rows: npt.NDArray[np.floating]) -> float:
    """Return the effective rank of centred activations.

    Args:
        rows: Samples as rows. Shape: ``[rows, features]``.

    Returns:
        ``exp(H(sigma / sum sigma))`` in ``[1, min(rows, features)]``; 0 when all rows are equal, NaN when any entry is
        not finite.

    Source: Roy and Vetterli 2007, EUSIPCO.
    """
    matrix = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(matrix).all():
        return float("nan")
    # Equal float64 rows may differ from their own mean by rounding, which is no direction.
    if (matrix == matrix[:1]).all():
        return 0.0
    return rank_of_spectrum(np.linalg.svd(matrix - matrix.mean(axis=0), compute_uv=False))


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
