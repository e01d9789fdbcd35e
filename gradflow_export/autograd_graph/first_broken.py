"""Where the first NaN or Inf behind a loss arose, as the autograd graph still holds it before the backward pass.

Nothing is computed again: what the nodes of the graph saved for their backward pass is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.loss_graph import LAYERS
from gradflow_export.autograd_graph.loss_shape import SHAPES
from gradflow_export.autograd_graph.nodes import Op, below, inputs, kind_of, longest, sources
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.metrics.arrays.local import local

Node = Any

_KEEPS = SHAPES | frozenset(
    (
        Op.ABS, Op.AMAX, Op.AMIN, Op.CAT, Op.CLAMP, Op.CLAMP_MAX, Op.CLAMP_MIN, Op.CONSTANT_PAD_ND, Op.ELU,
        Op.EMBEDDING, Op.GELU,
        Op.HARDTANH, Op.LEAKY_RELU, Op.LOG_SOFTMAX, Op.MAX, Op.MAX_POOL_2D_WITH_INDICES, Op.MAX_POOL_3D_WITH_INDICES,
        Op.MAXIMUM, Op.MIN,
        Op.MINIMUM, Op.MISH, Op.NATIVE_DROPOUT, Op.NEG, Op.RELU, Op.SIGMOID, Op.SILU, Op.SOFTMAX, Op.SOFTPLUS,
        Op.SPLIT, Op.STACK,
        Op.TANH, Op.THRESHOLD, Op.UNBIND, Op.WHERE,
    )
)  # fmt: skip
"""What gives out finite values where finite values enter."""
_SHOWS = frozenset(
    (
        Op.ADD, Op.ADDMM, Op.ALIAS, Op.CLONE, Op.CONVOLUTION, Op.EXPAND, Op.LOG_SOFTMAX, Op.MEAN, Op.MM,
        Op.NATIVE_BATCH_NORM,
        Op.NATIVE_LAYER_NORM, Op.NEG, Op.PERMUTE, Op.RESHAPE_ALIAS, Op.SOFTMAX, Op.SQUEEZE, Op.SUB, Op.SUM, Op.T,
        Op.TO_COPY,
        Op.TRANSPOSE, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW,
    )
)  # fmt: skip
"""What gives out something that is not finite where NaN or Inf enters."""
_WEIGHT_VIEWS = frozenset(
    (Op.PERMUTE, Op.RESHAPE_ALIAS, Op.T, Op.TO_COPY, Op.TRANSPOSE, Op.UNSAFE_VIEW, Op.UNSQUEEZE, Op.VIEW)
)
_TAKEN = frozenset(
    (
        "attn_bias", "attn_mask", "batch1", "batch2", "input", "key", "mat", "mat1", "mat2", "other", "query",
        "running_mean", "running_var", "self", "target", "tensor1", "tensor2", "tensors", "value", "vec", "weight",
    )
)  # fmt: skip
"""Names under which nodes save what they took; what they made has others."""
_SUMS = frozenset((Op.ADD, Op.AVG_POOL2D, Op.MEAN, Op.SUB))
_WIDE = frozenset((torch.float32, torch.float64))
_RAW = "_raw_saved_"
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_DATA = frozenset(("input", *(attribute for attribute, _, _ in LAYERS.values())))


class Begin(NamedTuple):
    """Where it began.

    Attributes:
        sites: One module; or the two layers it lies between, ``""`` for the input of the model or the loss. Empty where
            it is behind the model, in the loss itself.
        node: The operation, or the first that it can be.
    """

    sites: tuple[str, ...]
    node: Node


def broken(values: Tensor) -> bool | None:
    """Return whether a tensor holds NaN or Inf; ``None`` where it holds ``-inf`` alone beside finite values.

    That is how masks and the logarithms of impossible classes look. This waits for the device.

    Args:
        values: Shape: any; whole numbers are never broken.
    """
    values = local(values.detach())
    if values.layout is not torch.strided or not (values.is_floating_point() or values.is_complex()):
        return False
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return False
    if values.is_complex() or not bool(finite.any()):
        return True
    return None if bool((finite | (values == -torch.inf)).all()) else True


def first_broken(root: Tensor, model: nn.Module, mark: str, outputs: Sequence[Tensor] = ()) -> Begin | None:
    """Follow the graph of a loss that is NaN or Inf to the first operation with a result that is not finite.

    Args:
        root: The loss, before its backward pass.
        model: Whose modules are named.
        mark: Key of the metadata of nodes whose results the model gave out.
        outputs: Such results, as far as they are still there.

    Returns:
        ``None`` where the graph is too large, or does not tell.
    """
    nodes = _in_order(root.grad_fn)
    search = _Search(nodes, model, mark, outputs) if nodes else None
    return search.run() if search is not None and search.knows else None


def _in_order(root: Node) -> list[Node]:
    """Return all nodes of a graph, what a node takes before the node itself; none of too large a graph."""
    out: list[Node] = []
    entered: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    most = longest()
    while stack:
        node, done = stack.pop()
        if done:
            out.append(node)
        elif node not in entered:
            entered.add(node)
            if len(entered) > most:
                return []
            stack.append((node, True))
            stack.extend((source, False) for source in sources(node))
    return out


def _kept(node: Node, known: dict[type, list[tuple[str, str]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each tensor that a node saved, without calling anybody's hooks for it."""
    kind = type(node)
    if kind not in known:
        names = [name.removeprefix(_RAW) for name in dir(node) if name.startswith(_RAW)]
        known[kind] = [(n, f"_saved_{n}" if hasattr(kind, f"_saved_{n}") else f"saved_{n}") for n in names]
    for name, attribute in known[kind]:
        raw = getattr(node, _RAW + name)
        # With hooks (checkpoints, offloading) the forward pass would be computed again, or memory be copied, for us.
        if any(
            getattr(part, "unpack_hook", part) is not None
            for part in (raw if isinstance(raw, (tuple, list)) else (raw,))
        ):
            continue
        try:
            value = getattr(node, attribute)
        except (RuntimeError, AttributeError):  # freed, or overwritten since
            continue
        parts = value if isinstance(value, (tuple, list)) else (value,)
        yield from ((name, part) for part in parts if isinstance(part, Tensor))


class _Search:
    """One search through one graph.

    Args:
        nodes: In order, the root last.
        model: Whose modules are named.
        mark: As of :func:`first_broken`, and so ``outputs``.
        outputs: What the model gave out.
    """

    def __init__(self, nodes: Sequence[Node], model: nn.Module, mark: str, outputs: Sequence[Tensor]) -> None:
        self._nodes, self._model = nodes, model
        self._place = {node: place for place, node in enumerate(nodes)}
        self._state: dict[Node, bool] = {}
        self._constants: dict[Node, str] = {}
        given = [node for node in nodes if mark in node.metadata]
        self._inside = set(self._upstream(given)) if given else None
        self._holders = {
            id(p): site_name(name).rpartition(".")[0].partition(".parametrizations")[0]
            for name, p in model.named_parameters()
        }
        self._order = {name: place for place, name in enumerate(dict.fromkeys(self._holders.values()))}
        self._takers: dict[Node, list[Node]] = {}
        for node in nodes:
            for source in sources(node):
                self._takers.setdefault(source, []).append(node)
        self._look(outputs)

    @property
    def knows(self) -> bool:
        """Whether anything is known but that the loss is not finite."""
        return len(self._state) > 1

    def run(self) -> Begin | None:
        """Return where it began."""
        suspects = self._suspects()
        inside = None if self._inside is None else [node for node in suspects if node in self._inside]
        if inside == []:
            return Begin((), suspects[0])
        count, suspects = len(suspects), inside or suspects
        first, last = suspects[0], suspects[-1]
        owners = self._owners(first)
        if first in self._constants and (not owners or self._constants[first] in _DATA):
            # Made by what has no graph, at any time before; but for a number, by which the operation itself was done.
            after = owners[0] if owners else self._nearest(first, self._following)
            if not self._is_number(first):
                return None if after is None else Begin(("", after), first)
        a = next(iter(self._owners(first)), None) or self._nearest(first, sources)
        whole = len(suspects) == count
        b = (next(reversed(self._owners(last)), None) or self._nearest(last, self._following)) if whole else None
        if a is None and b is None:
            return None
        return Begin(self._named(a or "", b or ""), first)

    def _look(self, outputs: Sequence[Tensor]) -> None:
        """Learn of as many nodes as possible whether what they gave out was finite."""
        for tensor in outputs:
            self._learn(tensor.grad_fn, broken(tensor))
        known: dict[type, list[tuple[str, str]]] = {}
        for node in self._nodes:
            for name, value in _kept(node, known):
                state = broken(value)
                if value.grad_fn is not None:
                    self._learn(value.grad_fn, state)
                elif state and not value.requires_grad and name in _TAKEN:
                    self._constants.setdefault(node, name)
        self._state.update(
            dict.fromkeys([self._nodes[-1], *(n for n in self._constants if n not in self._state)], True)
        )
        for node in reversed(self._nodes):
            if self._state.get(node) is False and kind_of(node) in _SHOWS:
                self._state.update((source, False) for source in sources(node) if source not in self._state)

    def _is_number(self, node: Node) -> bool:
        """Whether what entered without a graph is a number of Python's, which has the widest type."""
        made: Any = getattr(node, "_input_metadata", ())
        value = getattr(node, f"_saved_{self._constants[node]}")
        wide = isinstance(value, Tensor) and value.dim() == 0 and value.dtype is torch.float64
        return wide and bool(made) and made[0].dtype is not torch.float64

    def _learn(self, node: Node, state: bool | None) -> None:
        if state is not None and node in self._place:
            self._state[node] = state or self._state.get(node, False)

    def _suspects(self) -> list[Node]:
        """Return the operations of which one made the first value that is not finite, in the order of the graph."""
        state, tainted = self._state, set[Node]()
        for node in self._nodes:
            if any(state.get(s) or (s not in state and s in tainted) for s in sources(node)):
                tainted.add(node)
        reached = self._upstream([self._nodes[-1]], lambda node: state.get(node) is not False)
        firsts = [node for node in reached if state.get(node) and node not in tainted]
        first = min(firsts, key=_time)
        if first in self._constants:
            return [first]
        region = self._upstream([first], lambda node: node is first or node not in state)
        region = sorted((node for node in region if sources(node)), key=_time)
        return [node for node in region if not _keeps_finite(node)] or region or [first]

    def _upstream(self, start: Iterable[Node], allowed: Callable[[Node], bool] = lambda _node: True) -> list[Node]:
        """Return the nodes that lead to some nodes, themselves included, through allowed ones only."""
        waiting = deque(start)
        seen = dict.fromkeys(waiting)
        while waiting:
            for source in sources(waiting.popleft()):
                if source not in seen and allowed(source):
                    seen[source] = None
                    waiting.append(source)
        return list(seen)

    def _following(self, node: Node) -> Iterable[Node]:
        takers = self._takers.get(node, ())
        return takers if self._inside is None else (taker for taker in takers if taker in self._inside)

    def _nearest(self, node: Node, following: Callable[[Node], Iterable[Node]]) -> str | None:
        """Return the nearest layer in one direction, itself left out."""
        waiting, seen = deque(following(node)), {node}
        while waiting:
            here = waiting.popleft()
            if here in seen:
                continue
            seen.add(here)
            if owners := self._owners(here):
                return owners[0]
            waiting.extend(following(here))
        return None

    def _owners(self, node: Node) -> list[str]:
        """Return the modules whose parameters an operation takes, in the order of registration."""
        found = set()
        for source in sources(node):
            while kind_of(source) in _WEIGHT_VIEWS and len(inputs(source)) == 1:
                source = below(source)  # noqa: PLW2901 - down to the parameter that is shown
            variable = getattr(source, "variable", None)
            if id(variable) in self._holders and variable is not None:
                found.add(self._holders[id(variable)])
        return sorted(found, key=self._order.__getitem__)

    def _named(self, a: str, b: str) -> tuple[str, ...]:
        """Return the one module that both layers lie in and that runs code of its own between them, or the two."""
        if a == b:
            return (a,)
        ends = a.split("."), b.split(".")
        least = min(map(len, ends))
        depth = next((i for i in range(least) if ends[0][i] != ends[1][i]), least)
        name = ".".join(ends[0][:depth])
        named = {site_name(path): module for path, module in self._model.named_modules()}
        module = named.get(name)
        if isinstance(module, nn.Sequential) and len(ends[0]) == len(ends[1]) == depth + 1:
            # It runs no code of its own: between two layers of it there is what it calls between them.
            children = [key for key, _ in module.named_children()]
            # An end that is none of them is the model's input, the loss, or the model by a parameter of its own.
            places = [children.index(end[depth]) for end in ends if end[depth] in children]
            between = len(places) == 2 and places[1] - places[0] == 2
            return (f"{name}.{children[places[0] + 1]}".lstrip("."),) if between else (a, b)
        return (a, b) if not name or isinstance(module, (*_HOLDERS, nn.Sequential)) else (name,)


def _keeps_finite(node: Node) -> bool:
    """Whether an operation makes finite values of finite ones; a sum of two does but in reduced precision."""
    kind = kind_of(node)
    if kind not in _SUMS | _KEEPS or None in inputs(node):
        return False  # what has no graph may have brought it
    if kind in _KEEPS:
        return True
    made: Any = getattr(node, "_input_metadata", ())
    return bool(made) and made[0].dtype in _WIDE


def _time(node: Node) -> int:
    """Return when an operation ran in the forward pass."""
    return torch_private.sequence_number(node)
