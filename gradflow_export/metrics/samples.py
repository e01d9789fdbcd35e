"""Evenly spaced samples of tensors: no draw from any random generator, the same entries every time."""

from __future__ import annotations

import torch
from torch import Tensor

from gradflow_export.metrics.local import local


def even_sample(tensor: Tensor, limit: int) -> Tensor:
    """Return at most ``limit`` evenly spaced entries.

    Args:
        tensor: Dense, real. Shape: any.
        limit: Greatest number of entries.

    Returns:
        A view where the tensor is contiguous. Shape: ``[min(numel, limit)]`` at most.
    """
    flat = local(tensor).detach().reshape(-1)
    count = flat.numel()
    if count <= limit:
        return flat
    stride = -(-count // limit)
    return flat[::stride]


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
