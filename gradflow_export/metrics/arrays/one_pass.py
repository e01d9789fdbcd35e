"""Statistics of many host tensors in one read, where the C library was built."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export import native
from gradflow_export.native.tensors import HEAD, Sums, TensorReader, interface_of

THREADED_ENTRIES = 2**20
"""Least number of entries for which starting further threads is worth it."""

_IS_CPU, _LAYOUT, _DTYPE = attrgetter("is_cpu"), attrgetter("layout"), attrgetter("dtype")
_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {getattr(torch, name): number for number, name in enumerate(native.KINDS)}
)


def tensor_reader(
    count: int,
    judged: int,
    copies: Sequence[tuple[int, int, int]] = (),
    checked: int = 0,
    sums: Sums | None = None,
    entries: int = 0,
) -> TensorReader | None:
    """Return a reader of many tensors, ``None`` where there is no library or this PyTorch cannot be asked.

    The tensors must be plain ones, no subclass: a DTensor may look like its shard and hold its entries elsewhere.

    Args:
        count: How many tensors.
        judged: Of how many, from the first on, statistics are made.
        copies: Place, stride and number of the entries to copy.
        checked: Of how many copied entries the squares are summed.
        sums: Signed sums that are multiplied with those before.
        entries: About how many entries there are in all, which decides on threads.
    """
    known = usable_interface()
    if known is None:
        return None
    long = entries >= THREADED_ENTRIES
    threads = torch.get_num_threads() if long else 1
    return TensorReader(known, count, judged, copies, checked, sums, threads, release=long)


def usable_interface() -> ctypes.Array[ctypes.c_int64] | None:
    """Return PyTorch's C interface, ``None`` without it or without the C library."""
    return interface() if native.available() else None


@functools.lru_cache(maxsize=1)
def interface() -> ctypes.Array[ctypes.c_int64] | None:
    """Find PyTorch's C interface in the library that is loaded, and try it on tensors that are known."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # What is not loaded yet must stay so: a second PyTorch in one process ends it.
            library = ctypes.CDLL(str(folder / name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (OSError, AttributeError):
            continue
        found = interface_of(library)
        return found if found is not None and _works(found) else None
    return None


def _works(found: ctypes.Array[ctypes.c_int64]) -> bool:
    """Whether tensors are described as they are: part of a longer one is read, one that is not contiguous refused."""
    part = torch.from_numpy(np.arange(7.0))[2:]
    read = TensorReader(found, 1, 1, [(0, 2, 3)]).read([part])
    refused = TensorReader(found, 1, 1).read([part[::2]])
    return read is not None and refused is None and read[HEAD : HEAD + 3].tolist() == [2.0, 4.0, 6.0]


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
