"""Numbers without a graph that a loss puts beside the answers of a model: what may be targets, in any form of loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gradflow_export.autograd_graph.loss_shape import COPIES, RESHAPES, VIEWS, factor_of, shape_of
from gradflow_export.autograd_graph.nodes import Op, edges, kind_of, sources, through, walk
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.metrics.arrays.local import local

MOST_ENTRIES = 65_536
"""Answers of one call that are followed; of more nothing is known."""
MOST_MET, MOST_COLUMNS = 4, 32
"""Numbers that are looked at, and their columns, at most."""
_NODES = 256
_DEEP = 16
_BY_ENTRY = frozenset((
    Op.ABS, Op.ADD, Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN, Op.DIV, Op.ELU, Op.EXP, Op.LOG, Op.LOG_1P, Op.LOG_SIGMOID,
    Op.LOG_SOFTMAX, Op.MUL, Op.NEG, Op.POW, Op.RELU, Op.RSUB, Op.SIGMOID, Op.SOFTMAX, Op.SOFTPLUS, Op.SQRT, Op.SUB,
    Op.TANH,
))  # fmt: skip
"""What makes an entry of each entry, of one argument with a graph; a softmax too, for which it may stand."""
_PRODUCTS = frozenset((Op.DIV, Op.MUL, Op.XLOGY))
Made = tuple[Tensor | None, Tensor | None]
"""What a node made, where that is known, and of which entry of the answers each entry was made."""
_UNKNOWN: Made = (None, None)


class Met(NamedTuple):
    """Numbers that a loss puts beside answers.

    Attributes:
        columns: Of the answers, one for each column.
        said: What was made of the answers in the unit of the numbers, which are taken off it; ``None`` in a product.
            Shape: ``[answers, columns]``.
        numbers: Shape: ``[answers, columns]``.
    """

    columns: tuple[int, ...]
    said: Tensor | None
    numbers: Tensor


def met_numbers(root: Any, node: Any, rows: Tensor) -> list[Met]:
    """Return the numbers that answers meet on their way to a loss, those that are subtracted first.

    A difference keeps neither of its sides. What was subtracted is known from the difference, where whatever takes it
    has saved it, and from what was made of the answers.

    Args:
        root: The last node of the loss, before its backward pass.
        node: What made the answers.
        rows: The answers, a row each, in the order of the output. Shape: ``[answers, scores]``.
    """
    if rows.numel() > MOST_ENTRIES or rows.numel() != math.prod(shape_of(node)):
        return []
    first = torch_private.sequence_number(node)
    later = [*walk([root], into=lambda each: torch_private.sequence_number(each) >= first, most=_NODES)]
    way = _Way(node, rows, _kept(later))
    found = [met for each in later for met in way.met(each)]
    return sorted(found, key=lambda met: met.said is None)[:MOST_MET]


def _kept(nodes: list[Any]) -> dict[Any, Tensor]:
    """Return what nodes made, as far as they, or what takes it, have saved it."""
    kept: dict[Any, Tensor] = {}
    for node in nodes:  # what takes a result comes before what made it
        kind, result = kind_of(node), _held(node, "result")
        if result is not None and tuple(result.shape) == shape_of(node):
            kept.setdefault(node, result)
        for (source, out), name in zip(edges(node), ("self", "other"), strict=False):
            value = _held(node, name)
            if source is not None and value is not None and out == 0 and tuple(value.shape) == shape_of(source):
                kept.setdefault(source, value)
        inner = sources(node)
        if node not in kept or len(inner) != 1:
            continue
        factor = factor_of(node)
        if kind == Op.NEG or (factor and not math.isnan(factor)):
            kept.setdefault(inner[0], kept[node] / (-1.0 if kind == Op.NEG else factor))
        elif kind in RESHAPES | COPIES and kept[node].numel() == math.prod(shape_of(inner[0])):
            kept.setdefault(inner[0], kept[node].reshape(shape_of(inner[0])))
    return kept


def _held(node: Any, name: str) -> Tensor | None:
    """Return what a node has saved, of a tensor on several devices the part on this one."""
    value = saved(node, name)
    return None if value is None else local(value)


class _Way:
    """The way from the answers to a loss, along which values and places of entries are known."""

    def __init__(self, node: Any, rows: Tensor, kept: Mapping[Any, Tensor]) -> None:
        self._count, self._scores = rows.shape
        shape = shape_of(node)
        places = torch.arange(rows.numel()).reshape(shape)  # not on the answers' device, which nothing waits for
        self._kept = kept
        self._made: dict[tuple[Any, int], Made] = {(node, 0): (rows.reshape(shape), places)}

    def met(self, node: Any) -> list[Met]:
        """Return what one node puts beside answers, if it does."""
        kind, pair = kind_of(node), edges(node)[:2]
        if kind not in _PRODUCTS | {Op.RSUB, Op.SUB} or len(sources(node)) != 1 or len(pair) != 2:
            return []
        turned = pair[0][0] is None
        value, places = self.made(pair[int(turned)])
        if kind in _PRODUCTS:
            return self._beside(None, places, _held(node, "self" if turned else "other"))
        apart = self._kept.get(node)
        if apart is None or value is None or getattr(node, "_saved_alpha", 1) != 1:
            return []
        taken_off = turned == (kind == Op.RSUB)
        return self._beside(value, places, value - apart if taken_off else value + apart)

    def made(self, edge: tuple[Any, int], deep: int = 0) -> Made:
        """Return what an edge of the graph holds, and of which answers it was made."""
        if edge not in self._made:
            self._made[edge] = _UNKNOWN if edge[0] is None or deep > _DEEP else self._follow(edge, deep)
        return self._made[edge]

    def _follow(self, edge: tuple[Any, int], deep: int) -> Made:
        node, out = edge
        kind, inner = kind_of(node), [each for each in edges(node) if each[0] is not None]
        kept = self._kept.get(node) if out == 0 else None
        if len(inner) == 2 and kind in {Op.DIV, Op.SUB} and _repeats(inner[1][0], node):
            inner = inner[:1]  # less the mean of all, or divided by the length of each
        if len(inner) != 1:
            return kept, None
        value, places = self.made(inner[0], deep + 1)
        if kind in _BY_ENTRY:
            places = places if places is not None and tuple(places.shape) == shape_of(node) else None
            return _entries(node, kind, value) if kept is None and len(sources(node)) == 1 else kept, places
        view = VIEWS.get(kind)
        if view is None:
            return kept, None
        shown = [None if each is None else view(node, out, each) for each in (value, places)]
        return kept if shown[0] is None else shown[0], shown[1]

    def _beside(self, said: Tensor | None, places: Tensor | None, numbers: Tensor | None) -> list[Met]:
        """Return numbers in the order of the answers, where all answers meet as many of them."""
        if places is None or numbers is None or numbers.is_complex() or numbers.numel() < 2:
            return []
        try:
            shape = np.broadcast_shapes(places.shape, numbers.shape)
        except ValueError:
            return []
        columns, rest = divmod(math.prod(shape), self._count)
        if rest or columns * self._count != places.numel() or columns > self._scores:
            return []
        sites = places.expand(shape).reshape(-1)
        order = None if bool((sites[1:] > sites[:-1]).all()) else sites.argsort()
        sites = (sites if order is None else sites[order]).reshape(self._count, columns)
        first = torch.arange(0, self._count * self._scores, self._scores)[:, None]
        if bool((sites - first != sites[:1]).any()) or int(sites[0, -1]) >= self._scores:
            return []
        some = slice(None, None, -(-columns // MOST_COLUMNS))

        def ordered(values: Tensor) -> Tensor:
            flat = values.expand(shape).reshape(-1)
            flat = flat if order is None else flat[order.to(flat.device)]
            return flat.reshape(self._count, columns)[:, some].float()

        return [Met(tuple(map(int, sites[0, some])), None if said is None else ordered(said), ordered(numbers))]


def _repeats(side: Any, node: Any) -> bool:
    """Whether one side of an operation has fewer entries than what it made."""
    return math.prod(shape_of(through(side, {Op.EXPAND}))) < math.prod(shape_of(node))


def _entries(node: Any, kind: str, value: Tensor | None) -> Tensor | None:
    """Return what a node made of each entry, of the few that keep what entered and not what they gave."""
    if value is None:
        return None
    factor = factor_of(node)
    if kind == Op.NEG:
        return -value
    if kind == Op.SOFTPLUS:
        return functional.softplus(value, float(node._saved_beta), float(node._saved_threshold))  # noqa: SLF001 - what a node saved has no other name
    if kind in {Op.LOG, Op.LOG_1P}:
        return value.log() if kind == Op.LOG else value.log1p()
    return None if math.isnan(factor) else value * factor
