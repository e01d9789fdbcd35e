"""Follows the graph behind predictions to the first layers: what entered them, and whether anything bends between."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradflow_export.taps.lossgraph import LAYERS, REACH, Node, below, kind_of, shape_of, through_shapes
from gradflow_export.taps.root import saved

MOST_NODES = 4_000
"""A longer graph is followed no further."""
NORMALISATIONS = frozenset(
    ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm")
)
_AFFINE = frozenset(
    [
        "Add",
        "Alias",
        "AsStrided",
        "AvgPool2D",
        "Cat",
        "Clone",
        "ConstantPadNd",
        "Div",
        "Expand",
        "Mean",
        "Mul",
        "Neg",
        "NativeBatchNorm",
        "NativeDropout",
        "CudnnBatchNorm",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "Squeeze",
        "Stack",
        "Sub",
        "Sum",
        "T",
        "ToCopy",
        "Transpose",
        "Unsqueeze",
        "UnsafeView",
        "View",
    ]
)
_WEIGHT_VIEWS = frozenset(("T", "ToCopy", "View", "Transpose", "Permute", "ReshapeAlias", "UnsafeView", "Unsqueeze"))
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass
class FirstLayer:
    """A layer that something without a gradient enters.

    Attributes:
        name: Of the module that holds its weight.
        entered: What entered it, ``None`` where it is not known.
        normalised: Whether a normalisation stands directly before or behind it.
        kind: Of its node.
    """

    name: str
    entered: Tensor | None
    normalised: bool
    kind: str


@dataclass
class Layers:
    """What was found behind some predictions.

    Attributes:
        first: The layers that data enters.
        last: Name of the nearest layer of the model, ``""`` where there is none.
        widths: Inputs and outputs of each layer with weights, from the loss back.
        bends: Whether there is any step that is not affine, or one that is not known.
        whole: Whether all was seen.
        own: Whether the first thing before the predictions, apart from an activation, is a layer of this model.
        foreign: Whether a parameter was met that is not of this model.
    """

    first: list[FirstLayer] = field(default_factory=list)
    last: str = ""
    widths: list[tuple[int, int]] = field(default_factory=list)
    bends: bool = False
    whole: bool = True
    own: bool = False
    foreign: bool = False


def layers_behind(node: Node, names: Mapping[int, str]) -> Layers:
    """Follow the graph from what made the predictions.

    Args:
        node: What made them; a last activation is passed over.
        names: Names of modules by the ``id`` of their parameters.
    """
    out = Layers()
    start = through_shapes(node)
    if kind_of(start) in REACH:
        start = through_shapes(below(start))
    out.own = kind_of(start) in LAYERS
    waiting: deque[tuple[Node, str]] = deque([(start, "")])
    seen = {start}
    while waiting:
        here, after = waiting.popleft()
        if here is None:
            continue
        if len(seen) > MOST_NODES:
            out.whole = False
            break
        for source in _enter(here, after, names, out):
            if source is not None and source not in seen:
                seen.add(source)
                kind = kind_of(here)
                waiting.append((source, after if kind in _WEIGHT_VIEWS else kind))
    return out


def _enter(node: Node, after: str, names: Mapping[int, str], out: Layers) -> list[Node]:
    """Take one node in, and return where data came from."""
    kind = kind_of(node)
    if kind == _LEAF:
        out.foreign |= id(getattr(node, "variable", None)) not in names
        return []
    if kind in LAYERS:
        attribute, data, weight = LAYERS[kind]
        name = _owner(below(node, weight), names)
        if name is not None:
            _add_layer(node, name, saved_at=(attribute, data), after=after, out=out)
            return [below(node, data)]
        if kind != "Convolution" and (below(node, data) is None) != (below(node, weight) is None):
            out.foreign |= kind in {"Addmm", "Linear"}
        out.bends = True  # a product of two activations, or a weight that is computed
    elif kind in NORMALISATIONS:
        name = _owner(below(node, 1), names)
        if below(node) is None and name is not None:
            out.first.append(FirstLayer(name, saved(node, "input"), normalised=True, kind=kind))
            out.last = out.last or name
        out.bends |= kind not in _AFFINE
        return [below(node)]
    elif kind == "Embedding":
        name = _owner(below(node), names)
        if name is not None:
            out.first.append(FirstLayer(name, None, normalised=True, kind=kind))
        out.bends = True
        return []
    elif kind not in _AFFINE or (kind == "Mul" and not _is_factor(node)):
        out.bends = True
    return [source for source, _ in node.next_functions]


def _add_layer(node: Node, name: str, *, saved_at: tuple[str, int], after: str, out: Layers) -> None:
    attribute, data = saved_at
    out.last = out.last or name
    weight = through_shapes(below(node, LAYERS[kind_of(node)][2]))
    shape = tuple(weight.variable.shape)
    outputs, inputs = (shape[0], shape[1]) if len(shape) > 1 else (1, shape[0])
    out.widths.append((inputs, outputs))
    if below(node, data) is None:
        entered = saved(node, attribute)
        out.first.append(FirstLayer(name, entered, normalised=after in NORMALISATIONS, kind=kind_of(node)))


def _owner(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the module whose weight this is, ``None`` where it is no parameter of the model as it stands."""
    while kind_of(node) in _WEIGHT_VIEWS:
        node = below(node)
    return names.get(id(getattr(node, "variable", None))) if kind_of(node) == _LEAF else None


def _is_factor(node: Node) -> bool:
    """Whether a product is with a number, or with a mask of dropout."""
    if below(node) is not None and below(node, 1) is not None:
        return False
    if node.name() == "MulBackward1":
        return True
    other: Any = saved(node, "other" if below(node) is not None else "self")
    if other is None:
        return False
    if other.dim() == 0:
        return True
    if other.device.type != "cpu" or other.shape != shape_of(node):
        return False
    values = torch.unique(other.reshape(-1)[:256])
    return len(values) <= 2 and bool((values == 0).any())
