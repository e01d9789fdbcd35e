"""Finds what sees the answer: next words to be predicted by attention, or a recurrent layer, that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.autograd_graph.loss_graph import Node, Term
from gradflow_export.autograd_graph.loss_shape import dim_of, shape_of
from gradflow_export.autograd_graph.nodes import ATTENTION, Op, below, inputs, kind_of, takers_in, through, walk
from gradflow_export.autograd_graph.provenance import is_product
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.readings import ClueSample
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import layers_of, seen
from gradflow_export.rules.history import History

MOST_NODES = 6_000
"""A longer graph is not read."""
SHORTEST = 4
"""Words of a sequence, at least."""
WORDS = 4_096
"""Words that are compared with targets, at most."""
HEADS, PLACES = 4, 64
"""Heads and places of an attention that are looked at."""
LAYERS = 8
"""Layers that are looked at."""
HIDDEN = -1e4
"""What is added to a score that is not to count is below this."""
_LEAST = 1e-6
_PASSING = frozenset((Op.CLONE, Op.EXPAND, Op.NATIVE_DROPOUT, Op.RESHAPE_ALIAS, Op.TO_COPY, Op.UNSAFE_VIEW, Op.VIEW))
_SCALING = _PASSING | frozenset(
    (Op.ADD, Op.CLAMP, Op.DIV, Op.MASKED_FILL, Op.MUL, Op.NEG, Op.SUB, Op.TRANSPOSE, Op.WHERE)
)


@dataclass(frozen=True)
class Graph:
    """All nodes behind a loss, both ways.

    Attributes:
        nodes: From the loss on.
        takers: By node, the nodes that take what it made.
    """

    nodes: tuple[Node, ...]
    takers: Mapping[Node, list[Node]]

    def above(self, sources: Iterable[Node]) -> set[Node]:
        """Return all nodes to which something leads from these."""
        return set(walk(sources, step=lambda node: self.takers.get(node, ())))


def graph_behind(node: Node) -> Graph | None:
    """Return the graph from a node on, ``None`` where it is too long."""
    takers = takers_in(node, MOST_NODES)
    return None if takers is None else Graph(tuple(takers), takers)


def samples_of(term: Term, graph: Graph, names: Mapping[int, str], backwards: set[int]) -> Iterator[ClueSample]:
    """Yield what the worker needs to tell whether the next words can be seen where they are to be predicted.

    Args:
        term: A cross-entropy.
        graph: All that is behind it.
        names: Names of modules by the ``id`` of their parameters.
        backwards: The weights of recurrent layers that read from the end, by ``id``.
    """
    if term.kind != "classes" or term.targets is None or term.targets.is_floating_point():
        return
    y, seen = local(term.targets), set[tuple[Any, ...]]()
    for node in graph.nodes:
        words = saved(node, "indices") if kind_of(node) == Op.EMBEDDING else None
        if words is None or words.dim() != 2 or (words.data_ptr(), words.shape) in seen:
            continue
        seen.add((words.data_ptr(), words.shape))
        for batch_first in (True, False):
            yield from _of_words(words, y, batch_first, term, node, graph, names, backwards)


def _of_words(
    words: Tensor,
    y: Tensor,
    batch_first: bool,
    term: Term,
    source: Node,
    graph: Graph,
    names: Mapping[int, str],
    backwards: set[int],
) -> Iterator[ClueSample]:
    count, length = words.shape if batch_first else words.shape[::-1]
    if length < SHORTEST or y.numel() % count or not length // 2 <= y.numel() // count <= length:
        return
    targets = y.reshape(count, -1) if batch_first else y.reshape(-1, count).t()
    rows = min(max(WORDS // length, 1), count)
    words, targets = (words if batch_first else words.t())[:rows], targets[:rows]
    reached = graph.above([n for n in graph.nodes if kind_of(n) == Op.EMBEDDING and _same(n, words, rows, batch_first)])
    reached.add(source)
    seers = list(_seers(graph, reached, length, names, backwards))[:LAYERS]
    beside = [words, *(seen for _, seen in seers if isinstance(seen, Tensor))]
    if not seers or any(each.device != y.device for each in beside):
        return
    filled = [s if isinstance(s, Tensor) else torch.full((1,), s, device=y.device) for _, s in seers]
    values = [words.reshape(-1), targets.reshape(-1), *filled]
    packed = torch.cat([value.to(torch.float64) for value in values])
    sites = tuple((site, len(seen)) for (site, _), seen in zip(seers, filled, strict=True))
    read = partial(_told, (rows, length), term.ignored, sites)
    yield ClueSample("target.ahead", sites[0][0], packed.contiguous(), read)


def _same(node: Node, words: Tensor, rows: int, batch_first: bool) -> bool:
    """Whether a lookup is of the same words: those of one memory, or in other words the same tensor."""
    other = saved(node, "indices")
    if other is None or other.dim() != 2:
        return False
    other = (other if batch_first else other.t())[:rows]
    return other.data_ptr() == words.data_ptr() and other.shape == words.shape


def _seers(
    graph: Graph, reached: set[Node], length: int, names: Mapping[int, str], backwards: set[int]
) -> Iterator[tuple[str, Tensor | float]]:
    """Yield layers that words come to, with what each place sees of the next one."""
    for node in graph.nodes:
        kind, seen = kind_of(node), None
        if kind.startswith(ATTENTION):
            seen = _fused(node, length) if below(node, 1) in reached else None
        elif kind in {Op.SOFTMAX, Op.SAFE_SOFTMAX}:
            product = product_of(node)
            seen = _softmax(node, length, graph) if product and inputs(product)[-1] in reached else None
        elif kind != Op.LEAF and _reads_back(node, backwards) and node in reached:
            seen = 1.0
        if seen is not None:
            yield owner_below(node, names), seen


def _reads_back(node: Node, backwards: set[int]) -> bool:
    """Whether a node is the part of a recurrent layer that reads from the end."""
    turned = {Op.T, Op.TRANSPOSE, Op.VIEW}
    held = (getattr(through(source, turned), "variable", None) for source in inputs(node))
    return kind_of(node) not in turned and any(id(weight) in backwards for weight in held)


def _fused(node: Node, length: int) -> Tensor | float | None:
    query, key = saved(node, "query"), saved(node, "key")
    if query is None or key is None or not query.shape[-2] == key.shape[-2] == length:
        return None
    if getattr(node, "_saved_is_causal", False):
        return 0.0
    mask = saved(node, "attn_mask") if hasattr(node, "_saved_attn_mask") else saved(node, "attn_bias")
    if mask is None:
        return 1.0
    visible = local(mask) if mask.dtype == torch.bool else local(mask) > HIDDEN
    return _next(visible.expand(*visible.shape[:-2], length, length))


def _softmax(node: Node, length: int, graph: Graph) -> Tensor | None:
    weights = saved(node, "result")
    if weights is None or weights.dim() < 3 or tuple(weights.shape[-2:]) != (length, length):
        return None
    if dim_of(node) not in {None, weights.dim() - 1} or not is_product(below(node)):
        return None
    seen = _next(local(weights) > _LEAST)
    for taker in _takers(node, graph):  # a mask that was put on the weights, not on the scores
        kept = saved(taker, "other") if kind_of(taker) == Op.MUL else saved(taker, "mask")
        if kept is not None and kept.dim() >= 2 and tuple(kept.shape[-2:]) == (length, length):
            kept = local(kept) != 0
            seen = seen * _next(~kept if kind_of(taker) == Op.MASKED_FILL else kept)
    return seen


def _takers(node: Node, graph: Graph) -> Iterator[Node]:
    for _ in range(4):
        takers = graph.takers.get(node, [])
        if len(takers) != 1:
            return
        node = takers[0]
        if kind_of(node) in {Op.MASKED_FILL, Op.MUL}:
            yield node
        elif kind_of(node) not in _PASSING:
            return


def _next(visible: Tensor) -> Tensor:
    """Return by place the share of some heads that see the next one. Shape: ``[places]``."""
    some = visible.reshape(-1, *visible.shape[-2:])[:HEADS, : PLACES + 1, : PLACES + 1]
    return some.diagonal(1, -2, -1).to(torch.float64).mean(0)


def product_of(node: Node) -> Node | None:
    """Return the product of queries and keys that a softmax is given."""
    behind = walk([below(node)], past=lambda here: kind_of(here) in _SCALING, most=32)
    return next((here for here in behind if kind_of(here) in {Op.BADDBMM, Op.BMM}), None)


def owner_below(node: Node, names: Mapping[int, str]) -> str:
    """Return the name of the module whose parameter stands nearest below a node, without its last part."""
    found = (names.get(id(getattr(here, "variable", None))) for here in walk([node], most=64))
    return next((name for name in found if name is not None), "")


def across_samples(term: Term, graph: Graph, names: Mapping[int, str]) -> dict[str, float]:
    """Return the layers behind which a softmax spreads scores over the samples of a batch, with how many these are.

    What is chosen from samples is added up over them, as nodes of one graph are. Here each row stays that of its sample
    up to the prediction.

    Args:
        term: A loss.
        graph: All that is behind it.
        names: Names of modules by the ``id`` of their parameters.
    """
    count = 0 if term.targets is None or term.targets.dim() < 1 else len(term.targets)
    out: dict[str, float] = {}
    for node in graph.nodes if count > 2 else ():
        shape = shape_of(node) if kind_of(node) in {Op.SOFTMAX, Op.SAFE_SOFTMAX} else ()
        over = shape[:1] == (count,) and len(shape) > 1 and dim_of(node) == 0
        if not over or count in shape[1:] or max(shape[1:]) < 2:
            continue
        if term.behind in walk(
            [node], step=lambda here: graph.takers.get(here, ()), into=lambda here: shape_of(here)[:1] == (count,)
        ):
            out[owner_below(node, names)] = float(count)
    return out


def across_queries(graph: Graph, names: Mapping[int, str]) -> dict[str, float]:
    """Return the layers whose attention weighs what it sums up by shares that add up over the queries, not the keys.

    Shares that are used the other way round, turned or divided by their sum before, are in order.

    Args:
        graph: All that is behind a loss.
        names: Names of modules by the ``id`` of their parameters.
    """
    out: dict[str, float] = {}
    for node in graph.nodes:
        shape = shape_of(node) if kind_of(node) in {Op.SOFTMAX, Op.SAFE_SOFTMAX} else ()
        here = node
        if len(shape) < 3 or dim_of(node) != len(shape) - 2 or min(shape[-2:]) < 2 or not is_product(below(node)):
            continue
        while len(takers := graph.takers.get(here, [])) == 1 and kind_of(takers[0]) in _PASSING:
            here = takers[0]
        if len(takers) == 1 and kind_of(takers[0]) == Op.BMM and below(takers[0]) is here:
            out[owner_below(node, names)] = float(shape[-2])
    return out


def _told(
    shape: tuple[int, int], ignored: int | None, sites: tuple[tuple[str, int], ...], values: npt.NDArray[Any]
) -> dict[str, dict[str, float]]:
    """Return the share of places that see the next word, where that is what they are to predict.

    Args:
        shape: Sequences, and words of each.
        ignored: Number of a target that does not count.
        sites: Layers, and how many places were looked at in each.
        values: These words, the targets, which may begin at a later place, and by layer what each place sees.
    """
    (rows, length), start = shape, len(values) - sum(places for _, places in sites)
    words, y = (part.reshape(rows, -1) for part in np.split(values[:start], [rows * length]))
    counts = (y >= 0) & (y != (-100 if ignored is None else ignored))
    few = counts.sum() < 2 * SHORTEST or 2 * counts.sum() < y.size
    if few or not any(_next_words(words, y, counts, first) for first in {0, length - y.shape[1]}):
        return {}
    told = dict[str, float]()
    for site, places in sites:
        told[site] = max(told.get(site, 0.0), float(np.asarray(values[start : start + places]).mean()))
        start += places
    return {"target.ahead": told}


def _next_words(words: npt.NDArray[Any], y: npt.NDArray[Any], counts: npt.NDArray[Any], first: int) -> bool:
    """Whether targets are the words after those from a place on, and not these words themselves."""
    count = min(y.shape[1], words.shape[1] - first - 1)
    here, after = words[:, first : first + count], words[:, first + 1 : first + 1 + count]
    y, counts = y[:, :count], counts[:, :count]
    most = np.count_nonzero(counts)
    alike, kept = (np.count_nonzero((part == y) & counts) for part in (after, here))
    return bool(most > 0 and alike >= 0.98 * most and kept <= 0.8 * most)


@dataclass(frozen=True, kw_only=True)
class SeenAnswers(Check):
    """Report models that should predict the next token but can attend to it: no causal mask, or an inverted one.

    Targets that equal the input tokens shifted by one show that the task is next-token prediction. Attention from a
    position to the next one, or a recurrent layer that reads the tokens in reverse, shows that the target is part of
    the input. The loss then goes to 0, and generation fails. Encoders of another sequence, prefixes whose targets are
    mostly ignored, and unshifted targets are not reported.

    Why it is bad:
        The loss goes to nearly 0 while the model copies the target instead of predicting it. During generation the next
        token does not exist yet, and the output is noise.

    Example:
        y = F.scaled_dot_product_attention(q, k, v)  # in a model that predicts the next word

    Use instead:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    Not reported:
        Targets that are not the inputs shifted by one; an encoder of another sequence; a prefix whose targets are
        mostly ignored; sequences too short for a verdict.

    Attributes:
        share: Minimum fraction of positions that attend to the next one.
    """

    share: float = 0.5
    patience: int = 2
    heal: int = 100

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("target.ahead",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        values = {site: seen(record, "target.ahead", site) or 0.0 for site in layers_of(record, "target.ahead")}
        layers = tuple(site for site, value in values.items() if value >= self.share)
        if not layers:
            return ()
        return (
            Finding(
                IssueType.BAD_TARGETS,
                Severity.HIGH,
                layers,
                max(values.values()),
                self.share,
                f"targets are the input tokens shifted by one, and {some(layers)} attends to the next token at "
                f"{number(100 * max(values.values()))} % of the positions: the model copies the target instead of "
                "predicting it.",
                "mask later positions: F.scaled_dot_product_attention(q, k, v, is_causal=True), "
                "mask=nn.Transformer.generate_square_subsequent_mask(n), or scores.masked_fill(torch.ones(n, "
                "n).triu(1).bool(), -inf); recurrent layers with bidirectional=False.",
                cause="target leakage",
                origin="target leakage",
            ),
        )
