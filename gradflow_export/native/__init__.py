"""Six statistics of many arrays in one read, by a small C library that is built when the package is installed.

The library needs neither Python's nor torch's headers and is called through ctypes, so that it fits every version of
both. Where no compiler was at hand it is missing, and callers take the slower way; ``GRADFLOW_NATIVE=0`` asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = ("float32", "float64", "bfloat16", "float16")
"""Types of entries by their number in the library."""

ROWS = ("norm", "magnitudes", "max", "min", "zeros", "nonfinite")
"""What the rows of the result hold: L2 norm, sum of magnitudes, greatest and least entry, counts."""

_FOLDER = Path(__file__).parent


def available() -> bool:
    """Return whether the library was built and may be used."""
    return os.environ.get("GRADFLOW_NATIVE") != "0" and _library() is not None


def statistics(
    pointers: Sequence[int], counts: npt.NDArray[np.int64], kinds: npt.NDArray[np.int32], threads: int = 1
) -> npt.NDArray[np.float64]:
    """Return six statistics of each array, read once.

    Args:
        pointers: Addresses of contiguous host memory.
        counts: Entries of each. Shape: ``[n]``.
        kinds: Index into :data:`KINDS` of each. Shape: ``[n]``.
        threads: Greatest number of threads; the result does not depend on it.

    Returns:
        The rows named in :data:`ROWS`. NaN is in norm and sum where an entry is NaN; max and min pass over it. An empty
        array has norm 0, max -Inf and min Inf. Shape: ``[6, n]``.

    Raises:
        MemoryError: The library found no memory for its own lists.
        RuntimeError: The library is missing; ask :func:`available` first.
    """
    if _library() is None:
        raise RuntimeError("the C library was not built; ask available() first, or install again with a C compiler.")
    out = np.empty((len(ROWS), len(counts)), dtype=np.float64)
    addresses = np.array(pointers, dtype=np.uint64)
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (addresses, counts, kinds))
    call = function("gradflow_statistics", release=True)
    failed = call(*arrays, ctypes.c_int64(len(counts)), ctypes.c_int32(threads), ctypes.c_void_p(out.ctypes.data))
    if failed:
        raise MemoryError("the C library found no memory for its lists")
    return out


def function(name: str, *, release: bool) -> Callable[..., Any]:
    """Return a function of the library.

    Args:
        name: What it is called in C.
        release: Whether other Python threads may run meanwhile.

    Raises:
        RuntimeError: The library is missing; ask :func:`available` first.
    """
    libraries = _library()
    if libraries is None:
        raise RuntimeError("the C library was not built; ask available() first, or install again with a C compiler.")
    found: Callable[..., Any] = getattr(libraries[int(release)], name)
    return found


@functools.lru_cache(maxsize=1)
def _library() -> tuple[ctypes.PyDLL, ctypes.CDLL] | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _FOLDER / f"_statistics{suffix}"
        if path.is_file():
            try:
                both = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
                both[0].gradflow_is_over, both[0].gradflow_signed_changes  # an AttributeError means an older version
            except (OSError, AttributeError):  # built for another machine
                continue
            return both
    return None
