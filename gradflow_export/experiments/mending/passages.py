"""Changes to what stands between a loss and the weights: gradients held back or used again, rounding, copies, norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import below, kind_of
from gradflow_export.experiments.interventions import Intervention, weights
from gradflow_export.experiments.mending.labels import Remembering
from gradflow_export.experiments.mending.losses import LOSSES, first
from gradflow_export.experiments.model_edits import LAYERS, tensors

NORMS = frozenset(("layer_norm", "group_norm", "rms_norm", "batch_norm"))
FEW = 4
"""Values of a channel up to which a batch norm says little but their signs."""
FLAT = frozenset(("sign", "round", "floor", "ceil", "trunc"))
"""Functions with a derivative of 0 everywhere."""
ARRAYS = frozenset(("tensor", "as_tensor", "from_numpy"))
"""Functions that make tensors of NumPy's arrays."""
SUMS = frozenset(("__add__", "__radd__", "__iadd__", "add"))
SHORT = frozenset((torch.bfloat16, torch.float16))


class OpenPassages(Remembering):
    """Lets gradients pass within the model: ``no_grad``, ``detach`` and ``sample`` there hold none back any more.

    Through functions that are flat everywhere they pass as they are.
    A loss of nothing but numbers, one of which the model has just answered, is given that answer.
    """

    opens = True

    def __init__(self) -> None:
        super().__init__()
        self._trained: set[int] = set()
        self._reached: set[int] = set()
        self._cut: dict[int, bool] = {}
        self._held: list[Tensor] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """Take note of what is trained, and of what has a gradient."""
        self._trained.update(map(id, weights(optimizer)))
        self._reached.update(id(weight) for weight in weights(optimizer) if weight.grad is not None)

    def told(self) -> dict[str, Any]:
        """Return whether there is a model that no gradient reached, although it is trained."""
        return {"opened": any(self._cut.values())}

    def cut(self, module: nn.Module) -> bool:
        """Return whether no gradient reached it in the first step, although it is trained."""
        if self._reached and id(module) not in self._cut:
            own = {id(weight) for weight in module.parameters() if weight.requires_grad} & self._trained
            self._cut[id(module)] = bool(own) and module.training and own.isdisjoint(self._reached)
        self.acted |= self._cut.get(id(module), False)
        return self._cut.get(id(module), False)

    def left(self, module: nn.Module, output: Any) -> Any:
        """Remember what such a model gives."""
        self._held = list(tensors([output])) if self.cut(module) else self._held
        return super().left(module, output)

    def handed(self, tensor: Tensor) -> bool:
        """Return whether it is what such a model gave."""
        return any(each is tensor for each in self._held)

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Let a checkpoint look at what its own block uses, and a loss at what was answered."""
        if name == "checkpoint":
            self.acted = True
            return args, {**kwargs, "use_reentrant": False}
        if name not in LOSSES or any(each.requires_grad for each in tensors([args, dict(kwargs)])):
            return args, kwargs
        given, put = first(args, kwargs)
        answer = None if given is None else self.like(given)
        if answer is None:
            return args, kwargs
        self.acted = True
        return put(answer)

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return what a flat function was given, with the numbers it gives; of an array what that was made of."""
        del kwargs
        if name in ARRAYS and isinstance(given, Tensor):
            known = self.like(given)
            self.acted |= known is not None
            return given if known is None else known
        if name not in FLAT or not args[0].requires_grad:
            return given
        self.acted = True
        return args[0] + (given - args[0]).detach()


class SpentLosses(Intervention):
    """Adds a loss up without its graph, once it went backward: the next pass is of what is new alone."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._spent: list[Tensor] = []

    def before_backward(self, loss: Tensor) -> None:
        """Remember it."""
        self._spent.append(loss)

    def after_step(self, optimizer: Optimizer) -> None:
        """Keep the last one, which may be added to in the next step."""
        del optimizer
        self._spent = self._spent[-1:]

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Cut it off where it is added to something."""
        if name not in SUMS or not any(each is spent for each in args for spent in self._spent):
            return args, kwargs
        self.acted = True
        return tuple(each.detach() if any(each is spent for spent in self._spent) else each for each in args), kwargs


class LongWeights(Intervention):
    """Takes each step in single precision, for weights that are kept in half; they are rounded after it."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._long: dict[int, Tensor] = {}
        self._before: list[tuple[Tensor, Tensor]] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """Put the long ones in their place."""
        self._before = []
        for weight in weights(optimizer):
            if weight.dtype in SHORT and weight.grad is not None:
                gradient, short = weight.grad, weight.data
                long = self._long.get(id(weight))
                if long is None or not torch.equal(long.to(short.dtype), short):
                    long = short.float()
                weight.grad = None
                weight.data = long
                weight.grad = gradient.float()
                self._long[id(weight)] = long
                self._before.append((weight, gradient))
                self.acted = True

    def after_step(self, optimizer: Optimizer) -> None:
        """Round them."""
        del optimizer
        for weight, gradient in self._before:
            self._long[id(weight)] = weight.data
            weight.grad = None
            weight.data = weight.data.to(gradient.dtype)
            weight.grad = gradient
        self._before = []


class TiedCopies(Intervention):
    """Keeps parameters equal that begin with the same numbers: each moves as all of them do on average."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._groups: list[list[Tensor]] = []

    def root(self, module: nn.Module) -> None:
        """Find them; what is constant, as the weights of a normalization are, is equal for another reason."""
        found: list[list[Tensor]] = []
        for weight in module.parameters():
            if weight.numel() < 2 or not weight.is_floating_point() or bool((weight == weight.flatten()[0]).all()):
                continue
            for group in found:
                if group[0].shape == weight.shape and torch.equal(group[0], weight):
                    group.append(weight)
                    break
            else:
                found.append([weight])
        self._groups += [group for group in found if len(group) > 1]

    def after_step(self, optimizer: Optimizer) -> None:
        """Give all of a group their mean."""
        del optimizer
        with torch.no_grad():
            for group in self._groups:
                mean = torch.stack([weight.data for weight in group]).mean(0)
                for weight in group:
                    self.acted |= not torch.equal(weight.data, mean)
                    weight.data.copy_(mean)


class BentBetween(Intervention):
    """Puts a ReLU between linear layers that follow each other directly."""

    stays = True

    def root(self, module: nn.Module) -> None:
        """Hook its layers."""
        for layer in module.modules():
            if isinstance(layer, LAYERS):
                layer.register_forward_pre_hook(self._before)

    def _before(self, layer: nn.Module, args: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or not _straight(args[0]):
            return None
        del layer
        self.acted = True
        return (args[0].relu(), *args[1:])


class OpenNorms(Intervention):
    """Leaves norms over a single number away, which return their bias whatever it is.

    A batch norm in training over a few numbers normalizes each sample instead.
    """

    stays = True

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return what the norm was given, or that of each sample."""
        if not starved(name, args, kwargs):
            return given
        self.acted, given_to = True, args[0] if args else kwargs["input"]
        return functional.group_norm(given_to, 1, *args[3:5]) if name == "batch_norm" else given_to


def starved(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a norm has a single number to normalize, or in training the few of a small batch."""
    given = args[0] if args else kwargs.get("input")
    if name not in NORMS or not isinstance(given, Tensor):
        return False
    if name == "batch_norm":
        return bool(args[5:6] and args[5]) and given.numel() <= FEW * given.shape[1] and given[:1].numel() > 1
    over = args[1] if len(args) > 1 else kwargs.get("num_groups", kwargs.get("normalized_shape"))
    # A group is over its channels and all places.
    alone = given[:1].numel() if name == "group_norm" else over is not None and math.prod(over)
    return alone == (over if name == "group_norm" else 1)


_LINEAR = ("Addmm", "Mm", "Bmm", "Convolution", "Linear", "MkldnnConvolution", "CudnnConvolution")
_PASSED = (
    "View", "UnsafeView", "Reshape", "Alias", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Expand", "Clone",
    "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "NativeDropout", "Add", "Mul", "LeakyRelu", "AvgPool2D",
)  # fmt: skip
_FAR = 6


def _straight(given: Tensor) -> bool:
    """Return whether a tensor comes from a linear layer, with only linear steps in between."""
    node = given.grad_fn
    for _ in range(_FAR):
        kind = kind_of(node)
        if kind in _LINEAR:
            return True
        if kind not in _PASSED or (kind == "LeakyRelu" and getattr(node, "_saved_negative_slope", 0.0) != 1.0):
            return False
        node = below(node)
    return False
