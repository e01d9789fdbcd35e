"""Follows the graph behind predictions to the first layers: what entered them, and whether all between is linear."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.bounds import FIXED
from gradflow_export.autograd_graph.loss_graph import LAYERS, Node, through_shapes
from gradflow_export.autograd_graph.loss_shape import shape_of
from gradflow_export.autograd_graph.nodes import (
    Op,
    below,
    by_number,
    inputs,
    is_written,
    kind_of,
    sources_in,
    through,
    walk,
)
from gradflow_export.hooks.backward_listener import saved

MOST_NODES = 4_000
"""A longer graph is followed no further."""
_SCALED = 32
"""Nodes that may stand between an input and the layer that it enters."""
_SUMMED = 8
"""Parts that a sum of outputs may have."""
_FAR = 1e4
"""Limits of an activation that lie as far out are not meant to be reached."""
NORMALISATIONS = frozenset(
    (
        Op.NATIVE_BATCH_NORM,
        Op.CUDNN_BATCH_NORM,
        Op.MIOPEN_BATCH_NORM,
        Op.NATIVE_LAYER_NORM,
        Op.NATIVE_GROUP_NORM,
        Op.FUSED_RMS_NORM,
    )
)
_AFFINE = frozenset(
    [
        Op.ADD,
        Op.ALIAS,
        Op.AS_STRIDED,
        Op.AVG_POOL2D,
        Op.CAT,
        Op.CLONE,
        Op.CONSTANT_PAD_ND,
        Op.DIV,
        Op.EXPAND,
        Op.MEAN,
        Op.MUL,
        Op.NEG,
        Op.NATIVE_BATCH_NORM,
        Op.NATIVE_DROPOUT,
        Op.CUDNN_BATCH_NORM,
        Op.PERMUTE,
        Op.RESHAPE_ALIAS,
        Op.SELECT,
        Op.SLICE,
        Op.SPLIT,
        Op.SQUEEZE,
        Op.STACK,
        Op.SUB,
        Op.SUM,
        Op.T,
        Op.TO_COPY,
        Op.TRANSPOSE,
        Op.UNSQUEEZE,
        Op.UNSAFE_VIEW,
        Op.VIEW,
    ]
)
_WEIGHT_VIEWS = frozenset(
    (Op.T, Op.TO_COPY, Op.VIEW, Op.TRANSPOSE, Op.PERMUTE, Op.RESHAPE_ALIAS, Op.UNSAFE_VIEW, Op.UNSQUEEZE)
)
_HEADS = frozenset((
    Op.ADD, Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN, Op.DIV, Op.HARDTANH, Op.LEAKY_RELU, Op.MUL, Op.NATIVE_BATCH_NORM,
    Op.NATIVE_DROPOUT, Op.NATIVE_LAYER_NORM, Op.NEG, Op.SUB,
))  # fmt: skip
_TURNS = frozenset((Op.T, Op.TRANSPOSE, Op.PERMUTE))
"""Of a matrix there is but one other order of its dimensions."""
_FUSED_CELLS = frozenset((Op.MKLDNN_RNN_LAYER, Op.CUDNN_RNN))
LOOKUPS = frozenset((Op.EMBEDDING, Op.EMBEDDING_BAG))


@dataclass
class FirstLayer:
    """A layer that something without a gradient enters.

    Attributes:
        name: Of the module that holds its weight.
        entered: What entered it, ``None`` where it is not known.
        normalised: Whether a normalisation stands directly before or behind it.
        tokens: Whether what enters it are numbers of words, not sizes.
        weight: The ``id`` of its weight; 0 where it does not matter.
    """

    name: str
    entered: Tensor | None
    normalised: bool
    tokens: bool = False
    weight: int = 0


@dataclass(frozen=True)
class Straight:
    """A layer of a row without a non-linearity.

    Attributes:
        name: Of the module that holds its weight.
        inputs: Features, or channels, that enter it.
        outputs: That leave it.
        plain: Whether it is a matrix; a convolution in a row widens what is seen, or is one of a factorisation.
        normalised: Whether a normalisation stands directly behind it.
    """

    name: str
    inputs: int
    outputs: int
    plain: bool = True
    normalised: bool = False


@dataclass
class Layers:
    """What was found behind some predictions.

    Attributes:
        first: The layers that data enters.
        made: Nodes of all layers of the model, with the names of their modules.
        last: Name of the nearest layer of the model, ``""`` where there is none.
        run: The longest row of layers with nothing but affine steps between them, from the input on.
        bends: Whether there is any step that is not affine, or one that is not known.
        whole: Whether all was seen.
        own: Whether the first thing before the predictions, apart from an activation, is a layer of this model, or a
            sum of such alone.
        foreign: Whether a leaf was met that is no parameter of this model.
        beside: Whether it was a parameter, which another optimizer may train.
        written: Whether a function was met for which a user wrote how gradients pass.
    """

    first: list[FirstLayer] = field(default_factory=list)
    made: list[tuple[Node, str]] = field(default_factory=list)
    last: str = ""
    run: tuple[Straight, ...] = ()
    bends: bool = False
    whole: bool = True
    own: bool = False
    foreign: bool = False
    beside: bool = False
    written: bool = False


def _behind_head(node: Node) -> Node:
    """Return the layer whose outputs are scaled, shifted, limited or normalised, by parameters or what has no graph."""
    while kind_of(node) in _HEADS or kind_of(node) in FIXED:
        given = (part for part in inputs(node) if part is not None)
        parts = [part for part in given if kind_of(through(part, _WEIGHT_VIEWS)) != Op.LEAF]
        if len(parts) != 1:
            break
        node = through_shapes(parts[0])
    return node


def layers_behind(node: Node, names: Mapping[int, str], turned: Collection[int], root: Node) -> Layers:
    """Follow the graph from what made the predictions.

    Args:
        node: What made them; a last activation is passed over.
        names: Names of modules by the ``id`` of their parameters.
        turned: The ``id`` of weights that data from outside is multiplied by transposed, and a gradient as they are,
            where a loss contains one, as a penalty on it does.
        root: What made the whole loss.
    """
    out = Layers()
    start = through_shapes(node)
    if kind_of(start) in FIXED:
        start = through_shapes(below(start))
    out.own = _is_own(start, names, turned)
    waiting: deque[tuple[Node, str, tuple[Straight, ...]]] = deque([(start, "", ())])
    seen = {start}
    while waiting:
        here, after, row = waiting.popleft()
        if here is None:
            continue
        if len(seen) > MOST_NODES:
            out.whole = False
            break
        sources, row = _enter(here, after, row, names, turned, out)
        kind = kind_of(here)
        out.written |= is_written(kind)
        for source in sources:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append((source, after if kind in _WEIGHT_VIEWS else kind, row))
    entered = [made for made, _ in out.made if below(made, LAYERS[kind_of(made)][1]) is None]
    back = [made for made in entered if _goes_back(made, turned, root)]
    if back:
        weights = {_weight(made)[0] for made in back}
        out.made = [(made, name) for made, name in out.made if made not in back]
        out.first = [layer for layer in out.first if layer.weight not in weights]
    return out


def _is_own(node: Node, names: Mapping[int, str], turned: Collection[int]) -> bool:
    """Whether this is what a layer of the model gave out, or the sum of such outputs, as of a wide and a deep part."""
    waiting = [node]
    while waiting and len(waiting) <= _SUMMED:
        head = _behind_head(waiting.pop())
        kind = kind_of(head)
        if kind in {Op.ADD, Op.SUB}:
            waiting += [through_shapes(part) for part in inputs(head) if part is not None]
            continue
        looked_up = _owner(below(head), names) if kind in LOOKUPS else None
        if (_layer(head, names, turned) if kind in LAYERS else looked_up) is None:
            return False
    return not waiting


def calls_of(layers: Layers, name: str) -> list[Tensor]:
    """Return what entered a layer from outside the model, once for each call; inputs may require a gradient."""
    made = ((node, *LAYERS[kind_of(node)][:2]) for node, each in layers.made if each == name)
    entered = (saved(node, held) for node, held, data in made if _is_outside(below(node, data)))
    return [each for each in entered if each is not None]


def _is_outside(node: Node) -> bool:
    """Whether no parameter has a part in what a node gives: inputs, or inputs that were scaled."""
    made = {} if node is None else sources_in(node, _SCALED)
    return made is not None and not any(isinstance(getattr(each, "variable", None), nn.Parameter) for each in made)


def _enter(
    node: Node,
    after: str,
    row: tuple[Straight, ...],
    names: Mapping[int, str],
    turned: Collection[int],
    out: Layers,
) -> tuple[list[Node], tuple[Straight, ...]]:
    """Take one node in; return where its data came from, and the row of layers that goes on from here."""
    kind = kind_of(node)
    if kind == Op.LEAF:
        variable = getattr(node, "variable", None)
        out.foreign |= id(variable) not in names
        out.beside |= id(variable) not in names and isinstance(variable, nn.Parameter)
        return [], ()
    if kind in LAYERS:
        data, weight = LAYERS[kind][1:]
        name = _layer(node, names, turned)
        if name is not None:
            return [below(node, data)], _add_layer(node, name, after, row, out)
        sources = [source for source in (below(node, data), below(node, weight)) if source is not None]
        if len(sources) == 1 and kind != Op.CONVOLUTION:  # with a matrix that has no graph, as a graph's neighbours
            return sources, row
        out.bends = True  # a product of two activations, or a weight that is computed
        row = ()
    elif kind in NORMALISATIONS:
        name = _owner(below(node, 1), names)
        if below(node) is None and name is not None:
            out.first.append(FirstLayer(name, saved(node, "input"), normalised=True))
            out.last = out.last or name
        out.bends |= kind not in _AFFINE
        return [below(node)], row if kind in _AFFINE else ()
    elif kind in LOOKUPS:
        name = _owner(below(node), names)
        if name is not None:
            out.first.append(FirstLayer(name, saved(node, "indices"), normalised=True, tokens=True))
        return [], ()
    elif not is_straight(node) and (kind not in _AFFINE or (kind in {Op.DIV, Op.MUL} and not is_factor(node))):
        _add_steps(node, names, out)
        out.bends = True
        row = ()
    return inputs(node), () if _joins(node) else row


def _joins(node: Node) -> bool:
    """Whether a node puts two branches together: what comes before in one of them is no part of a row with the rest."""
    given = (part for part in inputs(node) if part is not None)
    return sum(kind_of(through(part, _WEIGHT_VIEWS)) != Op.LEAF for part in given) > 1


def _add_steps(node: Node, names: Mapping[int, str], out: Layers) -> None:
    """Note what enters one kernel that runs all steps: they are rows, as to a layer that multiplies by its matrix."""
    if kind_of(node) not in _FUSED_CELLS or below(node) is not None:
        return
    name = next((found for source in inputs(node) if (found := _owner(source, names)) is not None), None)
    entered = saved(node, "input")
    if name is not None and entered is not None and entered.dim() == 3:
        out.first.append(FirstLayer(name, entered.flatten(0, 1), normalised=False))


def _add_layer(node: Node, name: str, after: str, row: tuple[Straight, ...], out: Layers) -> tuple[Straight, ...]:
    attribute, data, weight = LAYERS[kind_of(node)]
    out.last = out.last or name
    variable = through_shapes(below(node, weight)).variable
    shape = tuple(variable.shape)
    outputs, inputs = (shape[0], shape[1]) if len(shape) > 1 else (1, shape[0])
    normalised = after in NORMALISATIONS
    row = (Straight(name, inputs, outputs, plain=len(shape) <= 2, normalised=normalised), *row)
    out.made.append((node, name))
    out.run = max(out.run, row, key=len)
    if below(node, data) is None:
        out.first.append(FirstLayer(name, saved(node, attribute), normalised=normalised, weight=id(variable)))
    return row


def _layer(node: Node, names: Mapping[int, str], turned: Collection[int]) -> str | None:
    """Return the module that multiplies by its weight here, ``None`` where none does, or a gradient goes back."""
    _, data, held = LAYERS[kind_of(node)]
    name = _owner(below(node, held), names)
    if name is None or kind_of(node) != Op.MM or below(node, data) is not None:
        return name
    weight, turns = _weight(node)
    return name if turns or weight not in turned else None


def _weight(node: Node) -> tuple[int, bool]:
    """Return the ``id`` of the weight that a layer multiplies by, and whether it is transposed."""
    source, turns = below(node, LAYERS[kind_of(node)][2]), 0
    while kind_of(source) in _WEIGHT_VIEWS:
        turns += kind_of(source) in _TURNS
        source = below(source)
    return id(getattr(source, "variable", None)), turns % 2 == 1


def _goes_back(node: Node, turned: Collection[int], root: Node) -> bool:
    """Whether a gradient enters a product: data does by the other side, and nothing comes of it there."""
    weight, turns = _weight(node)
    if kind_of(node) != Op.MM or weight in turned:
        return False
    for other in walk([root], most=MOST_NODES):
        data = below(other, LAYERS[kind_of(other)][1]) if kind_of(other) in LAYERS else None
        if data is not None and _weight(other) == (weight, not turns):
            return all(each is not node for each in walk([data], most=MOST_NODES))
    return False


def _owner(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the module whose weight this is, ``None`` where it is no parameter of the model as it stands."""
    while kind_of(node) in _WEIGHT_VIEWS:
        node = below(node)
    return names.get(id(getattr(node, "variable", None))) if kind_of(node) == Op.LEAF else None


def entering(first: list[FirstLayer], states: set[int]) -> list[FirstLayer]:
    """Leave out what a first state of zeros enters, as in every recurrent layer, where anything else enters."""

    def is_blank(entered: Tensor | None) -> bool:  # on a device nothing here waits for
        return entered is not None and entered.device.type == "cpu" and not bool(entered.any())

    return [layer for layer in first if layer.weight not in states and not is_blank(layer.entered)] or first


def widest(first: list[FirstLayer]) -> FirstLayer | None:
    """Return the layer that most numbers enter, as far as that is known; the first one where it is not."""
    known = [layer for layer in first if layer.entered is not None and layer.entered.numel()]
    chosen = max(known, key=lambda layer: layer.entered.numel(), default=None)  # type: ignore[union-attr]
    return chosen or (first[0] if first else None)


def is_straight(node: Node) -> bool:
    """Whether this is an activation that is linear: a slope of 1 on both sides, or limits no number comes to."""
    kind = kind_of(node)
    if kind == Op.LEAKY_RELU:
        return bool(getattr(node, "_saved_negative_slope", 0.0) == 1.0)
    if kind != Op.HARDTANH:
        return False
    low, high = getattr(node, "_saved_min_val", 0.0), getattr(node, "_saved_max_val", 0.0)
    return bool(low <= -_FAR and high >= _FAR)


def is_factor(node: Node) -> bool:
    """Whether a product or quotient is with a number, or with a mask of dropout."""
    if by_number(node):
        return True
    both = below(node) is not None and below(node, 1) is not None
    if both or (kind_of(node) == Op.DIV and below(node) is None):
        return False
    other: Any = saved(node, "other" if below(node) is not None else "self")
    return other is not None and (other.dim() == 0 or _is_mask(other, shape_of(node)))


def _is_mask(other: Tensor, shape: tuple[int, ...]) -> bool:
    if other.device.type != "cpu" or tuple(other.shape) != shape:
        return False
    values = torch.unique(other.reshape(-1)[:256])
    return len(values) <= 2 and bool((values == 0).any())
