"""Dead and saturated units, from the outputs of activation modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def greatest_outputs(output: Tensor, unit_dim: int) -> Tensor:
    """Return the greatest output of each unit over samples and positions; a unit was active where it is above zero.

    Args:
        output: Two or more dimensions, not empty, with units along ``unit_dim``.
        unit_dim: Dimension of the units: 1 for channels, -1 for features.

    Returns:
        Shape: ``[units]``.
    """
    units = unit_dim % output.dim()
    return output.detach().amax(dim=[d for d in range(output.dim()) if d != units])


def dead_shares(greatest: Sequence[Tensor]) -> Tensor:
    """Return the share of units of each module that were never above zero; NaN is no sign of death.

    Args:
        greatest: Greatest outputs per module, on one device; not empty. Shape of each: ``[units]``.

    Returns:
        Shape: ``[len(greatest)]``, in [0, 1].

    Source: Lu et al. 2019, arXiv:1903.06733.
    """
    sizes = torch.tensor([g.numel() for g in greatest], device=greatest[0].device)
    modules = torch.repeat_interleave(torch.arange(len(greatest), device=sizes.device), sizes)
    dead = (torch.cat(list(greatest)) <= 0).float()
    return torch.zeros(len(greatest), device=sizes.device).index_add_(0, modules, dead) / sizes.clamp_min(1)


def zero_share(output: Tensor) -> Tensor:
    """Return ``#{output == 0} / numel``. Shape: scalar."""
    o = output.detach()
    return 1.0 - torch.count_nonzero(o) / max(o.numel(), 1)


def saturated_share(output: Tensor, kind: str) -> Tensor:
    """Return the share of outputs where the activation's derivative is below 1 % of its maximum.

    Args:
        output: The activation's outputs. Shape: any.
        kind: ``"tanh"`` (1 - o^2 < 0.01), ``"sigmoid"`` (o (1 - o) < 0.0025), or ``"clipped:<low>:<high>"`` for
            piecewise linear ones, saturated exactly at their bounds.

    Returns:
        Shape: scalar, in [0, 1].

    Source: Glorot and Bengio 2010, AISTATS.
    """
    o = output.detach()
    if kind == "tanh":
        hit = o.square() > 0.99
    elif kind == "sigmoid":
        hit = o * (1 - o) < 0.0025
    else:
        _, low, high = kind.split(":")
        hit = (o <= float(low)) | (o >= float(high))
    return hit.sum() / max(o.numel(), 1)
