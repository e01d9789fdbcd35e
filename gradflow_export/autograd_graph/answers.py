"""Sees what a model answers and the gradient that comes back to it, so that no loss need be known by its form."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.gradient_hooks import TensorHooks
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls, output_tensor
from gradflow_export.metrics.arrays.local import local

MOST_COLUMNS = 256
"""Greatest number of scores of a sample; of more nothing is read."""
PASSES = 4
"""Calls of the model in one step that are looked at."""


class Answer:
    """What one call of the model gave out.

    Attributes:
        rows: Each sample, or place, a row of its scores.
        take: Called with its gradient, in the same shape.
    """

    def __init__(self, output: Tensor, rows: Tensor) -> None:
        # What made it would hold the graph, and with it what the user has let go.
        self._output = weakref.ref(output)
        self.rows = rows
        self.take: Callable[[Tensor], None] | None = None

    @property
    def node(self) -> Any:
        """What made it in the graph; ``None`` once nobody holds it any more."""
        output = self._output()
        return None if output is None else output.grad_fn

    def arrives(self, gradient: Tensor) -> None:
        """Hand over the gradient, once."""
        take, self.take = self.take, None
        rows = None if take is None or gradient.layout is not torch.strided else in_rows(gradient)
        if take is not None and rows is not None and rows.shape == self.rows.shape:
            take(rows)


class Answers:
    """Sees the calls of a model while armed, and the gradients of what they gave out.

    Args:
        guard: Wraps the hooks.
        code: Of a model that is compiled no call is seen: a hook that comes and goes would have it compiled anew.
    """

    def __init__(self, *, guard: Guard = unguarded, code: CompiledCode | None = None) -> None:
        self._guard, self._calls, self._code = guard, ModuleCalls(), code
        self._hooks = TensorHooks(guard(_arrives))
        self.given: list[Answer] = []

    def attach(self, model: nn.Module) -> contextlib.ExitStack:
        """Begin to know the model, of which only a weak reference is kept."""
        self._calls.add(model, self._guard(self._called))
        stack = self._calls.attach()
        stack.callback(self._hooks.remove)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""
        self.forget()
        self._calls.arm(on=on and not (self._code is not None and self._code.found))

    def forget(self) -> None:
        """Forget the calls so far."""
        self.given = []

    def _called(self, _module: nn.Module, _args: Any, output: Any) -> None:
        given = output_tensor(output)
        if given is None or given.grad_fn is None or len(self.given) >= PASSES:
            return
        with torch.no_grad():
            rows = in_rows(given.detach())
            if rows is None:
                return
            answer = Answer(given, rows.clone())
        self._hooks.place(given, answer)
        self.given.append(answer)


def _arrives(answer: Answer, gradient: Tensor) -> None:
    with torch.no_grad():
        answer.arrives(gradient)


def in_rows(output: Tensor) -> Tensor | None:
    """Return an output with a row for each sample or place; ``None`` where it has no samples, or too many scores.

    The scores are the last dimension of up to three, and the second of pictures.
    """
    held = local(output)
    if held.dim() < 1 or held.is_complex() or not held.numel():
        return None
    if held.dim() > 3 and held.shape[1] > 1:
        held = held.movedim(1, -1)
    columns = held.shape[-1] if held.dim() >= 2 and (held.dim() < 4 or output.shape[1] > 1) else 1
    return held.reshape(-1, columns) if columns <= MOST_COLUMNS else None
