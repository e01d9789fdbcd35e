"""Dead and saturated units, from the outputs of activation modules."""

from __future__ import annotations

import torch
from torch import Tensor


def active_units(output: Tensor, unit_dim: int) -> Tensor:
    """Return which units had any output above zero.

    Args:
        output: Shape: any, with units along ``unit_dim``.
        unit_dim: Dimension of the units: 1 for channels, -1 for features.

    Returns:
        True where some sample or position was positive. Shape: ``[units]``.

    Source: Lu et al. 2019, arXiv:1903.06733.
    """
    units = output.detach().movedim(unit_dim, 0).flatten(1)
    return units.amax(dim=1) > 0


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
