"""Calls of the criterion: what each gave waits until a backward pass comes from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradflow_export.hooks.gradient_hooks import TensorHooks
from gradflow_export.hooks.guards import Guard
from gradflow_export.hooks.module_hooks import ModuleHook, Placed, hook_calls
from gradflow_export.instruments.backward_passes import Passes
from gradflow_export.instruments.micro_batches import Part, Pass
from gradflow_export.metrics.arrays.local import local

Reader = Callable[[Tensor, Tensor, Tensor, int], list[Part]]
"""Reads the statistics of a loss's logits and targets, of which the classes lie along a dimension."""


@dataclass(eq=False, slots=True)
class _Call:
    """What one call gave.

    Attributes:
        loss: Without its graph.
        seconds: How long the call took, until that is reported.
        parts: Statistics of logits and targets.
        counted: The latest pass that came from it.
    """

    loss: Tensor
    seconds: float
    parts: Sequence[Part] = ()
    counted: Pass | None = None


class CriterionCalls:
    """Reports losses of the criterion, each with the backward pass that comes from it.

    A loss that is only looked at, as in an evaluation without ``no_grad`` or of a batch that is thrown away, is part of
    no step. What a call gave hangs on the node of its loss and goes when that graph goes: there are no books to keep.

    Args:
        criterion: The loss module, if there is one.
        passes: Where each loss is put.
        read: Reads logits and targets, where this step is due.
        on_call: Called with each loss that has a graph, and the first tensor that it is of.
        guard: Wraps the hooks.

    Attributes:
        placed: Hooks that are laid aside on steps that make no record.
        seconds: Inside calls that a pass came from, since it was last set to 0.
    """

    def __init__(
        self,
        criterion: nn.Module | None,
        *,
        passes: Passes,
        read: Reader,
        on_call: Callable[[Tensor, Tensor | None], None],
        guard: Guard,
    ) -> None:
        self._criterion, self._passes, self._read, self._on_call = criterion, passes, read, on_call
        self._guard, self._hooks = guard, TensorHooks(guard(self._reached))
        self._began: float | None = None
        self.placed: list[Placed] = []
        self.seconds = 0.0

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch calls; closing the returned stack ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self._hooks.remove)
        if self._criterion is not None:
            begin, end = ModuleHook(self._guard(self._entered)), ModuleHook(self._guard(self._called))
            self.placed = [hook_calls([(self._criterion, begin)], before=True), hook_calls([(self._criterion, end)])]
            for placed in self.placed:
                stack.callback(placed)
        return stack

    def _entered(self, _module: nn.Module, _args: Any, _output: Any = None) -> None:
        self._began = time.perf_counter()

    def _called(self, _module: nn.Module, args: Any, output: Any) -> None:
        began, self._began = self._began, None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        seconds = 0.0 if began is None else time.perf_counter() - began
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        call = _Call(output.detach(), seconds)
        classification = len(tensors) > 1 and not tensors[1].is_floating_point() and tensors[0].dim() > 1
        if classification and tensors[0].dim() == tensors[1].dim() + 1:
            call.parts = self._read(output, tensors[0], tensors[1], 1)
        self._hooks.place(output, call)
        self._on_call(output, tensors[0] if tensors else None)

    def _reached(self, call: _Call, _gradient: Tensor) -> None:
        one = self._passes.latest
        if call.counted is one:
            return
        call.counted = one
        if not one.rooted:
            one.add_root(local(call.loss))
        for part in call.parts:
            one.add_part(part)
        self.seconds, call.seconds = self.seconds + call.seconds, 0.0
