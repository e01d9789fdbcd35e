"""Penalties on weights that are taken off a loss: nothing then keeps the weights from growing."""

from __future__ import annotations

from typing import Any

from gradflow_export.autograd_graph.loss_domain import sign_of
from gradflow_export.autograd_graph.loss_shape import SHAPES
from gradflow_export.autograd_graph.nodes import Op, below, by_number, inputs, kind_of, walk
from gradflow_export.hooks.backward_listener import saved

Node = Any

_MOST = 4096
_SUMS = SHAPES | frozenset((Op.ADD, Op.CAT, Op.MEAN, Op.NEG, Op.RSUB, Op.STACK, Op.SUB, Op.SUM, Op.UNBIND))
_SIZES = frozenset((Op.ABS, Op.LINALG_VECTOR_NORM, Op.MSE_LOSS, Op.MUL, Op.NORM, Op.POW, Op.SQRT))
_WITHIN = _SUMS | _SIZES | frozenset((Op.BMM, Op.LEAF, Op.MM))


def weights_that_grow(root: Any) -> Node:
    """Return a size of weights that a loss rewards; ``None`` where it rewards none.

    A size is a sum of squares or of absolute values, a norm, or a distance from something, of matrices of weights and
    of nothing else: what the model computes has no part in it.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    waiting, seen = [(root.grad_fn, 1.0)], {root.grad_fn}
    while waiting and len(seen) < _MOST:
        node, sign = waiting.pop()
        if sign < 0 and _is_size(node):
            return node
        if kind_of(node) in _SUMS or _is_scaled(node):
            for index, source in enumerate(inputs(node)):
                if source is not None and source not in seen:
                    seen.add(source)
                    waiting.append((source, sign * sign_of(node, index)))
    return None


def _is_scaled(node: Node) -> bool:
    """Whether a node multiplies by one number; one on another device, which would have to be waited for, is above 0."""
    if by_number(node) or kind_of(node) not in {Op.DIV, Op.MUL} or sum(map(bool, inputs(node))) != 1:
        return by_number(node)
    other = saved(node, "other") if below(node) is not None else saved(node, "self")
    return other is not None and other.dim() == 0 and (kind_of(node) == Op.MUL or below(node) is not None)


def _is_size(node: Node) -> bool:
    """Whether a node is a number of 0 or more that is made of weights alone, and grows with them."""
    kind = kind_of(node)
    if kind not in _SIZES or (kind == Op.MUL and below(node) is not below(node, 1)):
        return False
    if kind == Op.POW and (getattr(node, "_saved_exponent", None) or 1) % 2:
        return False
    made = list(walk([node], most=_MOST))
    weights = [each.variable for each in made if kind_of(each) == Op.LEAF]
    return any(weight.dim() > 1 for weight in weights) and all(kind_of(each) in _WITHIN for each in made)
