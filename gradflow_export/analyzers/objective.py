"""What an analyzer differentiates: the user's input, model and loss, and who minimises which loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks.discover import site_name

Player = str | nn.Module | Iterable[Tensor]
Losses = tuple[Tensor, ...]
Players = Sequence[Sequence[Tensor]]


class Objective:
    """Draws batches and computes losses.

    Args:
        model: What is called: with one argument, with several when ``input_fn`` returns a tuple, or with keyword
            arguments when it returns a mapping.
        input_fn: Returns the input of one pass.
        loss_fn: Takes the model's output and returns its loss, or one loss per player.
        players: The parameters that each loss is minimised over; ``None`` when there is one loss for all.
        likely: Players if it turns out that there are as many losses: what each of several optimizers owns.
    """

    def __init__(
        self,
        model: nn.Module,
        input_fn: Callable[[], Any],
        loss_fn: Callable[[Any], Any],
        players: Players | None = None,
        likely: Players = (),
    ) -> None:
        self.model, self.input_fn, self.loss_fn = model, input_fn, loss_fn
        self.players = players
        self._likely = likely

    def evaluate(self, inputs: Any) -> tuple[Any, Losses]:
        """Return the model's output and the losses, one per player.

        Raises:
            ArgumentTypeError: ``loss_fn`` returned something else than tensors.
            ArgumentError: A loss is no scalar, depends on no parameter, or the number of losses is wrong.
        """
        if type(inputs) is tuple:  # a named tuple, such as PackedSequence, is one argument
            output = self.model(*inputs)
        elif isinstance(inputs, Mapping):
            output = self.model(**inputs)
        else:
            output = self.model(inputs)
        return output, self._checked(self.loss_fn(output))

    def backward(self, losses: Losses) -> None:
        """Accumulate into each parameter the gradient of the loss that it is trained on."""
        if self.players is None:
            losses[0].backward()  # type: ignore[no-untyped-call]
            return
        found = [
            torch.autograd.grad(loss, list(player), retain_graph=True, allow_unused=True)
            for loss, player in zip(losses, self.players, strict=True)
        ]
        for player, gradients in zip(self.players, found, strict=True):
            for parameter, gradient in zip(player, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _checked(self, returned: Any) -> Losses:
        losses = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        for loss in losses:
            if not isinstance(loss, Tensor):
                raise ArgumentTypeError(
                    f"loss_fn must return a scalar tensor, or one per player, got {type(loss).__name__}; for example "
                    "loss_fn=lambda output: F.cross_entropy(output, targets)."
                )
            if loss.numel() != 1:
                raise ArgumentError(
                    f"loss_fn must return a scalar, got a tensor of shape {list(loss.shape)}; take its .mean()."
                )
            if not loss.requires_grad:
                raise ArgumentError(
                    "the loss depends on no parameter of the model: every parameter is frozen, or the output was "
                    "detached or computed under torch.no_grad(). Compute it from the model's output itself."
                )
        if self.players is None and len(losses) == len(self._likely) > 1:
            self.players = self._likely
        wanted = 1 if self.players is None else len(self.players)
        if len(losses) != wanted:
            raise ArgumentError(
                f"loss_fn returned {len(losses)} losses for {wanted} player{'s' * (wanted > 1)}. Pass players=[...] "
                "with the parameters that each loss trains, in the same order, or return the sum."
            )
        return tuple(loss.reshape(()) for loss in losses)


def named_players(model: nn.Module, players: Sequence[Player]) -> list[list[Tensor]]:
    """Return the trainable parameters of each player.

    Args:
        model: Names are looked up in it.
        players: Dotted names of modules, modules, or parameters.

    Raises:
        ArgumentError: A name is no module of the model, a player has no trainable parameter, or shares one.
        ArgumentTypeError: An entry is none of these.
    """
    by_name = {site_name(name): module for name, module in model.named_modules()}
    out: list[list[Tensor]] = []
    for index, player in enumerate(players):
        if isinstance(player, str):
            if player not in by_name:
                raise ArgumentError(
                    f"players names {player!r}, which is no module of the model{nearest(player, by_name)}"
                )
            found: list[Any] = list(by_name[player].parameters())
        elif isinstance(player, nn.Module):
            found = list(player.parameters())
        else:
            found = list(player) if isinstance(player, Iterable) and not isinstance(player, Tensor) else [player]
        if not all(isinstance(p, Tensor) for p in found):
            raise ArgumentTypeError(
                f"players[{index}] must be a module, its name or its parameters, got {type(player).__name__}; for "
                "example players=[model.generator, model.discriminator]."
            )
        trainable = [p for p in found if p.requires_grad]
        if not trainable:
            raise ArgumentError(f"players[{index}] has no trainable parameter; name a module with requires_grad=True.")
        if any(p is other for p in trainable for earlier in out for other in earlier):
            raise ArgumentError(
                f"players[{index}] shares a parameter with an earlier one; each parameter belongs to one player."
            )
        out.append(trainable)
    return out


def as_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None, model: nn.Module) -> list[Optimizer]:
    """Return a list of the optimizers.

    Raises:
        ArgumentTypeError: Something in it is none.
        ArgumentError: One owns no parameter of the model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    listed: list[Any] = (
        [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    )
    for item in listed:
        if not isinstance(item, Optimizer):
            raise ArgumentTypeError(
                f"optimizer must be a torch.optim.Optimizer, a list of them or None, got {type(item).__name__}."
            )
        if not any(id(p) in own for group in item.param_groups for p in group["params"]):
            raise ArgumentError(
                f"optimizer {type(item).__name__} owns no parameter of the model; make it from model.parameters() of "
                "the model that is analysed, or leave it out."
            )
    return listed


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step`` cannot be called without a closure, as that of LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
