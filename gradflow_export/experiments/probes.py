"""Interventions that ask one question each: one batch for ever, evaluation mode, sight of the future."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.model_edits import mapped, tensors

LEAKED = 1e-4
"""Relative change of earlier outputs from which on they depend on a later input."""


class OneBatch(Intervention):
    """Gives the script its first batch for ever, where it takes batches from a ``DataLoader``."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[int, Any] = {}

    def batch(self, loader: object, given: Any) -> Any:
        """Return what the script gets instead of a batch."""
        self.acted = True
        return self._first.setdefault(id(loader), given)


class EvalMode(Intervention):
    """Puts models into evaluation mode while the loss is measured."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._measuring = False

    def measure(self) -> None:
        """The loss is measured from now on."""
        self._measuring = True

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Switch to it."""
        if self._measuring:
            self.acted = True
            module.eval()
        return args, kwargs


class Causality(Intervention):
    """Changes the last position of the first batch and looks at what a model gives for those before it.

    Attributes:
        change: Largest relative change of an earlier output; ``None`` where no input is a sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.change: float | None = None
        self._busy = False

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look, once."""
        if not self._busy and not self.acted and torch.is_grad_enabled():
            self._busy, self.acted = True, True
            modes = {member: member.training for member in module.modules()}
            try:
                module.eval()
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self.change = self._compare(module, args, kwargs)
            finally:
                for member, mode in modes.items():
                    member.training = mode
                self._busy = False
        return args, kwargs

    def _compare(self, module: nn.Module, args: Any, kwargs: Any) -> float | None:
        first = next((each for each in tensors([args, kwargs]) if _is_sequence(each)), None)
        if first is None:
            return None
        before = _output(module(*args, **kwargs), first)
        changed = mapped([args, kwargs], lambda each: _last_changed(each) if each is first else each)
        after = _output(module(*changed[0], **changed[1]), first)
        if before is None or after is None:
            return None
        scale = float(before.abs().max())
        return float((before - after)[:, :-1].abs().max()) / scale if scale else None


def _is_sequence(tensor: Tensor) -> bool:
    """Whether it is ``[batch, length]`` of whole numbers or ``[batch, length, features]``."""
    wanted = 3 if tensor.is_floating_point() else 2
    return tensor.dim() == wanted and tensor.shape[1] > 2 and not tensor.is_sparse


def _last_changed(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if tensor.is_floating_point():
        changed[:, -1] = -changed[:, -1] + 1
    else:
        changed[:, -1] = tensor[:, 0] + (tensor[:, 0] == tensor[:, -1]).to(tensor) * (tensor[:, 1] - tensor[:, 0])
    return changed


def _output(given: Any, like: Tensor) -> Tensor | None:
    """Return the first tensor that has a position for each of the input's."""
    found = tensors(list(given.values()) if hasattr(given, "values") and callable(given.values) else [given])
    return next((each for each in found if each.dim() >= 2 and each.shape[:2] == like.shape[:2]), None)
