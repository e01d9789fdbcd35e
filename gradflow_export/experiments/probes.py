"""Interventions that ask one question each: one batch for ever, evaluation mode, sight of the future, noise."""

from __future__ import annotations

import weakref
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import Intervention, weights
from gradflow_export.experiments.model_edits import mapped, tensors

NAMED = 40
"""Letters of a layer's name that are sent, the last ones."""
LEAKED = 1e-4
"""Relative change of earlier outputs from which on they depend on a later input."""


class OneBatch(Intervention):
    """Gives the script its first batch for ever, where it takes batches from a ``DataLoader``.

    One that is made when another has gone, as in each epoch, gives the batch of that one where it has the same shape.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._first: list[tuple[weakref.ref[object], list[torch.Size], Any]] = []

    def batch(self, loader: object, given: Any) -> Any:
        """Return what the script gets instead of a batch."""
        self.acted = True
        shapes = [each.shape[1:] for each in tensors([given])]
        for at, (known, kind, first) in enumerate(self._first):
            if known() is loader or (known() is None and kind == shapes):
                self._first[at] = weakref.ref(loader), kind, first
                return first
        self._first.append((weakref.ref(loader), shapes, given))
        return given


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


class Outputs(Intervention):
    """Takes a number of what each layer without children gives in each of the first steps, in the order of calls."""

    STEPS, CALLS = 30, 48

    def __init__(self) -> None:
        super().__init__()
        self.acted = True
        self._sums: list[list[tuple[str, int]]] = [[]]

    def root(self, module: nn.Module) -> None:
        """Hook them."""
        for name, layer in module.named_modules():
            if not any(True for _ in layer.children()):
                layer.register_forward_hook(lambda _layer, _args, output, name=name: self._note(name, output))

    def after_step(self, optimizer: Optimizer) -> None:
        """Begin a new step."""
        del optimizer
        if len(self._sums) < self.STEPS:
            self._sums.append([])
        else:
            self.CALLS = 0

    def told(self) -> dict[str, Any]:
        """Return for each step the layers' names and their numbers."""
        return {"outputs": self._sums}

    def _note(self, name: str, output: Any) -> None:
        if len(self._sums[-1]) < self.CALLS:
            # The sum may hide a difference; its bits hardly ever do.
            sums = [float(each.detach().double().sum()) for each in tensors([output])]
            self._sums[-1].append((name[-NAMED:], crc32(repr(sums).encode())))


class GradientNoise(Intervention):
    """Compares the gradients of the measured steps, at weights that stand still: their mean, and how they spread.

    Attributes:
        samples: Those of the largest batch that a model was given.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0
        self._measuring = False
        self._sums: dict[int, Tensor] = {}
        self._squares = 0.0
        self._steps = 0

    def measure(self) -> None:
        """The weights stand still from now on."""
        self._measuring = True

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Count the samples."""
        del module
        if torch.is_grad_enabled():
            self.samples = max([self.samples, *(len(each) for each in tensors([args, kwargs]) if each.dim())])
        return args, kwargs

    def before_step(self, optimizer: Optimizer) -> None:
        """Add a gradient up."""
        if not self._measuring:
            return
        self._steps, self.acted = self._steps + 1, True
        for weight in weights(optimizer):
            if weight.grad is not None and not weight.grad.is_sparse:
                gradient = weight.grad.detach().double()
                self._sums[id(weight)] = self._sums.get(id(weight), 0.0) + gradient
                self._squares += float(gradient.square().sum())

    def told(self) -> dict[str, Any]:
        """Return the batch, the variance of a gradient summed over its entries, and the squared norm of their mean."""
        count = max(self._steps, 2)
        whole = sum(float(each.square().sum()) for each in self._sums.values())
        spread = max(self._squares - whole / count, 0.0) / (count - 1)
        # What the mean has of the noise is no signal.
        return {"noise": (self.samples, spread, max(whole / count**2 - spread / count, 0.0))}


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

    def told(self) -> dict[str, Any]:
        """Return the change."""
        return {"future": self.change}

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
