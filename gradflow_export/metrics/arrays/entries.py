"""What the entries of gradients are like, beyond their norms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.local import all_local
from gradflow_export.metrics.arrays.norms import l2_norms, stored
from gradflow_export.metrics.arrays.one_launch import device_statistics
from gradflow_export.metrics.arrays.one_pass import native_statistics

_HALF = (torch.float16, torch.bfloat16)

ENTRY_STATISTICS = ("l1", "linf", "mean", "zero_share", "nonfinite")


def entry_statistics(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the L2 norm and five statistics of the entries of each tensor.

    Args:
        tensors: Not empty. Shape of each: any. For sparse tensors only touched rows count; for complex ones |x|.

    Returns:
        Norms ``[len(tensors)]``, and sum of magnitudes, greatest magnitude, mean magnitude, share of exact zeros and
        number of NaN or Inf entries, in the order of ``ENTRY_STATISTICS``, float64 ``[5, len(tensors)]``. Contiguous
        tensors on the CPU are read once for all of it where the C library was built, and plain ones on a GPU where
        there is triton.
    """
    tensors = all_local(tensors)
    known = native_statistics(tensors)
    if known is None:
        launched = device_statistics(tensors)
        if launched is not None:
            return _from_rows(launched)
        return l2_norms(tensors), torch.stack([_statistics_of(tensor) for tensor in tensors], dim=1)
    counts = np.array([max(tensor.numel(), 1) for tensor in tensors], dtype=np.float64)
    return torch.from_numpy(known[0]), torch.from_numpy(statistics_of_rows(known, counts))


def statistics_of_rows(rows: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the statistics of ``ENTRY_STATISTICS`` from those of the C library.

    Args:
        rows: As named in ``native.ROWS``. Shape: ``[6, tensors]``.
        counts: Entries of each tensor, at least 1. Shape: ``[tensors]``.

    Returns:
        Shape: ``[5, tensors]``.
    """
    _, magnitudes, high, low, zeros, nonfinite = rows
    # The library passes over NaN in the greatest and least entry; a sum of magnitudes cannot.
    greatest = np.where(np.isnan(magnitudes), np.nan, np.maximum(np.maximum(high, -low), 0.0))
    return np.stack([magnitudes, greatest, magnitudes / counts, zeros / counts, nonfinite])


def _from_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    norms, magnitudes, high, low, zeros, nonfinite, counts = rows
    counts = counts.clamp(min=1)
    greatest = torch.maximum(high, -low).clamp(min=0.0)
    # The kernel passes over NaN in the greatest and least entry; a sum of magnitudes cannot.
    greatest = torch.where(magnitudes.isnan(), magnitudes, greatest)
    return norms, torch.stack([magnitudes, greatest, magnitudes / counts, zeros / counts, nonfinite])


def _statistics_of(tensor: Tensor) -> Tensor:
    entries = stored(tensor)
    count = max(entries.numel(), 1)
    magnitudes = entries.abs()
    total = magnitudes.sum(dtype=torch.float32 if entries.dtype in _HALF else None).double()
    nonfinite = torch.zeros((), dtype=torch.float64, device=entries.device)
    if entries.device.type != "cpu" or not bool(torch.isfinite(total)):
        nonfinite = (~torch.isfinite(entries)).sum().double()
        if entries.dtype is not torch.float64:
            total = magnitudes.sum(dtype=torch.float64)
    greatest = magnitudes.amax().double() if entries.numel() else torch.zeros_like(nonfinite)
    zeros = (entries.numel() - torch.count_nonzero(entries)) / count
    return torch.stack([total, greatest, total / count, zeros.double(), nonfinite])
