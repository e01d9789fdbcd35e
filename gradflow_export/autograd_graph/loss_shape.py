"""Shapes and activations between the last layer and a loss: what was applied twice, mixed up or broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradflow_export.autograd_graph.nodes import Op, below, by_number, kind_of
from gradflow_export.hooks.backward_listener import saved

SHAPES = frozenset(
    [
        Op.ALIAS,
        Op.AS_STRIDED,
        Op.CLONE,
        Op.EXPAND,
        Op.INDEX,
        Op.PERMUTE,
        Op.RESHAPE_ALIAS,
        Op.SELECT,
        Op.SLICE,
        Op.SQUEEZE,
        Op.T,
        Op.TO_COPY,
        Op.TRANSPOSE,
        Op.UNSAFE_VIEW,
        Op.UNSQUEEZE,
        Op.VIEW,
    ]
)
"""Nodes that show the same entries, or some of them, in another shape."""
Node = Any
MOST_ENTRIES = 65_536
"""Outputs that are followed through a change of shape; more of them are taken on trust."""
_STEPS = 16
RESHAPES = frozenset((Op.RESHAPE_ALIAS, Op.SQUEEZE, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW))
"""Nodes that show all entries in their order."""
COPIES = frozenset((Op.ALIAS, Op.CLONE, Op.TO_COPY))
"""Nodes that show the same entries in the same shape."""
_AROUND_LOGARITHMS = frozenset((Op.ADD, Op.CLAMP, Op.LOG, Op.NEG, Op.RSUB, Op.SUB))


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of what a node made; empty for a scalar and where it is not known, or there is none."""
    known = getattr(node, "_input_metadata", ())
    try:
        return tuple(known[0].shape) if known else ()
    except RuntimeError:  # of a nested tensor
        return ()


def factor_of(node: Node) -> float:
    """Return the plain number that a product or quotient multiplies its one argument by; NaN where none is known.

    Nothing waits for a device: a number that lies on one is not known.
    """
    if kind_of(node) not in {Op.DIV, Op.MUL} or below(node) is None or below(node, 1) is not None:
        return math.nan
    other = getattr(node, "_saved_other", None) if by_number(node) else saved(node, "other")
    if other is None or (isinstance(other, Tensor) and (other.dim() > 0 or other.device.type != "cpu")):
        return math.nan
    number = float(other)
    if kind_of(node) == Op.MUL:
        return number
    return 1.0 / number if number else math.nan


def weighs_samples(node: Node) -> bool:
    """Whether a node gives the samples of a loss different weights, as a mask does; not the columns of all of them."""
    shape, kind = shape_of(node), kind_of(node)
    if not shape or shape[0] < 2 or kind not in {Op.DIV, Op.INDEX, Op.MASKED_FILL, Op.MUL, Op.WHERE} or by_number(node):
        return False
    factor = saved(node, "other" if below(node) is not None else "self") if kind in {Op.DIV, Op.MUL} else None
    return factor is None or (factor.dim() == len(shape) and factor.shape[0] > 1)


def adds_bias(node: Node) -> bool:
    """Whether a sum is with a parameter that is a vector, as where a layer is given what is not contiguous."""
    if kind_of(node) != Op.ADD:
        return False
    variable = getattr(below(node, 1), "variable", None)
    return variable is not None and variable.dim() == 1


def dim_of(node: Node) -> int | None:
    """Return the one dimension that an operation runs along, counted from the first one."""
    dim = getattr(node, "_saved_dim", None)
    if not isinstance(dim, int):  # of several it is none
        return None
    dim = signed(dim)
    return dim + len(shape_of(node)) if dim < 0 else dim


def crossed(a: Tensor, b: Tensor) -> bool:
    """Whether each of two tensors was repeated along a dimension in which the other one varies, one of them the first.

    Within a sample, quantiles may be compared with quantiles.
    """
    if a.shape != b.shape or a.dim() < 2:
        return False
    repeated = [{d for d in range(t.dim()) if t.stride(d) == 0 and t.shape[d] > 1} for t in (a, b)]
    return bool(repeated[0] - repeated[1]) and bool(repeated[1] - repeated[0]) and 0 in repeated[0] ^ repeated[1]


def argument(node: Node) -> Node:
    """Return what a logarithm was taken of: the first node from here that is no logarithm, sum or limit."""
    for _ in range(_STEPS):
        if kind_of(node) not in _AROUND_LOGARITHMS and kind_of(node) not in RESHAPES:
            break
        node = below(node) if below(node) is not None else below(node, 1)
    return node


def over_positions(softmax: Node, dim: int, layers: frozenset[str]) -> bool:
    """Whether a softmax runs along another dimension than the one a layer gives its classes in, the last.

    Args:
        softmax: Of a loss, or its logarithm.
        dim: The dimension it runs over.
        layers: Kinds of nodes that are layers.
    """
    shape, node = shape_of(softmax), below(softmax)
    for _ in range(_STEPS):
        if kind_of(node) in layers or adds_bias(node):
            break
        if kind_of(node) not in RESHAPES | COPIES:
            return False
        node = below(node)
    made = shape_of(node)
    # Of a product of two activations either dimension may be the one to choose from.
    if kind_of(node) in {Op.BMM, Op.CONVOLUTION} or len(shape) < 3 or len(made) < 2 or dim == len(shape) - 1:
        return False
    return shape[-1] == made[-1] > 1


def mixes_positions(node: Node, dim: int, layers: frozenset[str]) -> bool:
    """Whether a softmax over classes runs over numbers of several samples or pixels instead.

    ``view`` keeps the order in memory: ``[B, C, H, W]`` viewed as ``[B * H * W, C]`` puts C neighbouring pixels of one
    class into a row. Followed are the positions that outputs of the last layer belong to. A softmax over positions on
    purpose, as in the choice of a place, has another size than the layer has outputs.

    Args:
        node: What enters the softmax.
        dim: The dimension it runs over.
        layers: Kinds of nodes that are layers.
    """
    steps: list[Node] = []
    while kind_of(node) not in layers and not adds_bias(node):
        if (
            len(steps) == _STEPS
            or not shape_of(node)
            or kind_of(node) not in RESHAPES | COPIES | {Op.PERMUTE, Op.T, Op.TRANSPOSE}
        ):
            return False
        steps.append(node)
        node = below(node)
    shape = shape_of(node)
    if (
        kind_of(node) == Op.BMM
        or len(shape) < 2
        or math.prod(shape) > MOST_ENTRIES
        or not any(kind_of(step) in RESHAPES for step in steps)
    ):
        return False
    axis = 1 if kind_of(node) == Op.CONVOLUTION else len(shape) - 1
    outside = [size for index, size in enumerate(shape) if index != axis]
    positions = torch.arange(math.prod(outside)).view(outside).unsqueeze(axis).expand(shape)
    for step in reversed(steps):
        positions = VIEWS[kind_of(step)](step, 0, positions)
    if positions.dim() <= dim or positions.shape[dim] != shape[axis] or shape[axis] < 2:
        return False
    return bool((positions != positions.narrow(dim, 0, 1)).any())


def signed(dim: int) -> int:
    """Return a dimension as it was given: nodes save those below 0 as unsigned numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


def _turned(node: Node, _out: int, value: Tensor) -> Tensor:
    return value.transpose(signed(node._saved_dim0), signed(node._saved_dim1))  # noqa: SLF001 - what a node saved has no other name


def _permuted(node: Node, _out: int, value: Tensor) -> Tensor:
    return value.permute([signed(dim) for dim in node._saved_dims])  # noqa: SLF001 - the same


def _selected(node: Node, _out: int, value: Tensor) -> Tensor:
    return value.select(signed(node._saved_dim), signed(node._saved_index))  # noqa: SLF001 - the same


def _sliced(node: Node, _out: int, value: Tensor) -> Tensor:
    saved_ends = (node._saved_start, node._saved_end)  # noqa: SLF001 - the same
    begin, end = (None if each is None else signed(each) for each in saved_ends)
    places = [slice(None)] * (signed(node._saved_dim) % value.dim())  # noqa: SLF001 - the same
    places.append(slice(begin, end, node._saved_step))  # noqa: SLF001 - the same
    return value[tuple(places)]


def _split(node: Node, out: int, value: Tensor) -> Tensor:
    dim, size = signed(node._saved_dim), signed(node._saved_split_size)  # noqa: SLF001 - the same
    return value.narrow(dim, out * size, min(size, value.shape[dim] - out * size))


def _split_by_sizes(node: Node, out: int, value: Tensor) -> Tensor:
    sizes = [signed(size) for size in node._saved_split_sizes]  # noqa: SLF001 - the same
    return value.narrow(signed(node._saved_dim), sum(sizes[:out]), sizes[out])  # noqa: SLF001 - the same


VIEWS: Mapping[str, Callable[[Node, int, Tensor], Tensor]] = MappingProxyType(
    {
        **dict.fromkeys(COPIES, lambda _node, _out, value: value),
        **dict.fromkeys(RESHAPES, lambda node, _out, value: value.reshape(shape_of(node))),
        Op.EXPAND: lambda node, _out, value: value.expand(shape_of(node)),
        Op.PERMUTE: _permuted,
        Op.SELECT: _selected,
        Op.SLICE: _sliced,
        Op.SPLIT: _split,
        Op.SPLIT_WITH_SIZES: _split_by_sizes,
        Op.T: lambda _node, _out, value: value.t(),
        Op.TRANSPOSE: _turned,
        Op.UNBIND: lambda node, out, value: value.unbind(signed(node._saved_dim))[out],  # noqa: SLF001 - the same
    }
)
"""What nodes show of what entered, by their kind: called with the node, which of its results is meant, and that."""
