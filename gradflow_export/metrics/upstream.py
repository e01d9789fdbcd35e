"""The gradient that the loss sends back into the model."""

from __future__ import annotations

import torch
from torch import Tensor

UPSTREAM_METRICS = ("upstream.norm", "upstream.mean_norm", "upstream.zero_share", "upstream.nonfinite_share")


def upstream_statistics(gradient: Tensor) -> Tensor:
    """Return the four statistics named in ``UPSTREAM_METRICS``.

    Args:
        gradient: Gradient of the loss with respect to logits or predictions. Shape: ``[samples, ...]``, not empty.

    Returns:
        L2 norm of everything, mean over samples of the L2 norm of each, share of entries that are exactly 0 and share
        that is NaN or Inf, float64. Shape: ``[4]``. For cross-entropy with mean reduction the gradient of a sample is
        ``(softmax(z) - onehot(y)) / samples``.
    """
    rows = gradient.detach().reshape(gradient.shape[0] if gradient.dim() else 1, -1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=None if rows.is_complex() else torch.float64)
    count = max(rows.numel(), 1)
    zeros = (rows == 0).sum() / count
    broken = (rows - rows != 0).sum() / count  # Inf - Inf is NaN
    return torch.stack([torch.linalg.vector_norm(norms), norms.mean(), zeros.to(norms), broken.to(norms)])


def join_upstream(statistics: Tensor, samples: Tensor, entries: Tensor) -> Tensor:
    """Return what :func:`upstream_statistics` would be of the gradients of several batches together.

    Args:
        statistics: Those of each batch. Shape: ``[batches, 4]``.
        samples: Samples of each. Shape: ``[batches]``.
        entries: Entries of each. Shape: ``[batches]``.

    Returns:
        Shape: ``[4]``.
    """
    norm = torch.linalg.vector_norm(statistics[:, 0])
    mean = (statistics[:, 1] * (samples / samples.sum())).sum()
    shares = (statistics[:, 2:] * (entries / entries.sum())[:, None]).sum(dim=0)
    return torch.cat([torch.stack([norm, mean]), shares])
