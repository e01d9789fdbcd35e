"""What margin losses and the loss of unaligned sequences are given, against what they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradflow_export.autograd_graph.nodes import Op, below, by_number, exponent_of, kind_of, sources
from gradflow_export.hooks.backward_listener import saved

Node = Any
_SHAPES = frozenset(
    (Op.ALIAS, Op.CLONE, Op.RESHAPE_ALIAS, Op.SQUEEZE, Op.TO_COPY, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW)
)
_LIMITS = frozenset((Op.CLAMP, Op.CLAMP_MIN, Op.RELU))


def sign_of(node: Node, index: int) -> float:
    """Return -1.0 where a node turns the sign of an argument, as far as that costs nothing to know."""
    kind = kind_of(node)
    if kind in {Op.NEG, Op.RSUB} or (kind == Op.SUB and index == 1):
        return -1.0
    factor = getattr(node, "_saved_other", None) if by_number(node) else None
    if factor is None and kind in {Op.MUL, Op.DIV}:
        factor = saved(node, "other" if below(node) is not None else "self")
        # A number on another device would have to be waited for.
        factor = float(factor) if factor is not None and factor.dim() == 0 and factor.device.type == "cpu" else None
    return -1.0 if isinstance(factor, (int, float)) and factor < 0 else 1.0


def signs_of(node: Node) -> tuple[Tensor, Node] | None:
    """Return what a margin loss takes for labels of -1 and 1, and what made the scores.

    Known are ``soft_margin_loss``, ``hinge_embedding_loss`` and ``cosine_embedding_loss``, and every
    ``clamp(margin - labels * scores, min=0)`` or ``relu`` of it, squared or not: the hinge loss as it is written by
    hand, and ``margin_ranking_loss``.

    Args:
        node: Of a graph, close to its root.

    Returns:
        ``None`` where this is none of them. Where a loss compares labels with -1 and 1, what is neither is 0.
    """
    kind = kind_of(node)
    if kind == Op.SOFT_MARGIN_LOSS:
        target = saved(node, "target")
        return None if target is None else (target, below(node))
    if kind == Op.ADD and kind_of(below(node)) == kind_of(below(node, 1)) == Op.WHERE:
        return _compared(below(node), below(node, 1))
    return _clamped(node)


def _clamped(node: Node) -> tuple[Tensor, Node] | None:
    """Return the labels of ``clamp(margin - labels * scores, min=0)``, squared or not."""
    if exponent_of(node) == 2:
        node = below(node)
    kind = kind_of(node)
    limited = kind in {Op.CLAMP, Op.CLAMP_MIN} and getattr(node, "_saved_min", None) == 0
    if kind != Op.RELU and (not limited or getattr(node, "_saved_max", None) is not None):
        return None
    inner = _only(node)
    product = _only(inner) if kind_of(inner) in {Op.ADD, Op.RSUB, Op.SUB} else None
    if kind_of(product) != Op.MUL or (below(product) is None) == (below(product, 1) is None):
        return None
    labels = saved(product, "self" if below(product) is None else "other")
    if labels is None or labels.dim() == 0 or labels.numel() < 2:
        return None
    # One number for each pair of a batch is a mask of the pairs that count.
    pairs = labels.dim() == 2 and labels.shape[0] == labels.shape[1] > 1
    return None if pairs else (labels, _only(product))


def _only(node: Node) -> Node:
    """Return the one node that an operation got its argument from, changes of shape aside, else ``None``."""
    found = sources(node)
    here = found[0] if len(found) == 1 else None
    while kind_of(here) in _SHAPES:
        here = below(here)
    return here


def _compared(one: Node, other: Node) -> tuple[Tensor, Node] | None:
    """Return the labels behind ``where(labels == 1, ...) + where(labels == -1, clamp(...))``."""
    limited = [kind_of(_only(node)) in _LIMITS for node in (one, other)]
    if limited[0] == limited[1]:
        return None
    positive, negative = (other, one) if limited[0] else (one, other)
    here, there = saved(positive, "condition"), saved(negative, "condition")
    if here is None or there is None or here.shape != there.shape:
        return None
    return here.to(torch.float32) - there.to(torch.float32), _only(positive)
