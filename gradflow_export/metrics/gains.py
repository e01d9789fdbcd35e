"""Backward gains between consecutive blocks, from the norms of the gradients at their outputs."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradflow_export.records.statistics import theil_sen

AMPLIFYING = 2.0
DAMPING = 0.5
EPS = 1e-30


def gains(norms: Sequence[float | None], eps: float = EPS) -> list[float | None]:
    """Return how much the gradient grows on its way back through each block.

    Args:
        norms: ``||dL/dh_i||`` per block in depth order, ``None`` where no gradient arrived. Shape: ``[n]``.
        eps: A norm below this counts as zero.

    Returns:
        ``gamma_i = norms[i-1] / norms[i]``; entry k is the transition k to k+1. ``None`` if either norm is missing,
        inf where the denominator is below ``eps``, NaN where either norm is NaN or both are inf. Shape: ``[n - 1]``.

    >>> gains([4.0, 2.0, 2.0, None, 0.0])
    [2.0, 1.0, None, None]
    """
    known = _all_usable(norms, eps)
    if known is not None:
        return list(map(operator.truediv, known, itertools.islice(known, 1, None)))
    return [_gain(before, after, eps) for before, after in itertools.pairwise(norms)]


def arrived(norms: Sequence[float | None], eps: float = EPS) -> list[bool]:
    """Return for each transition whether any gradient arrived: 0 / 0 is no gain, whatever stands for it.

    Args:
        norms: As for :func:`gains`. Shape: ``[n]``.
        eps: A norm below this counts as zero.

    Returns:
        False where either norm is missing or both count as zero. Shape: ``[n - 1]``.
    """
    pairs = itertools.pairwise(norms)
    return [a is not None and b is not None and not (a < eps and b < eps) for a, b in pairs]


def passed(norms: Sequence[float | None], eps: float = EPS) -> list[bool]:
    """Return for each transition whether any gradient passed: of nothing there is no logarithm, only that of ``eps``.

    Args:
        norms: As for :func:`gains`. Shape: ``[n]``.
        eps: A norm below this counts as zero.

    Returns:
        False where either norm is missing or the one before counts as zero. Shape: ``[n - 1]``.
    """
    return [a is not None and b is not None and not a < eps for a, b in itertools.pairwise(norms)]


def _all_usable(norms: Sequence[float | None], eps: float) -> Sequence[float] | None:
    """Return the norms where each is finite and counts as more than zero, as in nearly every step, else ``None``."""
    known = [norm for norm in norms if norm is not None]
    usable = len(known) == len(norms) and all(map(math.isfinite, known)) and min(known, default=eps) >= eps
    return known if usable else None


def _gain(before: float | None, after: float | None, eps: float) -> float | None:
    if before is None or after is None:
        return None
    if math.isnan(before) or math.isnan(after) or (math.isinf(before) and math.isinf(after)):
        return math.nan
    if after < eps:
        return math.inf
    return before / after


def log_gains(norms: Sequence[float | None], eps: float = EPS) -> list[float | None]:
    """Return ``ln norms[i-1] - ln norms[i]``, each norm clamped to at least ``eps``.

    ``None``, inf and NaN stand where :func:`gains` has them. Shape: ``[n - 1]``.

    >>> log_gains([4.0, 2.0, 2.0, 0.0])
    [0.6931471805599453, 0.0, inf]
    """
    known = _all_usable(norms, eps)
    if known is not None and (not known or max(known) / min(known) < math.inf):
        logs = list(map(math.log, known))
        return list(map(operator.sub, logs, itertools.islice(logs, 1, None)))
    logs = [math.nan if norm is None else math.log(max(norm, eps)) for norm in norms]
    return [
        gain if gain is None or not math.isfinite(gain) else before - after
        for (before, after), gain in zip(itertools.pairwise(logs), gains(norms, eps), strict=True)
    ]


@dataclass(frozen=True)
class DepthGain:
    """The gain of the whole chain.

    Attributes:
        total: Sum of the log gains: ``ln ||dL/dh_0|| - ln ||dL/dh_N||``; NaN without two usable norms, and
            where the first or the last is zero.
        slope: Theil-Sen slope of ``ln ||dL/dh_i||`` over depth i, of the norms that are not zero; NaN without two.
    """

    total: float
    slope: float


def depth_gain(norms: Sequence[float | None], eps: float = EPS) -> DepthGain:
    """Return the scale-free quantities that decide vanishing and exploding.

    Args:
        norms: As for :func:`gains`. Shape: ``[n]``.
        eps: A norm below this counts as zero: a chain that is cut has no depth gain, as no number measures it.

    Source: Saxe et al. 2014, arXiv:1312.6120 (deep linear nets have exactly ``(N - 1) ln g``); Sen 1968.
    """
    usable = [(i, n) for i, n in enumerate(norms) if n is not None and math.isfinite(n)]
    nonzero = [(i, math.log(n)) for i, n in usable if n >= eps]
    if len(nonzero) < 2:
        return DepthGain(math.nan, math.nan)
    depth, logs = np.array(nonzero, dtype=np.float64).T
    whole = usable[0][1] >= eps and usable[-1][1] >= eps
    return DepthGain(float(logs[0] - logs[-1]) if whole else math.nan, theil_sen(depth, logs))


def summary_stats(norms: Sequence[float | None], eps: float = EPS) -> dict[str, float | int]:
    """Return the counts and means of the third seed document, with ``num_nonfinite`` so that they always add up.

    ``num_amplifying + num_damping + num_healthy + num_vanishing + num_missing + num_nonfinite`` is ``n - 1``. Means are
    NaN when no gain is finite.
    """
    every = gains(norms, eps)
    finite = [g for g in every if g is not None and math.isfinite(g)]
    logs = [g for g in log_gains(norms, eps) if g is not None and math.isfinite(g)]
    # A NaN or inf *norm* is not a vanished denominator: those transitions are counted apart (A15).
    broken = sum(
        1
        for before, after, gain in zip(norms, norms[1:], every, strict=False)
        if gain is not None and not (math.isfinite(before or 0.0) and math.isfinite(after or 0.0))
    )
    sound = [
        g
        for before, after, g in zip(norms, norms[1:], every, strict=False)
        if g is not None and math.isfinite(before or 0.0) and math.isfinite(after or 0.0)
    ]
    return {
        "mean_gain": math.fsum(finite) / len(finite) if finite else math.nan,
        "min_gain": min(finite, default=math.nan),
        "max_gain": max(finite, default=math.nan),
        "mean_log_gain": math.fsum(logs) / len(logs) if logs else math.nan,
        "num_amplifying": sum(g > AMPLIFYING for g in sound if math.isfinite(g)),
        "num_damping": sum(g < DAMPING for g in sound),
        "num_healthy": sum(DAMPING <= g <= AMPLIFYING for g in sound),
        "num_vanishing": sum(math.isinf(g) for g in sound),
        "num_missing": sum(g is None for g in every),
        "num_nonfinite": broken,
    }
