"""Rows of what enters a loss, and answers: those of a loss written out by hand, and those that are the words given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.layer_graph import FirstLayer, widest
from gradflow_export.autograd_graph.loss_graph import Node, Term
from gradflow_export.autograd_graph.loss_shape import adds_bias, dim_of, factor_of, shape_of, signed
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, sources, through, walk
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.metrics.constants import PICKED

ROWS = 256
"""Samples of a batch that are taken, at most."""
FEATURES = 256
"""Numbers of each sample, at most."""
MOST_PRODUCTS = 2**26
"""Products of a last layer that is computed once more, at most."""
CHANNELS, IMAGES, PIXELS = 4, 64, 2048
"""Channels of what is taken for an image, at most, and how many images, and numbers of each, are looked at."""
WORDS = 1024
"""Words that are compared with targets, at most."""
CLASSES = 64
"""Weights of classes that are looked at, at most."""
OTHERS = 4
"""Inputs of which the size is read."""
LEAST_SAMPLES = 8
"""Samples of a batch of which a loss chooses one for each, at least."""
Said = Mapping[Node, Tensor]
"""What a model gave out, by the node that made it."""
NOTHING: Said = MappingProxyType({})
_FAR = 4_000
_IN_ORDER = frozenset(
    (Op.ALIAS, Op.CLONE, Op.RESHAPE_ALIAS, Op.SQUEEZE, Op.TO_COPY, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW)
)
"""What changes shape alone, and not the order of the entries."""
_PARTS = frozenset((Op.SELECT, Op.SLICE))
"""What shows a part: of a single column, as in ``model(x)[:, 0]``, all entries in their order."""
_RECURRENT = frozenset((Op.CUDNN_RNN, Op.MKLDNN_RNN_LAYER))
_BY_PLACE = _IN_ORDER | frozenset(
    [
        Op.ADD,
        Op.DIV,
        Op.ELU,
        Op.FUSED_RMS_NORM,
        Op.GELU,
        Op.LEAKY_RELU,
        Op.LOG_SOFTMAX,
        Op.MUL,
        Op.NATIVE_DROPOUT,
        Op.NATIVE_LAYER_NORM,
        Op.RELU,
        Op.SILU,
        Op.SUB,
        Op.TANH,
    ]
)
_ENTERED = MappingProxyType({Op.ADDMM: "mat1", Op.CONVOLUTION: "input", Op.LINEAR: "input", Op.MM: "self"})
_MATRICES = MappingProxyType({Op.ADDMM: 1, Op.LINEAR: 0, Op.MM: 0})
"""Layers that keep rows apart, and which of their arguments these are."""


def by_hand(term: Term, said: Said = NOTHING) -> tuple[Tensor, Tensor] | None:
    """Return predictions and targets of ``(prediction - target)`` squared or without its sign, as ``F.l1_loss`` is.

    Nothing keeps them but their difference. They are what the model gave out, or what its last layer did, which is
    computed once more from what entered it, where that is little work.

    Args:
        term: A loss of which the predictions are not known.
        said: What the model gave out, by the node that made it.

    Returns:
        Both, of one shape; ``None`` where anything else stands between the last layer and the difference.
    """
    difference, apart = saved(term.node, "self"), below(term.node)
    if difference is None or kind_of(apart) != Op.SUB or getattr(apart, "_saved_alpha", 1) != 1:
        return None
    turned = below(apart) is None
    made = below(apart, int(turned))
    while made not in said and kind_of(made) in _IN_ORDER:
        made = below(made)
    out = said[made].float() if made in said else _given_out(below(apart, int(turned)))
    if out is None or out.numel() != difference.numel() or out.device != difference.device:
        return None
    out, held = out.reshape(difference.shape), local(difference).to(out.dtype)
    return out, out + held if turned else out - held


def _given_out(node: Node) -> Tensor | None:
    bias = None
    while kind_of(node) in _IN_ORDER or kind_of(node) in _PARTS or adds_bias(node):
        if adds_bias(node):
            bias = below(node, 1).variable
        node = below(node)
    kind, result = kind_of(node), saved(node, "result")
    if result is not None:  # an activation that keeps what it gave
        return local(result).float()
    entered = saved(node, _ENTERED.get(kind, ""))
    weight = _variable(below(node, {Op.ADDMM: 2}.get(kind, 1)))
    if entered is None or weight is None:
        return None
    x, w = local(entered).float(), local(weight.detach()).float()
    if kind == Op.CONVOLUTION:
        bias = _variable(below(node, 2))
        work = x.numel() * w.shape[0] * math.prod(w.shape[2:])
        if work > MOST_PRODUCTS or getattr(node, "_saved_transposed", True):
            return None
        stride, padding, dilation = (
            list(getattr(node, f"_saved_{name}")) for name in ("stride", "padding", "dilation")
        )
        groups: int = getattr(node, "_saved_groups", 1)
        b = None if bias is None else bias.detach().float()
        return torch.convolution(
            x, w, b, stride, padding, dilation, transposed=False, output_padding=[0], groups=groups
        )
    if x.numel() * w.shape[0] > MOST_PRODUCTS or x.shape[-1] != w.shape[-1] or w.dim() != 2:
        return None
    bias = bias if kind == Op.MM else _variable(below(node, {Op.ADDMM: 0}.get(kind, 2)))
    return nn.functional.linear(x, w, None if bias is None else bias.detach().float())


def _variable(node: Node) -> Tensor | None:
    found = getattr(through(node, {Op.T, Op.TO_COPY, Op.TRANSPOSE}), "variable", None)
    return found if isinstance(found, Tensor) else None


def weighted(term: Term, most: int) -> Tensor | None:
    """Return the weights that a loss gives to classes, and labels.

    Args:
        term: A cross-entropy of classes, or a binary one with a weight for positives.
        most: Labels, at most.

    Returns:
        How many weights there are, these, and labels, none of several that are judged apart; ``None`` without weights.
        Shape: ``[1 + weights + <= most]``.
    """
    weights = saved(term.node, "weight" if term.kind == "classes" else "pos_weight")
    if weights is None or term.targets is None or term.kind not in {"classes", "binary"}:
        return None
    several = term.kind == "binary" and weights.numel() > 1
    if term.kind == "binary" and not several:
        weights = torch.cat([torch.ones_like(weights).reshape(1), weights.reshape(1)])
    if weights.dim() != 1 or not 1 < len(weights) <= CLASSES:
        return None
    labels = even_sample(local(term.targets), most)[: 0 if several else most]
    count = torch.full((1,), float(len(weights)), device=labels.device)
    return torch.cat([count, weights.to(labels.device, torch.float32), labels.to(torch.float32)])


def among_samples(term: Term, most: int) -> Tensor | None:
    """Return targets that choose among the samples of the batch, as those of a contrastive loss: one class for each.

    Scores that were put together, as those of a positive before its negatives, choose among something else.

    Args:
        term: A loss.
        most: Targets, at most.

    Returns:
        Some targets; ``None`` where classes are something else. Shape: ``[<= most]``.
    """
    scores, targets = term.predictions, term.targets
    if term.kind != "classes" or scores is None or targets is None or scores.dim() != 2:
        return None
    node = term.behind
    while not math.isnan(factor_of(node)):
        node = below(node)
    chosen = kind_of(node) != Op.CAT and len(scores) == scores.shape[1] == targets.numel() >= LEAST_SAMPLES
    return even_sample(local(targets), most).to(torch.float32) if chosen else None


def signs(term: Term, most: int) -> Tensor | None:
    """Return labels of a margin loss, ``None`` where it is none. Shape: ``[<= most]``."""
    return None if term.signs is None else even_sample(local(term.signs), most).to(torch.float32)


def same_words(term: Term, first: list[FirstLayer]) -> Tensor | None:
    """Return where targets are the words that entered the model at the same places, and come straight to the loss.

    Straight: along a path on which each place stays by itself, sums of residual branches included. A model that has to
    put a text into fewer numbers and say it again has no such path.

    Args:
        term: A cross-entropy.
        first: The layers that data enters.

    Returns:
        1 where they are the same, 2 where both are what the model declares as padding, 0 where they differ, NaN where a
        target does not count. Shape: ``[<= WORDS]``.
    """
    y = term.targets
    if term.kind != "classes" or y is None or y.is_floating_point() or y.dim() < 1:
        return None
    tables = [layer.entered for layer in first if layer.tokens and layer.entered is not None]
    near = [words for words in tables if words.dim() > 1 and words.numel() == y.numel() and words.device == y.device]
    reached = _reached(term.behind, y.numel()) if near else {}
    padding = [(words, reached.get((words.data_ptr(), words.numel()))) for words in near]
    targets = local(y).reshape(-1)[:WORDS]
    same = [
        (local(words).reshape(-1)[:WORDS] == targets) * (1.0 + (targets == pad))
        for words, pad in padding
        if pad is not None
    ]
    if not same:
        return None
    counts = (targets >= 0) & (targets != (-100 if term.ignored is None else term.ignored))
    return torch.where(counts, torch.stack(same).amax(dim=0).to(torch.float32), torch.nan)


def _reached(node: Node, count: int) -> dict[tuple[int, int], int]:
    """Return where the words lie that come straight here, and how many they are, each with the number of padding."""
    behind = walk([node], step=lambda here: _sources(here, kind_of(here), count), most=_FAR)
    held = [(saved(here, "indices"), here) for here in behind if kind_of(here) == Op.EMBEDDING]
    return {
        (each.data_ptr(), each.numel()): signed(here._saved_padding_idx)  # noqa: SLF001 - what a node saved
        for each, here in held
        if each is not None
    }


def _rows(node: Node) -> int:
    """Return how many rows entered a matrix, 0 where that is not known."""
    entered = saved(node, _ENTERED[kind_of(node)])
    return 0 if entered is None else math.prod(entered.shape[:-1])


def _sources(node: Node, kind: str, count: int) -> list[Node]:
    """Return what a node takes, where it keeps the places apart."""
    if kind in _MATRICES:
        return [below(node, _MATRICES[kind])] if _rows(node) == count else []
    if kind in _RECURRENT:
        # What a recurrent layer says at a place has passed the word there; batch and time may be turned round.
        return [through(below(node), {Op.CLONE, Op.TRANSPOSE})]
    if kind == Op.STACK:  # of the steps of a recurrent layer, whose words all entered by one matrix: the nearest one
        made = (each for each in walk([node], most=_FAR) if kind_of(each) in _MATRICES and _rows(each) == count)
        nearest = next(made, None)
        data = None if nearest is None else below(nearest, _MATRICES[kind_of(nearest)])
        return [] if data is None else [through(data, _IN_ORDER | {Op.TRANSPOSE})]
    if kind == Op.CAT:  # of features, beside each other at each place
        return sources(node) if dim_of(node) == len(shape_of(node)) - 1 else []
    if kind == Op.TRANSPOSE:
        return [below(node)] if kind_of(below(node)) in _RECURRENT | {Op.STACK} else []
    return sources(node) if kind in _BY_PLACE else []


def choices(term: Term) -> int:
    """Return among how many each prediction chooses: 1 where scores are no logarithms, 0 where it does not choose."""
    if term.kind not in PICKED or term.predictions is None:
        return 0
    return term.predictions.shape[1] if term.kind == "classes" else 1


def in_order(scores: Tensor, predictions: Tensor) -> bool:
    """Whether scores have the shape of predictions, or were put in rows for each position."""
    flat = predictions.dim() == 2 and scores.shape[-1] == predictions.shape[1]
    return scores.shape == predictions.shape or (flat and scores.numel() == predictions.numel())


def others(layers: list[FirstLayer]) -> dict[str, tuple[Tensor, bool]]:
    """Return some rows of what enters other layers than the widest input, and whether it is normalised, by layer.

    Words have no size, and are left out.
    """
    first = widest(layers)
    known = {each.name: each for each in layers if each.entered is not None and each.entered.dim() and not each.tokens}
    return {
        name: (thinned(rows_of(each.entered)).to(torch.float32).contiguous(), each.normalised)
        for name, each in [*known.items()][:OTHERS]
        if first is not None and each.entered is not None and name != first.name
    }


def images(layers: list[FirstLayer]) -> dict[str, tuple[Tensor, int]]:
    """Return the first numbers of some images of three or four channels, and how many channels these are, by layer.

    Of two, as the parts of a complex spectrum are, neighbours may differ in sign by nature.
    """
    return {
        each.name: (
            local(each.entered)[:IMAGES].flatten(1)[:, :PIXELS].to(torch.float32).contiguous(),
            each.entered.shape[1],
        )
        for each in layers[:OTHERS]
        if each.entered is not None and each.entered.dim() > 2 and 2 < each.entered.shape[1] <= CHANNELS
    }


def is_answer(term: Term) -> bool:
    """Whether predictions are classes, or one number for each sample: a target of more may be the input, or noise."""
    return term.kind in PICKED or (term.targets is not None and term.targets.shape[:1] == (term.targets.numel(),))


def some_rows(tensor: Tensor) -> Tensor:
    """Return at most ``ROWS`` rows, always the same of so many: one of each part, for every second may be alike."""
    count = len(tensor)
    if count <= ROWS:
        return tensor
    part = torch.arange(ROWS, device=tensor.device)
    begin, end = part * count // ROWS, (part + 1) * count // ROWS
    # Which of its part is as good as drawn: multiples of the golden ratio, in 32 bits.
    return tensor.index_select(0, begin + (part * 2654435769 % 2**32 >> 8) % (end - begin))


def thinned(entered: Tensor) -> Tensor:
    """Return evenly spaced rows and features."""
    return some_rows(entered)[:, :: max(-(-entered.shape[1] // FEATURES), 1)]


def rows_of(entered: Tensor, count: int = 0) -> Tensor:
    """Return a tensor as a row for each sample, of which there may be ``count`` one after the other."""
    held = local(entered)
    single = held.dim() == 1
    if held.is_complex():  # two features: real and imaginary part
        held = torch.view_as_real(held.resolve_conj())
    if single and count and len(held) % count == 0:
        return held.reshape(count, -1)
    return held.reshape(len(held), -1) if held.dim() > 1 else held.reshape(-1, 1)
