"""Weights as a grid of declared width shows them to the forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = 1e-3
"""Root mean square distance from a place within a step, in steps, up to which weights lie at it, besides rounding."""


def on_grid(before: Tensor, after: Tensor, step: float, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a grid over the weights that two forward passes used.

    Args:
        before: Float64, real. Shape: ``[rows, entries]``.
        after: Shape: that of ``before``.
        step: Width of the grid, above 0. Its points are the multiples of ``step``, or, where all weights lie at the
            same distance from these, as -1 and 1 do on a grid of width 2, the multiples shifted by that distance.
        rounding: Spacing of the weights' number format at 1, ``torch.finfo(dtype).eps``: points are kept no better.

    Returns:
        The grid points next to the weights, before and after, and 1 where the weights lie between the points, else 0:
        then an update that moves no weight to another point is not lost but adds up. Shapes: that of ``before``, that
        of ``before``, scalar.

    Source: mean direction of directional statistics, Mardia and Jupp 2000.
    """
    first, second = before / step, after / step
    places = torch.cat([first.reshape(-1), second.reshape(-1)])
    limit = TOLERANCE + rounding * places.square().mean().sqrt()
    turns = 2 * math.pi * torch.frac(places)
    shift = torch.atan2(turns.sin().mean(), turns.cos().mean()) / (2 * math.pi)
    # One weight alone lies at one place by nature: its grid is taken as it was declared.
    shifted = (_off(places - shift) <= limit) & (shift.abs() > limit) & (before.numel() > 1)
    shift = torch.where(shifted, shift, torch.zeros_like(shift))
    points = [(torch.round(place - shift) + shift) * step for place in (first, second)]
    return points[0], points[1], (_off(places - shift) > limit).to(before.dtype)


def _off(places: Tensor) -> Tensor:
    """Return the root mean square distance of places from whole numbers."""
    return (places - torch.round(places)).square().mean().sqrt()
