"""Statistics of many host tensors in one read, where the C library was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export import native
from gradflow_export.metrics.local import is_plain

THREADED_ENTRIES = 2**20
"""Least number of entries for which starting further threads is worth it."""

_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {getattr(torch, name): number for number, name in enumerate(native.KINDS)}
)


def native_statistics(tensors: Sequence[Tensor]) -> npt.NDArray[np.float64] | None:
    """Return what :func:`gradflow_export.native.statistics` returns.

    Args:
        tensors: Shape of each: any.

    Returns:
        The rows named in ``native.ROWS``; ``None`` when a tensor is not a contiguous real floating one on the CPU, or
        the library is missing. Shape: ``[6, len(tensors)]``.
    """
    if not native.available():
        return None
    # A subclass, such as a DTensor, may look contiguous and hold its entries elsewhere.
    kinds = [
        _KINDS.get(t.dtype, -1) if is_plain(t) and t.is_cpu and t.layout is torch.strided and t.is_contiguous() else -1
        for t in tensors
    ]
    if -1 in kinds:
        return None
    counts = np.array([t.numel() for t in tensors], dtype=np.int64)
    threads = torch.get_num_threads() if int(counts.sum()) >= THREADED_ENTRIES else 1
    pointers = [t.data_ptr() for t in tensors]
    return native.statistics(pointers, counts, np.array(kinds, dtype=np.int32), threads)
