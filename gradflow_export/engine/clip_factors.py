"""What torch's clipping made of gradient norms: those before and after it, from those that were read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.instruments.gradients.clipping import ClipCall
from gradflow_export.records.column import Column
from gradflow_export.records.statistics import root_of_squares

Floats = npt.NDArray[np.float64]
Calls = Sequence[tuple[ClipCall, float]]
"""Calls, each with its total norm."""

_NORM = "parameter.gradient_norm"
_SIZES = (_NORM, "parameter.gradient_l1", "parameter.gradient_linf", "parameter.gradient_mean")


class Unclipped(NamedTuple):
    """Norm of all gradients before clipping and after it, and what was left of each parameter, where that is known."""

    whole: float
    used: float
    factors: Floats | None = None


def before_clipping(norms: Column | None, clips: Calls) -> Unclipped | None:
    """Return what torch's clipping did; ``None`` without a call."""
    if norms is None or not clips or not norms.present.any():
        return None
    used = root_of_squares(norms.values[norms.present])
    broken = [total for _, total in clips if not math.isfinite(total)]
    if broken:
        return Unclipped(broken[0], used)
    factors = _factors(clips, len(norms.sites))
    if not factors[norms.present].all():  # clipped to 0: what was there is lost
        return None
    return Unclipped(root_of_squares(norms.values[norms.present] / factors[norms.present]), used, factors)


def clip_inside(columns: Mapping[str, Column], clips: Calls) -> None:
    """Make what was read before a step that itself clips what the step used.

    Args:
        columns: Per-site values by metric; sizes of gradients are multiplied by what the step's own calls left of them.
        clips: All calls.
    """
    norms, inside = columns.get(_NORM), [clip for clip in clips if clip[0].inside]
    if norms is None or not inside:
        return
    factors, read = _factors(inside, len(norms.sites)), root_of_squares(norms.values[norms.present])
    with np.errstate(invalid="ignore"):  # of Inf nothing is left, and that is NaN
        for column in (columns[metric] for metric in _SIZES if metric in columns):
            column.values *= factors
        scale = columns.get("gradient.clip_scale")
        if scale is not None:
            scale.values *= np.divide(root_of_squares(norms.values[norms.present]), read) if read else 1.0


def _factors(clips: Calls, count: int) -> Floats:
    """Return what the calls left of each parameter. Shape: ``[count]``."""
    factors = np.ones(count)
    for call, total in clips:
        factors[call.places[call.places < count]] *= call.factor(total)
    return factors
