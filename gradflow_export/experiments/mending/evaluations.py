"""Changes to evaluation: the mode it is done in, and what is drawn at random there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradflow_export.experiments.interventions import Intervention

MIDDLES = MappingProxyType({
    "rand": 0.5, "rand_like": 0.5, "uniform_": 0.5, "randn": 0.0, "randn_like": 0.0, "normal_": 0.0, "exponential_": 1.0
})  # fmt: skip
"""Functions of torch that draw numbers, and the middle of what each draws."""


class OwnMode(Intervention):
    """Calls a model in the mode that its passes are for, and lets no dropout act in evaluation.

    Args:
        training: Whether it is training, where gradients are wanted; else evaluation.
    """

    stays = True

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self._training, self.steady = training, not training
        self._modes: list[tuple[nn.Module, bool]] = []

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Switch to it."""
        if torch.is_grad_enabled() == self._training:
            self._modes = [(each, each.training) for each in module.modules()]
            self.acted |= any(mode != self._training for _, mode in self._modes)
            for each, _ in self._modes:
                each.training = self._training
        return args, kwargs

    def left(self, module: nn.Module, output: Any) -> Any:
        """Switch back."""
        del module
        for each, mode in self._modes:
            each.training = mode
        self._modes = []
        return output


class QuietEvaluation(Intervention):
    """Gives the middle of a distribution for each number that is drawn where no gradients are wanted."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._held = contextlib.ExitStack()

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin with it."""
        self._held.close()
        if not torch.is_grad_enabled() and not module.training:
            self._held.enter_context(_Middles(self))
        return args, kwargs

    def left(self, module: nn.Module, output: Any) -> Any:
        """End it."""
        del module
        self._held.close()
        return output


class _Middles(TorchFunctionMode):
    """Stands in for what draws.

    Args:
        change: Takes note of it.
    """

    def __init__(self, change: Intervention) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        name, named = getattr(func, "__name__", ""), dict(kwargs or {})
        if name not in MIDDLES and name != "normal":
            return func(*args, **named)
        self._change.acted = True
        named.pop("generator", None)
        if name == "normal":
            return _mean(args, named)
        if name.endswith("_"):
            middle = args[1] if name == "normal_" and len(args) > 1 else named.get("mean", MIDDLES[name])
            return args[0].fill_(middle)
        plain = torch.zeros_like if name.endswith("like") else torch.zeros
        return plain(*args, **named).fill_(MIDDLES[name])


def _mean(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what :func:`torch.normal` draws around, in the shape of what it draws."""
    mean = args[0] if args else kwargs["mean"]
    spread = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    size = args[2] if len(args) > 2 else kwargs.get("size")
    shape = (torch.zeros(size) if size is not None else torch.as_tensor(spread)) * 0
    return torch.as_tensor(mean) + shape
