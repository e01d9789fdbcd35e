"""Losses that do nothing but draw two predictions together: of two networks, or of each sample and itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradflow_export.autograd_graph.layer_graph import NORMALISATIONS
from gradflow_export.autograd_graph.loss_graph import LAYERS
from gradflow_export.autograd_graph.loss_shape import SHAPES
from gradflow_export.autograd_graph.nodes import Op, below, inputs, is_variant, kind_of, sources, sources_in
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.records.loss_mistakes import WITH_ITSELF

Node = Any

_NEAR, _WHOLE, _FEW = 96, 20_000, 8
_EPS = 1e-5
_COMPARES = frozenset((Op.MSE_LOSS, Op.MUL, Op.SMOOTH_L1_LOSS))
_SIZES = frozenset((Op.ABS, Op.LINALG_VECTOR_NORM, Op.POW))
_ACTIVATIONS = frozenset((Op.CLAMP_MIN, Op.LOG_SOFTMAX, Op.SIGMOID, Op.SOFTMAX, Op.TANH))
_SUMS = frozenset((Op.ADD, Op.DIV, Op.MEAN, Op.NEG, Op.RSUB, Op.SUB, Op.SUM, Op.XLOGY))
_TO_EACH = SHAPES | _COMPARES | _SIZES | _ACTIVATIONS | _SUMS


def drawn_together(root: Any) -> Node:
    """Return the layer that made one of two predictions that a loss only draws together, ``None`` for other losses.

    Nothing from outside enters between the layers and the loss, neither targets nor weights of samples, and nothing
    compares samples with each other: the loss is least where all of them get one answer. A differential equation, whose
    inputs are differentiated by, has other answers.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    ends: dict[Node, frozenset[Node]] = {}

    def ends_of(node: Node) -> frozenset[Node]:
        if node in ends:
            return ends[node]
        if _is_layer(node):
            ends[node] = frozenset([node])
            return ends[node]
        if kind_of(node) not in _TO_EACH or _takes_from_outside(node) or len(ends) > _NEAR:
            raise LookupError
        ends[node] = frozenset[Node]().union(*map(ends_of, sources(node)))
        return ends[node]

    try:
        ends_of(root.grad_fn)
    except LookupError:
        return None
    # A difference alone is no distance: a critic scores what is real above what is not.
    compares = [node for node in ends if kind_of(node) in _COMPARES]
    compares += [below(node) for node in ends if kind_of(node) in _SIZES and kind_of(below(node)) == Op.SUB]
    logarithms = (node for node in ends if {kind_of(each) for each in sources(node)} == {Op.LOG_SOFTMAX})
    compares += [node for node in logarithms if kind_of(node) == Op.SUB]  # as a divergence holds it
    compared = ([ends[each] for each in sources(node)] for node in compares)
    apart = [sides for sides in compared if len(sides) == 2 and all(sides) and sides[0].isdisjoint(sides[1])]
    return next(iter(apart[0][0])) if apart and not _differentiates_inputs(root.grad_fn) else None


def own_positives(root: Any) -> Node:
    """Return the product of a contrastive loss in which each sample is its own positive, ``None`` for other losses.

    Both sides of the product are equal bit for bit, and the entry on the diagonal is the class of each row. As one part
    of a loss this holds samples apart on purpose; as all of it, it takes away what two views differ in.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    waiting, products = [root.grad_fn], []
    for _ in range(_FEW):
        if not waiting:
            break
        node = waiting.pop()
        if kind_of(node) != Op.NLL_LOSS:
            if kind_of(node) not in _SUMS | {Op.MUL} or _takes_from_outside(node):
                return None
            waiting += sources(node)
            continue
        targets, made = saved(node, "target"), below(node)
        while kind_of(made) in SHAPES | {Op.DIV, Op.LOG_SOFTMAX, Op.MUL}:
            made = below(made)
        one, other = saved(made, "self"), saved(made, "mat2")
        if kind_of(made) != Op.MM or targets is None or one is None or other is None or one.device.type != "cpu":
            return None
        own = targets.equal(torch.arange(len(one))) and one.equal(other.T) and not one.equal(one.roll(1, 0))
        if not own or len(one) < _FEW:
            return None
        products.append(made)
    return products[0] if products and not waiting else None


def with_itself(node: Any) -> tuple[str, float, Node] | None:
    """Return a distance or ratio of two outputs that are equal to the bit, but for the ``eps`` that norms add.

    Args:
        node: Of the graph of a loss; what it takes the size of.

    Returns:
        The mistake, its sign, and the layer behind it; ``None`` for what is no such distance.
    """
    apart, gap = below(node), saved(node, "self")
    apart = below(apart) if kind_of(apart) == Op.ADD and below(apart, 1) is None else apart
    given = sources(apart)
    if kind_of(apart) == Op.SUB and len(given) == 2 and given[0] is given[1]:
        return WITH_ITSELF, 1.0, below(apart)
    if kind_of(apart) != Op.SUB or len(given) < 2 or gap is None or gap.device.type != "cpu":
        return None
    alike = gap.numel() > 1 and bool((gap == gap.flatten()[0]).all()) and abs(float(gap.flatten()[0])) <= _EPS
    return (WITH_ITSELF, 1.0, below(apart)) if alike else None


def _differentiates_inputs(root: Node) -> bool:
    """Whether something else than parameters requires a gradient: a derivative by it is compared, as in a PDE."""
    nodes = sources_in(root, _WHOLE)
    return nodes is None or any(kind_of(n) == Op.LEAF and not isinstance(n.variable, nn.Parameter) for n in nodes)


def _is_layer(node: Node) -> bool:
    """Whether a node is a layer with a weight that is trained, or a normalisation."""
    kind = kind_of(node)
    weight = below(node, LAYERS[kind][2]) if kind in LAYERS else None
    while kind_of(weight) in SHAPES:
        weight = below(weight)
    return kind in NORMALISATIONS or kind_of(weight) == Op.LEAF


def _takes_from_outside(node: Node) -> bool:
    """Whether a tensor without a graph, other than a single number, may be an argument."""
    kind, given = kind_of(node), inputs(node)
    if None not in given or is_variant(node, Op.RSUB, 1):
        return False
    if kind in {Op.MUL, Op.DIV}:
        other = saved(node, "self" if given[0] is None else "other")
        return other is not None and other.numel() > 1
    return kind in {*_COMPARES, Op.ADD, Op.RSUB, Op.SUB, Op.XLOGY}
