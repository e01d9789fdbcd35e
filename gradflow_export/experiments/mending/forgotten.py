"""Steps that a script forgets to make: it clears the gradients of an optimizer that has not used them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import FrozenWeights


def before_clearing(act: Callable[[Optimizer], object]) -> None:
    """Call a function with each optimizer whose gradients are about to be cleared, until this process ends."""
    plain = Optimizer.zero_grad

    @functools.wraps(plain)
    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        act(optimizer)
        plain(optimizer, *args, **kwargs)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign, assignment]


class MadeSteps(FrozenWeights):
    """Makes the steps that a script forgets, and undoes them.

    A step is made before the model is called again, or before gradients are cleared, whichever comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Optimizer] = {}
        self._due = False
        before_clearing(self._clears)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make one."""
        if torch.is_grad_enabled():
            self._make()
        return super().called(module, args, kwargs)

    def after_backward(self) -> None:
        """A step is due."""
        self._due = True

    def _clears(self, optimizer: Optimizer) -> None:
        self._known[id(optimizer)] = optimizer
        self._make()

    def _make(self) -> None:
        due, self._due = self._due, self._due and not self._known
        for optimizer in self._known.values() if due else ():
            optimizer.step()


class TakenSteps(MadeSteps):
    """Makes them, and leaves them as they are."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that there was one."""
        del optimizer
        self.acted = True

    def told(self) -> dict[str, Any]:
        """Return that what was missing is there."""
        return {"opened": self.acted}
