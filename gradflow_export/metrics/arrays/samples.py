"""Evenly spaced samples of tensors: no draw from any random generator, the same entries every time."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.metrics.arrays.sketch import mixed


def even_sample(tensor: Tensor, limit: int) -> Tensor:
    """Return at most ``limit`` evenly spaced entries.

    Args:
        tensor: Real; of a sparse one the entries that it holds. Shape: any.
        limit: Greatest number of entries.

    Returns:
        A view where the tensor is contiguous. Shape: ``[min(numel, limit)]`` at most.
    """
    flat = dense_entries(tensor).reshape(-1)
    count = flat.numel()
    if count <= limit:
        return flat
    stride = -(-count // limit)
    return flat[::stride]


@functools.lru_cache(maxsize=64)
def scattered(count: int, limit: int) -> Tensor:
    """Return places that are drawn evenly over ``count`` entries, one of each of ``limit`` pieces, and always the same.

    Unlike places at one distance they are not all of a few columns of a matrix.

    Returns:
        Rising, on the CPU. Shape: ``[limit]``.
    """
    shares = (mixed(np.arange(1, limit + 1, dtype=np.uint64)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    places = ((np.arange(limit) + shares) * (count / limit)).astype(np.int64)
    return torch.from_numpy(np.minimum(places, count - 1))


def rows_of(output: Tensor, rows: int, features: int) -> Tensor:
    """Return a few samples of a layer's output with features as columns.

    Args:
        output: ``[batch, features]``, ``[batch, positions, features]`` or, with four or more dimensions,
            ``[batch, channels, *positions]``.
        rows: Greatest number of rows: samples and positions together.
        features: Greatest number of columns.

    Returns:
        Evenly spaced rows and columns, float32 or float64. Shape: ``[<= rows, <= features]``.
    """
    h = local(output).detach()
    h = torch.view_as_real(h).flatten(-2) if h.is_complex() else h
    if h.dim() <= 1:
        h = h.reshape(-1, 1) if h.dim() else h.reshape(1, 1)
    elif h.dim() >= 4:
        positions = h.flatten(2)
        per_sample = max(rows // max(h.shape[0], 1), 1)
        stride = max(positions.shape[2] // per_sample, 1)
        h = positions[:, :, ::stride].movedim(1, 2).flatten(0, 1)
    else:
        h = h.reshape(-1, h.shape[-1])
    h = h[:: max(-(-h.shape[0] // rows), 1), :: max(-(-h.shape[1] // features), 1)]
    return h if h.dtype in (torch.float32, torch.float64) else h.float()


def size_of_rows(output: Tensor) -> tuple[int, int]:
    """Return how many rows and columns there are of which :func:`rows_of` takes some."""
    h = local(output)
    columns = (h.shape[1] if h.dim() >= 4 else h.shape[-1]) if h.dim() > 1 else 1
    rows = h.numel() // max(columns, 1)
    return (rows, 2 * columns) if h.is_complex() else (rows, columns)


def row_sample(tensor: Tensor, limit: int) -> Tensor:
    """Return evenly spaced whole rows, with about ``limit`` entries in all and at least one row.

    Args:
        tensor: Dense, not empty. Shape: any; the first dimension counts rows, a vector has rows of one entry.
        limit: Wanted number of entries.

    Returns:
        Shape: ``[rows, entries of a row]``.
    """
    flat = local(tensor).detach()
    flat = flat.reshape(flat.shape[0], -1) if flat.dim() else flat.reshape(1, 1)
    return flat[:: -(-flat.numel() // limit)]
