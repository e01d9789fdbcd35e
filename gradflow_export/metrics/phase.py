"""Gradients and changes split into phase and magnitude: of complex entries, or of a row's direction and length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_NODES = 8
"""Fewest nodes whose gradients are correlated."""


def polar_gradients(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to phase and magnitude of complex weights.

    Args:
        weight: Complex. Shape: any.
        gradient: PyTorch's gradient ``dL/da + i dL/db`` for ``w = a + ib``. Shape: that of ``weight``.

    Returns:
        ``dL/dphi = |w| Im(conj(u) g)`` and ``dL/dr = Re(conj(u) g)`` with ``u = w / |w|``; both 0 where w is 0. Shape
        of both: that of ``weight``, real.

    Source: chain rule through ``w = r exp(i phi)``; ``torch.polar``.
    """
    size = weight.abs()
    turned = torch.where(size > 0, weight / size, torch.zeros_like(weight)).conj() * gradient
    return size * turned.imag, turned.real


def polar_changes(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far phase and magnitude of complex weights moved.

    Args:
        before: Complex. Shape: any.
        after: Shape: that of ``before``.

    Returns:
        Phase after minus before, wrapped to (-pi, pi], 0 where either is 0, and magnitude after minus before. Shape of
        both: that of ``before``, real. Units: radian, weight.
    """
    return torch.angle(after * before.conj()), after.abs() - before.abs()


def wrap(angle: Tensor) -> Tensor:
    """Return angles wrapped to (-pi, pi]. Shape: that of ``angle``. Unit: radian.

    >>> wrap(torch.tensor([0.5, 2.0 * torch.pi + 0.5]))
    tensor([0.5000, 0.5000])
    """
    wrapped = math.pi - torch.remainder(math.pi - angle, 2 * math.pi)
    return torch.where(angle.abs() < math.pi, angle, wrapped)  # so that small angles keep all their digits


def row_gradients(weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return how strong the gradient is across and along each row of real weights.

    Args:
        weight: Shape: ``[rows, columns]``.
        gradient: Shape: that of ``weight``.

    Returns:
        ``||g - <g, u> u||`` and ``<g, u>`` with ``u = w / ||w||``, by row; the second is 0 for a layer that a
        normalisation follows. Shape of both: ``[rows]``.

    Source: weight normalisation, Salimans and Kingma 2016, arXiv:1602.07868.
    """
    size = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    unit = torch.where(size > 0, weight / size, torch.zeros_like(weight))
    along = (gradient * unit).sum(dim=1)
    return torch.linalg.vector_norm(gradient - along[:, None] * unit, dim=1), along


def row_changes(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much each row of real weights turned, and by how much its length changed.

    Args:
        before: Shape: ``[rows, columns]``.
        after: Shape: that of ``before``.

    Returns:
        The angle between the rows in [0, pi], 0 where either is 0, and length after minus before. Shape of both:
        ``[rows]``. Units: radian, weight.

    Source: ``2 atan2(||u - v||, ||u + v||)``, which keeps small angles exact; Kahan 2006.
    """
    a, b = (torch.linalg.vector_norm(rows, dim=1, keepdim=True) for rows in (before, after))
    u, v = before * b, after * a
    angle = 2 * torch.atan2(torch.linalg.vector_norm(u - v, dim=1), torch.linalg.vector_norm(u + v, dim=1))
    return angle, (b - a)[:, 0]


def row_turns(angles: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return by how much each row turned, from the changes of phase of its entries.

    Args:
        angles: Wrapped to (-pi, pi]. Shape: ``[rows, entries]``.
        counted: False for entries that have no phase; ``None`` counts all. Shape: that of ``angles``.

    Returns:
        The root mean square over the entries that count, so that a row all of whose entries turn by 0.5 turns by 0.5,
        however long it is; 0 where none counts. Shape: ``[rows]``, in [0, pi]. Unit: radian.
    """
    count = torch.full_like(angles[:, 0], angles.shape[1]) if counted is None else counted.sum(dim=1).to(angles.dtype)
    angles = angles if counted is None else torch.where(counted, angles, torch.zeros_like(angles))
    turns: Tensor = torch.linalg.vector_norm(angles, dim=1) / count.clamp(min=1.0).sqrt()
    return turns


def node_sizes(values: Tensor) -> Tensor:
    """Return the L2 norm of each row. Shape of values: ``[nodes, entries]``; of the result: ``[nodes]``."""
    sizes: Tensor = torch.linalg.vector_norm(values, dim=1)
    return sizes


def quiet_share(sizes: Tensor, deviations: float = 6.0, factor: float = 20.0) -> Tensor:
    """Return the share of nodes whose gradient is unusually small for their layer.

    Args:
        sizes: Gradient norm of each node of one layer. Shape: ``[nodes]``, not empty.
        deviations: Least distance below the median of ln norms, in robust standard deviations.
        factor: Least factor below the median, so that a layer of nearly equal norms has none.

    Returns:
        Shape: scalar, in [0, 1]. A node without any gradient is unusually small unless most are.

    Source: modified z-score with the median absolute deviation, Iglewicz and Hoaglin 1993.
    """
    logs, centre = sizes.log(), _median(sizes).log()
    spread = 1.4826 * _median((logs - centre).abs().nan_to_num(nan=0.0, posinf=math.inf))
    limit = torch.maximum(deviations * spread, torch.full_like(spread, math.log(factor)))
    known = sizes.isfinite().all() & (centre > -math.inf)
    return (known & (logs < centre - limit)).to(sizes.dtype).mean()


def _median(values: Tensor) -> Tensor:
    """Return the middle value, or the mean of the two in the middle, as NumPy does. Shape: scalar."""
    ordered, count = values.sort().values, len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def correlations(phase: Tensor, magnitude: Tensor) -> Tensor:
    """Return how the gradients of phase and magnitude go together across nodes.

    Args:
        phase: ``|g_phi|`` by node. Shape: ``[nodes]``.
        magnitude: ``|g_r|`` by node. Shape: ``[nodes]``.

    Returns:
        Pearson's r of their logarithms and Spearman's of their ranks, ties in order of appearance, over the nodes where
        both are above 0; NaN where fewer than eight are left or one side does not vary. Shape: ``[2]``, in [-1, 1].

    Source: Pearson 1895; Spearman 1904.
    """
    usable = ((phase > 0) & (magnitude > 0)).to(phase.dtype)
    logs = [torch.where(usable > 0, values, torch.ones_like(values)).log() for values in (phase, magnitude)]
    # Nodes without a gradient rank last on both sides: among the others they would tie in the same order and agree.
    last = [torch.where(usable > 0, values, torch.full_like(values, math.inf)) for values in (phase, magnitude)]
    ranks = [values.argsort(stable=True).argsort().to(phase.dtype) for values in last]
    return torch.stack([_pearson(logs[0], logs[1], usable), _pearson(ranks[0], ranks[1], usable)])


def _pearson(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    count = weight.sum()
    a, b = ((values - (values * weight).sum() / count) * weight for values in (a, b))
    r = torch.div(torch.dot(a, b), torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)).clamp(-1, 1)
    return torch.where(count >= LEAST_NODES, r, torch.full_like(r, math.nan))
