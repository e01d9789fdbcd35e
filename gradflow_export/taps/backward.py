"""Backward passes: when the first of a step began, how many there were, and whether they added to earlier gradients."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from gradflow_export.taps.slots import Slot, slots

LOOKED_AT = 8
"""Parameters that are asked whether they hold a gradient already; all of them would cost more than it tells."""


class BackwardPasses:
    """Told by the loss's gradient that a pass begins.

    Args:
        model: Returns the model whose parameters the passes fill in, ``None`` when it is gone.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._chosen: list[Slot] = []
        self.began: float | None = None
        self._count = self._onto = 0

    def begin(self) -> None:
        """Count one pass."""
        self.began = time.perf_counter() if self.began is None else self.began
        self._count += 1
        held = [slot() for slot in self._chosen]
        if not held or any(p is None for p in held):
            held = [slot() for slot in self._choose()]
        self._onto += any(p is not None and p.grad is not None for p in held)

    def forget(self) -> None:
        """Begin a new step."""
        self.began = None
        self._count = self._onto = 0

    def scalars(self) -> dict[str, float]:
        """Return how many passes there were and the share that found gradients to add to; empty without a pass."""
        if not self._count:
            return {}
        return {"runtime.backward_passes": float(self._count), "runtime.accumulated_share": self._onto / self._count}

    def _choose(self) -> list[Slot]:
        model = self._model()
        trained = [] if model is None else [slot for slot, p in slots(model) if p.requires_grad]
        self._chosen = trained[:: -(-len(trained) // LOOKED_AT) or 1]
        return self._chosen
