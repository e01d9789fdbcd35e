"""Weights as a grid of declared width shows them to the forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHIFTED = 0.02
"""Distance from the multiples of the step, in steps, from which on a grid counts as shifted."""
ALIGNED = 0.99
"""Least mean resultant length of the places within a step at which all entries count as lying at one place."""
BETWEEN = 0.05
"""Root mean square distance from the grid, in steps, from which on weights lie between its points."""


def on_grid(before: Tensor, after: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a grid over the weights that two forward passes used.

    Args:
        before: Float64, real. Shape: ``[rows, entries]``.
        after: Shape: that of ``before``.
        step: Width of the grid, above 0. Its points are the multiples of ``step``, or, where all weights lie at the
            same distance from these, as -1 and 1 do on a grid of width 2, the multiples shifted by that distance.

    Returns:
        The grid points next to the weights, before and after, and 1 where the weights lie between the points, else 0:
        then an update that moves no weight to another point is not lost but adds up. Shapes: that of ``before``, that
        of ``before``, scalar.

    Source: mean direction of directional statistics, Mardia and Jupp 2000.
    """
    places = [tensor / step for tensor in (before, after)]
    turns = torch.cat([2 * math.pi * torch.frac(place).reshape(-1) for place in places])
    east, north = turns.cos().mean(), turns.sin().mean()
    shift = torch.atan2(north, east) / (2 * math.pi)
    # One weight alone lies at one place by nature: its grid is taken as it was declared.
    shifted = (shift.abs() > SHIFTED) & (torch.hypot(east, north) > ALIGNED) & (before.numel() > 1)
    shift = torch.where(shifted, shift, torch.zeros_like(shift))
    points = [torch.round(place - shift) for place in places]
    off = torch.cat([(place - shift - point).reshape(-1) for place, point in zip(places, points, strict=True)])
    between = off.square().mean().sqrt() > BETWEEN
    first, second = ((point + shift) * step for point in points)
    return first, second, between.to(before.dtype)
