"""Steps that a script forgets to make: it clears the gradients of an optimizer that has not used them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import Intervention, weights


def before_clearing(act: Callable[[Optimizer], object]) -> None:
    """Call a function with each optimizer whose gradients are about to be cleared, until this process ends."""
    plain = Optimizer.zero_grad

    @functools.wraps(plain)
    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if any(weight.grad is not None for weight in weights(optimizer)):
            act(optimizer)
        plain(optimizer, *args, **kwargs)

    Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


class TakenSteps(Intervention):
    """Keeps the steps that are made in place of forgotten ones; without it they are made and undone."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that there is one."""
        del optimizer
        self.acted = True

    def told(self) -> dict[str, Any]:
        """Return that what was missing is there."""
        return {"opened": self.acted}
