"""Penalties on weights that are taken off a loss: nothing then keeps the weights from growing."""

from __future__ import annotations

from typing import Any

from gradflow_export.autograd_graph.loss_balance import is_scaled
from gradflow_export.autograd_graph.loss_domain import sign_of
from gradflow_export.autograd_graph.loss_shape import SHAPES
from gradflow_export.autograd_graph.nodes import Op, below, exponent_of, inputs, kind_of, longest, sources_in

Node = Any

_MOST = 4096
_SUMS = SHAPES | frozenset((Op.ADD, Op.CAT, Op.MEAN, Op.NEG, Op.RSUB, Op.STACK, Op.SUB, Op.SUM, Op.UNBIND))
_SIZES = frozenset((Op.ABS, Op.LINALG_VECTOR_NORM, Op.MSE_LOSS, Op.MUL, Op.NORM, Op.POW, Op.SQRT))
_PRODUCTS = frozenset((Op.BMM, Op.MM))
_WITHIN = _SUMS | _SIZES | _PRODUCTS | frozenset((Op.LEAF,))


def weights_that_grow(root: Any) -> Node:
    """Return a size of weights that a loss rewards; ``None`` where it rewards none.

    A size is a sum of squares or of absolute values, a norm, or a distance from something, of matrices of weights and
    of nothing else: what the model computes has no part in it.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    waiting, seen, most = [(root.grad_fn, 1.0)], {root.grad_fn}, longest(_MOST)
    while waiting and len(seen) < most:
        node, sign = waiting.pop()
        if sign < 0 and _is_size(node):
            return node
        if kind_of(node) in _SUMS or is_scaled(node):
            for index, source in enumerate(inputs(node)):
                if source is not None and source not in seen:
                    seen.add(source)
                    waiting.append((source, sign * sign_of(node, index)))
    return None


def _is_size(node: Node) -> bool:
    """Whether a node is a number of 0 or more that is made of weights alone, and grows with them."""
    kind = kind_of(node)
    if kind not in _SIZES or (kind == Op.MUL and below(node) is not below(node, 1)):
        return False
    if kind == Op.POW and exponent_of(node) % 2:
        return False
    made = sources_in(node, _MOST) or {}  # nothing is proven of a graph that is too long
    weights = [each.variable for each in made if kind_of(each) == Op.LEAF]
    # A product with what has no graph is what a model makes of data.
    own = all(kind_of(each) in _WITHIN and (kind_of(each) not in _PRODUCTS or all(inputs(each))) for each in made)
    return own and any(weight.dim() > 1 for weight in weights)
