"""Answers that a loss was given: those of a loss written out by hand, and those that are the very words given."""

from __future__ import annotations

import math
from collections import deque
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.layer_graph import FirstLayer
from gradflow_export.autograd_graph.loss_graph import Node, Term
from gradflow_export.autograd_graph.loss_shape import adds_bias, below, kind_of
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.metrics.arrays.local import local

MOST_PRODUCTS = 2**26
"""Products of a last layer that is computed once more, at most."""
WORDS = 1024
"""Words that are compared with targets, at most."""
_FAR = 4_000
_IN_ORDER = frozenset(("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View"))
"""What changes shape alone, and not the order of the entries."""
_RECURRENT = frozenset(("CudnnRnn", "MkldnnRnnLayer"))
_BY_PLACE = _IN_ORDER | frozenset(
    [
        "Add",
        "Div",
        "Elu",
        "FusedRmsNorm",
        "Gelu",
        "LeakyRelu",
        "LogSoftmax",
        "Mul",
        "NativeDropout",
        "NativeLayerNorm",
        "Relu",
        "Silu",
        "Sub",
        "Tanh",
    ]
)
_ENTERED = MappingProxyType({"Addmm": "mat1", "Convolution": "input", "Linear": "input", "Mm": "self"})
_MATRICES = MappingProxyType({"Addmm": 1, "Linear": 0, "Mm": 0})
"""Layers that keep rows apart, and which of their arguments these are."""


def by_hand(term: Term) -> tuple[Tensor, Tensor] | None:
    """Return predictions and targets of ``(prediction - target)`` squared or without its sign, as ``F.l1_loss`` is.

    Nothing keeps them but their difference. What the last layer gave out is computed once more from what entered it,
    where that is little work.

    Args:
        term: A loss of which the predictions are not known.

    Returns:
        Both, of one shape; ``None`` where anything else stands between the last layer and the difference.
    """
    difference, apart = saved(term.node, "self"), below(term.node)
    if difference is None or kind_of(apart) != "Sub" or getattr(apart, "_saved_alpha", 1) != 1:
        return None
    turned = below(apart) is None
    out = _given_out(below(apart, int(turned)))
    if out is None or out.numel() != difference.numel() or out.device != difference.device:
        return None
    out, held = out.reshape(difference.shape), local(difference).to(out.dtype)
    return out, out + held if turned else out - held


def _given_out(node: Node) -> Tensor | None:
    bias = None
    while kind_of(node) in _IN_ORDER or adds_bias(node):
        if adds_bias(node):
            bias = below(node, 1).variable
        node = below(node)
    kind = kind_of(node)
    entered = saved(node, _ENTERED.get(kind, ""))
    weight = _variable(below(node, {"Addmm": 2}.get(kind, 1)))
    if entered is None or weight is None:
        return None
    x, w = local(entered).float(), local(weight.detach()).float()
    if kind == "Convolution":
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
    bias = bias if kind == "Mm" else _variable(below(node, {"Addmm": 0}.get(kind, 2)))
    return nn.functional.linear(x, w, None if bias is None else bias.detach().float())


def _variable(node: Node) -> Tensor | None:
    while kind_of(node) in {"T", "ToCopy", "Transpose"}:
        node = below(node)
    found = getattr(node, "variable", None)
    return found if isinstance(found, Tensor) else None


def same_words(term: Term, first: list[FirstLayer]) -> Tensor | None:
    """Return where targets are the words that entered the model at the same places, and come straight to the loss.

    Straight: along a path on which each place stays by itself, sums of residual branches included. A model that has to
    put a text into fewer numbers and say it again has no such path.

    Args:
        term: A cross-entropy.
        first: The layers that data enters.

    Returns:
        1 where they are the same, 0 where not, NaN where a target does not count. Shape: ``[<= WORDS]``.
    """
    y = term.targets
    if term.kind != "classes" or y is None or y.is_floating_point() or y.dim() < 1:
        return None
    tables = [layer.entered for layer in first if layer.tokens and layer.entered is not None]
    near = [words for words in tables if words.dim() > 1 and words.numel() == y.numel() and words.device == y.device]
    if not near or not _reaches_words(term.behind, near, y.numel()):
        return None
    targets = local(y).reshape(-1)[:WORDS]
    same = torch.stack([local(words).reshape(-1)[:WORDS] == targets for words in near]).any(dim=0)
    counts = (targets >= 0) & (targets != (-100 if term.ignored is None else term.ignored))
    return torch.where(counts, same.to(torch.float32), torch.nan)


def _reaches_words(node: Node, words: list[Tensor], count: int) -> bool:
    wanted = {(each.data_ptr(), each.numel()) for each in words}
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _FAR:
        here = waiting.popleft()
        kind = kind_of(here)
        if kind == "Embedding":
            held = saved(here, "indices")
            if held is not None and (held.data_ptr(), held.numel()) in wanted:
                return True
        for source in _sources(here, kind, count):
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
    return False


def _sources(node: Node, kind: str, count: int) -> list[Node]:
    """Return what a node takes, where it keeps the places apart."""
    if kind in _MATRICES:
        entered = saved(node, _ENTERED[kind])
        alone = entered is not None and math.prod(entered.shape[:-1]) == count
        return [below(node, _MATRICES[kind])] if alone else []
    if kind in _RECURRENT:
        # What a recurrent layer says at a place has passed the word there; batch and time may be turned round.
        source = below(node)
        while kind_of(source) in {"Clone", "Transpose"}:
            source = below(source)
        return [source]
    if kind == "Transpose":
        return [below(node)] if kind_of(below(node)) in _RECURRENT else []
    return [source for source, _ in node.next_functions] if kind in _BY_PLACE else []
