"""Whether the gradient keeps its direction from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradflow_export.metrics.norms import dense_entries
from gradflow_export.metrics.samples import even_sample

TENSORS = 8
ENTRIES = 512


def gradient_sample(gradients: Sequence[Tensor]) -> Tensor:
    """Return at most ``TENSORS * ENTRIES`` evenly spaced entries of the gradient; all of it for a small model.

    Args:
        gradients: Dense, on one device, not empty.

    Returns:
        Shape: ``[entries]``, float32 or float64.
    """
    chosen = gradients[:: -(-len(gradients) // TENSORS)]
    parts = [even_sample(dense_entries(g), ENTRIES) for g in chosen]
    flat = torch.cat(parts)
    return flat if flat.dtype is torch.float64 else flat.float()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a, b> / (||a|| ||b||)``, NaN when either is zero. Shape of both: ``[n]``; of the result: scalar."""
    a, b = a / a.abs().amax(), b / b.abs().amax()
    return torch.div(torch.dot(a, b), torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
