"""Changes to what losses are given, for mistakes that the graph of a loss proves.

They act at the functions of torch that a script calls, and only while it trains: the effect is measured by the loss as
the script has it. Where the mistake is in the shapes, the loss that is measured has the shapes mended as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.experiments.interventions import Intervention

ENTROPIES = frozenset(("cross_entropy",))
LOGARITHMS = frozenset(("nll_loss", "kl_div", "ctc_loss"))
BINARY = frozenset(("binary_cross_entropy_with_logits",))
ELEMENTWISE = frozenset((
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
    "__sub__", "sub", "__rsub__",
))  # fmt: skip
LOSSES = (
    "cross_entropy", "nll_loss", "kl_div", "ctc_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip
"""Losses of torch that compare an answer with a target."""
MARGIN = 1e-3
"""What shares may sum up to beyond 1."""
_TINY = 1e-12


class Logits(Intervention):
    """Gives each loss what it takes: logits, or logarithms of probabilities, made of the probabilities it was given."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the first argument of a loss."""
        if name not in ENTROPIES | LOGARITHMS | BINARY:
            return args, kwargs
        given, put = first(args, kwargs)
        if given is None or not given.is_floating_point() or not given.requires_grad:
            return args, kwargs
        made = given
        low, high = (float(each) for each in given.detach().aminmax())
        if name in BINARY:
            if low >= 0 and high <= 1:
                made = given.clamp(1e-6, 1 - 1e-6).logit()
        elif low >= 0 and high <= 1:
            axis = -1 if name in {"kl_div", "ctc_loss"} or given.dim() == 1 else 1
            sums = given.detach().sum(axis)
            if torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                made = given.clamp_min(_TINY).log()
            else:
                # Shares of each class by itself, as a sigmoid gives them.
                made = given.clamp(1e-6, 1 - 1e-6).logit()
                made = made.log_softmax(axis) if name in LOGARITHMS else made
        elif name in LOGARITHMS and high > 0:
            made = given.log_softmax(-1 if name in {"kl_div", "ctc_loss"} or given.dim() == 1 else 1)
        self.acted |= made is not given
        return put(made)


class OwnAxis(Intervention):
    """Lets a softmax of a table run over each row, where it runs over the rows; of a single unit it is a sigmoid."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the dimension."""
        if name not in {"softmax", "log_softmax"} or not args or not isinstance(args[0], Tensor):
            return args, kwargs
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if args[0].dim() != 2 or axis not in {0, -2}:
            return args, kwargs
        self.acted = True
        return ((args[0], -1, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "dim": -1})

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return the sigmoid of a single unit, of which every softmax is 1."""
        if name not in {"softmax", "log_softmax"} or not args or not isinstance(args[0], Tensor):
            return given
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if args[0].dim() < 2 or not isinstance(axis, int) or args[0].shape[axis] != 1:
            return given
        self.acted = True
        return args[0].sigmoid() if name == "softmax" else functional.logsigmoid(args[0])


class OwnPairs(Intervention):
    """Gives targets the shape of the predictions, where they have as many entries and would be broadcast."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the shape of what needs no gradient."""
        if name not in ELEMENTWISE:
            return args, kwargs
        named = [key for key in ("input", "target") if key in kwargs]
        pair = [*args[:2], *(kwargs[key] for key in named)][:2]
        if len(pair) < 2 or not all(isinstance(each, Tensor) for each in pair):
            return args, kwargs
        one, other = pair
        if one.shape == other.shape or one.numel() != other.numel() or one.numel() < 2:
            return args, kwargs
        if one.requires_grad == other.requires_grad:
            return args, kwargs
        self.acted = True
        mended = [one, other.reshape(one.shape)] if one.requires_grad else [one.reshape(other.shape), other]
        rest = {**kwargs, **{key: mended[len(mended) - len(named) + at] for at, key in enumerate(named)}}
        return (*mended[: 2 - len(named)], *args[2:]), rest


class TargetsAsShares(Intervention):
    """Brings the targets of a binary cross-entropy into 0 to 1, by the greatest of the first batch."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._greatest = 0.0

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Divide them; below 0 there is no share."""
        if name not in {"binary_cross_entropy", "binary_cross_entropy_with_logits"}:
            return args, kwargs
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if not isinstance(target, Tensor) or not target.numel():
            return args, kwargs
        low, high = (float(each) for each in target.detach().aminmax())
        if not self._greatest and (high > 1 or low < 0):
            self._greatest = max(high, 1.0)
        if not self._greatest:
            return args, kwargs
        self.acted = True
        mended = (target / self._greatest).clamp(0, 1)
        return ((args[0], mended, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "target": mended})


class LabelsAsShares(Intervention):
    """Divides each row of a cross-entropy's targets by its sum, where a row is more than one whole."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Divide them; targets that are numbers of classes have no rows."""
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if name not in ENTROPIES or not isinstance(target, Tensor) or not target.is_floating_point():
            return args, kwargs
        axis = 1 if target.dim() > 1 else 0
        sums = target.sum(axis, keepdim=True)
        if not target.numel() or float(target.detach().min()) < 0 or float(sums.max()) <= 1 + MARGIN:
            return args, kwargs
        self.acted = True
        mended = target / sums.clamp_min(_TINY)
        return ((args[0], mended, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "target": mended})


class AnswersInUnits(Intervention):
    """Reads predictions as standardized ones, where targets are far from 0 or far apart: the loss keeps its unit."""

    stays = True
    FAR = 30.0

    def __init__(self) -> None:
        super().__init__()
        self._units: tuple[float, float] | None = None

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Scale and shift them by the spread and the mean of the first targets."""
        if name not in {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}:
            return args, kwargs
        given, put = first(args, kwargs)
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if given is None or not isinstance(target, Tensor) or target.requires_grad or target.numel() < 2:
            return args, kwargs
        if self._units is None:
            mean, spread = float(target.double().mean()), float(target.double().std())
            far = spread > 0 and max(abs(mean), spread, 1 / spread) > self.FAR
            self._units = (mean, spread) if far else (0.0, 1.0)
        mean, spread = self._units
        if self._units == (0.0, 1.0):
            return args, kwargs
        self.acted = True
        return put(given * spread + mean)


class OpenEnd(Intervention):
    """Takes away an activation at the very end of the model: its answer is what the last layer says."""

    stays = True
    _KINDS = (nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.GELU, nn.LeakyReLU, nn.ELU)

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, Tensor] | None = None

    def root(self, module: nn.Module) -> None:
        """Hook the activations, and remember which gave the model's output."""
        for layer in module.modules():
            if isinstance(layer, self._KINDS):
                layer.register_forward_hook(self._after)

    def _after(self, _layer: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(output, Tensor):
            self._last = output, args[0]

    def left(self, module: nn.Module, output: Any) -> Any:
        """Return what the model says without it."""
        del module
        last, self._last = self._last, None
        if last is None or not isinstance(output, Tensor) or not _is_view(output, last[0]):
            return output
        self.acted = True
        return last[1].reshape(output.shape)


def first(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Callable[[Tensor], tuple[Any, Any]]]:
    """Return the first argument, and what puts another in its place."""
    if args:
        return (args[0] if isinstance(args[0], Tensor) else None), lambda made: ((made, *args[1:]), kwargs)
    given = kwargs.get("input")
    return (given if isinstance(given, Tensor) else None), lambda made: (args, {**kwargs, "input": made})


def _is_view(output: Tensor, inner: Tensor) -> bool:
    return output.numel() == inner.numel() and output.data_ptr() == inner.data_ptr()
