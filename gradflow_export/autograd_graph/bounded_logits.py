"""Cross-entropies written by hand whose logits are bounded, so that no answer can be sure."""

from __future__ import annotations

from typing import Any

from gradflow_export.autograd_graph.bounds import NARROW, before_logits, bounds_of
from gradflow_export.autograd_graph.loss_graph import through_shapes
from gradflow_export.autograd_graph.loss_shape import argument, shape_of
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, sources

Node = Any
Form = tuple[str, float, Node]
"""What is wrong, its number, and the node that made the predictions."""


def written(node: Node) -> Form | None:
    """Return the logarithm of a softmax that was written out, ``exp(x) / exp(x).sum()``, of bounded logits."""
    share = argument(node)
    share = through_shapes(below(share)) if kind_of(share) in {Op.GATHER, Op.INDEX} else share
    top, total = (through_shapes(below(share, side)) for side in (0, 1)) if kind_of(share) == Op.DIV else (None, None)
    if kind_of(top) != Op.EXP or kind_of(total) != Op.SUM or through_shapes(below(total)) is not top:
        return None
    given = through_shapes(below(top))
    if kind_of(given) == Op.SUB:  # the greatest score, so that none overflows
        given = through_shapes(below(given))
    return _form(given, shape_of(top)[-1])


def summed_up(node: Node) -> Form | None:
    """Return the logarithm of a sum of exponentials of bounded logits."""
    made = below(node)
    if kind_of(node) == Op.LOG:
        power = through_shapes(below(through_shapes(made))) if kind_of(through_shapes(made)) == Op.SUM else None
        made = below(power) if kind_of(power) == Op.EXP else None
    return _form(through_shapes(made), shape_of(made)[-1]) if shape_of(made) else None


def of_one(node: Node) -> Form | None:
    """Return the logarithm of a logistic function of a bounded logit, or of that times a label of -1 or 1."""
    made = through_shapes(below(node))
    if kind_of(node) == Op.LOG_1P:
        made = through_shapes(below(made)) if kind_of(made) == Op.EXP else None
    while kind_of(made) in {Op.MUL, Op.NEG} and len(sources(made)) == 1:
        made = through_shapes(sources(made)[0])
    return _form(made, 0)


def bounded(node: Node, classes: int) -> list[tuple[str, float]]:
    """Return what :func:`before_logits` does, but for what has one bound alone."""
    narrow = bounds_of(node).width <= NARROW and classes != 1
    return [*before_logits(node, classes).items()] if narrow else []


def _form(node: Node, classes: int) -> Form | None:
    return next(((found, least, node) for found, least in bounded(node, classes)), None)
