"""Changes to a running training script that are made from outside of it, at its optimizer's steps.

An intervention is active while the script trains, and is taken away before its effect is measured. What it changes
for a step it puts back after it, so that schedulers and the script itself never see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import walk


class Intervention:
    """Does nothing; each subclass overrides the moments at which it acts.

    Attributes:
        stays: Whether it remains active while its effect is measured, as an edit of the architecture must.
        acted: Whether it has changed anything.
        without_dropout: Whether dropout is off while it is active.
        opens: Whether what a model holds back of its gradients passes.
        steady: Whether dropout is off where no gradients are wanted.
        patience: Steps that it needs after a loss that is not finite.
    """

    stays = False
    without_dropout = False
    opens = False
    steady = False
    patience = 0

    def __init__(self) -> None:
        self.acted = False

    def root(self, module: nn.Module) -> None:
        """A module is called with gradients from outside any other module for the first time."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that such a module gets."""
        del module
        return args, kwargs

    def inner(self, module: nn.Module) -> nn.Module:
        """Return the module that is called in the place of one within such a module."""
        return module

    def left(self, module: nn.Module, output: Any) -> Any:
        """Return what such a module gives."""
        del module
        return output

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments that a function of torch gets, by its name."""
        del name
        return args, kwargs

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Return what a function of torch gives, by its name and what it got."""
        del name, args, kwargs
        return given

    def batch(self, loader: object, given: Any) -> Any:
        """Return the batch that the script gets from a loader."""
        del loader
        return given

    def cut(self, module: nn.Module) -> bool:
        """Return whether the script holds back all gradients of a model, and shall not."""
        del module
        return False

    def measure(self) -> None:
        """Training is over; the effect is measured from now on."""

    def told(self) -> dict[str, Any]:
        """Return what it saw, ready for JSON."""
        return {}

    def before_backward(self, loss: Tensor) -> None:
        """A backward pass begins."""

    def after_backward(self) -> None:
        """A backward pass has ended."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins its step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has ended its step."""


def weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer trains."""
    for group in optimizer.param_groups:
        yield from group["params"]


class GroupOption(Intervention):
    """Sets an option of every parameter group for each step.

    Args:
        name: The option, such as ``"lr"``.
        factor: What its value is multiplied by.
    """

    def __init__(self, name: str, factor: float) -> None:
        super().__init__()
        self._name, self._factor = name, factor
        self._before: list[tuple[dict[str, Any], Any]] = []

    def value(self, optimizer: Optimizer, number: int, current: Any) -> Any:
        """Return the value for a group, given by its position."""
        del optimizer, number
        return current * self._factor

    def before_step(self, optimizer: Optimizer) -> None:
        """Set it."""
        self._before = [(group, group[self._name]) for group in optimizer.param_groups if self._name in group]
        for number, (group, current) in enumerate(self._before):
            group[self._name] = self.value(optimizer, number, current)
            self.acted |= bool(group[self._name] != current)

    def after_step(self, optimizer: Optimizer) -> None:
        """Put it back."""
        del optimizer
        for group, before in self._before:
            group[self._name] = before
        self._before = []


class FirstRate(GroupOption):
    """Every step has the learning rate of the first one."""

    def __init__(self) -> None:
        super().__init__("lr", 1.0)
        self._first: dict[tuple[int, int], Any] = {}

    def value(self, optimizer: Optimizer, number: int, current: Any) -> Any:
        """Return the first learning rate of this group."""
        first = self._first.setdefault((id(optimizer), number), _copied(current))
        return _copied(first)


class FullRate(GroupOption):
    """Every step has the learning rate that the optimizer was made with."""

    def __init__(self) -> None:
        super().__init__("lr", 1.0)

    def value(self, optimizer: Optimizer, number: int, current: Any) -> Any:
        """Return the learning rate that this group was made with."""
        return _copied(made_with(optimizer, number, current))


def made_with(optimizer: Optimizer, number: int, current: Any) -> Any:
    """Return the learning rate that a group was made with, which a scheduler notes in the group."""
    return optimizer.param_groups[number].get("initial_lr", optimizer.defaults.get("lr", current))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class ClearedGradients(Intervention):
    """Clears the gradients of optimizers' parameters before the first backward pass after a step.

    That of any of them: what the pass of one part left in another belongs to no later step. Within a step, which calls
    a closure as often as it likes, they are cleared before each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stepped = False
        self._known: dict[int, Optimizer] = {}
        self._inside: dict[int, Optimizer] = {}

    def before_backward(self, loss: Tensor) -> None:
        """Clear them."""
        del loss
        for optimizer in (self._known if self._stepped else self._inside).values():
            for weight in weights(optimizer):
                self.acted |= weight.grad is not None
                weight.grad = None
        self._stepped = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Remember whose closure may be called."""
        self._known[id(optimizer)] = self._inside[id(optimizer)] = optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        """Remember that gradients have been used."""
        self._inside.pop(id(optimizer), None)
        self._stepped = True


class KeptGradients(Intervention):
    """Gives the optimizer the gradients as the last backward pass left them, whatever was done to them since."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._before: list[tuple[Tensor, Tensor | None]] = []

    def root(self, module: nn.Module) -> None:
        """Take note of its parameters."""
        self._known.update((id(weight), weight) for weight in module.parameters())

    def after_backward(self) -> None:
        """Save the gradients."""
        for key, weight in self._known.items():
            if weight.grad is not None and not weight.grad.is_sparse:
                self._saved[key] = weight.grad, weight.grad.detach().clone()

    def before_step(self, optimizer: Optimizer) -> None:
        """Put them back."""
        self._before = []
        for weight in weights(optimizer):
            self._known.setdefault(id(weight), weight)
            kept = self._saved.pop(id(weight), None)
            if kept is not None and (weight.grad is None or not torch.equal(weight.grad, kept[1])):
                self.acted = True
                self._before.append((weight, weight.grad))
                weight.grad = kept[1]

    def after_step(self, optimizer: Optimizer) -> None:
        """Give the script its own again, or what it has cleared would be added to the next ones.

        Those that a closure computed have been used.
        """
        for weight, gradient in self._before:
            weight.grad = gradient
        self._before = []
        for weight in weights(optimizer):
            self._saved.pop(id(weight), None)


class PinnedWeights(Intervention):
    """Undoes every change of the weights that is made between two steps."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Undo what happened since the step."""
        if module.training:
            self._undo()
        return args, kwargs

    def before_step(self, optimizer: Optimizer) -> None:
        """Undo what happened since the step."""
        del optimizer
        self._undo()

    def after_step(self, optimizer: Optimizer) -> None:
        """Save the weights."""
        for weight in weights(optimizer):
            self._saved[id(weight)] = weight, weight.detach().clone()

    def _undo(self) -> None:
        with torch.no_grad():
            for weight, saved in self._saved.values():
                if not torch.equal(weight, saved):
                    self.acted = True
                    weight.data.copy_(saved)


class EverythingTrained(Intervention):
    """Makes every parameter trainable; the optimizer trains those that it misses with its first group's options."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}
        self._lead: Optimizer | None = None
        self._group: dict[str, Any] | None = None
        self._owned: set[int] = set()

    def root(self, module: nn.Module) -> None:
        """Make its parameters trainable."""
        for weight in filter(torch.is_floating_point, module.parameters()):
            self._known[id(weight)] = weight
            if not weight.requires_grad:
                weight.requires_grad_(True)
                self.acted = True

    def before_backward(self, loss: Tensor) -> None:
        """Take note of parameters that the loss depends on and no module owns up to."""
        if self._lead is None:
            self._known.update((id(weight), weight) for weight in leaves(loss))

    def before_step(self, optimizer: Optimizer) -> None:
        """Lend the missing parameters to the optimizer that steps first once they have gradients.

        Another may step between the pass through them and the backward pass, which then fails.
        """
        self._owned.update(map(id, weights(optimizer)))
        missing = [weight for key, weight in self._known.items() if key not in self._owned]
        if self._lead is None and any(weight.grad is not None for weight in missing):
            self._lead = optimizer
        if optimizer is self._lead and missing:
            self.acted = True
            options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            self._group = {"params": missing, **options}
            optimizer.param_groups.append(self._group)

    def after_step(self, optimizer: Optimizer) -> None:
        """Take them back, and clear their gradients, which the script does not know of."""
        if optimizer is self._lead and self._group is not None:
            # By identity: groups of as many tensors cannot be compared.
            optimizer.param_groups[:] = [each for each in optimizer.param_groups if each is not self._group]
            for weight in self._group["params"]:
                weight.grad = None
            self._group = None


def leaves(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that a loss depends on."""
    for node in walk([loss.grad_fn]):
        weight = getattr(node, "variable", None)
        if isinstance(weight, nn.Parameter):
            yield weight


class OwnAdam(Intervention):
    """Lets Adam with its default options take each step instead of the script's own optimizer.

    Args:
        rate: Its learning rate.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate
        self._own: dict[int, Optimizer] = {}
        self._before: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """Save weights and gradients."""
        self._before = [
            (weight, weight.detach().clone(), None if weight.grad is None else weight.grad.detach().clone())
            for weight in weights(optimizer)
        ]

    def after_step(self, optimizer: Optimizer) -> None:
        """Undo the step and take another."""
        own = self._own.get(id(optimizer))
        if own is None:
            own = self._own[id(optimizer)] = torch.optim.Adam([weight for weight, _, _ in self._before], lr=self._rate)
        left = [weight.grad for weight, _, _ in self._before]
        with torch.no_grad():
            for weight, value, gradient in self._before:
                # A step with a closure computes its gradients itself; then those that it left are the ones to use.
                weight.data.copy_(value)
                weight.grad = weight.grad if gradient is None else gradient
        own.step()
        for (weight, _, _), gradient in zip(self._before, left, strict=True):
            weight.grad = gradient
        self.acted, self._before = True, []


class NoDropout(Intervention):
    """Turns dropout off."""

    without_dropout = True

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that a step was made without it."""
        del optimizer
        self.acted = True


class FrozenWeights(Intervention):
    """Undoes every step: the loss is measured and nothing learns."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Tensor, Tensor]] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """Save the weights."""
        self._before = [(weight, weight.detach().clone()) for weight in weights(optimizer)]

    def after_step(self, optimizer: Optimizer) -> None:
        """Put them back."""
        del optimizer
        self.acted = True
        for weight, value in self._before:
            weight.data.copy_(value)
        self._before = []
