"""Statistics of many host tensors in one read, where the C library was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export import native

THREADED_ENTRIES = 2**20
"""Least number of entries for which starting further threads is worth it."""

_IS_CPU, _LAYOUT, _DTYPE = attrgetter("is_cpu"), attrgetter("layout"), attrgetter("dtype")
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
    # Called at every step with every gradient: map() over attributes costs half of what a loop over tensors does.
    # A subclass, such as a DTensor, may look contiguous and hold its entries elsewhere.
    if not native.available() or not set(map(type, tensors)) <= {Tensor, nn.Parameter}:
        return None
    if not all(map(_IS_CPU, tensors)) or set(map(_LAYOUT, tensors)) != {torch.strided}:
        return None
    dtypes = set(map(_DTYPE, tensors))
    if not dtypes <= _KINDS.keys() or not all(map(Tensor.is_contiguous, tensors)):
        return None
    if len(dtypes) == 1:
        kinds = np.full(len(tensors), _KINDS[dtypes.pop()], dtype=np.int32)
    else:
        kinds = np.array([_KINDS[t.dtype] for t in tensors], dtype=np.int32)
    counts = np.fromiter(map(Tensor.numel, tensors), dtype=np.int64, count=len(tensors))
    threads = torch.get_num_threads() if int(counts.sum()) >= THREADED_ENTRIES else 1
    return native.statistics(list(map(Tensor.data_ptr, tensors)), counts, kinds, threads)
