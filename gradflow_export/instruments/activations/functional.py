"""Activations that are called as functions, such as ``F.relu``, and the layer that feeds each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gradflow_export.autograd_graph.junctions import tensors_of
from gradflow_export.autograd_graph.nodes import Node, Op, kind_of, walk
from gradflow_export.autograd_graph.provenance import is_plain, parameter_behind
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import is_compiled
from gradflow_export.hooks.forward_trace import Call, ForwardPasses
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.parameter_names import ParameterNames

UNSEEN_STEPS = 5
"""Sampled steps without any such call after which a model is taken to have none."""
NEAREST = 16
"""Nodes of the graph that are looked at for the layer that feeds an activation."""
MOST_NODES = 20_000
"""Nodes of the graph that are looked at in one step, however often the model is called."""

KINDS = MappingProxyType({Op.RELU: "relu", Op.SIGMOID: "sigmoid", Op.TANH: "tanh"})
_MODULES = (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh)


@dataclass(frozen=True)
class _Known:
    """One module of the model."""

    module: weakref.ref[nn.Module]
    activation: bool


class FunctionalActivations:
    """Shows what ``relu``, ``tanh`` and ``sigmoid`` gave out in the model's own forward pass, by whatever name.

    On sampled steps they are found in the graph of what the model gives out, with what they keep for the backward
    pass. Not seen: what runs without gradients or in a checkpoint, and models of which any part is compiled.

    Args:
        model: The unwrapped model; only weak references to its modules are kept.
        names: Of its parameters.
        see: Called with one of ``KINDS``, its node, what it gave out, and the layers behind which there is nothing but
            what the model gives out.
        code: Knows whether the model turned out to be compiled.
        guard: Keeps errors out of the user's loop.
    """

    def __init__(
        self,
        model: nn.Module,
        names: ParameterNames,
        see: Callable[[str, Node, Tensor, set[str | None]], bool],
        *,
        code: CompiledCode | None = None,
        guard: Guard = unguarded,
    ) -> None:
        modules = list(model.modules())
        self.may_be = any(map(_may_call, modules)) and not any(map(is_compiled, modules))
        if code is not None and code.found:
            self.may_be = False
        members = {id(m): _Known(weakref.ref(m), isinstance(m, _MODULES)) for m in modules} if self.may_be else {}
        self._passes: ForwardPasses[_Known] = ForwardPasses(
            members, code=code, left=guard(self._left), outermost=self.may_be
        )
        self._names, self._see = names, see
        self._unseen, self._seen, self._left_over = 0, False, MOST_NODES
        self._known: set[Node] = set()

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack ends it."""
        return self._passes.attach()

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        if not on and self._passes.armed:
            self._unseen = 0 if self._seen else self._unseen + self._passes.ran
            self._seen = self._passes.ran = False
        self._left_over, self._known = MOST_NODES, set()
        self._passes.arm(on=on and self._unseen < UNSEEN_STEPS)

    def known(self, output: Tensor) -> None:
        """Take what a module gave out that is known as an activation: it is none that is called as a function."""
        if self._passes.calls:
            self._known.add(output.grad_fn)

    def _left(self, call: Call[_Known], output: Any) -> None:
        known, self._known = self._known, set()
        if call.known.activation or self._left_over <= 0:
            return
        made = [tensor.grad_fn for tensor in tensors_of(output) if is_plain(tensor) and tensor.grad_fn is not None]
        given = {tensor.grad_fn for tensor in tensors_of(call.given)}
        heads = {feeding_layer(self._names, node) for node in made}
        for node in walk(made, into=lambda node: node not in given, most=self._left_over):
            self._left_over -= 1
            kind = KINDS.get(kind_of(node))
            tensor = None if kind is None or node in known else saved(node, "result")
            if kind is not None and tensor is not None and tensor.dim() >= 2 and tensor.is_floating_point():
                self._seen |= self._see(kind, node, tensor, heads)


def _may_call(module: nn.Module) -> bool:
    """Whether a module may call functions: those of the user's own classes, and PyTorch's transformer layers."""
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)


def feeding_layer(names: ParameterNames, node: Node, units: int | None = None) -> str | None:
    """Return the name of the nearest layer behind a node whose parameter has an entry or a row for each unit.

    Args:
        names: Of the model's parameters.
        node: What made an activation.
        units: How many units it has; ``None`` for a layer of any number.
    """

    def name_of(parameter: Any) -> str | None:
        fits = units is None or (parameter.dim() and parameter.shape[0] == units)
        return names.name_of(parameter) if fits else None

    name = parameter_behind(node, name_of, NEAREST)
    return None if name is None else name.rpartition(".")[0]
