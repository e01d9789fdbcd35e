"""Cross-entropies that were written out: the score of the right class is picked, or a softplus taken, by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradflow_export.autograd_graph.loss_shape import SHAPES, argument, dim_of
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, through
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.metrics.constants import Kind

Node = Any
_AROUND = SHAPES | {Op.SELECT}


class Picked(NamedTuple):
    """A loss of scores and targets: its kind, what made the scores, and both of them."""

    kind: Kind
    behind: Node
    predictions: Tensor
    targets: Tensor


def picked_loss(node: Node) -> Picked | None:
    """Return what a cross-entropy was made of that no function of torch computes.

    Known are ``log_softmax(scores).gather(1, targets)`` and ``log_softmax(scores)[rows, targets]``, as they enter a
    loss with a minus, ``logsumexp(scores) - scores.gather(1, targets)`` and ``softplus(scores) - targets * scores``.

    Args:
        node: Of a graph, close to its root; what it gives is averaged or summed up, and weighted by nothing.

    Returns:
        ``None`` where this is none of them. Predictions of classes are logarithms of probabilities.
    """
    kind = kind_of(node)
    if kind == Op.SUB and getattr(node, "_saved_alpha", 1) == 1:
        return _difference(_bare(below(node)), through(below(node, 1), _AROUND - {Op.INDEX}))
    if kind not in {Op.GATHER, Op.INDEX}:
        return None
    softmax = _bare(below(node))
    scores = saved(softmax, "result") if kind_of(softmax) == Op.LOG_SOFTMAX else None
    return None if scores is None else _classes(node, dim_of(softmax), _bare(below(softmax)), scores)


def true_of_two(node: Node) -> Node:
    """Return what made the probability of one class of two, of which the logarithms of the true ones are added up.

    Known is ``targets * p.log() + (1 - targets) * (1 - p).log()``, with targets of both classes and ``p`` of a sigmoid.

    Args:
        node: Of a graph, close to its root.

    Returns:
        ``None`` where this is none of it, or the targets are on a device that would be waited for.
    """
    parts = [_weighed_logarithm(_bare(below(node, side))) for side in (0, 1)] if kind_of(node) == Op.ADD else []
    if len(parts) != 2 or parts[0][0] is None or parts[0][0] is not parts[1][0]:
        return None
    one, other = (weights for _, weights in parts)
    both = one.shape == other.shape and one.device.type == "cpu" and torch.equal(one + other, torch.ones_like(one))
    return parts[0][0] if both and 0 < float(one.float().mean()) < 1 else None


def _weighed_logarithm(node: Node) -> tuple[Node, Tensor]:
    """Return the sigmoid whose logarithm a product has, and what that is multiplied by."""
    for side, name in ((0, "other"), (1, "self")) if kind_of(node) == Op.MUL else ():
        logarithm, weights = _bare(below(node, side)), saved(node, name)
        made = argument(below(logarithm)) if kind_of(logarithm) in {Op.LOG, Op.LOG_1P} else logarithm
        if below(node, 1 - side) is None and weights is not None and kind_of(made) in {Op.SIGMOID, Op.LOG_SIGMOID}:
            scores = _bare(below(made))
            return _bare(below(scores)) if kind_of(scores) == Op.NEG else scores, weights
    return None, torch.empty(0)


def _difference(level: Node, score: Node) -> Picked | None:
    values, behind = saved(level, "self"), _bare(below(level))
    if values is None or behind is None:
        return None
    if kind_of(level) == Op.LOGSUMEXP and kind_of(score) in {Op.GATHER, Op.INDEX} and _bare(below(score)) is behind:
        return _classes(score, values.dim() - 1, behind, values.float().log_softmax(-1))
    if kind_of(level) != Op.SOFTPLUS or kind_of(score) != Op.MUL:
        return None
    sides = [side for side, name in ((0, "other"), (1, "self")) if _bare(below(score, side)) is behind]
    targets = saved(score, ("other", "self")[sides[0]]) if len(sides) == 1 else None
    return None if targets is None or targets.shape != values.shape else Picked("binary", behind, values, targets)


def _classes(pick: Node, dim: int | None, behind: Node, scores: Tensor) -> Picked | None:
    targets = saved(pick, "index") if kind_of(pick) == Op.GATHER else _column(pick, scores)
    fits = targets is not None and scores.dim() == 2 and dim == 1 and targets.numel() == len(scores)
    return Picked("classes", behind, scores, targets.reshape(-1)) if fits and targets is not None else None


def _column(pick: Node, scores: Tensor) -> Tensor | None:
    """Return what picked a column of each row, where the rows are all of them in order."""
    indices = getattr(pick, "_saved_indices", ())
    if len(indices) != 2 or any(not isinstance(index, Tensor) for index in indices) or scores.device.type != "cpu":
        return None
    rows, columns = (index.detach().reshape(-1) for index in indices)
    return columns if rows.equal(torch.arange(len(scores))) else None


def _bare(node: Node) -> Node:
    while kind_of(node) in _AROUND:
        node = below(node)
    return node
