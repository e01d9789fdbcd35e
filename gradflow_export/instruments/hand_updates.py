"""Steps that no optimizer makes: weights that are others when the model is called again after a backward pass."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.guards import Guard, hook_all_calls, unguarded
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.parameter_slots import Slot, slots, tensors_at
from gradflow_export.instruments.gradients.stamps import is_blank, is_zeroed, stamp
from gradflow_export.metrics.arrays.checksum import checksum

_log = logging.getLogger("gradflow_export")


class HandUpdates:
    """Finds where a loop without an optimizer has updated the weights, and which gradients it did that with.

    The first update is found as the next backward pass begins: of most loops an optimizer has stepped by then. Once it
    is known that there is none, weights are looked at when the model is called again, and gradients are read as each
    pass ends, for most such loops clear them with the update; those of the first step are read only if none is cleared.

    Args:
        model: Returns the model.
        code: Knows whether calls happen inside compiled code, which hooks on all modules would compile again.
        guard: Wraps the hook.

    Attributes:
        on_pass: Called with the model at the end of each backward pass, and whether it is another one of the same step.
        on_step: Called with the model after an update.
        on: Whether no optimizer has stepped yet.
        marked: Whether the user marks the steps: what is written to weights between two marks is no step of its own.
        first: Whether the last one was the first of all, and found.
        updates: How many there were.
        size: How many parameters the model had as the last backward pass began.
    """

    def __init__(
        self, model: Callable[[], nn.Module | None], code: CompiledCode | None = None, *, guard: Guard = unguarded
    ) -> None:
        self.model, self._code, self._hook = model, code, guard(self._called)
        self.on_pass: Callable[[nn.Module, bool], None] = lambda _model, _again: None
        self.on_step: Callable[[nn.Module], None] = lambda _model: None
        self.on, self._waits, self._read = True, False, False
        self.marked = self.first = self._told = False
        self._by_hand: bool | None = None
        self.updates = self.size = 0
        self._slots: list[Slot] = []
        self._before: list[tuple[int, int | None]] = []
        self._gradients: list[tuple[int, int] | None] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._unhook_calls: Callable[[], None] | None = None

    def begin(self) -> None:
        """Take notice of a backward pass that begins; an update before it makes a step."""
        self.look()
        model = self.model()
        if self._waits or model is None:
            return
        held = list(slots(model))
        trained = [(slot, p) for slot, p in held if p.requires_grad]
        self.size, self._slots = len(held), [slot for slot, _ in trained]
        if not self.marked:
            self._waits, self._before = True, [(torch_private.version(p), _sum(p)) for _, p in trained]

    def trained(self) -> list[Tensor]:
        """Return the parameters that were trained as the last backward pass began, or what stands in their places."""
        return [p for p in tensors_at(self._slots) if p is not None]

    def over(self) -> None:
        """Take notice of the end of a backward pass that added to gradients."""
        model = self.model()
        if model is None or not self.on or self._by_hand is False:
            return
        self._gradients = [stamp(p.grad) for p in self.trained()]
        if not self._by_hand:
            return
        self.on_pass(model, self._read)
        self._read = True
        if self._unhook_calls is None and not self.marked and not (self._code is not None and self._code.found):
            self._modules = {id(model): weakref.ref(model), **{id(s.reference()): s.reference for s in self._slots}}
            self._unhook_calls = hook_all_calls(self._hook, before=True)

    def look(self) -> None:
        """Report a step where the weights are others than at the last backward pass."""
        self._unhook()
        model = self.model()
        if not (self._waits and self.on) or self.marked or model is None or self._by_hand is False:
            return
        now = self.trained()
        # While ``functional_call`` runs, tensors stand in for the parameters.
        if all(isinstance(p, nn.Parameter) for p in now) and self._changed(now) and self._has_none():
            self.on_step(model)

    def _changed(self, now: list[Tensor]) -> bool:
        """Whether weights are others than at the last backward pass; a write through ``.data`` is not counted."""
        versions = [torch_private.version(p) for p in now] != [version for version, _ in self._before]
        return versions or [_sum(p) for p in now] != [known for _, known in self._before]

    def mark(self, *, counted: bool) -> bool:
        """Take notice that the user ends a step.

        Args:
            counted: Whether optimizers have stepped, whose steps count.

        Returns:
            Whether it is a step: not where an optimizer has stepped, nor where one is still to and weights rest.
        """
        if counted and not self._told:
            self._told = True
            _log.warning("gradflow: an optimizer's steps are counted by themselves; exporter.step() is ignored.")
        idle = not self.marked and self._waits and not self._changed(self.trained())
        if counted or (idle and not self._has_none()):
            return False
        self.marked = True
        return True

    def _has_none(self) -> bool:
        """Whether no optimizer holds the parameters; looked at once, for it goes through every object there is."""
        if self._by_hand is None:
            self._by_hand = not _are_held(self.trained())
        return self._by_hand

    def end(self, model: nn.Module) -> None:
        """Take notice of a step, found or reported; gradients are read now if they are others, as after clipping."""
        now = [p.grad for p in self.trained()]
        pairs = list(zip(now, self._gradients, strict=True)) if len(now) == len(self._gradients) else []
        known = [(g, before) for g, before in pairs if before is not None]
        cleared = any(g is None or is_zeroed(g, before) for g, before in known)
        # What is written through ``.data`` changes no stamp.
        cleared |= bool(known) and not self._read and all(g is None or is_blank(g) for g, _ in known)
        if not (cleared or (self._read and pairs and all(stamp(g) == before for g, before in known))):
            self.on_pass(model, self._read)
        self._unhook()
        self._by_hand, self._waits, self._read, self._gradients = True, False, False, []
        self.updates += 1
        self.first = self.updates == 1 and not self.marked

    def attach(self) -> contextlib.ExitStack:
        """Return a stack whose closing ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self._unhook)
        return stack

    def _unhook(self) -> None:
        unhook, self._unhook_calls = self._unhook_calls, None
        if unhook is not None:
            unhook()

    def _called(self, module: nn.Module, _args: Any) -> None:
        known = None if torch.compiler.is_compiling() else self._modules.get(id(module))
        if known is not None and known() is module:
            self.look()


def _sum(parameter: Tensor) -> int | None:
    """Return what is another number after any update."""
    bits = checksum(parameter)
    return None if bits is None else int(bits)


def _are_held(parameters: list[Tensor]) -> bool:
    """Whether an optimizer holds one of these parameters: then a change is no step, for that is still to come."""
    mine = {id(p) for p in parameters}
    return any(id(p) in mine for o in instances(Optimizer) for group in o.param_groups for p in group["params"])
