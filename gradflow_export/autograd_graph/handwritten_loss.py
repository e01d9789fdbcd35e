"""Losses written by hand: overlaps, logarithms, likelihoods with a scale, differences of which every pair was taken."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gradflow_export.autograd_graph.bounded_logits import Form, bounded, of_one, summed_up, written
from gradflow_export.autograd_graph.bounds import bounds_of
from gradflow_export.autograd_graph.drawn_together import drawn_together, own_positives, with_itself
from gradflow_export.autograd_graph.loss_balance import scales_that_fall
from gradflow_export.autograd_graph.loss_domain import sign_of
from gradflow_export.autograd_graph.loss_graph import through_shapes
from gradflow_export.autograd_graph.loss_shape import SHAPES, adds_bias, argument, dim_of, factor_of, shape_of, signed
from gradflow_export.autograd_graph.nodes import Op, below, inputs, kind_of, sources, through
from gradflow_export.autograd_graph.picked_loss import true_of_two
from gradflow_export.autograd_graph.weight_penalty import weights_that_grow
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.records.loss_mistakes import (
    BROADCAST,
    CLAMPED_SCORES,
    COSINES_IN_CE,
    DRAWN_TOGETHER,
    FOCAL_OF_MEAN,
    OVER_POSITIONS,
    OVERLAP_MINIMISED,
    OWN_POSITIVES,
    PENALTY_TURNED,
    RATES_IN_POISSON,
    SCORES_IN_LOGARITHM,
    SCORES_IN_OVERLAP,
    SOFTMAX_OVER_BATCH,
    UNLIKELY,
    WITHOUT_BOUND,
)

Node = Any

_NEAR = 96
_LINEAR = SHAPES | frozenset((
    Op.ADD, Op.CAT, Op.DIAGONAL, Op.DIV, Op.GATHER, Op.MASKED_FILL, Op.MEAN, Op.MUL, Op.NAN_TO_NUM, Op.NEG, Op.RSUB,
    Op.STACK, Op.SUB, Op.SUM, Op.UNBIND, Op.WHERE,
))  # fmt: skip
_BENDS = frozenset((
    Op.ABS, Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN, Op.COSH, Op.EXP, Op.LINALG_VECTOR_NORM, Op.LOG, Op.LOG_1P, Op.MAXIMUM,
    Op.MINIMUM, Op.POW, Op.RELU, Op.SOFTPLUS, Op.SQRT,
))  # fmt: skip
_REDUCES = frozenset((Op.LINALG_VECTOR_NORM, Op.MEAN, Op.SUM))
_SCORES = frozenset((Op.ADDMM, Op.ADDMV, Op.CONVOLUTION, Op.LINEAR))
_LIMITS = frozenset((Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN))


def forms_of(root: Any) -> list[Form]:
    """Return what the structure of a loss that was written by hand proves to be wrong with it.

    Args:
        root: A scalar with a graph, before its backward pass.
    """
    found: list[Form] = []
    waiting: deque[tuple[Node, float, bool, bool]] = deque([(root.grad_fn, 1.0, True, True)])
    seen: set[Node] = {root.grad_fn}
    while waiting and len(seen) < _NEAR:
        node, sign, whole, bare = waiting.popleft()
        kind = kind_of(node)
        form = _form(node, kind, sign) or _pairs(node, kind, whole=whole)
        form = form or (_unlikely(node, kind) if bare and sign > 0 else None)
        if form is not None:
            found.append(form)
            continue
        if kind not in _LINEAR and kind not in _BENDS:
            continue
        for index, source in enumerate(inputs(node)):
            if source is not None and source not in seen:
                seen.add(source)
                turned = 0.0 if kind in _BENDS or _weighs(node, kind) else sign * sign_of(node, index)
                # Only what is averaged over everything at once was not meant to be a table of pairs.
                entire = whole and (kind not in _REDUCES or shape_of(node) == ())
                waiting.append((source, turned, entire, bare and turned != 0.0 and kind not in {Op.DIV, Op.MUL}))
    if any(map(_is_table, seen)):  # as in a distance of distributions, where all pairs are meant
        found = [form for form in found if form[0] != BROADCAST]
    return [*found, *((mistake, 1.0, node) for mistake, look in _WHOLES if (node := look(root)) is not None)]


def _form(node: Node, kind: str, sign: float) -> Form | None:
    if kind == Op.DIV:
        return _overlap(node, sign)
    looks = _LOOKS.get(kind, ())
    return next((form for form in (look(node) for look in looks) if form is not None), None)


def _clamped(node: Node) -> Form | None:
    """Return a binary cross-entropy of a layer's outputs that were cut off at 0 and 1."""
    limit = through_shapes(below(node))
    layer = through_shapes(below(limit)) if kind_of(limit) in _LIMITS else None
    return (CLAMPED_SCORES, 1.0, layer) if _gives_scores(layer) else None


def _gives_scores(node: Node) -> bool:
    weighed = kind_of(node) == Op.MM and kind_of(through(below(node, 1), {Op.T})) == Op.LEAF  # a layer without a bias
    return kind_of(node) in _SCORES or adds_bias(node) or weighed


def _unscaled(node: Node) -> Node:
    """Return what was multiplied or divided by one number, as by a temperature."""
    while kind_of(node) in {Op.DIV, Op.MUL} and _alone(node) is not None and not _weighs(node, kind_of(node)):
        node = _alone(node)
    return node


def _weighs(node: Node, kind: str) -> bool:
    """Whether a node multiplies by numbers that may be of any sign."""
    if kind not in {Op.MUL, Op.DIV}:
        return False
    if below(node) is not None and below(node, 1) is not None:
        return True
    other = saved(node, "other") if below(node) is not None else saved(node, "self")
    return other is not None and other.numel() > 1


def _pairs(node: Node, kind: str, *, whole: bool) -> Form | None:
    """Return a difference, sum or product in which every number of a batch met every other's target.

    Where a table of products, or of more than numbers, is not averaged as a ``whole``, pairs may be meant.
    """
    graph, made = _alone(node) if kind in {Op.ADD, Op.MUL, Op.RSUB, Op.SUB} else None, shape_of(node)
    if kind == Op.ADD and sorted(map(shape_of, sources(node))) == [made[:1], (*made[:1], 1)]:
        graph = max(sources(node), key=shape_of)
    if graph is None or len(made) < 2 or made[0] != made[1] or made[0] < 3:
        return None
    if not whole and (kind in {Op.ADD, Op.MUL} or len(made) > 2):
        return None
    graph = below(graph) if kind_of(graph) == Op.EXPAND else graph
    given, column = shape_of(graph), (made[0], 1, *made[2:])
    if kind == Op.MUL:
        other = saved(node, "self" if below(node) is None else "other")
        if other is None or {given, tuple(other.shape)} != {made[1:], column}:
            return None
    if given not in {made[1:], column} or _is_meant(graph, column):
        return None
    return BROADCAST, float(made[0]), through_shapes(graph)


def _is_meant(node: Node, column: tuple[int, ...]) -> bool:
    """Whether numbers were made a column on purpose, before or after anything done to each, or are parameters."""
    while math.prod(shape_of(node)) == math.prod(column):
        if kind_of(node) == Op.LEAF:
            return True
        made = kind_of(node) in SHAPES and (kind_of(node) == Op.UNSQUEEZE or not _gives_scores(below(node)))  # its own
        if made and shape_of(node) == column and shape_of(below(node)) == (column[0], *column[2:]):
            return True
        node = _alone(node)
    return False


def _is_table(node: Node) -> bool:
    """Whether a node compares numbers of a batch with each other, all of which have a graph."""
    made, given = shape_of(node), {shape_of(source) for source in sources(node)}
    return kind_of(node) in {Op.RSUB, Op.SUB} and len(given) == 2 and made[:1] == made[1:2] != () and made not in given


def _log_softmax(node: Node) -> Form | None:
    """Return a log_softmax of probabilities, or one of a layer's outputs along the samples."""
    shape, dim, inner = shape_of(node), dim_of(node), through_shapes(below(node))
    if dim is None or not shape:
        return None
    for mistake, least in bounded(inner, shape[dim]):
        return mistake, least, inner
    along = dim == 0 and len(shape) == 2 and shape[1] > 1 and shape[0] != shape[1]
    layer = _unscaled(below(node))
    return (SOFTMAX_OVER_BATCH, 1.0, layer) if along and _gives_scores(layer) else None


def _unlikely(node: Node, kind: str) -> Form | None:
    """Return logarithms of the probabilities of what is true, added to a loss as they are: without a minus."""
    softmax = through_shapes(below(node)) if kind in {Op.GATHER, Op.INDEX} else None
    made = through_shapes(below(softmax)) if kind_of(softmax) == Op.LOG_SOFTMAX else true_of_two(node)
    return None if made is None else (UNLIKELY, 1.0, made)


def _unaligned(node: Node) -> Form | None:
    """Return the loss of unaligned sequences whose log_softmax runs along another dimension than the classes."""
    made, axis = below(node), 2
    while kind_of(made) in {Op.PERMUTE, Op.TRANSPOSE}:
        dims = list(range(len(shape_of(made))))
        if kind_of(made) == Op.PERMUTE:
            dims = [signed(d) % len(dims) for d in made._saved_dims]  # noqa: SLF001 - what a node saved has no other name
        else:
            one, other = (signed(d) % len(dims) for d in (made._saved_dim0, made._saved_dim1))  # noqa: SLF001 - the same
            dims[one], dims[other] = dims[other], dims[one]
        axis, made = dims[axis], below(made)
    wrong = kind_of(made) == Op.LOG_SOFTMAX and len(shape_of(made)) == 3 and dim_of(made) != axis
    return (OVER_POSITIONS, 1.0, through_shapes(below(made))) if wrong else None


def _chosen(node: Node) -> Form | None:
    """Return nll_loss of rows of a log_softmax that runs along the samples."""
    inner = below(node)
    while kind_of(inner) in {Op.INDEX, Op.INDEX_SELECT, Op.SLICE, Op.TO_COPY}:
        inner = below(inner)
    if (
        kind_of(inner) == Op.LOG_SOFTMAX
        and inner is not below(node)
        and len(shape_of(inner)) == 2
        and dim_of(inner) == 0
    ):
        return OVER_POSITIONS, 1.0, through_shapes(below(inner))
    return None


def _cosines(node: Node) -> Form | None:
    """Return a cross-entropy of cosines, of features with a weight for each class or scaled down, which stay small."""
    softmax = through_shapes(below(node)) if kind_of(node) == Op.NLL_LOSS else node
    product, scale = _scaled(through_shapes(below(softmax)))
    if kind_of(softmax) not in {Op.LOGSUMEXP, Op.LOG_SOFTMAX} or kind_of(product) not in {Op.LINEAR, Op.MM}:
        return None
    sides = [through_shapes(below(product, index)) for index in (0, 1)]
    whole = [through_shapes(below(side)) for side in sides if _is_normalised(side)]
    classes = shape_of(product)[-1]
    small = scale < 1.0 or (scale == 1.0 and any(hasattr(side, "variable") for side in whole))
    if len(whole) != 2 or classes < 4 or not small:
        return None
    return COSINES_IN_CE, math.log1p((classes - 1) * math.exp(-2.0 * scale)), product


def _scaled(node: Node) -> tuple[Node, float]:
    """Return what was multiplied by plain numbers, and the size of their product; masks are left out."""
    scale = 1.0
    while kind_of(node) == Op.MASKED_FILL or not math.isnan(factor_of(node)):
        factor = 1.0 if kind_of(node) == Op.MASKED_FILL else factor_of(node)
        scale, node = scale * abs(factor), through_shapes(below(node))
    return node, scale


def _is_normalised(node: Node) -> bool:
    if kind_of(node) == Op.CAT:  # as two views of each sample
        return all(_is_normalised(through_shapes(part)) for part in inputs(node))
    if kind_of(node) != Op.DIV:
        return False
    size = through_shapes(below(node, 1))
    size = through_shapes(below(size)) if kind_of(size) in _LIMITS else size
    same = through_shapes(below(size)) is through_shapes(below(node))
    return same and kind_of(size) in {Op.LINALG_VECTOR_NORM, Op.NORM}


def _overlap(node: Node, sign: float) -> Form | None:
    """Return an overlap, as in Dice and Jaccard losses, of scores, or one that is minimised."""
    shared = [part for part in _summed(below(node)) if kind_of(part) in {Op.BMM, Op.MUL} and _alone(part) is not None]
    if not shared or below(node, 1) is None:
        return None
    predicted = through_shapes(_alone(shared[0]))
    sizes = [part for part in _summed(below(node, 1)) if predicted is not None and _holds(part, predicted)]
    if not sizes:
        return None
    # Beside squares alone a product may be a projection, as of a signal on another; a loss takes an overlap off one.
    squared = all(kind_of(part) == Op.POW for part in sizes)
    if _gives_scores(predicted):
        return (SCORES_IN_OVERLAP, 1.0, predicted) if sign < 0 or not squared else None
    over_batch = kind_of(below(predicted)) == Op.CONVOLUTION and dim_of(predicted) == 0
    if kind_of(predicted) == Op.SOFTMAX and over_batch and len(shape_of(below(predicted))) == len(shape_of(predicted)):
        return SOFTMAX_OVER_BATCH, 1.0, predicted
    several = kind_of(through_shapes(below(node, 1))) in {Op.ADD, Op.SUB}
    minimised = sign > 0 and several and kind_of(predicted) in {Op.SIGMOID, Op.SOFTMAX}
    return (OVERLAP_MINIMISED, 1.0, predicted) if minimised else None


def _alone(node: Node) -> Node:
    """Return the one argument that has a graph, ``None`` where two have."""
    found = sources(node)
    return found[0] if len(found) == 1 else None


def _holds(node: Node, wanted: Node) -> bool:
    """Whether something is made of one tensor and of numbers without a graph."""
    for _ in range(12):
        if node is wanted or node is None:
            break
        if kind_of(node) not in SHAPES | {Op.ABS, Op.ADD, Op.MEAN, Op.MUL, Op.NEG, Op.POW, Op.RSUB, Op.SUB, Op.SUM}:
            return False
        node = _alone(node)
    return node is wanted


def _summed(node: Node) -> list[Node]:
    """Return what was summed up into a number, constants and factors aside."""
    found: list[Node] = []
    waiting = [node]
    for _ in range(16):
        if not waiting:
            break
        here = waiting.pop()
        kind = kind_of(here)
        if kind in {Op.MEAN, Op.SUM}:
            inner = through_shapes(below(here))
            weighted = through_shapes(_alone(inner)) if kind_of(inner) == Op.MUL else None
            if kind_of(inner) in {Op.BMM, Op.MEAN, Op.SUM} or kind_of(weighted) in {Op.BMM, Op.MEAN, Op.SUM}:
                waiting.append(weighted or inner)
            elif inner is not None:
                found.append(inner)
        elif kind == Op.BMM:
            found.append(here)
        elif kind in SHAPES | {Op.ADD, Op.CLAMP, Op.CLAMP_MIN, Op.DIV, Op.MUL, Op.RSUB, Op.SUB}:
            waiting += sources(here)
    return found


def _logarithm(node: Node) -> Form | None:
    """Return targets times the logarithm of a layer's outputs, where probabilities were meant."""
    if (below(node) is None) == (below(node, 1) is None):
        return None
    log = through_shapes(below(node) if below(node) is not None else below(node, 1))
    made = argument(log) if kind_of(log) == Op.LOG else None
    return (SCORES_IN_LOGARITHM, 1.0, made) if made is not log and _gives_scores(made) else None


def _focal(node: Node) -> Form | None:
    """Return ``(1 - exp(-loss)) ** g * loss`` where the loss is already the mean of a batch."""
    for index in (0, 1):
        loss, weight = below(node, index), below(node, 1 - index)
        if kind_of(loss) not in {Op.BINARY_CROSS_ENTROPY_WITH_LOGITS, Op.NLL_LOSS} or shape_of(loss) != ():
            continue
        for _ in range(8):
            if kind_of(weight) == Op.EXP:
                scores = shape_of(below(loss))
                inner = below(weight)
                inner = below(inner) if kind_of(inner) == Op.NEG else inner
                return (
                    (FOCAL_OF_MEAN, 1.0, through_shapes(below(loss)))
                    if inner is loss and scores and scores[0] > 1
                    else None
                )
            if kind_of(weight) not in {Op.ADD, Op.MUL, Op.NEG, Op.POW, Op.RSUB, Op.SUB}:
                break
            weight = below(weight) if below(weight) is not None else below(weight, 1)
    return None


def _rates(node: Node) -> Form | None:
    """Return ``exp(x) - target * x`` where x is no logarithm of a rate but the rate."""
    rate, product = below(node), through_shapes(below(node, 1))
    if kind_of(rate) != Op.EXP or kind_of(product) != Op.MUL or (below(product) is None) == (below(product, 1) is None):
        return None
    made = through_shapes(below(rate))
    same = made is through_shapes(below(product) if below(product) is not None else below(product, 1))
    return (RATES_IN_POISSON, 1.0, made) if same and bounds_of(made).low >= 0 else None


_LOOKS: Mapping[str, tuple[Callable[[Node], Form | None], ...]] = MappingProxyType(
    {
        Op.ABS: (with_itself,),
        Op.BINARY_CROSS_ENTROPY: (_clamped,),
        Op.CTC_LOSS: (_unaligned,),
        Op.EXP: (with_itself,),
        Op.LINALG_VECTOR_NORM: (with_itself,),
        Op.LOG: (written, summed_up),
        Op.LOGSUMEXP: (_cosines, summed_up),
        Op.LOG_1P: (of_one,),
        Op.LOG_SIGMOID: (of_one,),
        Op.LOG_SOFTMAX: (_log_softmax, _cosines),
        Op.MUL: (with_itself, _logarithm, _focal),
        Op.NLL_LOSS: (_chosen, _cosines),
        Op.NLL_LOSS_2D: (_chosen,),
        Op.NORM: (with_itself,),
        Op.POW: (with_itself,),
        Op.SOFTPLUS: (of_one,),
        Op.SUB: (_rates,),
    }
)
_WHOLES: tuple[tuple[str, Callable[[Any], Node]], ...] = (
    (WITHOUT_BOUND, scales_that_fall),
    (DRAWN_TOGETHER, drawn_together),
    (OWN_POSITIVES, own_positives),
    (PENALTY_TURNED, weights_that_grow),
)
