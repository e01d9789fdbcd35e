"""Rectifiers that are called as functions, such as ``F.relu``, and the layer that feeds each."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradflow_export.autograd_graph.provenance import is_plain, nearest_parameter
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import is_compiled
from gradflow_export.hooks.forward_trace import ForwardPasses
from gradflow_export.hooks.function_spy import rectifier_spies
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.parameter_names import ParameterNames

UNSEEN_STEPS = 5
"""Sampled steps without any such call after which a model is taken to have none."""
NEAREST = 16
"""Nodes of the graph that are looked at for the layer that feeds a rectifier."""

_RECTIFIERS = (nn.ReLU, nn.ReLU6)


@dataclass(frozen=True)
class _Known:
    """One module of the model."""

    module: weakref.ref[nn.Module]
    rectifier: bool


class FunctionalRectifiers:
    """Shows what enters ``torch.relu``, ``Tensor.relu`` and ``F.relu`` while the model's own forward pass runs.

    The functions are replaced for that long only, and only on sampled steps. Calls from within ``nn.ReLU`` are not
    shown: the module is known. Not seen: functions bound to an attribute or by ``functools.partial`` other than
    ``F.relu`` itself, what runs without gradients, and models of which any part is compiled.

    Args:
        model: The unwrapped model; only weak references to its modules are kept.
        see: Called with the tensor that is, or was, rectified.
        code: Knows whether the model turned out to be compiled.
        guard: Keeps errors out of the user's loop.
    """

    def __init__(
        self,
        model: nn.Module,
        see: Callable[[Tensor], bool],
        *,
        code: CompiledCode | None = None,
        guard: Guard = unguarded,
    ) -> None:
        modules = list(model.modules())
        self.may_be = any(map(_may_call, modules)) and not any(map(is_compiled, modules))
        if code is not None and code.found:
            self.may_be = False
        members = {id(m): _Known(weakref.ref(m), isinstance(m, _RECTIFIERS)) for m in modules} if self.may_be else {}
        self._passes: ForwardPasses[_Known] = ForwardPasses(members, code=code)
        self._see, self._show = see, guard(self._called)
        self._unseen, self._seen = 0, False

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack puts every function back."""
        return self._passes.attach(rectifier_spies(self._show) if self.may_be else [])

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        if not on and self._passes.armed:
            self._unseen = 0 if self._seen else self._unseen + self._passes.ran
            self._seen = self._passes.ran = False
        self._passes.arm(on=on and self._unseen < UNSEEN_STEPS)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0] if args else kwargs.get("input")
        calls = self._passes.calls
        outside = bool(calls) and not calls[-1].known.rectifier
        if outside and is_plain(tensor) and tensor.dim() >= 2 and tensor.numel():
            self._seen |= self._see(tensor)


def _may_call(module: nn.Module) -> bool:
    """Whether a module may call functions: those of the user's own classes, and PyTorch's transformer layers."""
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)


def feeding_layer(names: ParameterNames, tensor: Tensor, units: int) -> str | None:
    """Return the name of the nearest layer before a tensor whose parameter has an entry or a row for each unit.

    Args:
        names: Of the model's parameters.
        tensor: An activation with a graph.
        units: How many units it has.
    """

    def name_of(parameter: Any) -> str | None:
        return names.name_of(parameter) if parameter.dim() and parameter.shape[0] == units else None

    name = nearest_parameter(tensor, name_of, NEAREST)
    return None if name is None else name.rpartition(".")[0]
