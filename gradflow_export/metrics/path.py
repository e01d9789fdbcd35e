"""The path of the weights over a window of steps: does it go straight, turn, or go round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.arrays.algebra import eigenvectors, product
from gradflow_export.metrics.direction import coherence

Floats = npt.NDArray[np.float64]

RESTING = 1e-6
"""Greatest spread of a path, relative to the size of the weights, that is rounding and no path."""


@dataclass(frozen=True)
class PathStatistics:
    """How a path runs.

    Attributes:
        winding: Turns about the mean of the window, in the plane of the two greatest principal components.
        plane: Share of the path's variance in that plane.
        growth: Root mean square distance from the mean in the second half of the window over that in the first.
        work: ``sum g_{t+1} . d_t / sum |g_{t+1}| |d_t|`` with ``d_t`` the move from t to t + 1: -1 where every move
            leads downhill to its very end, near 0 for noise, and 0 or more along a closed path in the field of a single
            loss.
        straightness: ``|sum d_t| / sum |d_t|``.
        turning: Mean angle between consecutive moves, in radians.
        coherence: Mean pairwise cosine of the gradients of the window.
    """

    winding: float = 0.0
    plane: float = 0.0
    growth: float = 1.0
    work: float = 0.0
    straightness: float = 0.0
    turning: float = 0.0
    coherence: float = math.nan


def path_statistics(positions: Floats, gradients: Floats, players: Sequence[int] = ()) -> PathStatistics:
    """Return how a path runs.

    Args:
        positions: Weights, or a sample of them, at each step. Shape: ``[n, entries]``, n at least 3, finite.
        gradients: The gradients there. Shape: ``[n, entries]``, finite.
        players: Entries of each player, in order; each is measured in units of its own spread, because nothing compares
            the units of two players. Empty means one player.

    Source: Mardia and Jupp 2000, Directional Statistics; principal components of a random walk wind at most three
        quarters of a turn in the long limit (Antognini and Sohl-Dickstein 2018, arXiv:1806.08805). That a closed path
        in a gradient field does no work is the gradient theorem.
    """
    centred = positions - _mean(positions)
    units = _units(centred, players)
    if not units.any() or float(np.abs(centred).max()) <= RESTING * float(np.abs(positions).max()):
        return PathStatistics(coherence=coherence(gradients)[1])
    gradients = gradients / float(np.abs(gradients).max() or 1.0)
    centred, scaled = centred / np.where(units > 0, units, 1.0), gradients * units
    variance, axes = eigenvectors(product(centred, centred.T))
    variance = np.maximum(variance, 0.0)
    plane = axes[:, -2:] * np.sqrt(variance[-2:])
    angles = np.arctan2(plane[:, 1], plane[:, 0])
    if not (np.abs(angles[1:] - angles[:-1]) < math.pi).all():
        angles = np.unwrap(angles)
    radii, half = np.add.reduce(plane * plane, 1), len(plane) // 2
    inner = float(radii[:half].mean())
    moves = centred[1:] - centred[:-1]
    lengths = _lengths(moves)
    effort = float((lengths * _lengths(scaled[1:])).sum())
    cosines = _ratio(np.add.reduce(moves[1:] * moves[:-1], 1), lengths[1:] * lengths[:-1])
    return PathStatistics(
        winding=abs(float(angles[-1] - angles[0])) / math.tau,
        plane=float(variance[-2:].sum() / variance.sum()),
        growth=math.sqrt(float(radii[half:].mean()) / inner) if inner > 0 else math.inf,
        work=float((moves * scaled[1:]).sum()) / effort if effort > 0 else 0.0,
        straightness=float(np.linalg.norm(moves.sum(axis=0)) / lengths.sum()),
        turning=float(np.arccos(np.minimum(np.maximum(cosines, -1.0), 1.0)).mean()),
        coherence=coherence(gradients)[1],
    )


def path_errors(positions: Floats, gradients: Floats, players: Sequence[int]) -> PathStatistics:
    """Return the standard error of each statistic where the entries are some of all weights.

    Half the difference between what either half of each player's entries says by itself.

    Args:
        positions: As for :func:`path_statistics`.
        gradients: The gradients there.
        players: Entries of each player, in order; at least 2 each.

    Source: the method of random groups, Wolter 2007, Introduction to Variance Estimation, section 2.2.
    """
    places = np.concatenate([np.arange(size) for size in players])
    halves = []
    for odd in (0, 1):
        own = [(size + 1 - odd) // 2 for size in players]
        halves.append(astuple(path_statistics(positions[:, places % 2 == odd], gradients[:, places % 2 == odd], own)))
    return PathStatistics(*(0.5 * abs(a - b) for a, b in zip(*halves, strict=True)))


def radii(positions: Floats, players: Sequence[int]) -> list[float]:
    """Return the root mean square distance from the mean of the window, player by player.

    Args:
        positions: Shape: ``[n, entries]``.
        players: Entries of each player, in order.
    """
    squares = _mean(np.square(positions - _mean(positions)))
    ends = list(itertools.accumulate(players))
    return [math.sqrt(float(np.add.reduce(squares[end - size : end]))) for size, end in zip(players, ends, strict=True)]


def _units(centred: Floats, players: Sequence[int]) -> Floats:
    """Return the unit of each entry: the spread of the player it belongs to, 0 where that rests."""
    sizes = players or (centred.shape[1],)
    return np.repeat(
        [radius / math.sqrt(max(size, 1)) for radius, size in zip(radii(centred, sizes), sizes, strict=True)], sizes
    )


def _mean(rows: Floats) -> Floats:
    """Return what the method of arrays does, without its detours: a window is looked at in code that is no more warm.

    Args:
        rows: Shape: ``[n, entries]``.
    """
    return np.asarray(np.add.reduce(rows, 0) / len(rows), dtype=np.float64)


def _lengths(rows: Floats) -> Floats:
    """Return the length of each row. Shape: ``[n]``."""
    return np.asarray(np.sqrt(np.add.reduce(rows * rows, 1)), dtype=np.float64)


def _ratio(over: Floats, under: Floats) -> Floats:
    return np.divide(over, under, out=np.ones_like(over), where=under > 0)
