"""Whether the gradient keeps its direction from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradflow_export.metrics.norms import dense_entries
from gradflow_export.metrics.samples import even_sample

TENSORS = 4
ENTRIES = 1024


def evenly_chosen(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return at most ``TENSORS`` evenly spaced ones of the gradients; not empty unless they are."""
    return gradients[:: -(-len(gradients) // TENSORS) or 1]


def gradient_sample(chosen: Sequence[Tensor]) -> Tensor:
    """Return at most ``ENTRIES`` evenly spaced entries of each tensor, joined.

    Args:
        chosen: Dense gradients on one device, not empty.

    Returns:
        Shape: ``[entries]``, float32 or float64.
    """
    flat = torch.cat([even_sample(dense_entries(g), ENTRIES) for g in chosen])
    return flat if flat.dtype is torch.float64 else flat.float()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a, b> / (||a|| ||b||)``, NaN when either is zero. Shape of both: ``[n]``; of the result: scalar."""
    a, b = a / a.abs().amax(), b / b.abs().amax()
    return torch.div(torch.dot(a, b), torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
