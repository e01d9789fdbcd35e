"""The graph of autograd: what its nodes are called, and how to walk it (floor 0, without torch).

This is the one place that reads ``next_functions`` and lists names of nodes: those that torch gives, without
``Backward`` and the number of the variant. A test compares them with the torch that is installed; a release that calls
one otherwise is mended here.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Final

if sys.platform != "win32":
    import resource

Node = Any
Edge = tuple[Node, int]
"""A node, and which of its results is meant."""
MOST_NODES = 20_000
"""A graph of more nodes is not walked through: :func:`longest`."""
_STACK = 1 << 19 if sys.platform == "darwin" else 1 << 20 if sys.platform == "win32" else 0
"""Bytes of the stack of a thread, where it is not that of the process."""
_FREED = 512
"""Bytes of stack for each node, twice of what they were measured to need."""


class Op:
    """Kinds of nodes, by operation."""

    ABS: Final = "Abs"
    ADD: Final = "Add"
    ADDMM: Final = "Addmm"
    ADDMV: Final = "Addmv"
    ALIAS: Final = "Alias"
    AMAX: Final = "Amax"
    AMIN: Final = "Amin"
    AS_STRIDED: Final = "AsStrided"
    AVG_POOL2D: Final = "AvgPool2D"
    BADDBMM: Final = "Baddbmm"
    BINARY_CROSS_ENTROPY: Final = "BinaryCrossEntropy"
    BINARY_CROSS_ENTROPY_WITH_LOGITS: Final = "BinaryCrossEntropyWithLogits"
    BMM: Final = "Bmm"
    CAT: Final = "Cat"
    CEIL: Final = "Ceil"
    CHECKPOINT: Final = "CheckpointFunctionBackward"
    CLAMP: Final = "Clamp"
    CLAMP_MAX: Final = "ClampMax"
    CLAMP_MIN: Final = "ClampMin"
    CLONE: Final = "Clone"
    CONSTANT_PAD_ND: Final = "ConstantPadNd"
    CONVOLUTION: Final = "Convolution"
    COPY_SLICES: Final = "torch::autograd::CopySlices"
    COS: Final = "Cos"
    COSH: Final = "Cosh"
    CTC_LOSS: Final = "CtcLoss"
    CUDNN_BATCH_NORM: Final = "CudnnBatchNorm"
    CUDNN_RNN: Final = "CudnnRnn"
    DIAGONAL: Final = "Diagonal"
    DIV: Final = "Div"
    ELU: Final = "Elu"
    EMBEDDING: Final = "Embedding"
    EMBEDDING_BAG: Final = "EmbeddingBag"
    EXP: Final = "Exp"
    EXPAND: Final = "Expand"
    FLIP: Final = "Flip"
    FLOOR: Final = "Floor"
    FUSED_RMS_NORM: Final = "FusedRmsNorm"
    GATHER: Final = "Gather"
    GELU: Final = "Gelu"
    HARDSIGMOID: Final = "Hardsigmoid"
    HARDTANH: Final = "Hardtanh"
    HUBER_LOSS: Final = "HuberLoss"
    INDEX: Final = "Index"
    INDEX_SELECT: Final = "IndexSelect"
    LEAF: Final = "torch::autograd::AccumulateGrad"
    LEAKY_RELU: Final = "LeakyRelu"
    LERP: Final = "Lerp"
    LINALG_VECTOR_NORM: Final = "LinalgVectorNorm"
    LINEAR: Final = "Linear"
    LOG: Final = "Log"
    LOG_1P: Final = "Log1P"
    LOGSUMEXP: Final = "Logsumexp"
    LOG_SIGMOID: Final = "LogSigmoid"
    LOG_SOFTMAX: Final = "LogSoftmax"
    MASKED_FILL: Final = "MaskedFill"
    MASKED_SELECT: Final = "MaskedSelect"
    MAX: Final = "Max"
    MAXIMUM: Final = "Maximum"
    MAX_POOL_2D_WITH_INDICES: Final = "MaxPool2DWithIndices"
    MAX_POOL_3D_WITH_INDICES: Final = "MaxPool3DWithIndices"
    MEAN: Final = "Mean"
    MIN: Final = "Min"
    MINIMUM: Final = "Minimum"
    MIOPEN_BATCH_NORM: Final = "MiopenBatchNorm"
    MISH: Final = "Mish"
    MKLDNN_RNN_LAYER: Final = "MkldnnRnnLayer"
    MM: Final = "Mm"
    MSE_LOSS: Final = "MseLoss"
    MUL: Final = "Mul"
    MULTI_MARGIN_LOSS: Final = "MultiMarginLoss"
    MV: Final = "Mv"
    NAN_TO_NUM: Final = "NanToNum"
    NATIVE_BATCH_NORM: Final = "NativeBatchNorm"
    NATIVE_DROPOUT: Final = "NativeDropout"
    NATIVE_GROUP_NORM: Final = "NativeGroupNorm"
    NATIVE_LAYER_NORM: Final = "NativeLayerNorm"
    NEG: Final = "Neg"
    NLL_LOSS: Final = "NllLoss"
    NLL_LOSS_2D: Final = "NllLoss2D"
    NORM: Final = "Norm"
    NORMAL: Final = "Normal"
    ONCE: Final = "torch::autograd::Error"
    PERMUTE: Final = "Permute"
    POW: Final = "Pow"
    RECIPROCAL: Final = "Reciprocal"
    RELU: Final = "Relu"
    RESHAPE_ALIAS: Final = "ReshapeAlias"
    ROUND: Final = "Round"
    RSUB: Final = "Rsub"
    SAFE_SOFTMAX: Final = "SafeSoftmax"
    SELECT: Final = "Select"
    SIGMOID: Final = "Sigmoid"
    SIGN: Final = "Sign"
    SIN: Final = "Sin"
    SILU: Final = "Silu"
    SLICE: Final = "Slice"
    SMOOTH_L1_LOSS: Final = "SmoothL1Loss"
    SOFTMAX: Final = "Softmax"
    SOFTPLUS: Final = "Softplus"
    SOFT_MARGIN_LOSS: Final = "SoftMarginLoss"
    SPLIT: Final = "Split"
    SPLIT_WITH_SIZES: Final = "SplitWithSizes"
    SQRT: Final = "Sqrt"
    SQUEEZE: Final = "Squeeze"
    STACK: Final = "Stack"
    SUB: Final = "Sub"
    SUM: Final = "Sum"
    T: Final = "T"
    TANH: Final = "Tanh"
    THRESHOLD: Final = "Threshold"
    TO_COPY: Final = "ToCopy"
    TRANSPOSE: Final = "Transpose"
    TRUNC: Final = "Trunc"
    UNBIND: Final = "Unbind"
    UNSAFE_VIEW: Final = "UnsafeView"
    UNSQUEEZE: Final = "Unsqueeze"
    VIEW: Final = "View"
    WHERE: Final = "Where"
    XLOGY: Final = "Xlogy"


BY_HAND = frozenset((Op.CHECKPOINT, Op.COPY_SLICES, Op.LEAF, Op.ONCE))
"""Kinds that torch writes by hand: no derivative has their name."""
ATTENTION: Final = "ScaledDotProduct"
"""How the kinds of all fused attentions begin."""


def kind_of(node: Node) -> str:
    """Return what made a tensor, such as ``"Addmm"`` for ``AddmmBackward0``; empty where nothing did.

    Only derivatives of torch's own operations end in a number. A user's ``torch.autograd.Function`` of the same name,
    such as a ``Sign`` that passes gradients straight through, is no such operation, and keeps its whole name.

    Args:
        node: A ``grad_fn``, or ``None``.
    """
    if node is None:
        return ""
    return _kind(node.name())


@functools.lru_cache(maxsize=1024)  # there are few, and they are asked for thousands of times in one graph
def _kind(name: str) -> str:
    kind, _, number = name.removesuffix("_copy").rpartition("Backward")
    return kind if number.isdecimal() else name


def is_written(kind: str) -> bool:
    """Whether a user wrote how gradients pass, in a ``torch.autograd.Function``: such as one that turns them round."""
    return kind.endswith("Backward") and kind not in BY_HAND


def is_variant(node: Node, kind: str, number: int) -> bool:
    """Whether a node is one variant of an operation, by the number at the end of its name.

    Args:
        node: A node.
        kind: Of :class:`Op`.
        number: Such as 0 for the sum over everything and 1 for one over some dimensions.
    """
    return bool(node.name() == f"{kind}Backward{number}")


def by_number(node: Node) -> bool:
    """Whether a product or quotient is with a plain number."""
    return is_variant(node, Op.MUL, 1) or is_variant(node, Op.DIV, 1)


def exponent_of(node: Node) -> float:
    """Return the plain number that a power has; NaN for any other node, and where the exponent is a tensor."""
    exponent = getattr(node, "_saved_exponent", None) if kind_of(node) == Op.POW else None
    return float(exponent) if isinstance(exponent, (int, float)) else math.nan


def edges(node: Node) -> tuple[Edge, ...]:
    """Return by argument what it came from; the node of an edge is ``None`` for an argument without a graph."""
    found: tuple[Edge, ...] = getattr(node, "next_functions", ())
    return found


def inputs(node: Node) -> list[Node]:
    """Return by argument the node that it came from, ``None`` for one without a graph."""
    return [source for source, _ in edges(node)]


def sources(node: Node) -> list[Node]:
    """Return the nodes that arguments came from."""
    return [source for source, _ in getattr(node, "next_functions", ()) if source is not None]


def below(node: Node, index: int = 0) -> Node:
    """Return the node that an argument came from, ``None`` for one without a graph."""
    found = getattr(node, "next_functions", ())
    return found[index][0] if index < len(found) else None


def longest(most: float = MOST_NODES) -> int:
    """Return how many nodes of a graph this thread may look at.

    PyTorch frees a node that Python has seen within the call that frees the one behind it, so that a graph of 40 000
    of them overflows a stack of 8 MiB, where one that nobody has looked at is freed in a loop.

    Args:
        most: A limit of one's own.
    """
    stack = float(_STACK)
    if sys.platform != "win32" and (not stack or threading.current_thread() is threading.main_thread()):
        limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
        stack = math.inf if limit == resource.RLIM_INFINITY else limit
    return int(min(most, MOST_NODES, stack // _FREED))


def head_of(node: Node, count: int = 4) -> tuple[type, ...]:
    """Return what the last operations are, followed by their first arguments.

    Args:
        node: The last of them.
        count: How many at most.
    """
    out: list[type] = []
    while node is not None and len(out) < count:
        out.append(type(node))
        found = getattr(node, "next_functions", ())
        node = found[0][0] if found else None
    return tuple(out)


def walk(
    roots: Iterable[Node],
    *,
    step: Callable[[Node], Iterable[Node]] = sources,
    past: Callable[[Node], bool] = lambda _: True,
    into: Callable[[Node], bool] = lambda _: True,
    most: float = MOST_NODES,
) -> Iterator[Node]:
    """Yield each node behind some nodes once, these first, nearer ones before those that lie behind them.

    Args:
        roots: Where to begin; ``None`` is left out.
        step: Where a node leads to.
        past: Whether to go on behind a node.
        into: Whether to go to a node at all; these themselves are not asked.
        most: Nodes that are met at most, and no more than are :func:`longest`.
    """
    most = longest(most)
    waiting = deque(dict.fromkeys(root for root in roots if root is not None))
    seen = set(waiting)
    while waiting and len(seen) <= most:
        node = waiting.popleft()
        yield node
        for source in step(node) if past(node) else ():
            if source not in seen and into(source):
                seen.add(source)
                waiting.append(source)


def through(node: Node, kinds: Container[str]) -> Node:
    """Return the first node of no such kind, from one on and along first arguments.

    Args:
        node: Where to begin.
        kinds: Of :class:`Op`; those that are passed.
    """
    while kind_of(node) in kinds:
        node = below(node)
    return node


def is_alone(node: Node, term: Node) -> bool:
    """Whether a loss is one term, averaged or scaled: what was written out beside others may be a condition."""
    while node is not term and len(sources(node)) == 1:
        node = sources(node)[0]
    return node is term


def sources_in(root: Node, most: int = MOST_NODES) -> dict[Node, list[Node]] | None:
    """Return by node what its arguments came from, as :func:`sources` does; ``None`` where a graph is too long.

    Args:
        root: What everything leads to; it is the first key.
        most: Nodes that a graph may have, and no more than are :func:`longest`.
    """
    most, found = longest(most), dict[Node, list[Node]]({root: []})
    waiting = deque(found)
    while waiting:
        node = waiting.popleft()
        own = found[node] = sources(node)
        for source in own:
            if source not in found:
                found[source] = []
                waiting.append(source)
        if len(found) > most:
            return None
    return found


def takers_in(root: Node, most: int = MOST_NODES) -> dict[Node, list[Node]] | None:
    """Return by node which nodes take its result, once for each argument; ``None`` where a graph is too long.

    Args:
        root: What everything leads to; it is the first key, and nothing takes it.
        most: Nodes that a graph may have, and no more than are :func:`longest`.
    """
    most, takers = longest(most), dict[Node, list[Node]]({root: []})
    waiting = deque(takers)
    while waiting:
        node = waiting.popleft()
        for source in sources(node):
            held = takers.get(source)
            if held is None:
                takers[source] = [node]
                waiting.append(source)
            else:
                held.append(node)
        if len(takers) > most:
            return None
    return takers
