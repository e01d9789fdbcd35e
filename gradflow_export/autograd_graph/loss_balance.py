"""Whether a loss holds a scale in balance: what grows with it and its logarithm must pull in opposite directions."""

from __future__ import annotations

from collections import deque
from typing import Any

from gradflow_export.autograd_graph.loss_domain import sign_of
from gradflow_export.autograd_graph.loss_shape import SHAPES
from gradflow_export.autograd_graph.nodes import Op, below, by_number, edges, exponent_of, inputs, kind_of
from gradflow_export.hooks.backward_listener import saved

Node = Any
_Edge = tuple[Node, int]
_Key = tuple[str, Node, int]

_NEAR = 160
_MOVES = SHAPES | frozenset([Op.CAT, Op.FLIP, Op.INDEX_SELECT, Op.SPLIT, Op.SPLIT_WITH_SIZES, Op.STACK, Op.UNBIND])
_SUMS = _MOVES | frozenset([Op.ADD, Op.MEAN, Op.NEG, Op.RSUB, Op.SUB, Op.SUM])
_POSITIVE = frozenset(
    [
        Op.ABS,
        Op.BINARY_CROSS_ENTROPY,
        Op.BINARY_CROSS_ENTROPY_WITH_LOGITS,
        Op.EXP,
        Op.HUBER_LOSS,
        Op.MSE_LOSS,
        Op.NLL_LOSS,
        Op.NLL_LOSS_2D,
        Op.RELU,
        Op.SIGMOID,
        Op.SMOOTH_L1_LOSS,
        Op.SOFTMAX,
        Op.SOFTPLUS,
    ]
)


class _Balance:
    """What pulls at each scale: its logarithm by its own sign, and what is multiplied by it.

    Attributes:
        logs: Signs with which a number, the logarithm of a scale, is added to the loss.
        grown: Pairs of the sign of what a scale multiplies, and of the power it does so with.
    """

    def __init__(self) -> None:
        self.logs: dict[_Key, set[float]] = {}
        self.grown: dict[_Key, set[tuple[float, float]]] = {}

    def falls(self, key: _Key) -> bool:
        """Whether the loss has no lower bound as this scale goes to 0 or beyond all limits."""
        signs, pulls = self.logs.get(key, set()), self.grown.get(key, set())
        if key[0] == "log" and self.logs.get(("exp", *key[1:])) == {-1.0}:
            pulls = pulls | {(-1.0, 1.0)}  # what a logarithm was taken of is taken off as it is
        if len(signs) != 1 or not pulls:
            return False
        (sign,) = signs
        return sign != 0 and all(power * sign > 0 for _, power in pulls) and len({times for times, _ in pulls}) == 1

    def exponential(self, edge: _Edge, times: float, power: float) -> None:
        """Take down what an exponential is of, through factors and changes of shape."""
        for _ in range(12):
            node, index = edge
            self.grown.setdefault(("exp", node, index), set()).add((times, power))
            if not (kind_of(node) in _MOVES | {Op.NEG} or is_scaled(node)) or kind_of(node) in {Op.CAT, Op.STACK}:
                return
            place = 0 if below(node) is not None else 1
            power *= sign_of(node, place)
            edge = edges(node)[place]
            if edge[0] is None:
                return

    def factor(self, edge: _Edge, times: float, power: float) -> None:
        """Take down one factor of a product: an exponential, a power of a scale, or a scale."""
        node, _ = edge
        while kind_of(node) in _MOVES - {Op.CAT, Op.STACK} or is_scaled(node) or _is_even(node, odd=True):
            place = 0 if below(node) is not None else 1
            edge = edges(node)[place]
            node = edge[0]
            if node is None:
                return
        if kind_of(node) == Op.EXP:
            self.exponential(edges(node)[0], times, power)
        self.grown.setdefault(("log", *edge), set()).add((times, power))


def scales_that_fall(root: Any) -> Node | None:
    """Return the logarithm of a scale that a loss drives beyond all limits, ``None`` where there is none.

    A likelihood holds ``error / scale`` and ``log scale``: one falls as the other rises. With a sign lost both fall
    together: ``error * scale + log scale``, ``(x * scale + shift)^2 + log scale``, or with both turned round,
    ``log scale - scale``. Only sums of the two are looked at, without weights that a batch gives: those of a policy
    gradient may have any sign.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    balance = _Balance()
    waiting: deque[tuple[_Edge, float]] = deque([((root.grad_fn, 0), 1.0)])
    seen: set[tuple[_Edge, float]] = {((root.grad_fn, 0), 1.0)}  # one number may be added with both signs
    while waiting and len(seen) < _NEAR:
        (node, index), sign = waiting.popleft()
        kind = kind_of(node)
        balance.logs.setdefault(("exp", node, index), set()).add(sign)
        if kind == Op.LOG:
            balance.logs.setdefault(("log", *edges(node)[0]), set()).add(sign)
        elif kind == Op.EXP:
            balance.exponential(edges(node)[0], sign, 1.0)
        elif kind in {Op.MUL, Op.DIV} and below(node) is not None and below(node, 1) is not None:
            _product(balance, node, kind, sign)
        elif kind in {Op.MSE_LOSS, Op.POW} and sign > 0 and (kind == Op.MSE_LOSS or _is_even(node)):
            _inside(balance, edges(node)[0])
        if kind in _SUMS or is_scaled(node):
            signed = (
                (edge, sign * sign_of(node, place)) for place, edge in enumerate(edges(node)) if edge[0] is not None
            )
            for each in signed:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
    turned = (key for key, signs in balance.logs.items() if key[0] == "log" and signs == {1.0} and balance.falls(key))
    return next((key[1] for key in balance.grown if balance.falls(key)), None) or next((key[1] for key in turned), None)


def _product(balance: _Balance, node: Node, kind: str, sign: float) -> None:
    one, other = edges(node)[:2]
    if kind == Op.MUL and one == other:
        if sign > 0:
            _inside(balance, one)
        return
    if sign * definite(one[0]) > 0:
        balance.factor(other, 1.0, 1.0 if kind == Op.MUL else -1.0)
    if kind == Op.MUL and sign * definite(other[0]) > 0:
        balance.factor(one, 1.0, 1.0)


def _inside(balance: _Balance, edge: _Edge) -> None:
    """Take down the scales that what is squared was multiplied by or divided by."""
    waiting, seen = deque([edge]), {edge}
    while waiting and len(seen) < _NEAR:
        node, _ = waiting.popleft()
        kind = kind_of(node)
        if kind not in _SUMS | {Op.DIV, Op.MUL}:
            continue
        known = [source for source in edges(node) if source[0] is not None]
        for place, source in enumerate(edges(node)):
            if source[0] is not None and (kind == Op.MUL or (kind == Op.DIV and place == 1)):
                balance.factor(source, 1.0, 1.0 if kind == Op.MUL else -1.0)
        waiting += [source for source in known if source not in seen]
        seen.update(known)


def definite(node: Node) -> float:
    """Return 1.0 where a node can give nothing below 0, -1.0 for nothing above, else 0.0, by its structure alone."""
    sign = 1.0
    for _ in range(12):
        kind = kind_of(node)
        if kind in _POSITIVE or _is_even(node) or (kind == Op.MUL and below(node) is below(node, 1) is not None):
            return sign
        if kind in {Op.CAT, Op.STACK}:
            signs = {definite(source) for source in inputs(node)}
            return sign * signs.pop() if len(signs) == 1 else 0.0
        if not (kind in _MOVES | {Op.MEAN, Op.NEG, Op.SUM} or is_scaled(node)):
            return 0.0
        place = 0 if below(node) is not None else 1
        sign *= sign_of(node, place)
        node = below(node, place)
    return 0.0


def _is_even(node: Node, *, odd: bool = False) -> bool:
    exponent = exponent_of(node)
    return exponent > 0 and (odd or exponent % 2 == 0)


def is_scaled(node: Node) -> bool:
    """Whether a node multiplies or divides by one number, known to be one."""
    if kind_of(node) not in {Op.DIV, Op.MUL} or (below(node) is not None and below(node, 1) is not None):
        return False
    if by_number(node):
        return True
    if below(node) is None and kind_of(node) == Op.DIV:
        return False
    other = saved(node, "other" if below(node) is not None else "self")
    return other is not None and other.numel() == 1
