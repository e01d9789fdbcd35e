"""Beside a gradient scaler: what it will skip by itself is no anomaly."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import Optimizer

from gradflow_export.debugging.nan.faults import Fault
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.hooks import torch_private


def is_enabled(scaler: Any) -> bool:
    """Return whether there is a scaler that scales."""
    return scaler is not None and bool(scaler.is_enabled())


class Scaling:
    """A ``torch.amp.GradScaler``, or none.

    Args:
        scaler: The loop's scaler.
        patience: Steps it may skip in a row.

    Attributes:
        skipped: Steps it skipped so far.

    Raises:
        ArgumentTypeError: It is no scaler.
    """

    def __init__(self, scaler: Any, patience: int) -> None:
        if scaler is not None and not hasattr(scaler, "is_enabled"):
            raise ArgumentTypeError(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; leave it out without one."
            )
        self._scaler, self._patience = scaler, patience
        self.skipped = self._in_a_row = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss as its backward pass needs it."""
        if not is_enabled(self._scaler):
            return loss
        out: Tensor = self._scaler.scale(loss)
        return out

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale unless that has happened."""
        # Asking the scaler twice would raise.
        state = torch_private.scaler_state(self._scaler, optimizer)
        if is_enabled(self._scaler) and state.get("stage", OptState.READY) is OptState.READY:
            self._scaler.unscale_(optimizer)

    def skips(self, optimizer: Optimizer, *, overflowed: bool) -> bool:
        """Say whether the scaler will skip this step by itself.

        Args:
            optimizer: Whose step comes next.
            overflowed: Whether gradients are not finite though the loss is.
        """
        if not is_enabled(self._scaler):
            return False
        found = torch_private.scaler_state(self._scaler, optimizer).get("found_inf_per_device", {})
        if not (overflowed and any(float(flag) for flag in found.values())):
            self._in_a_row = 0
            return False
        self.skipped += 1
        self._in_a_row += 1
        return True

    def fault(self) -> Fault | None:
        """Return what is wrong when it has skipped too many steps in a row."""
        if self._in_a_row < self._patience:
            return None
        return Fault(
            "scaler",
            f"the gradient scaler has skipped {self._in_a_row} steps in a row, so that it is not the scale",
        )
