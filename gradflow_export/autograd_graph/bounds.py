"""What values a node can give out whatever the weights are: intervals, carried from activations to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gradflow_export.autograd_graph.loss_shape import MOST_ENTRIES, SHAPES, factor_of
from gradflow_export.autograd_graph.nodes import Op, below, exponent_of, inputs, kind_of, sources, through
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.records.loss_mistakes import (
    RELU_BEFORE_BCE,
    RELU_BEFORE_CE,
    SIGMOID_BEFORE_BCE,
    SIGMOID_BEFORE_CE,
    SOFTMAX_BEFORE_BCE,
    SOFTMAX_BEFORE_CE,
    TANH_BEFORE_BCE,
    TANH_BEFORE_CE,
)

Node = Any
NARROW = 2.5
"""Width within which no logit is sure: a softmax of two such classes leaves 8 % to the wrong one."""
_MOST_NODES = 32
_FAR = 700.0
_BEFORE_CE = MappingProxyType(
    {
        Op.SOFTMAX: SOFTMAX_BEFORE_CE,
        Op.SIGMOID: SIGMOID_BEFORE_CE,
        Op.TANH: TANH_BEFORE_CE,
        Op.RELU: RELU_BEFORE_CE,
    }
)
_BEFORE_BCE = MappingProxyType(
    {
        Op.SIGMOID: SIGMOID_BEFORE_BCE,
        Op.SOFTMAX: SOFTMAX_BEFORE_BCE,
        Op.TANH: TANH_BEFORE_BCE,
        Op.RELU: RELU_BEFORE_BCE,
    }
)


class Bounds(NamedTuple):
    """An interval.

    Attributes:
        low: Nothing is below.
        high: Nothing is above.
        width: How far two values may be apart, which is known after a shift by what no node has saved.
    """

    low: float = -math.inf
    high: float = math.inf
    width: float = math.inf


ANY = Bounds()
FIXED: Mapping[str, Bounds] = MappingProxyType(
    {
        **dict.fromkeys((Op.HARDSIGMOID, Op.SAFE_SOFTMAX, Op.SIGMOID, Op.SOFTMAX), Bounds(0.0, 1.0, 1.0)),
        **dict.fromkeys((Op.COS, Op.SIN, Op.TANH), Bounds(-1.0, 1.0, 2.0)),
        **dict.fromkeys((Op.LOG_SIGMOID, Op.LOG_SOFTMAX), Bounds(high=0.0)),
        Op.ELU: Bounds(low=-1.0),
        Op.RELU: Bounds(low=0.0),
        Op.SOFTPLUS: Bounds(low=0.0),
    }
)
"""What an activation can give out at all, by the name of its node."""
_MEANS = ("AdaptiveAvgPool", "AvgPool", Op.MEAN, "Upsample")
_JOINS = SHAPES | {Op.CAT, Op.LERP, Op.MAXIMUM, Op.MINIMUM, Op.NAN_TO_NUM, Op.STACK, Op.WHERE}
_LIMITS = frozenset((Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN, Op.HARDTANH, Op.RELU))


def bounds_of(node: Node) -> Bounds:
    """Return what a node can give out, as far as that follows from nodes near it."""
    return _bounds(node, {})


def squashed(node: Node) -> tuple[str, Bounds]:
    """Return which activation bounds what a loss takes for logits, empty for none, and what that can be.

    Returns:
        ``Op.SOFTMAX``, ``Op.SIGMOID`` for what is never negative, ``Op.TANH``, or ``Op.RELU`` for what has a lower
        bound of 0 alone.
    """
    bounds = bounds_of(node)
    if bounds.width > NARROW:
        return (Op.RELU if bounds.low >= 0 else ""), bounds
    made, first = node, next(iter(sources(node)), None)
    while kind_of(made) not in FIXED and (kind_of(first) in FIXED or bounds_of(first).width <= NARROW):
        made, first = first, next(iter(sources(first)), None)
    if kind_of(made) in {Op.LOG_SOFTMAX, Op.SAFE_SOFTMAX, Op.SOFTMAX} or _is_share(made):
        return Op.SOFTMAX, bounds
    return (Op.SIGMOID if bounds.low >= 0 or kind_of(made) == Op.SIGMOID else Op.TANH), bounds


def twice(node: Node) -> bool:
    """Whether a softmax or sigmoid that gives probabilities is given such again, in place of logits."""
    return kind_of(node) in {Op.SIGMOID, Op.SOFTMAX} and squashed(below(node))[0] in {Op.SIGMOID, Op.SOFTMAX}


def before_logits(node: Node, classes: int = 0) -> dict[str, float]:
    """Return what bounds that which a cross-entropy takes for logits, with the least that the loss can then be.

    Args:
        node: What made these.
        classes: How many there are; 0 for the cross-entropy of two that takes one logit.
    """
    activation, bounds = squashed(node)
    if not classes and activation:
        least = math.log1p(math.exp(-min(bounds.high, _FAR))) if activation == Op.SIGMOID else 1.0
        return {} if bounds.low == -math.inf else {_BEFORE_BCE[activation]: least}
    if classes < 2 or not activation or (activation == Op.RELU != kind_of(node)):
        return {}
    return {_BEFORE_CE[activation]: math.log1p((classes - 1) * math.exp(-min(bounds.width, _FAR)))}


def _bounds(node: Node, known: dict[Node, Bounds]) -> Bounds:
    kind = kind_of(node)
    if kind in FIXED and kind != Op.RELU:
        return FIXED[kind]
    if node is None or _is_share(node):
        return ANY if node is None else FIXED[Op.SOFTMAX]
    if not (kind in _KNOWN or kind.startswith(_MEANS)):
        return ANY
    if node not in known and len(known) < _MOST_NODES:
        known[node] = ANY  # until all below it is known
        known[node] = _computed(node, kind, [_bounds(source, known) for source in sources(node)])
    return known.get(node, ANY)


def _computed(node: Node, kind: str, given: list[Bounds]) -> Bounds:
    """Return what an operation can give out of arguments with a graph that have these bounds."""
    if not given:
        return ANY
    whole = len(given) == len(inputs(node))  # no argument is without a graph, whose values are not known
    if kind in _JOINS or kind.startswith(_MEANS):
        return _interval(min(b.low for b in given), max(b.high for b in given), given) if whole else ANY
    if kind in _LIMITS:
        low, high = _limits(node, kind)
        return _interval(min(max(given[0].low, low), high), min(max(given[0].high, low), high), given)
    if kind in {Op.ADD, Op.RSUB, Op.SUB}:
        return _sum(given, kind, whole=whole) if getattr(node, "_saved_alpha", 1) == 1 else ANY
    if kind in {Op.DIV, Op.MUL}:
        return _product(node, kind, given)
    return _BY_ONE[kind](node, given[0]) if kind in _BY_ONE else ANY


def _interval(low: float, high: float, given: list[Bounds]) -> Bounds:
    """Return an interval no wider than one of what it was made of; of several at unknown places nothing is known."""
    return Bounds(low, high, min(high - low, given[0].width if len(given) == 1 else math.inf))


def _limits(node: Node, kind: str) -> tuple[float, float]:
    names = ("_saved_min_val", "_saved_max_val") if kind == Op.HARDTANH else ("_saved_min", "_saved_max")
    if kind == Op.RELU:
        return 0.0, math.inf
    ends = (getattr(node, name, None) for name in names)
    low, high = (float(end) if isinstance(end, (int, float)) else math.nan for end in ends)
    return (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)


def _sum(given: list[Bounds], kind: str, *, whole: bool) -> Bounds:
    width = sum(bounds.width for bounds in given)
    if not whole or len(given) != 2:
        return Bounds(width=width)  # shifted by something
    (a, b), (c, d) = given[0][:2], given[1][:2]
    low, high = (a + c, b + d) if kind == Op.ADD else (a - d, b - c) if kind == Op.SUB else (c - b, d - a)
    return Bounds(low, high, width)


def _product(node: Node, kind: str, given: list[Bounds]) -> Bounds:
    factor = factor_of(node)
    if not math.isnan(factor):
        return _scaled(given[0], (factor, factor))
    if len(given) == 2:
        return _scaled(given[0], given[1][:2]) if kind == Op.MUL else ANY
    other = None if kind == Op.DIV else saved(node, "other" if below(node) is not None else "self")
    if other is None or other.device.type != "cpu" or not 0 < other.numel() <= MOST_ENTRIES or other.is_complex():
        return ANY  # no device is waited for
    return _scaled(given[0], (float(other.min()), float(other.max())))


def _scaled(bounds: Bounds, factors: tuple[float, float]) -> Bounds:
    """Return the bounds of a product with what lies between two factors."""
    ends = [0.0 if not end or not factor else end * factor for end in bounds[:2] for factor in factors]
    low, high = min(ends), max(ends)
    if factors[0] == factors[1]:
        return Bounds(low, high, bounds.width * abs(factors[0]) if factors[0] else 0.0)
    return Bounds(low, high, high - low)


def _is_share(node: Node) -> bool:
    """Whether a node is a softmax that was written out, ``exp(x) / exp(x).sum()``."""
    top, total = (through(below(node, side), SHAPES) for side in (0, 1)) if kind_of(node) == Op.DIV else (None, None)
    return kind_of(top) == Op.EXP and kind_of(total) == Op.SUM and through(below(total), SHAPES) is top


def _raised(bounds: Bounds, exponent: float) -> Bounds:
    most = max(map(abs, bounds[:2])) ** exponent
    return Bounds(0.0, most, most)


def _exp(bounds: Bounds) -> Bounds:
    low, high = (math.exp(min(end, _FAR)) if end < math.inf else math.inf for end in bounds[:2])
    return Bounds(low, high, high - low)


def _inverse(bounds: Bounds) -> Bounds:
    return Bounds(1.0 / bounds.high, 1.0 / bounds.low, 1.0 / bounds.low) if bounds.low > 0 else ANY


_BY_ONE: Mapping[str, Callable[[Node, Bounds], Bounds]] = MappingProxyType(
    {
        Op.ABS: lambda _, bounds: _raised(bounds, 1.0),
        Op.EXP: lambda _, bounds: _exp(bounds),
        Op.NATIVE_DROPOUT: lambda node, bounds: _scaled(bounds, (0.0, 1.0 / (1.0 - getattr(node, "_saved_p", 0.5)))),
        Op.NEG: lambda _, bounds: _scaled(bounds, (-1.0, -1.0)),
        Op.POW: lambda node, bounds: _raised(bounds, exponent_of(node)) if exponent_of(node) % 2 == 0 else ANY,
        Op.RECIPROCAL: lambda _, bounds: _inverse(bounds),
        Op.SQRT: lambda _, bounds: Bounds(0.0, max(bounds.high, 0.0) ** 0.5, max(bounds.high, 0.0) ** 0.5),
    }
)
_KNOWN = _JOINS | _LIMITS | _BY_ONE.keys() | {Op.ADD, Op.DIV, Op.MUL, Op.RSUB, Op.SUB}
