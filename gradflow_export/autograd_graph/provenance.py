"""Where a tensor comes from: whether scores are a product of two activations, read off the autograd graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import Op, below, inputs, kind_of, sources
from gradflow_export.hooks import torch_private

_RESHAPES = frozenset(
    (Op.EXPAND, Op.PERMUTE, Op.RESHAPE_ALIAS, Op.SQUEEZE, Op.T, Op.TRANSPOSE, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW)
)
_VIEWS = _RESHAPES | frozenset((Op.ALIAS, Op.CLONE, Op.SLICE, Op.TO_COPY))
_ELEMENTWISE = _VIEWS | frozenset(
    (Op.ADD, Op.CLAMP, Op.COPY_SLICES, Op.DIV, Op.MASKED_FILL, Op.MUL, Op.NEG, Op.SELECT, Op.SUB, Op.TANH, Op.WHERE)
)
_PRODUCTS = frozenset((Op.BMM, Op.BADDBMM))
_NODES = 32


def is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Whether this is an ordinary tensor: no subclass, not nested, under no function transform or graph capture."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.is_nested or tensor.layout is not torch.strided:
        return False
    if torch_private.is_transformed(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_product(node: Any) -> bool:
    """Whether what a node made comes from a batched product of two activations by elementwise steps: scale, mask, bias.

    A product with a parameter is a layer, whose softmax is a router's or a classifier's.

    Args:
        node: The ``grad_fn`` of a tensor, or ``None``.
    """
    waiting, seen = [node], 0
    while waiting and seen < _NODES:
        here, seen = waiting.pop(), seen + 1
        kind = kind_of(here)
        if kind in _PRODUCTS and not any(_is_parameter(source) for source in inputs(here)[-2:]):
            return True
        if kind in _ELEMENTWISE:
            waiting += inputs(here)
    return False


def _is_parameter(node: Any) -> bool:
    for _ in range(_NODES):
        if kind_of(node) not in _VIEWS:
            break
        node = below(node)
    return kind_of(node) == Op.LEAF


def nearest_parameter(tensor: Tensor, name_of: Callable[[object], str | None], within: int) -> str | None:
    """Return the name of the parameter that stands nearest before a tensor in the graph of autograd.

    Args:
        tensor: What was computed, or a parameter itself.
        name_of: Returns the name of a parameter that is looked for, ``None`` for any other tensor.
        within: How many nodes before the tensor are looked at.

    Returns:
        The name; ``None`` where none is among these nodes.
    """
    return name_of(tensor) if tensor.grad_fn is None else parameter_behind(tensor.grad_fn, name_of, within)


def parameter_behind(node: Any, name_of: Callable[[object], str | None], within: int) -> str | None:
    """Return the name of the parameter that stands nearest behind a node, as :func:`nearest_parameter` does."""
    nodes: deque[Any] = deque([node])
    for _ in range(within):
        if not nodes:
            break
        node = nodes.popleft()
        variable = getattr(node, "variable", None)
        name = None if variable is None else name_of(variable)
        if name is not None:
            return name
        nodes.extend(sources(node))
    return None
