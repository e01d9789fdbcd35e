"""Updates that a script makes by hand, made anew as steps of an optimizer: so they are counted, and can be changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import leaves


class HandStep(Optimizer):
    """Makes the last update of a script: with its rate of 1 the same, with another rate a multiple of it.

    Parameters that it is lent move against their gradients, as far as the script's own moved against theirs.

    Args:
        weights: What the script updates.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__(weights, {"lr": 1.0})
        self._moves: dict[int, tuple[Tensor, Tensor]] = {}
        self._share = 0.0

    def take(self, held: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Undo an update, given each weight, what it was before, and its gradient; the next step makes it."""
        along = whole = 0.0
        self._moves = {}
        for weight, before, gradient in held:
            self._moves[id(weight)] = before, weight.detach().clone()
            along -= float(((weight.detach() - before) * gradient).sum())
            whole += float(gradient.square().sum())
            weight.data.copy_(before)
            weight.grad = gradient
        self._share = along / whole if whole else 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make it."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if id(weight) in self._moves:
                    before, after = self._moves[id(weight)]
                    weight.data.copy_(after if group["lr"] == 1 else before + group["lr"] * (after - before))
                elif weight.grad is not None:
                    weight.data.sub_(weight.grad, alpha=self._share * group["lr"])


class HandUpdates:
    """Finds updates that a script makes after a backward pass without an optimizer, and makes each anew as a step.

    It is found as the next call of a model or the next pass begins: weights are others, or gradients were cleared.

    Attributes:
        on: Whether it is looked for; a script of which an optimizer steps changes weights for other reasons.
    """

    def __init__(self) -> None:
        self.on = True
        self._held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._waits = False
        self._optimizer: HandStep | None = None

    def attach(self) -> None:
        """Begin to listen; there is no end, but that of the process."""
        call, backward = nn.Module.__call__, torch.autograd.backward

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._look()
            return call(module, *args, **kwargs)

        @functools.wraps(backward)
        def backwards(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._look()
            known = list(leaves(tensors)) if self.on and isinstance(tensors, Tensor) else []
            backward(tensors, *args, **kwargs)
            self._hold(known)

        nn.Module.__call__ = called  # type: ignore[method-assign]
        torch.autograd.backward = backwards

    def _hold(self, weights: Iterable[Tensor]) -> None:
        """Save what a backward pass has just given gradients to."""
        for weight in weights:
            if weight.grad is not None and not weight.grad.is_sparse:
                self._waits = True
                _, before, _ = self._held.get(id(weight)) or (weight, weight.detach().clone(), weight.grad)
                self._held[id(weight)] = weight, before, weight.grad.detach().clone()

    def _look(self) -> None:
        """Make the update that came after the last pass, if there was one."""
        waits, self._waits = self._waits and self.on, False
        held = list(self._held.values()) if waits else []
        moved = [weight for weight, before, _ in held if not torch.allclose(weight, before, 0.0, 0.0, equal_nan=True)]
        if self._optimizer is None and moved:
            self._optimizer = HandStep(moved)
        cleared = any(weight.grad is None for weight, _, _ in held)
        if self._optimizer is None or not (moved or cleared):
            return
        own = self._optimizer.param_groups[0]["params"]
        own += [weight for weight in moved if all(weight is not each for each in own)]
        held, self._held = [self._held[id(weight)] for weight in own if id(weight) in self._held], {}
        left = [weight.grad for weight, _, _ in held]
        self._optimizer.take(held)
        self._optimizer.step()
        for (weight, _, _), gradient in zip(held, left, strict=True):
            weight.grad = gradient
