"""How much a policy explores: entropy of discrete actions, spread of continuous ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASKED_LOGIT = -1e7
"""A logit at or below this marks an action that is not allowed."""


def discrete_entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean normalised entropy of categorical policies.

    Args:
        logits: Log-probabilities up to a constant; an action that is not allowed has ``-inf`` or at most
            ``MASKED_LOGIT``. Shape: ``[..., actions]``.
        mask: True or non-zero where an action is allowed. Shape: one that broadcasts to that of ``logits``.

    Returns:
        Mean over rows of ``-sum p ln p / ln K`` with K the actions allowed there; rows with one allowed action have no
        choice and are left out; NaN when no row is left. Shape: scalar. Unit: 1, in [0, 1].

    Source: Shannon 1948.
    """
    z = logits.detach()
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    barred = z <= MASKED_LOGIT
    if mask is not None:
        barred = barred | ~mask.detach().to(z.device).bool().expand_as(z)
    allowed = (~barred).sum(dim=-1)
    logs = z.masked_fill(barred, -math.inf).log_softmax(dim=-1)
    entropies = -(logs.exp() * logs).masked_fill(barred, 0.0).sum(dim=-1)
    free = allowed >= 2
    shares = torch.where(free, entropies / allowed.clamp_min(2).to(z.dtype).log(), torch.zeros_like(entropies))
    return shares.sum() / free.sum()


def mean_std(std: Tensor, action_range: float | None = None) -> Tensor:
    """Return the mean standard deviation of Gaussian actions, of a squashed one before squashing.

    Args:
        std: Shape: any, not empty.
        action_range: Width of the range of actions; the result is then in units of half of it.

    Returns:
        Shape: scalar. Unit: 1.
    """
    mean = std.detach().double().mean()
    return mean if action_range is None else mean / (action_range / 2)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the mean entropy per dimension, ``ln(2 pi e sigma^2) / 2``; negative for a narrow policy.

    Args:
        std: Shape: any, not empty.

    Returns:
        Shape: scalar. Unit: nats.

    Source: Cover and Thomas 2006, theorem 8.4.1.
    """
    return std.detach().double().log().mean() + 0.5 * math.log(2 * math.pi * math.e)
