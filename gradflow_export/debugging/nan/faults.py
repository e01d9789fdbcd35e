"""What is wrong with the numbers of one step, and what each policy does about gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradflow_export.errors import GradflowError
from gradflow_export.hooks import torch_private
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.rules.base import some

Named = Sequence[tuple[str, Tensor]]


class NumericalAnomalyError(GradflowError, ArithmeticError):
    """A step held NaN or Inf and the stability manager was asked to raise; the update has not happened."""


@dataclass
class Fault:
    """One thing that is wrong with the numbers of a step.

    Attributes:
        kind: ``"nan_loss"``, ``"inf_loss"``, ``"nan_gradient"``, ``"inf_gradient"``, ``"broken_weights"``,
            ``"broken_state"`` or ``"scaler"``.
        message: One sentence.
        parameters: Those concerned.
        entries: How many entries of each are NaN or Inf.
        origin: Where it began, in a few words; ``""`` where that is not known.
        operation: The operation that made it, with the traceback of its forward call, where that is known.
    """

    kind: str
    message: str
    parameters: tuple[str, ...] = ()
    entries: tuple[int, ...] = ()
    origin: str = ""
    operation: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return {
            "type": self.kind, "message": self.message, "parameters": list(self.parameters),
            "entries": list(self.entries), "origin": self.origin, "operation": dict(self.operation),
        }  # fmt: skip


def loss_fault(loss: float) -> Fault | None:
    """Return what is wrong with a loss."""
    if math.isfinite(loss):
        return None
    kind, word = ("nan_loss", "NaN") if math.isnan(loss) else ("inf_loss", "infinite")
    return Fault(kind, f"the loss is {word}")


def gradient_fault(named: Named, norms: Sequence[float]) -> Fault | None:
    """Return what is wrong with gradients.

    Args:
        named: Parameters that have one.
        norms: L2 norm of each.
    """
    wrong = [(name, p) for (name, p), norm in zip(named, norms, strict=True) if not math.isfinite(norm)]
    counts = [_counts(p.grad) for _, p in wrong if p.grad is not None]
    if not any(sum(pair) for pair in counts):  # the norm of finite entries may overflow on some devices
        return None
    names = tuple(name for name, _ in wrong)
    nan = any(count for count, _ in counts)
    word = "NaN" if nan else "Inf"
    return Fault(
        "nan_gradient" if nan else "inf_gradient",
        f"the gradient of {some(names)} holds {word}",
        names,
        tuple(sum(pair) for pair in counts),
    )


def _counts(gradient: Tensor) -> tuple[int, int]:
    """Return how many entries are NaN and how many infinite."""
    entries = dense_entries(gradient)
    return int(torch.isnan(entries).sum()), int(torch.isinf(entries).sum())


def drop_gradients(parameters: Sequence[Tensor]) -> None:
    """Set gradients to ``None``: optimizers pass such parameters over, their decay and their state included."""
    for p in parameters:
        p.grad = None


def zero_nonfinite(parameters: Sequence[Tensor]) -> None:
    """Set the entries of gradients that are NaN or Inf to 0, in place."""
    _repair(parameters, 0.0, None)


def clamp_nonfinite(parameters: Sequence[Tensor], most: float) -> None:
    """Set NaN to 0 and bring every entry of the gradients into ``[-most, most]``, in place."""
    _repair(parameters, most, most)


def writable(parameter: Tensor) -> Tensor | None:
    """Return the entries of a gradient to be changed in place, ``None`` without one. Shape: any.

    Entries of a sparse gradient that belong to one place are added up first.
    """
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return torch_private.sparse_values(parameter.grad)  # values() of a coalesced one is a copy


def _repair(parameters: Sequence[Tensor], infinite: float, most: float | None) -> None:
    with torch.no_grad():
        for p in parameters:
            values = writable(p)
            if values is None:
                continue
            torch.nan_to_num_(values, nan=0.0, posinf=infinite, neginf=-infinite)
            if most is not None:
                values.clamp_(-most, most)
