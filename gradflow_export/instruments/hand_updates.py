"""Steps that no optimizer makes: weights that are others when the model is called again after a backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.instances import instances
from gradflow_export.instruments.gradients.stamps import is_zeroed, stamp
from gradflow_export.metrics.arrays.checksum import checksum


class HandUpdates:
    """Finds where a loop without an optimizer has updated the weights, and which gradients it did that with.

    The update lies between the end of a backward pass and the next call of the model, or the next backward pass where
    no module is called; there weights are compared, all of them. Gradients are read as the pass ends, for most such
    loops clear them with the update.

    Args:
        model: Returns the model.
        code: Knows whether calls happen inside compiled code, which hooks on all modules would compile again.
        guard: Wraps the hook.

    Attributes:
        on_pass: Called with the model at the end of each backward pass, and whether it is another one of the same step.
        on_step: Called with the model after an update.
        on: Whether no optimizer has stepped yet.
    """

    def __init__(
        self, model: Callable[[], nn.Module | None], code: CompiledCode | None = None, *, guard: Guard = unguarded
    ) -> None:
        self._model, self._code, self._hook = model, code, guard(self._called)
        self.on_pass: Callable[[nn.Module, bool], None] = lambda _model, _again: None
        self.on_step: Callable[[nn.Module], None] = lambda _model: None
        self.on, self._waits, self._read = True, False, False
        self._sums: list[Tensor | None] | None = None
        self._versions: list[tuple[int, int]] = []
        self._counted = True
        self._alone: bool | None = None
        self._gradients: list[tuple[int, int] | None] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Take notice of a backward pass that begins; an update before it makes a step."""
        self.look()
        self._wait()

    def over(self) -> None:
        """Take notice of the end of a backward pass that added to gradients."""
        model = self._model()
        if model is None or not self.on:
            return
        self.on_pass(model, self._read)
        self._read, self._gradients = True, [stamp(p.grad) for p in _trained(model)]
        self._wait()

    def look(self) -> None:
        """Report a step where the weights are others than at the last backward pass."""
        self._unhook()
        if not (self._waits and self.on):
            return
        model = self._model()
        if model is None:
            return
        trained = _trained(model)
        if _versions(trained) == self._versions:
            sums = zip(trained, self._sums or (), strict=False)
            if not any(s is not None and not torch.equal(s, _sum(p, s)) for p, s in reversed([*sums])):
                return
            self._counted = False
        if self._alone is None:  # once, for it looks at every object there is
            self._alone = not _are_held(trained)
        if self._alone:
            self.on_step(model)

    def end(self, model: nn.Module) -> None:
        """Take notice of a step, found or reported; gradients are read now if they are others, as after clipping."""
        now = [p.grad for p in _trained(model)]
        pairs = list(zip(now, self._gradients, strict=True)) if self._read and len(now) == len(self._gradients) else []
        known = [(g, before) for g, before in pairs if before is not None]
        cleared = any(g is None or is_zeroed(g, before) for g, before in known)
        if not pairs or not (cleared or all(stamp(g) == before for g, before in known)):
            self.on_pass(model, self._read)
        self._unhook()
        self._waits = self._read = False

    def attach(self) -> contextlib.ExitStack:
        """Return a stack whose closing ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self._unhook)
        return stack

    def _wait(self) -> None:
        """Watch for an update from here on."""
        model = self._model()
        if model is None:
            return
        if not self._waits:
            self._waits, trained = True, _trained(model)
            self._versions = _versions(trained)
            # Counted only until it is known that versions tell: writes to ``.data`` leave them as they are.
            self._sums = None if self._counted and self._sums is not None else [checksum(p) for p in trained]
        if self._handle is None and not (self._code is not None and self._code.found):
            self._modules = {id(m): weakref.ref(m) for m in model.modules()}
            self._handle = register_module_forward_pre_hook(self._hook)

    def _unhook(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _called(self, module: nn.Module, _args: Any) -> None:
        known = None if torch.compiler.is_compiling() else self._modules.get(id(module))
        if known is not None and known() is module:
            self.look()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _versions(parameters: list[nn.Parameter]) -> list[tuple[int, int]]:
    """Return what changes with a write that PyTorch counts, and with another tensor in the same place."""
    return [(torch_private.version(p), p.data_ptr() if type(p) is nn.Parameter else id(p)) for p in parameters]


def _sum(parameter: nn.Parameter, like: Tensor) -> Tensor:
    now = checksum(parameter)
    return torch.zeros_like(like) if now is None else now


def _are_held(parameters: list[nn.Parameter]) -> bool:
    """Whether an optimizer holds one of these parameters: then a change is no step, for that is still to come."""
    mine = {id(p) for p in parameters}
    return any(id(p) in mine for o in instances(Optimizer) for group in o.param_groups for p in group["params"])
