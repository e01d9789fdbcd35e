"""Sees what a model answers and the gradient that comes back to it, so that no loss need be known by its form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import walk
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.gradient_hooks import TensorHooks
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls, output_tensor
from gradflow_export.hooks.readings import ClueSample, Drained
from gradflow_export.metrics.arrays.local import local

MOST_COLUMNS = 256
"""Greatest number of scores of a sample; of more nothing is read."""
PASSES = 4
"""Calls of the model in one step that are looked at."""
_FAR = 4_000
FEW, SOME = 8, 64
"""Samples that are compared with each other: fewest, and how many of them and of their entries at most."""
ROUNDING = 1e-6
"""Difference of equal answers, as a share of the greatest."""


class Answer:
    """What one call of the model gave out.

    Attributes:
        rows: Each sample, or place, a row of its scores.
        in_order: Whether the rows hold the scores in the order of the output.
        beside: What entered for some samples, and what the model said of them, for the worker.
        take: Called with its gradient, in the same shape.
    """

    def __init__(self, output: Tensor, rows: Tensor, beside: Drained) -> None:
        # What made it would hold the graph, and what the user has let go; the output may be gone before its loss.
        self._number = torch_private.sequence_number(output.grad_fn)
        self.rows, self.beside, self.in_order = rows, beside, output.dim() <= 3
        self.take: Callable[[Tensor], None] | None = None

    def node_behind(self, root: Any) -> Any:
        """Return what made it in the graph of a loss, ``None`` where the loss is of something else.

        Args:
            root: The last node of the loss. What was made before the answer is not looked at.
        """
        later = walk([root], into=lambda node: torch_private.sequence_number(node) >= self._number, most=_FAR)
        return next((node for node in later if torch_private.sequence_number(node) == self._number), None)

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

    Attributes:
        given: Answers of this step that no gradient has come back to.
        used: What stands beside those that a gradient came back to.
        missed: Whether some answer's loss was ever not seen: of more calls than are looked at, or of a second pass.
    """

    def __init__(self, *, guard: Guard = unguarded, code: CompiledCode | None = None) -> None:
        self._guard, self._calls, self._code = guard, ModuleCalls(), code
        self._hooks = TensorHooks(guard(self._arrives))
        self.given: list[Answer] = []
        self.used: Drained = []
        self.missed = False
        self._questions: list[Tensor] = []

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
        self.given, self.used, self._questions = [], [], []

    def over(self) -> None:
        """Forget what was asked before a loss that has been seen; answers without a gradient may have another."""
        self._questions = []

    def said(self, root: Any) -> dict[Any, Tensor]:
        """Return what the calls gave out that a loss is of, a row for each sample, by the nodes that made it.

        Args:
            root: The last node of the loss.
        """
        found = ((each.node_behind(root), each.rows) for each in self.given if each.in_order)
        return {node: rows for node, rows in found if node is not None}

    def asked(self, count: int) -> Tensor | None:
        """Return what the model was last given, a row for each of so many answers; ``None`` where it has other rows."""
        x = self._questions[-1] if self._questions else torch.empty(0)
        fits = x.layout is torch.strided and x.dim() > 0 and x.numel() > 0
        fits = fits and (len(x) == count or x.numel() == count)
        return (x if len(x) == count else x.reshape(count, -1)) if fits and not x.is_complex() else None

    def _called(self, _module: nn.Module, args: Any, output: Any) -> None:
        self._questions = [local(part.detach()) for part in args[:1] if isinstance(part, Tensor)]
        given = output_tensor(output)
        if given is None or given.grad_fn is None or len(self.given) >= PASSES:
            self.missed |= given is not None and given.grad_fn is not None
            return
        with torch.no_grad():
            rows = in_rows(given.detach())
            if rows is None:
                return
            answer = Answer(given, rows.clone(), _beside(args, local(given.detach())))
        self._hooks.place(given, answer)
        self.given.append(answer)

    def _arrives(self, answer: Answer, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if answer in self.given:
            self.given.remove(answer)
        else:
            self.missed = True
        self.used += answer.beside
        with torch.no_grad():
            answer.arrives(gradient)


def _beside(args: Any, output: Tensor) -> Drained:
    """Return some samples as they entered, and what the model said of them, where both are known."""
    entered = local(args[0].detach()) if args and isinstance(args[0], Tensor) else None
    if entered is None or entered.layout is not torch.strided or not entered.dim():
        return []
    if len(entered) != len(output) or len(output) < FEW or entered.is_complex():
        return []
    corners = [part[:SOME].reshape(min(len(part), SOME), -1) for part in (entered, output)]
    columns = [corner[:, :: max(-(-corner.shape[1] // SOME), 1)].to(output.device, torch.float32) for corner in corners]
    compare = partial(_alike, columns[0].shape[1])
    return [ClueSample("answer.alike", "", torch.cat(columns, dim=1).contiguous(), compare)]


def _alike(inputs: int, values: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return whether all answers are one, to the last digits, to questions that are not."""
    x, y = values[:, :inputs], values[:, inputs:]
    if not np.isfinite(y).all() or (x == x[:1]).all():
        return {}
    return {"answer.alike": {"": float(np.ptp(y, axis=0).max() <= ROUNDING * np.abs(y).max())}}


def in_rows(output: Tensor) -> Tensor | None:
    """Return an output with a row for each sample or place; ``None`` where it has no samples, or too many scores.

    The scores are the last dimension of up to three, and the second of pictures.
    """
    held = local(output)
    if held.dim() < 1 or held.is_complex() or held.is_nested or not held.numel():
        return None
    if held.dim() > 3 and held.shape[1] > 1:
        held = held.movedim(1, -1)
    columns = held.shape[-1] if held.dim() >= 2 and (held.dim() < 4 or output.shape[1] > 1) else 1
    return held.reshape(-1, columns) if columns <= MOST_COLUMNS else None
