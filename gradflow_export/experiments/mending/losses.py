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
DISTANCES = frozenset(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "__sub__", "sub"))
RATES = "poisson_nll_loss"
ACTIVATIONS = frozenset((
    "sigmoid", "tanh", "relu", "softplus", "hardtanh", "relu6", "gelu", "leaky_relu", "elu", "silu",
))  # fmt: skip
LOSSES = (
    "cross_entropy", "nll_loss", "kl_div", "ctc_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip
"""Losses of torch that compare an answer with a target."""
WEIGHTED = ENTROPIES | BINARY | {"nll_loss", "binary_cross_entropy"}
WEIGHTS = frozenset(("weight", "pos_weight"))
MARGIN = 1e-3
"""What shares may sum up to beyond 1."""
_TINY = 1e-12


class Logits(Intervention):
    """Gives each loss what it takes: logits, or logarithms of probabilities, made of the probabilities it was given."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the first argument of a loss, or say what it is."""
        if name == RATES and not (len(args) > 2 or "log_input" in kwargs) and float(args[0].detach().min()) >= 0:
            self.acted = True
            return args, {**kwargs, "log_input": False}
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
    """Gives targets and predictions one shape, where they have as many entries and would be broadcast.

    That of the one with fewer dimensions: what the script goes on to compare with them has it as well. Of as many
    dimensions it is that of the predictions.
    """

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change the shape of one of them."""
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
        own = one.dim() < other.dim() or (one.dim() == other.dim() and one.requires_grad)
        mended = [one, other.reshape(one.shape)] if own else [one.reshape(other.shape), other]
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
        target, put = argument(1, "target", args, kwargs)
        if target is None or not target.numel():
            return args, kwargs
        low, high = (float(each) for each in target.detach().aminmax())
        if not self._greatest and (high > 1 or low < 0):
            self._greatest = max(high, 1.0)
        if not self._greatest:
            return args, kwargs
        self.acted = True
        return put((target / self._greatest).clamp(0, 1))


class LabelsAsShares(Intervention):
    """Divides each row of a cross-entropy's targets by its sum, where a row is more than one whole."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Divide them; targets that are numbers of classes have no rows."""
        target, put = argument(1, "target", args, kwargs)
        if name not in ENTROPIES or target is None or not target.is_floating_point():
            return args, kwargs
        axis = 1 if target.dim() > 1 else 0
        sums = target.sum(axis, keepdim=True)
        if not target.numel() or float(target.detach().min()) < 0 or float(sums.max()) <= 1 + MARGIN:
            return args, kwargs
        self.acted = True
        return put(target / sums.clamp_min(_TINY))


class AnswersInUnits(Intervention):
    """Reads predictions as standardized ones, where targets are far from 0 or far apart: the loss keeps its unit.

    Losses of torch, and differences in a loss that is written by hand.
    """

    stays = True
    FAR, APART = 30.0, 8.0

    def __init__(self) -> None:
        super().__init__()
        self._units: tuple[float, float] | None = None

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Scale and shift them by the spread and the mean of the first targets."""
        if name not in DISTANCES:
            return args, kwargs
        given, put = argument(0, "input", args, kwargs)
        target, other = argument(1, "target", args, kwargs)
        if given is not None and target is not None and target.requires_grad and not given.requires_grad:
            # Of a difference either may come first.
            given, target, put = target, given, other
        if given is None or target is None or target.requires_grad or target.numel() < 2:
            return args, kwargs
        if given.shape != target.shape and name not in LOSSES:
            # What a layer subtracts is most often broadcast.
            return args, kwargs
        if self._units is None:
            mean, spread = float(target.double().mean()), float(target.double().std())
            far = (
                spread > 0 and max(abs(mean), spread, 1 / spread, self.FAR / self.APART * abs(mean) / spread) > self.FAR
            )
            self._units = (mean, spread) if far else (0.0, 1.0)
        mean, spread = self._units
        if self._units == (0.0, 1.0):
            return args, kwargs
        self.acted = True
        return put(given * spread + mean)


class Unweighted(Intervention):
    """Takes the weights of classes away from losses of torch."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Leave them out, wherever they stand."""
        if name not in WEIGHTED or not any(
            isinstance(each, Tensor) for each in (*args[2:3], *map(kwargs.get, WEIGHTS))
        ):
            return args, kwargs
        self.acted = True
        return (*args[:2], *(None for _ in args[2:3]), *args[3:]), {**kwargs, **dict.fromkeys(WEIGHTS & kwargs.keys())}


class LogTargets(Intervention):
    """Tells a divergence that its targets are log-probabilities, where they are negative numbers."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Set the option."""
        target, _ = argument(1, "target", args, kwargs)
        if name != "kl_div" or target is None or kwargs.get("log_target") or float(target.detach().max()) > 0:
            return args, kwargs
        self.acted = True
        return args, {**kwargs, "log_target": True}


class OpenEnd(Intervention):
    """Takes away an activation at the very end of the model or before a loss: what counts is what the layer says."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, Tensor] | None = None

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Remember what an activation was given."""
        before = args[0] if args else kwargs.get("input")
        if name in ACTIVATIONS and isinstance(before, Tensor) and isinstance(given, Tensor) and given.requires_grad:
            self._last = given, before
        return given

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Give a loss what the last activation was given."""
        if name not in LOSSES:
            return args, kwargs
        given, put = first(args, kwargs)
        made = given if given is None else self._opened(given)
        return (args, kwargs) if made is None or made is given else put(made)

    def left(self, module: nn.Module, output: Any) -> Any:
        """Return what the model says without it."""
        del module
        return self._opened(output) if isinstance(output, Tensor) else output

    def _opened(self, output: Tensor) -> Tensor:
        if self._last is None or not _is_view(output, self._last[0]):
            return output
        before, self._last = self._last[1], None
        self.acted = True
        return before.reshape(output.shape)


class Probabilities(Intervention):
    """Lets a model answer with probabilities, and gives losses of torch that take logits those."""

    def __init__(self) -> None:
        super().__init__()
        self._made: tuple[Tensor, Tensor] | None = None

    def left(self, module: nn.Module, output: Any) -> Any:
        """Return what the model says as probabilities: of several classes, or of each number by itself."""
        del module
        if not isinstance(output, Tensor) or not output.requires_grad or not output.is_floating_point():
            return output
        made = output.softmax(1) if output.dim() > 1 and output.shape[1] > 1 else output.sigmoid()
        self._made, self.acted = (made, output), True
        return made

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Give a loss that takes logits what the model said."""
        if name not in ENTROPIES | BINARY or self._made is None:
            return args, kwargs
        given, put = first(args, kwargs)
        made, said = self._made
        return put(said.reshape(given.shape)) if given is not None and _is_view(given, made) else (args, kwargs)


class OwnPlaces(Intervention):
    """Gives a loss the predictions first, where they came in the place of the targets."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Change their order."""
        if name not in LOSSES or len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
            return args, kwargs
        if args[0].requires_grad or not args[1].requires_grad or args[0].shape != args[1].shape:
            return args, kwargs
        self.acted = True
        return (args[1], args[0], *args[2:]), kwargs


class ScaledCosines(Intervention):
    """Multiplies what a cross-entropy is given, where it lies between -1 and 1."""

    SCALE = 16.0

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Scale it."""
        given, put = first(args, kwargs)
        if name not in ENTROPIES or given is None or not given.requires_grad or float(given.detach().abs().max()) > 1:
            return args, kwargs
        self.acted = True
        return put(given * self.SCALE)


class OtherSign(Intervention):
    """Differentiates the loss with the other sign."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Turn it round."""
        if name != "backward" or not args[0].requires_grad:
            return args, kwargs
        self.acted = True
        return (-args[0], *args[1:]), kwargs


def first(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Callable[[Tensor], tuple[Any, Any]]]:
    """Return the first argument, and what puts another in its place."""
    return argument(0, "input", args, kwargs)


def argument(
    at: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Callable[[Tensor], tuple[Any, Any]]]:
    """Return an argument where it is a tensor, by its position and its name, and what puts another in its place."""
    given = args[at] if len(args) > at else kwargs.get(name)

    def put(made: Tensor) -> tuple[Any, Any]:
        return ((*args[:at], made, *args[at + 1 :]), kwargs) if len(args) > at else (args, {**kwargs, name: made})

    return (given if isinstance(given, Tensor) else None), put


def _is_view(output: Tensor, inner: Tensor) -> bool:
    return output.numel() == inner.numel() and output.data_ptr() == inner.data_ptr()
