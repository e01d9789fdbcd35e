"""Reads the graph of a loss before its backward pass: which loss, of what, made how, and what entered the first layers.

Nothing of the user's code is touched: names of nodes tell the structure, tensors they have saved tell the numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gradflow_export.autograd_graph.bounds import before_logits, bounds_of, squashed, twice
from gradflow_export.autograd_graph.loss_domain import sign_of, signs_of
from gradflow_export.autograd_graph.loss_shape import (
    SHAPES,
    adds_bias,
    argument,
    crossed,
    dim_of,
    mixes_positions,
    over_positions,
    shape_of,
    weighs_samples,
)
from gradflow_export.autograd_graph.nodes import Op, below, by_number, exponent_of, inputs, is_variant, kind_of, sources
from gradflow_export.autograd_graph.picked_loss import picked_loss
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.metrics.constants import Kind
from gradflow_export.records.loss_mistakes import (
    BROADCAST,
    LOGARITHMS_IN_KL,
    LOGITS_IN_CTC,
    LOGITS_IN_NLL,
    MAXIMISED,
    OVER_POSITIONS,
    POSITIONS_MIXED,
    PROBABILITIES_IN_CTC,
    PROBABILITIES_IN_KL,
    PROBABILITIES_IN_NLL,
    SOFTMAX_OF_ONE,
    SOFTMAX_OVER_BATCH,
    SWAPPED,
    TWICE,
)

Node = Any
_ARITHMETIC = frozenset((
    Op.ADD, Op.ALIAS, Op.CAT, Op.CLONE, Op.DIV, Op.MASKED_FILL, Op.MEAN, Op.MUL, Op.NAN_TO_NUM, Op.NEG,
    Op.RESHAPE_ALIAS, Op.RSUB, Op.SELECT, Op.SQRT, Op.SQUEEZE, Op.STACK, Op.SUB, Op.SUM, Op.TO_COPY, Op.UNBIND,
    Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW, Op.WHERE,
))  # fmt: skip
_PENALTIES = frozenset((Op.ABS, Op.LINALG_VECTOR_NORM, Op.NORM, Op.POW, Op.RELU, Op.LEAF))
_PICKS = frozenset((Op.CLAMP, Op.EXP, Op.GATHER, Op.INDEX, Op.LOG))
_LOSSES: Mapping[str, Kind] = MappingProxyType(
    {
        Op.NLL_LOSS: "classes",
        Op.NLL_LOSS_2D: "classes",
        Op.MSE_LOSS: "squared",
        Op.SMOOTH_L1_LOSS: "huber",
        Op.HUBER_LOSS: "huber",
        Op.BINARY_CROSS_ENTROPY: "binary",
        Op.BINARY_CROSS_ENTROPY_WITH_LOGITS: "binary",
    }
)
LAYERS: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        Op.ADDMM: ("mat1", 1, 2),
        Op.ADDMV: ("mat", 1, 2),
        Op.BMM: ("self", 0, 1),
        Op.CONVOLUTION: ("input", 0, 1),
        Op.LINEAR: ("input", 0, 1),
        Op.MM: ("self", 0, 1),
        Op.MV: ("self", 0, 1),
    }
)
"""What a layer saves of its input, and which of its arguments are the input and the weight."""
_NEAR = 64
_IN_KL = frozenset((LOGARITHMS_IN_KL, PROBABILITIES_IN_KL))


@dataclass
class Term:
    """One loss of predictions and targets within a root.

    Attributes:
        kind: What it measures.
        node: Its node in the graph.
        behind: The node that made the predictions, without changes of their shape.
        predictions: As its node saved them, ``None`` where they are not known: logarithms of probabilities for
            ``"classes"`` and ``"soft"``.
        targets: The same.
        logits: Whether predictions of a ``"binary"`` loss are logits.
        ignored: Class number that does not count.
        signs: Labels that are to be -1 or 1.
        summed: Whether all entries are added up at once, as ``F.cross_entropy`` does.
        even: Whether all samples count alike: none is masked.
        mistakes: What its structure shows, with a number each.
    """

    kind: Kind
    node: Node
    behind: Node
    predictions: Tensor | None = None
    targets: Tensor | None = None
    logits: bool = False
    ignored: int | None = None
    signs: Tensor | None = None
    summed: bool = False
    even: bool = True
    mistakes: dict[str, float] = field(default_factory=dict)

    @property
    def reach(self) -> tuple[float, float]:
        """The range that predictions cannot leave."""
        return bounds_of(self.behind)[:2]

    @property
    def shares(self) -> bool:
        """Whether what is said of the classes of a sample adds up to 1."""
        if self.kind == "soft":
            return self.summed
        along = kind_of(self.behind) == Op.SOFTMAX and len(shape_of(self.behind)) == 2 and dim_of(self.behind) == 1
        return self.kind == "binary" and not self.logits and along


def through_shapes(node: Node) -> Node:
    """Return the first node from here that does more than change shape or number format."""
    while kind_of(node) in SHAPES:
        node = below(node)
    return node


def terms_of(root: Tensor) -> tuple[list[Term], bool]:
    """Return the losses that a root is made of, as far as they are known ones, and whether they are all of it.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    found: list[Term] = []
    others: set[Node] = set()
    waiting: deque[tuple[Node, float, bool, bool, bool]] = deque([(root.grad_fn, 1.0, False, True, True)])
    seen: set[Node] = {root.grad_fn}
    while waiting and len(seen) < _NEAR:
        node, sign, summed, alike, even = waiting.popleft()
        term = _special(node) or (_picked(node, sign) if alike else None) or _term(node)
        if term is not None:
            term.summed, term.even = summed, even
            # Logarithms of probabilities are summed up and turned round: there the sign is that of a loss.
            if kind_of(node) not in _PICKS and (sign > 0) == (term.kind == "soft" and _IN_KL.isdisjoint(term.mistakes)):
                term.mistakes[MAXIMISED] = 1.0
            found.append(term)
            continue
        if kind_of(node) in _ARITHMETIC or kind_of(node) in _PICKS:
            even &= not weighs_samples(node)
            for index, source in enumerate(inputs(node)):
                if source is not None and source not in seen:
                    seen.add(source)
                    every = alike and (kind_of(node) not in {Op.DIV, Op.MUL} or by_number(node))
                    waiting.append((source, sign * sign_of(node, index), is_variant(node, Op.SUM, 0), every, even))
        elif kind_of(node) not in _PENALTIES:
            others.add(node)
    # Smoothed labels: beside what was chosen of the logarithms stands the mean of all of them.
    return found, not waiting and others <= {through_shapes(below(term.node)) for term in found}


def _picked(node: Node, sign: float) -> Term | None:
    """Return a cross-entropy that was written out; what is picked to be made greater is a likelihood."""
    found = picked_loss(node) if kind_of(node) == Op.SUB or sign < 0 else None
    if found is None:
        return None
    binary = found.kind == "binary"
    term = Term(found.kind, node, found.behind, found.predictions, found.targets, logits=binary)
    term.mistakes.update(before_logits(found.behind, 0 if binary else found.predictions.shape[1]))
    return term


def _term(node: Node) -> Term | None:
    kind = kind_of(node)
    if kind in {Op.NLL_LOSS, Op.NLL_LOSS_2D}:
        return _classes(node)
    if kind in {Op.BINARY_CROSS_ENTROPY, Op.BINARY_CROSS_ENTROPY_WITH_LOGITS}:
        return _binary(node, logits=kind.endswith("Logits"))
    if kind == Op.MULTI_MARGIN_LOSS:
        term = Term("margin", node, through_shapes(below(node)), saved(node, "self"), saved(node, "target"))
        _check_softmax(term)
        return term
    if kind in _LOSSES:
        return _distance(node, _LOSSES[kind])
    if kind in {Op.SIGMOID, Op.SOFTMAX}:
        return _policy(node)
    return _by_hand(node, kind) if kind in {Op.POW, Op.ABS, Op.MUL, Op.SUB} else None


def _special(node: Node) -> Term | None:
    """Return a loss of margins, or one of unaligned sequences where it is given something else than it takes."""
    margin = signs_of(node)
    if margin is not None:
        return Term("absolute", node, through_shapes(margin[1]), signs=margin[0])
    before = through_shapes(below(node)) if kind_of(node) == Op.CTC_LOSS else None
    before = through_shapes(below(before)) if adds_bias(before) else before
    mistake = LOGITS_IN_CTC if kind_of(before) in LAYERS else ""
    if kind_of(node) == Op.CTC_LOSS and squashed(before)[0] == Op.SOFTMAX:
        mistake = PROBABILITIES_IN_CTC
    return Term("classes", node, before, mistakes={mistake: 1.0}) if mistake else None


def _policy(node: Node) -> Term | None:
    """Return probabilities that are used as they are, where they run over the batch or are those of probabilities."""
    term = Term("soft", node, node)
    _check_softmax(term)
    if twice(node):
        term.mistakes[TWICE] = 1.0
    return term if not term.mistakes.keys().isdisjoint((SOFTMAX_OVER_BATCH, TWICE)) else None


def _classes(node: Node) -> Term:
    before = through_shapes(below(node))
    term = Term("classes", node, before, saved(node, "self"), saved(node, "target"))
    ignored = getattr(node, "_saved_ignore_index", None)
    term.ignored = None if ignored is None else ignored - 2**64 if ignored >= 2**63 else ignored
    kind = kind_of(before)
    if kind == Op.LOG_SOFTMAX:
        shape, dim = shape_of(before), dim_of(before)
        term.mistakes.update(dict.fromkeys(_misplaced(before, direct=below(node) is before), 1.0))
        inner = through_shapes(below(before))
        term.mistakes.update(before_logits(inner, shape[dim] if dim is not None and shape else 1))
        if kind_of(inner) == Op.LOG and twice(argument(inner)):
            term.mistakes[TWICE] = 1.0
        if dim is not None and mixes_positions(below(before), dim, frozenset(LAYERS)):
            term.mistakes[POSITIONS_MIXED] = 1.0
        term.behind = inner
    elif kind == Op.LOG and twice(argument(before)):
        term.mistakes[TWICE] = 1.0
    elif squashed(before)[0] in {Op.SOFTMAX, Op.SIGMOID}:
        term.mistakes[PROBABILITIES_IN_NLL] = 1.0
    elif kind in LAYERS:
        term.mistakes[LOGITS_IN_NLL] = 1.0
    return term


def _misplaced(softmax: Node, *, direct: bool) -> list[str]:
    """Return what is wrong with the dimension of a log_softmax over classes; ``direct`` where nll_loss takes it so."""
    shape, dim = shape_of(softmax), dim_of(softmax)
    if dim is None or not shape:
        return []
    if shape[dim] == 1:
        return [SOFTMAX_OF_ONE]
    if over_positions(softmax, dim, frozenset(LAYERS)):
        return [OVER_POSITIONS]
    return [SOFTMAX_OVER_BATCH] if direct and len(shape) > 1 and dim != 1 else []


def _binary(node: Node, *, logits: bool) -> Term:
    if below(node) is None and below(node, 1) is not None:  # what is to be learned stands where targets do
        return Term("binary", node, through_shapes(below(node, 1)), mistakes={SWAPPED: 1.0})
    before = through_shapes(below(node))
    term = Term("binary", node, before, saved(node, "self"), saved(node, "target"), logits=logits)
    if logits:
        term.mistakes.update(before_logits(before, 0))
    elif twice(before):
        term.mistakes[TWICE] = 1.0
    _check_softmax(term)
    return term


def _distance(node: Node, kind: Kind) -> Term:
    predictions, targets = saved(node, "self"), saved(node, "target")
    term = Term(kind, node, through_shapes(below(node)), predictions, targets)
    if below(node, 1) is not None:  # two networks compared with each other: there is no target
        term.targets = None
    _check_softmax(term)
    if predictions is not None and targets is not None and crossed(predictions, targets):
        term.mistakes[BROADCAST] = float(predictions.shape[0])
        term.predictions = term.targets = None
    return term


def _check_softmax(term: Term) -> None:
    if kind_of(term.behind) != Op.SOFTMAX:
        return
    shape, dim = shape_of(term.behind), dim_of(term.behind)
    if dim is None or not shape:
        return
    if shape[dim] == 1:
        term.mistakes[SOFTMAX_OF_ONE] = 1.0
    elif dim == 0 and len(shape) == 2:
        term.mistakes[SOFTMAX_OVER_BATCH] = 1.0


def _by_hand(node: Node, kind: str) -> Term | None:
    """Return a loss that was written out: from chosen log-probabilities, or from a difference of which all is known."""
    first, second = below(node), below(node, 1)
    if kind == Op.SUB:
        return _divergence(node) if first is None else None
    if kind == Op.MUL and second is None and kind_of(through_shapes(first)) == Op.LOG_SOFTMAX:
        return _soft(node, through_shapes(first))
    squared = (kind == Op.MUL and first is second) or exponent_of(node) == 2
    if not (squared or kind == Op.ABS) or kind_of(first) not in {Op.SUB, Op.RSUB}:
        return None
    inner = sources(first)
    if len(inner) != 1:
        return None
    return Term("squared" if squared else "absolute", node, through_shapes(inner[0]))


def _divergence(node: Node) -> Term | None:
    """Return what ``F.kl_div`` is made of where it was given probabilities: ``xlogy(t, t) - t * p``."""
    product = below(node, 1)
    if kind_of(product) != Op.MUL or below(product) is not None:
        return None
    source, targets = through_shapes(below(product, 1)), saved(product, "self")
    if targets is not None and targets.device.type == "cpu" and bool((targets < 0).any()):
        return Term("soft", node, source, mistakes={LOGARITHMS_IN_KL: 1.0})
    again = kind_of(source) == Op.LOG_SOFTMAX and kind_of(through_shapes(below(source))) == Op.SOFTMAX
    if not (again or squashed(source)[0] in {Op.SIGMOID, Op.SOFTMAX}) or targets is None:
        return None
    return Term("soft", node, source, mistakes={TWICE if again else PROBABILITIES_IN_KL: 1.0})


def _soft(node: Node, before: Node) -> Term:
    targets, scores = saved(node, "other"), saved(before, "result")
    term = Term("soft", node, through_shapes(below(before)))
    shape, dim = shape_of(before), dim_of(before)
    if targets is not None and scores is not None and targets.shape == scores.shape and dim == scores.dim() - 1:
        term.predictions, term.targets = scores, targets
    term.mistakes.update(dict.fromkeys(_misplaced(before, direct=False), 1.0))
    term.mistakes.update(before_logits(term.behind, shape[dim] if dim is not None and shape else 1))
    return term
