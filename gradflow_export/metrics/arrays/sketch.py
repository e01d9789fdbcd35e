"""Signed sums: a short vector in place of a long one, so that norms and products can be computed of what is not kept.

Entries are taken in blocks of 1 024. Each block is added to consecutive sums, from a place on that its number decides,
and each entry with a sign that its place in the block and the block's number decide. Products of such sums are unbiased
estimates of those of the vectors, whatever these are like: their standard error is at most ``(2 / buckets)^(1/2)``.

Source: Alon, Matias and Szegedy 1996, STOC; Charikar, Chen and Farach-Colton 2002, ICALP.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export import native
from gradflow_export.metrics.arrays.local import PLAIN
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.native.changes import address_of

Floats = npt.NDArray[np.float64]
BLOCK = 1024
SIGNS = 5 * BLOCK
"""Signs that are drawn; each block takes its own from somewhere among them."""
BUCKETS = 2**12
"""Signed sums that a change is measured by."""
NORM_ERROR = math.sqrt(0.5 / BUCKETS)
"""Greatest relative standard error of a norm that is estimated from them, 0.011."""

_PASS, _PARTS = 2**18, 4
_MASK = np.uint64(2**64 - 1)


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers that look drawn at random, one for each (the last steps of splitmix64). Shape: any."""
    x = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


@functools.lru_cache(maxsize=1)
def signs() -> npt.NDArray[np.float32]:
    """Return the signs as drawn, their opposites, and a block of ones. Shape: ``[2 * SIGNS + BLOCK]``."""
    drawn = mixed(np.arange(1, SIGNS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    table = np.where(drawn >> np.uint64(63), -1.0, 1.0).astype(np.float32)
    return np.concatenate([table, -table, np.ones(BLOCK, dtype=np.float32)])


def seed_of(number: int) -> int:
    """Return a seed for the reading of a number: the errors of different readings are independent."""
    return int(mixed(np.array([number + 1], dtype=np.uint64))[0])


def signed_sums(
    tensor: Tensor, seed: int, without: Tensor | None = None, *, squares: bool = True
) -> tuple[Tensor, Tensor]:
    """Return signed sums of all entries of a tensor, and the sum of their squares.

    Args:
        tensor: Dense, real. Shape: any.
        seed: Decides on places and signs.
        without: Rows, that is places in the first dimension, that are left out; rising, on the CPU. Shape: ``[n]``.
        squares: Whether squares are asked for; 0 otherwise.

    Returns:
        In float64, on the tensor's device. Shape: ``[BUCKETS]`` and scalar.
    """
    known = _by_library(tensor, seed, without, squares)
    return known if known is not None else _by_torch(tensor, seed, without)


def _by_library(tensor: Tensor, seed: int, without: Tensor | None, squares: bool) -> tuple[Tensor, Tensor] | None:
    interface = usable_interface()
    if interface is None or type(tensor) not in PLAIN:
        return None
    sums, total = np.zeros((_PARTS, BUCKETS)), np.zeros(1)
    rows = np.zeros(0, dtype=np.int64) if without is None else np.ascontiguousarray(without.numpy())
    failed = native.function("gradflow_signed_parts", release=True)(
        interface,
        ctypes.c_void_p(address_of(tensor)),
        ctypes.c_int64(_width(tensor)),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_uint64(seed),
        ctypes.c_void_p(signs().ctypes.data),
        ctypes.c_int64(BUCKETS),
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_void_p(sums.ctypes.data),
        ctypes.c_void_p(total.ctypes.data if squares else None),
    )
    return None if failed else (torch.from_numpy(sums[0]), torch.from_numpy(total)[0])


def sums_of_all(tensors: Sequence[Tensor], seed: int) -> tuple[Floats, Floats] | None:
    """Return what :func:`signed_sums` does of many tensors, by one call for all of them.

    Args:
        tensors: Plain ones.
        seed: Decides on places and signs.

    Returns:
        Sums, and those of the squares; ``None`` without the library, or where it cannot read one of the tensors.
        Shape: ``[tensors, BUCKETS]`` and ``[tensors]``.
    """
    held = np.empty((len(tensors), BUCKETS))
    squares = _changes(tensors, seed, held, compare=False)
    return None if squares is None else (held, squares)


def squared_distances(tensors: Sequence[Tensor], seed: int, held: Floats) -> Floats | None:
    """Return how far signed sums are from those of :func:`sums_of_all`, squared: ``None`` where that has none."""
    return _changes(tensors, seed, held, compare=True)


def _changes(tensors: Sequence[Tensor], seed: int, held: Floats, *, compare: bool) -> Floats | None:
    interface, count = usable_interface(), len(tensors)
    if interface is None:
        return None
    out = np.empty(count)
    failed = native.function("gradflow_signed_changes", release=True)(
        interface,
        (ctypes.c_uint64 * count)(*map(address_of, tensors)),
        ctypes.c_int64(count),
        ctypes.c_uint64(seed),
        ctypes.c_void_p(signs().ctypes.data),
        ctypes.c_int64(BUCKETS),
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_int32(compare),
        ctypes.c_void_p(held.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
    )
    return None if failed else out


def _by_torch(tensor: Tensor, seed: int, without: Tensor | None) -> tuple[Tensor, Tensor]:
    flat = tensor.detach().reshape(-1)
    device, count = flat.device, flat.numel()
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    table = torch.from_numpy(signs()).to(device, torch.float64).unfold(0, BLOCK, 1)
    within = torch.arange(BLOCK, device=device)
    for start in range(0, count, _PASS):
        part = flat[start : start + _PASS].double()
        if without is not None:
            width = _width(tensor)
            rows = without[(without >= start // width) & (without <= (start + len(part) - 1) // width)]
            places = (rows[:, None] * width + torch.arange(width) - start).reshape(-1)
            part = part.index_fill(0, places[(places >= 0) & (places < len(part))].to(device), 0.0)
        squares += part.square().sum()
        part = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).reshape(-1, BLOCK)
        blocks = np.arange(start // BLOCK, start // BLOCK + len(part), dtype=np.uint64)
        hashes = mixed(blocks + np.uint64(seed))
        starts = (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)
        turns = ((hashes >> np.uint64(32)) % np.uint64(SIGNS - BLOCK)).astype(np.int64)
        turns += np.where(hashes >> np.uint64(63), SIGNS, 0)
        signed = part * table[torch.from_numpy(turns).to(device)]
        to = (torch.from_numpy(starts).to(device)[:, None] + within) % BUCKETS
        sums.index_add_(0, to.reshape(-1), signed.reshape(-1))
    return sums, squares


def touched_rows(gradient: Tensor, limit: int) -> Tensor | None:
    """Return the rows of a dense gradient that are not all 0.

    Args:
        gradient: Dense, real, on the CPU. Shape: ``[rows, ...]``.
        limit: Greatest number of rows.

    Returns:
        Rising. ``None`` where there are more. Shape: ``[n]``.
    """
    interface = usable_interface()
    if interface is not None and type(gradient) in PLAIN and gradient.is_contiguous():
        rows = np.empty(limit, dtype=np.int64)
        find: Any = native.function("gradflow_touched_rows", release=True)
        find.restype = ctypes.c_int64
        count = find(
            interface,
            ctypes.c_void_p(address_of(gradient)),
            ctypes.c_int64(_width(gradient)),
            ctypes.c_int64(limit),
            ctypes.c_void_p(rows.ctypes.data),
        )
        return None if count < 0 else torch.from_numpy(rows[:count].copy())
    flat = gradient.detach().reshape(gradient.shape[0], -1)
    found = torch.count_nonzero(flat, dim=1).nonzero().reshape(-1)
    return None if len(found) > limit else found


def _width(tensor: Tensor) -> int:
    return max(tensor.numel() // max(tensor.shape[0], 1), 1) if tensor.dim() else 1
