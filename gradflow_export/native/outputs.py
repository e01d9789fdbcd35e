"""Reads tensors that models make on their way, some at a time: outputs and arriving gradients."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.native import function

Interface = ctypes.Array[ctypes.c_int64]
Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
_ADDRESS = attrgetter("_cdata")


class Grid(NamedTuple):
    """A few rows and columns of a contiguous tensor.

    Attributes:
        rows: How many.
        step: Of how many rows one is taken.
        inner: Rows that follow each other at ``stride``.
        outer: Entries from one such group to the next.
        stride: Entries from one row of a group to the next.
        columns: How many.
        apart: Entries between two columns.
        all_rows: Rows of the tensor.
        all_columns: Columns of the tensor.
    """

    rows: int = 0
    step: int = 1
    inner: int = 1
    outer: int = 0
    stride: int = 0
    columns: int = 0
    apart: int = 0
    all_rows: int = 0
    all_columns: int = 0


def grid_of(shape: Sequence[int], rows: int, features: int) -> Grid:
    """Return the rows and columns that ``metrics.samples.rows_of`` takes of a contiguous tensor.

    Args:
        shape: Of the tensor, without a dimension of 0.
        rows: Greatest number of rows.
        features: Greatest number of columns.
    """
    if len(shape) >= 4:
        batch, width, positions = shape[0], shape[1], math.prod(shape[2:])
        skip = max(positions // max(rows // batch, 1), 1)
        inner, whole = -(-positions // skip), batch * positions
        count, outer, stride, apart = batch * inner, width * positions, skip, positions
    else:
        width = shape[-1] if len(shape) > 1 else 1
        inner, count, outer, stride, apart = 1, math.prod(shape) // width, width, 0, 1
        whole = count
    step, skip = max(-(-count // rows), 1), max(-(-width // features), 1)
    return Grid(-(-count // step), step, inner, outer, stride, -(-width // skip), skip * apart, whole, width)


class OutputReader:
    """Reads one output at a time, while it is still in the processor's own cache: its size and its spread.

    Args:
        interface: What ``native.tensors.interface_of`` returned.
        sizes: Become root mean squares. Shape of this and what follows: ``[sites]``.
        sized: Become True where there is one.
        spreads: Become root mean squares of entries less the mean of their column.
        spread: Become True where there is one.
        errors: Become the standard errors of the spreads, as shares of them.
        told: Become True where there is one.
        rows: Most rows that a grid has.
        columns: Most columns that it has.

    Attributes:
        grids: Rows and columns of the spread at each site; without rows it is 0. Shape: ``[sites, 9]``.
    """

    def __init__(
        self,
        interface: Interface,
        sizes: Floats,
        sized: Marks,
        spreads: Floats,
        spread: Marks,
        errors: Floats,
        told: Marks,
        rows: int,
        columns: int,
    ) -> None:
        self.grids = np.zeros((len(sizes), len(Grid())), dtype=np.int64)
        self._call = _quick("gradflow_sent")
        work = np.empty((rows + 2) * columns + rows)  # kept: 17 KB that malloc takes from elsewhere each time are cold
        self._held = interface, self.grids, sizes, spreads, errors, sized, spread, told, work
        self._addresses = _addresses_of(interface, *self._held[1:], room=len(work))
        self._to = ctypes.addressof(self._addresses)  # a number is passed with less ado

    def read(self, site: int, tensor: Any) -> bool:
        """Read a tensor, of no subclass; False where that cannot be done."""
        return not self._call(self._to, tensor._cdata, site)  # noqa: SLF001 - no public form


class GradientReader:
    """Reads one gradient at a time and joins norms of one site to the norm over all of them.

    Args:
        interface: What ``native.tensors.interface_of`` returned.
        norms: Become L2 norms. Shape of this and what follows: ``[sites]``.
        present: Become True where there is one.
        arrivals: Are counted up.
    """

    def __init__(self, interface: Interface, norms: Floats, present: Marks, arrivals: Counts) -> None:
        self._call = _quick("gradflow_returned")
        self._held = interface, norms, present, arrivals
        self._addresses = _addresses_of(interface, norms, present, arrivals)
        self._to = ctypes.addressof(self._addresses)  # a number is passed with less ado

    def read(self, site: int, tensor: Any) -> bool:
        """Read a tensor, of no subclass; False where that cannot be done."""
        return not self._call(self._to, tensor._cdata, site)  # noqa: SLF001 - no public form


def read_rectified(
    interface: Interface,
    tensors: Sequence[Any],
    shapes: Sequence[tuple[int, int]],
    firsts: Sequence[int],
    fired: npt.NDArray[np.uint8],
) -> list[float]:
    """Mark the units that fired, and return how many entries of each tensor are exactly zero.

    Args:
        interface: What ``native.tensors.interface_of`` returned.
        tensors: Of no subclass.
        shapes: Number of units of each, and how many entries one has in a row.
        firsts: Where the units of each begin in ``fired``.
        fired: Becomes 1 for each unit that is above zero or NaN anywhere.

    Returns:
        Counts, -1 where a tensor cannot be read.
    """
    count = len(tensors)
    out = (ctypes.c_double * count)()
    lie = struct.pack(f"={2 * count}q", *[number for shape in shapes for number in shape])
    begin = struct.pack(f"={count}q", *firsts)
    marks = ctypes.c_void_p(fired.ctypes.data)
    _call("gradflow_rectified")(interface, _addresses(tensors), ctypes.c_int64(count), lie, begin, marks, out)
    return list(out)


def _quick(name: str) -> Any:
    """Return a function that takes an address, a tensor's address and a number, with few words between."""
    call = _call(name)
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return call


def _addresses_of(interface: Interface, *arrays: npt.NDArray[Any], room: int = 0) -> ctypes.Array[ctypes.c_int64]:
    addresses = [ctypes.addressof(interface), *(array.ctypes.data for array in arrays), room]
    return (ctypes.c_int64 * len(addresses))(*addresses)


def _call(name: str) -> Any:
    # The lock of the interpreter is kept: the reading is short, and getting it back may take longer.
    return function(name, release=False)


def _addresses(tensors: Sequence[Any]) -> bytes:
    return struct.pack(f"={len(tensors)}Q", *map(_ADDRESS, tensors))
