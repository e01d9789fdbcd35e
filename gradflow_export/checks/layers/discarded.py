"""Finds activations whose result is thrown away: ``F.relu(x)`` as a line of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.autograd_graph.layer_graph import NORMALISATIONS
from gradflow_export.autograd_graph.loss_graph import LAYERS, Node
from gradflow_export.autograd_graph.nodes import Op, below, kind_of, sources, walk
from gradflow_export.checks.detached import owner_of
from gradflow_export.checks.leakage import Graph
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import is_compiled
from gradflow_export.hooks.forward_trace import ForwardPasses
from gradflow_export.hooks.function_spy import Spy
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import layers_of
from gradflow_export.rules.history import History

MOST_CALLS = 64
"""Calls of one step that are remembered."""
_SHAPES = (
    Op.ALIAS,
    Op.CLONE,
    Op.EXPAND,
    Op.PERMUTE,
    Op.RESHAPE_ALIAS,
    Op.SQUEEZE,
    Op.T,
    Op.TO_COPY,
    Op.TRANSPOSE,
    Op.UNSAFE_VIEW,
)
_STRAIGHT = NORMALISATIONS | frozenset((*_SHAPES, Op.AVG_POOL2D, Op.NATIVE_DROPOUT, Op.UNSQUEEZE, Op.VIEW))


@dataclass(frozen=True)
class _Known:
    """One module of the model."""

    module: weakref.ref[nn.Module]


class Activations:
    """Remembers calls of activations in the model's forward passes: what went in, and whether the result still lives.

    Args:
        model: The unwrapped model; only weak references to its modules are kept.
        code: Knows whether the model turned out to be compiled.
        guard: Wraps what sees the calls.
    """

    def __init__(self, model: nn.Module, *, code: CompiledCode | None = None, guard: Guard = unguarded) -> None:
        modules = list(model.modules())
        plain = not any(map(is_compiled, modules)) and not (code is not None and code.found)
        members = {id(module): _Known(weakref.ref(module)) for module in modules} if plain else {}
        self._passes: ForwardPasses[_Known] = ForwardPasses(members, code=code)
        self._see = guard(self._called)
        self._calls: list[tuple[Node, Node, weakref.ref[Tensor]]] = []
        self._used: set[Node] = set()
        self._between: dict[Node, str] = {}

    def attach(self) -> ExitStack:
        """Begin; closing the returned stack puts every function back."""
        owners = ((torch, "relu"), (torch, "tanh"), (Tensor, "relu"), (Tensor, "tanh"))
        names = ((functional, name) for name in ("elu", "gelu", "leaky_relu", "mish", "selu", "silu"))
        spies = [Spy(owner, name, self._see, result=True) for owner, name in (*owners, *names)]
        return self._passes.attach(spies)

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        self._passes.arm(on=on)

    def forget(self) -> None:
        """Forget what was seen in this step."""
        self._calls, self._used, self._between = [], set(), {}

    def read(self, graph: Graph, names: Mapping[int, str]) -> None:
        """Take in one of the losses of a step.

        Args:
            graph: All that is behind it.
            names: Names of modules by the ``id`` of their parameters.
        """
        members = set(graph.nodes)
        for source, result, _ in self._calls:
            if result in members:
                self._used.add(result)
            elif source in members:
                name = _between(graph, source, names)
                if name is None:
                    self._used.add(result)
                else:
                    self._between[source] = name

    def discarded(self) -> list[str]:
        """Return the layers that go straight on to another one, beside an activation of which nothing is left."""
        lost = dict[str, None]()
        for source, result, reference in self._calls:
            if source in self._between and result not in self._used and reference() is None:
                lost[self._between[source]] = None
        return list(lost)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, result = args[0] if args else kwargs.get("input"), kwargs["result"]
        if not (isinstance(given, Tensor) and isinstance(result, Tensor)) or given is result:
            return
        if given.grad_fn is not None and result.grad_fn is not None and len(self._calls) < MOST_CALLS:
            self._calls.append((given.grad_fn, result.grad_fn, weakref.ref(result)))


def _between(graph: Graph, source: Node, names: Mapping[int, str]) -> str | None:
    """Return the layer that made what entered an activation, where it goes on to layers with nothing in between."""
    here = source
    while owner_of(here, names) is None and _is_straight(here):
        here = next(iter(sources(here)), None)
    above = walk(
        [source], step=lambda node: graph.takers.get(node, ()), into=lambda taker: owner_of(taker, names) is None
    )
    return owner_of(here, names) if all(each is source or _is_straight(each) for each in above) else None


def _is_straight(node: Node) -> bool:
    """Whether a step is linear and mixes in nothing else: also a mask of dropout, or a graph's neighbours."""
    kind = kind_of(node)
    if kind in LAYERS:
        return below(node, LAYERS[kind][1]) is None or below(node, LAYERS[kind][2]) is None
    return kind in _STRAIGHT or (kind in {Op.DIV, Op.MUL} and (below(node) is None or below(node, 1) is None))


@dataclass(frozen=True, kw_only=True)
class DiscardedActivation(Check):
    """Report activations between two layers whose result is not used, such as ``F.relu(x)`` on a line of its own.

    The input of the activation reaches the next layer through linear operations only, no loss of the step depends on
    the result, and the result is no longer referenced.

    Why it is bad:
        The next layer gets the input of the activation instead of its result. The two layers are one linear map,
        although the code suggests an activation between them.

    Example:
        x = self.fc1(x)
        F.relu(x)
        x = self.fc2(x)

    Use instead:
        x = F.relu(self.fc1(x))
        x = self.fc2(x)

    Not reported:
        The result is used elsewhere, kept, or part of a loss; another activation is between the two layers.
    """

    heal: int = 100

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("layer.discarded",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        layers = layers_of(record, "layer.discarded")
        if not layers:
            return ()
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.MEDIUM,
                layers,
                1.0,
                0.0,
                f"the result of an activation after {some(layers)} is discarded: the next layer gets the input of "
                "the activation, and the two layers are one linear map.",
                "use the result: x = F.relu(x), or nn.ReLU(inplace=True).",
                cause="result thrown away",
            ),
        )
