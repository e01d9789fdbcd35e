"""Finds changes of shape that were to move dimensions: view and reshape keep the order in memory, and mix entries."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from itertools import accumulate, combinations, pairwise

from gradflow_export.autograd_graph.loss_graph import Node
from gradflow_export.autograd_graph.loss_shape import shape_of
from gradflow_export.autograd_graph.nodes import Op, below, inputs, kind_of, through
from gradflow_export.checks.leakage import Graph, owner_below

_VIEWS = frozenset((Op.RESHAPE_ALIAS, Op.UNSAFE_VIEW, Op.VIEW))
_TURNS = frozenset((Op.CLONE, Op.TRANSPOSE))
_MOST_DIMENSIONS = 6


def reordered(graph: Graph, names: Mapping[int, str]) -> dict[str, float]:
    """Return the layers behind which a view stands where dimensions were to be moved, with the size of one it cuts.

    Args:
        graph: All that is behind a loss.
        names: Names of modules by the ``id`` of their parameters.
    """
    out: dict[str, float] = {}
    for node in graph.nodes:
        before = tuple(getattr(node, "_saved_self_sym_sizes", ())) if kind_of(node) in _VIEWS else ()
        size = cut(before, shape_of(node)) if before and 0 not in before else 0
        if size and not _is_meant(below(node)):
            out[owner_below(node, names)] = float(size)
    return out


def cut(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the size of a dimension that a change of shape cuts, both parts of which become parts of others.

    0 where there is none, and where the new dimensions are not those there were, or products of some, in another order.
    Where one size divides the other the same may come of a plain split and join, which is believed unless samples stay
    the first dimension or become it.
    """
    before, after = (tuple(size for size in shape if size != 1) for shape in (before, after))
    ends, wanted = [1, *accumulate(before, operator.mul)], {1, *accumulate(after, operator.mul)}
    uneven = any(high % low for low, high in pairwise(sorted({*ends, *wanted})))
    if len(before) > _MOST_DIMENSIONS or not (uneven or set(after[:1]) <= set(before)):
        return 0
    found = (
        size
        for size, (low, high) in zip(before, pairwise(ends), strict=True)
        if any(low < end < high for end in wanted) and (uneven or not {low, high} & wanted)
    )
    return next(found, 0) if _made_of(before, after) else 0


def _made_of(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether each wanted size is the product of some of the sizes, all of which are used once."""
    if not wanted:
        return not sizes
    places = range(len(sizes))
    return any(
        math.prod(sizes[place] for place in chosen) == wanted[0]
        and _made_of(tuple(sizes[place] for place in places if place not in chosen), wanted[1:])
        for count in places
        for chosen in combinations(places, count + 1)
    )


def _is_meant(node: Node) -> bool:
    """Whether a view of this means to cut: what constants pad is skewed, and a batch of products is one of heads."""
    if kind_of(through(node, _TURNS)) == Op.BMM:
        return True
    padded = through(node, _TURNS | _VIEWS | {Op.SLICE})
    return kind_of(padded) == Op.CONSTANT_PAD_ND or (kind_of(padded) == Op.CAT and None in inputs(padded))
