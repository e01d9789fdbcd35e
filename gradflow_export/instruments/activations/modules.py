"""Dead, saturated and zero outputs of activation modules."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import Node
from gradflow_export.hooks.compiled_calls import Reading
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.hooks.parameter_names import ParameterNames
from gradflow_export.hooks.readings import Drained, Pending, join_scalars
from gradflow_export.instruments.activations.fired_units import FiredUnits
from gradflow_export.instruments.activations.functional import FunctionalActivations, feeding_layer
from gradflow_export.instruments.base import Cost, Instrument, Setting
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.units import dead_shares, greatest_outputs, saturated_share, zero_share
from gradflow_export.records.catalog import MetricSpec, spec

WINDOW = 5
"""Sampled steps per window; a unit is dead when it fired in neither this window nor the one before."""

_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_CONV1D = (nn.Conv1d, nn.ConvTranspose1d)


def saturation_kind(module: nn.Module) -> str | None:
    """Return how saturation of this activation is detected, ``None`` when it does not saturate."""
    if isinstance(module, nn.Tanh):
        return "tanh"
    if isinstance(module, nn.Sigmoid):
        return "sigmoid"
    if isinstance(module, nn.Hardsigmoid):
        return "clipped:0:1"
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return f"clipped:{module.min_val}:{module.max_val}"
    return None


class ActivationInstrument(Instrument):
    """Watches ReLU, ReLU6, Tanh, Sigmoid, Hardtanh and Hardsigmoid modules while the module calls are armed.

    ``F.relu``, ``torch.tanh`` and ``torch.sigmoid`` are no modules: their units go by the layer that feeds them. What
    the model gives out is left out, as it saturates where answers are certain. Other functions are not seen.
    """

    instrument: ClassVar[str] = "activations"
    interval: ClassVar[int] = 50
    cost: ClassVar[Cost] = "H"

    def __init__(self, calls: ModuleCalls, model: nn.Module, *, guard: Guard = unguarded) -> None:
        self.calls = calls
        self._guard, self._names = guard, ParameterNames(weakref.ref(model))
        self._functional = FunctionalActivations(model, self._names, self._by_function, code=calls.code, guard=guard)
        self._unit_dim_3d = 1 if any(isinstance(m, _CONV1D) for m in model.modules()) else -1
        named = [(site_name(n) or type(m).__name__, m) for n, m in model.named_modules()]
        self._rectifiers = [(n, m) for n, m in named if isinstance(m, _RECTIFIERS)]
        self._saturating = [(n, m, kind) for n, m in named if (kind := saturation_kind(m)) is not None]
        self._dead_sites = tuple(n for n, _ in self._rectifiers)
        self._places = {name: place for place, name in enumerate(self._dead_sites)}
        self._saturating_sites = tuple(n for n, _, _ in self._saturating)
        self._active: dict[int, Tensor] = {}
        self._earlier: dict[int, Tensor] = {}
        self._touched: set[int] = set()
        self._zero: dict[int, Tensor | float] = {}
        self._saturated: dict[int, Tensor | float] = {}
        self._saturated_at: dict[str, Tensor | float] = {}  # by the layer that feeds a function
        self._samples = 0
        self._fired = FiredUnits()
        self._read_together = False
        self._modules = len(self._rectifiers) + len(self._saturating) + (calls.enabled and self._functional.may_be)

    @classmethod
    def make(cls, setting: Setting) -> ActivationInstrument:
        """Make one for a model."""
        return cls(ModuleCalls(code=setting.code), setting.model, guard=setting.part(cls.instrument))

    @property
    def modules(self) -> int:
        """How many modules are read."""
        return self._modules

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(f"activation.{name}") for name in ("dead_share", "saturated_share", "zero_share"))

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the activations' calls."""
        for index, (_, module) in enumerate(self._rectifiers):
            inside = Reading(self._guard(partial(self._rectified, index, None, None)))
            self.calls.add(module, self._guard(partial(self._rectified, index)), inside)
        for index, (_, module, kind) in enumerate(self._saturating):
            inside = Reading(self._guard(partial(self._saturable, index, kind, None, None)))
            self.calls.add(module, self._guard(partial(self._saturable, index, kind)), inside)
        self._rectifiers, self._saturating = [], []
        stack = self.calls.attach()
        if self.calls.enabled:
            stack.enter_context(self._functional.attach())
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        self.calls.arm(on=on)
        self._functional.arm(on=on)
        self._names.begin()

    def _by_function(self, kind: str, node: Node, output: Tensor, heads: set[str | None]) -> bool:
        """Take what a function gave out, if a layer feeds it."""
        layer = feeding_layer(self._names, node, output.shape[self._unit_dim(output)])
        if layer is None:
            return False
        if kind != "relu":
            if layer not in heads:
                with torch.no_grad():
                    self._saturated_at[layer] = saturated_share(local(output), kind)
            return True
        index = self._places.setdefault(layer, len(self._dead_sites))
        if index == len(self._dead_sites):
            self._dead_sites += (layer,)
        self._rectified(index, None, None, output)
        return True

    def _unit_dim(self, output: Tensor) -> int:
        return 1 if output.dim() >= 4 else (self._unit_dim_3d if output.dim() == 3 else -1)

    def _rectified(self, index: int, _module: nn.Module | None, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() < 2 or output.numel() == 0 or output.is_nested:
            return
        self._functional.known(output)
        unit_dim = self._unit_dim(output)
        if self._fired.offer(index, output, unit_dim):
            self._read_together = True
            return
        with torch.no_grad():
            output = local(output)
            greatest = greatest_outputs(output, unit_dim)
            known = self._active.get(index)
            if known is not None and known.shape == greatest.shape and known.device == greatest.device:
                greatest = torch.maximum(known, greatest.to(known.dtype))
            self._active[index] = greatest
            self._zero[index] = zero_share(output)
            self._touched.add(index)

    def _saturable(self, index: int, kind: str, _module: nn.Module | None, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.numel():
            self._functional.known(output)
            with torch.no_grad():
                self._saturated[index] = saturated_share(local(output), kind)

    def drain(self) -> Drained:
        """Give out shares of the modules called since the last call; windows go on."""
        out: Drained = []
        dead: dict[int, Tensor | float] = dict(self._dead())
        if self._read_together:
            shares, zeros = self._fired.shares()
            dead.update(shares)
            self._zero.update(zeros)
        # The activation of the output is a module, if any is, and the last one.
        saturating = (*self._saturated_at, *self._saturating_sites)
        saturated = dict(enumerate(self._saturated_at.values()))
        saturated.update({len(saturated) + index: share for index, share in self._saturated.items()})
        for metric, sites, values in (
            ("activation.dead_share", self._dead_sites, dead),
            ("activation.zero_share", self._dead_sites, self._zero),
            ("activation.saturated_share", saturating, saturated),
        ):
            if values:
                where = sorted(values)
                joined = join_scalars([values[index] for index in where])
                out.append(Pending(metric, sites, joined, np.array(where, dtype=np.int64)))
        if self._touched or self._read_together:
            self._samples += 1
            if self._samples % WINDOW == 0:
                self._earlier, self._active = self._active, {}
                self._fired.turn()
        self.forget()
        return out

    def forget(self) -> None:
        """Forget what was collected outside windows: the step makes no record."""
        self._touched, self._zero, self._saturated, self._saturated_at = set(), {}, {}, {}
        if self._read_together:
            self._read_together = False
            self._fired.forget()

    def _dead(self) -> dict[int, Tensor]:
        """Return the dead share of each module called since the last drain, over this window and the one before."""
        both: dict[int, Tensor] = {}
        for index in sorted(self._touched):
            greatest, earlier = self._active[index], self._earlier.get(index)
            if earlier is not None and earlier.shape == greatest.shape and earlier.device == greatest.device:
                greatest = torch.maximum(greatest, earlier.to(greatest.dtype))
            both[index] = greatest.to(next(iter(both.values())).device) if both else greatest
        return dict(zip(both, dead_shares(list(both.values())).unbind(), strict=True)) if both else {}
