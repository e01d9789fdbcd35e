"""The slope of a function of one number by finite differences, with an estimate of its own error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

STEPS = (1e-5, 1e-7, 1e-3, 1e-2, 1e-8)
"""Steps, the likeliest first: smaller ones avoid kinks, larger ones rise above rounding in float32."""

ROUNDING = 16 * torch.finfo(torch.float64).eps
"""Relative error of a difference of two values."""


@dataclass(frozen=True)
class Slope:
    """A slope at 0.

    Attributes:
        value: By central differences at a step and at half of it, extrapolated to no step at all.
        noise: Estimate of its error: what the two differ by, what a fourth difference finds of kinks and of rounding,
            and what rounding makes of it at least.
        rounding: The last part alone.
    """

    value: float
    noise: float
    rounding: float


def slopes(function: Callable[[float], float], middle: float, magnitude: float) -> Iterator[Slope]:
    """Yield the slope of a function at 0, measured with one step after another.

    Args:
        function: Of one number; steps are in its unit.
        middle: Its value at 0.
        magnitude: Of what is added up to its value, of which rounding takes a share.

    Source: Richardson's extrapolation, ``(4 D(h/2) - D(h)) / 3`` with ``D(h) = (f(h) - f(-h)) / 2h``; its error is of
    the order ``h^4``. The fourth difference ``f(h) - 4 f(h/2) + 6 f(0) - 4 f(-h/2) + f(-h)`` is of that order too where
    the function is smooth, and as large as the jump of the slope times ``h`` where it has a kink.
    """
    for step in STEPS:
        far, near, back, behind = (function(step * share) for share in (1.0, 0.5, -0.5, -1.0))
        wide, narrow = (far - behind) / (2 * step), (near - back) / step
        fourth = far - 4 * near + 6 * middle - 4 * back + behind
        rounding = ROUNDING * max(magnitude, *map(abs, (far, near, middle, back, behind))) / step
        yield Slope((4 * narrow - wide) / 3, abs(wide - narrow) + abs(fourth) / step + rounding, rounding)
