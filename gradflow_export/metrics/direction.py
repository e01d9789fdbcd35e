"""Whether the gradient keeps its direction from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradflow_export.metrics.norms import dense_entries
from gradflow_export.metrics.samples import even_sample

TENSORS = 4
ENTRIES = 1024


def gradient_sample(gradients: Sequence[Tensor]) -> Tensor:
    """Return evenly spaced entries of evenly spaced tensors: at most ``ENTRIES`` each of at most ``TENSORS``.

    Args:
        gradients: Dense, on one device, not empty.

    Returns:
        Shape: ``[entries]``, float32 or float64.
    """
    chosen = gradients[:: -(-len(gradients) // TENSORS)]
    flat = torch.cat([even_sample(dense_entries(g), ENTRIES) for g in chosen])
    return flat if flat.dtype is torch.float64 else flat.float()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a, b> / (||a|| ||b||)``, NaN when either is zero. Shape of both: ``[n]``; of the result: scalar."""
    a, b = a / a.abs().amax(), b / b.abs().amax()
    return torch.div(torch.dot(a, b), torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
