"""The field of gradients that an optimizer follows: does it contract, does it go round, does it keep its direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.metrics.jacobian import Linearized, check_twice

Floats = npt.NDArray[np.float64]


def gradient_field(losses: Sequence[Tensor], players: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Linearized]:
    """Return the field ``xi = (dL_k / dtheta_k)_k`` that simultaneous descent follows, and its Jacobian.

    Args:
        losses: One scalar per player, recorded with a graph.
        players: The parameters each loss is minimised over; a parameter belongs to one player.

    Returns:
        ``xi`` (shape: ``[parameters]``) and ``J = d xi / d theta``, which is the Hessian when there is one player.

    Raises:
        RuntimeError: An operation has no second derivative.

    Source: Balduzzi et al. 2018, arXiv:1802.05642, eq. (1) to (3).
    """
    parts: list[Tensor] = []
    for loss, player in zip(losses, players, strict=True):
        found = torch.autograd.grad(loss, list(player), create_graph=True, allow_unused=True)
        parts.extend(torch.zeros_like(p) if g is None else g for g, p in zip(found, player, strict=True))
    check_twice(parts)
    flat = [p for player in players for p in player]
    xi = torch.cat([part.detach().reshape(-1).to(flat[0]) for part in parts])
    return xi, Linearized(flat, parts)


@dataclass(frozen=True)
class Circulation:
    """What random probes show of the Jacobian J of a field, with ``S = (J + J^T)/2`` and ``A = (J - J^T)/2``.

    Attributes:
        divergence: ``-tr J / d`` of the descent flow; below 0 it contracts.
        expanding: Share of the probes in which it expands.
        rotation: ``||A||_F^2 / (||S||_F^2 + ||A||_F^2)``: 0 for a potential, 1 for a Hamiltonian game.
    """

    divergence: float
    expanding: float
    rotation: float


def circulation(jacobian: Linearized, *, single: bool, probes: int = 8, seed: int = 0) -> Circulation:
    """Estimate divergence and rotation share from Rademacher probes.

    Args:
        jacobian: Square, as :func:`gradient_field` returns it.
        single: Whether there is one loss: then J is a Hessian, its rotation is 0 and is not computed.
        probes: How many; the variance of the trace falls as one over their number.
        seed: Of a generator of our own.

    Source: Hutchinson 1990; Letcher et al. 2019, JMLR 20:84.
    """
    rng = np.random.default_rng(seed)
    traces, symmetric, antisymmetric = [], 0.0, 0.0
    for _ in range(probes):
        v = jacobian.like(rng.choice((-1.0, 1.0), size=jacobian.columns))
        back = jacobian.transposed(v).double()
        traces.append(float(torch.dot(v.double(), back)) / jacobian.columns)
        if not single:
            forth = jacobian.apply(v).double()
            symmetric += float((forth + back).square().sum())
            antisymmetric += float((forth - back).square().sum())
    both = symmetric + antisymmetric
    return Circulation(
        -math.fsum(traces) / probes, sum(t < 0 for t in traces) / probes, antisymmetric / both if both > 0 else 0.0
    )


def directional_curl(jacobian: Linearized, xi: Tensor) -> tuple[float, float]:
    """Return how strongly the field turns along itself.

    Args:
        jacobian: J of the field.
        xi: The field itself. Shape: ``[parameters]``.

    Returns:
        ``||A xi|| / ||xi||`` and ``||A xi||^2 / (||A xi||^2 + ||S xi||^2)``; 0 where the field is 0.
    """
    forth, back = jacobian.apply(xi).double(), jacobian.transposed(xi).double()
    around, along = float((forth - back).norm()) / 2, float((forth + back).norm()) / 2
    size, both = float(xi.double().norm()), around**2 + along**2
    return (around / size if size > 0 else 0.0), (around**2 / both if both > 0 else 0.0)


@dataclass(frozen=True)
class NoiseScale:
    """How large a batch is needed for its gradient to be more signal than noise.

    Attributes:
        signal: Unbiased estimate of ``|G|^2``, the squared norm of the true gradient; may be below 0 by chance.
        noise: Unbiased estimate of ``tr Sigma``, the variance of one sample's gradient.
    """

    signal: float
    noise: float

    @property
    def samples(self) -> float:
        """``B_simple = tr Sigma / |G|^2`` in samples; inf when no signal was found."""
        return self.noise / self.signal if self.signal > 0 else math.inf


def noise_scale(small_square: float, big_square: float, small: float, big: float) -> NoiseScale:
    """Estimate the gradient noise scale from squared norms at two batch sizes.

    Args:
        small_square: Mean ``||g||^2`` over batches of ``small`` samples.
        big_square: ``||g||^2`` over ``big`` samples.
        small: Samples in a small batch.
        big: Samples in the big batch, more than ``small``.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    signal = (big * big_square - small * small_square) / (big - small)
    return NoiseScale(signal, (small_square - big_square) / (1.0 / small - 1.0 / big))


def gradient_diversity(squares: Sequence[float], sum_square: float) -> float:
    """Return ``sum_i ||g_i||^2 / ||sum_i g_i||^2``: 1/n when all agree, 1 when orthogonal; inf when they cancel.

    Source: Yin et al. 2018, arXiv:1706.05699.
    """
    return math.fsum(squares) / sum_square if sum_square > 0 else math.inf
