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
    """

    rows: int = 0
    step: int = 1
    inner: int = 1
    outer: int = 0
    stride: int = 0
    columns: int = 0
    apart: int = 0


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
        inner = -(-positions // skip)
        count, outer, stride, apart = batch * inner, width * positions, skip, positions
    else:
        width = shape[-1] if len(shape) > 1 else 1
        inner, count, outer, stride, apart = 1, math.prod(shape) // width, width, 0, 1
    step, skip = max(-(-count // rows), 1), max(-(-width // features), 1)
    return Grid(-(-count // step), step, inner, outer, stride, -(-width // skip), skip * apart)


def read_outputs(
    interface: Interface, tensors: Sequence[Any], grids: Sequence[Grid]
) -> tuple[list[float], list[float]]:
    """Return L2 norm and spread of each tensor.

    Args:
        interface: What ``native.tensors.interface_of`` returned.
        tensors: Of no subclass.
        grids: Rows and columns of the spread; without rows it is 0.

    Returns:
        Norms, -1 where a tensor cannot be read; root mean squares of entries less the mean of their column.
    """
    count = len(tensors)
    out = (ctypes.c_double * (2 * count))()
    lie = struct.pack(f"={7 * count}q", *[number for grid in grids for number in grid])
    _call("gradflow_outputs")(interface, _addresses(tensors), ctypes.c_int64(count), lie, out)
    values = list(out)
    return values[:count], values[count:]


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


def _call(name: str) -> Any:
    # The lock of the interpreter is kept: the reading is short, and getting it back may take longer.
    return function(name, release=False)


def _addresses(tensors: Sequence[Any]) -> bytes:
    return struct.pack(f"={len(tensors)}Q", *map(_ADDRESS, tensors))
