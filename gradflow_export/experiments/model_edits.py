"""Changes to the model of a running training script, and to what goes into it.

Edits of the architecture remain while their effect is measured: the weights were trained for it. Placebos do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.losses import LOSSES

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
SQUASHING = frozenset(("sigmoid", "tanh"))


class Kaiming(Intervention):
    """Draws the weights of linear and convolutional layers anew, with He's variance; biases begin at 0.

    So are other tables of weights drawn that hold one number throughout, as layers of the script's own may.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def root(self, module: nn.Module) -> None:
        """Draw them."""
        layers = [
            each for each in module.modules() if isinstance(each, LAYERS) and isinstance(each.weight, nn.Parameter)
        ]
        with torch.no_grad():
            for layer in layers:
                if layer.bias is not None:
                    layer.bias.zero_()
            for weight in dict.fromkeys([*(layer.weight for layer in layers), *level(module)]):
                drawn = torch.empty(weight.shape)
                nn.init.kaiming_normal_(drawn, nonlinearity="relu", generator=self._generator)
                weight.copy_(drawn)
                self.acted = True


def level(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of at least two dimensions whose entries are all the same number."""
    return [
        weight
        for weight in module.parameters()
        if weight.dim() > 1 and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all())
    ]


class Reset(Intervention):
    """Calls ``reset_parameters()`` of every layer that has it: the initialization that its author gave it."""

    stays = True

    def root(self, module: nn.Module) -> None:
        """Call it, without moving the script's own random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for layer in module.modules():
                reset = getattr(layer, "reset_parameters", None)
                if callable(reset):
                    reset()
                    self.acted = True


class NormAfterLayers(Intervention):
    """Normalizes the output of each linear and convolutional layer but the last over its features.

    That is the last dimension of a linear layer's output, and all but the batch of others'.
    """

    stays = True

    def root(self, module: nn.Module) -> None:
        """Hook its layers; the last one gives the model's answer."""
        for layer in [layer for layer in module.modules() if isinstance(layer, LAYERS)][:-1]:
            layer.register_forward_hook(self._after)

    def _after(self, _layer: nn.Module, args: Any, output: Any) -> Tensor | None:
        if not args or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        self.acted = True
        shape = output.shape[-1:] if output.dim() <= 3 else output.shape[1:]
        return functional.layer_norm(output, shape) if output.shape[-1:].numel() > 1 else output


class Relu(Intervention):
    """Puts a ReLU in place of the sigmoids and hyperbolic tangents of a model, but for one that gives its answer.

    Which one that is shows at the first call, which is left as it is.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._spared: dict[int, int] = {}
        self._inside, self._at = 0, 0
        self._last: Tensor | None = None

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Count anew."""
        self._inside, self._at, self._last = id(module) if torch.is_grad_enabled() else 0, 0, None
        return args, kwargs

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return the ReLU of what the function was given."""
        before = args[0] if args else kwargs.get("input")
        if name not in SQUASHING or not self._inside or given is self._last or not isinstance(before, Tensor):
            return given
        self._at += 1
        self._last = given
        if self._spared.get(self._inside, self._at) != self._at:
            self.acted, self._last = True, before.relu()
        return self._last

    def left(self, module: nn.Module, output: Any) -> Any:
        """Take note of the one at the end."""
        if self._inside:
            ends = any(each is self._last for each in tensors([output]))
            self._spared.setdefault(id(module), self._at if ends else 0)
        self._inside = 0
        return output


class _OfInputs(Intervention):
    """Changes tensors that come from the data: those among the arguments through which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Change them."""
        if not torch.is_grad_enabled():
            return args, kwargs
        self.begin(module)
        return mapped(args, self._apply), mapped(kwargs, self._apply)

    def begin(self, module: nn.Module) -> None:
        """A call begins."""

    def _apply(self, tensor: Tensor) -> Tensor:
        square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        if tensor.requires_grad or tensor.is_sparse or square or tensor.numel() < 2:
            return tensor
        changed = self.change(tensor)
        self.acted |= changed is not tensor and not torch.equal(changed, tensor)
        return changed

    def change(self, tensor: Tensor) -> Tensor:
        """Return what takes its place."""
        raise NotImplementedError


class Shuffled(_OfInputs):
    """Permutes the rows of the inputs against everything else; what is given in one call stays together."""

    def __init__(self) -> None:
        super().__init__()
        self._orders: dict[int, Tensor] = {}

    def begin(self, module: nn.Module) -> None:
        """Draw a new order."""
        del module
        self._orders = {}

    def change(self, tensor: Tensor) -> Tensor:
        """Permute it along its first dimension."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows < 2:
            return tensor
        if rows not in self._orders:
            self._orders[rows] = torch.randperm(rows, generator=self._generator)
        return tensor[self._orders[rows].to(tensor.device)]


class Noise(_OfInputs):
    """Puts noise of the same mean and spread in place of the inputs; whole numbers are drawn from their own."""

    def change(self, tensor: Tensor) -> Tensor:
        """Draw a tensor like it."""
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=self._generator).to(tensor)
            return drawn * tensor.std() + tensor.mean()
        if tensor.dtype is torch.bool or tensor.is_complex():
            return tensor
        picked = torch.randint(tensor.numel(), (tensor.numel(),), generator=self._generator)
        return tensor.reshape(-1)[picked.to(tensor.device)].reshape(tensor.shape)


class Standardized(_OfInputs):
    """Gives inputs mean 0 and spread 1, by the first batch: each column of a table has a spread of its own.

    The mean is that of each place in a sample, so that an offset which differs from place to place is taken away too.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._scales: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._module = 0

    def begin(self, module: nn.Module) -> None:
        """Take note of whose inputs they are."""
        self._module = id(module)

    def change(self, tensor: Tensor) -> Tensor:
        """Shift and scale it."""
        if not tensor.is_floating_point():
            return tensor
        key = (self._module, tensor.dim(), *tensor.shape[1:2])
        if key not in self._scales:
            many = tensor.dim() > 1 and len(tensor) > 8
            mean = tensor.mean(0) if many else tensor.mean()
            spread = tensor.std(0) if many and tensor.dim() == 2 else (tensor - mean).std()
            self._scales[key] = mean, torch.where(spread > 0, spread, torch.ones_like(spread))
        mean, spread = self._scales[key]
        return (tensor - mean) / spread


class Finite(_OfInputs):
    """Puts 0 in the place of what is not finite, among inputs and targets."""

    stays = True

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Replace it among the targets of a loss."""
        return (mapped(args, self._apply), mapped(kwargs, self._apply)) if name in LOSSES else (args, kwargs)

    def change(self, tensor: Tensor) -> Tensor:
        """Replace it."""
        return torch.where(tensor.isfinite(), tensor, 0) if tensor.is_floating_point() else tensor


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same lists, tuples and dicts with each tensor in them changed; anything else as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple(mapped(each, change) for each in value)
    if type(value) is list:
        return [mapped(each, change) for each in value]
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    yield from found
