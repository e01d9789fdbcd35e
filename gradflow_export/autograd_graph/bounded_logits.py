"""Cross-entropies written by hand whose logits are bounded, so that no answer can be sure."""

from __future__ import annotations

from typing import Any

from gradflow_export.autograd_graph.bounds import NARROW, before_logits, bounds_of
from gradflow_export.autograd_graph.loss_shape import SHAPES, argument, shape_of
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, sources, through

Node = Any
Form = tuple[str, float, Node]
"""What is wrong, its number, and the node that made the predictions."""


def written(node: Node) -> Form | None:
    """Return the logarithm of a softmax that was written out, ``exp(x) / exp(x).sum()``, of bounded logits."""
    share = argument(node)
    share = _bare(below(share)) if kind_of(share) in {Op.GATHER, Op.INDEX} else share
    top, total = (_bare(below(share, side)) for side in (0, 1)) if kind_of(share) == Op.DIV else (None, None)
    if kind_of(top) != Op.EXP or kind_of(total) != Op.SUM or _bare(below(total)) is not top:
        return None
    given = _bare(below(top))
    given = _bare(below(given)) if kind_of(given) == Op.SUB else given  # the greatest score, so that none overflows
    return _form(given, shape_of(top)[-1])


def summed_up(node: Node) -> Form | None:
    """Return the logarithm of a sum of exponentials of bounded logits."""
    made = below(node)
    if kind_of(node) == Op.LOG:
        power = _bare(below(_bare(made))) if kind_of(_bare(made)) == Op.SUM else None
        made = below(power) if kind_of(power) == Op.EXP else None
    return _form(_bare(made), shape_of(made)[-1]) if shape_of(made) else None


def of_one(node: Node) -> Form | None:
    """Return the logarithm of a logistic function of a bounded logit, or of that times a label of -1 or 1."""
    made = _bare(below(node))
    if kind_of(node) == Op.LOG_1P:
        made = _bare(below(made)) if kind_of(made) == Op.EXP else None
    while kind_of(made) in {Op.MUL, Op.NEG} and len(sources(made)) == 1:
        made = _bare(sources(made)[0])
    return _form(made, 0)


def bounded(node: Node, classes: int) -> list[tuple[str, float]]:
    """Return what :func:`before_logits` does, but for what has one bound alone."""
    narrow = bounds_of(node).width <= NARROW and classes != 1
    return [*before_logits(node, classes).items()] if narrow else []


def _form(node: Node, classes: int) -> Form | None:
    return next(((found, least, node) for found, least in bounded(node, classes)), None)


def _bare(node: Node) -> Node:
    """Return the first node from here that does more than change shape or number format."""
    return through(node, SHAPES)
