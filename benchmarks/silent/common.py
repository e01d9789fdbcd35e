"""What each program of the corpus is made of: a model, a loop as its author would write it, a proof of learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TYPES = (
    "NOT_TRAINING", "WRONG_LOSS", "DATA_SCALE", "BAD_TARGETS", "LEARNING_RATE", "BAD_INIT", "CAPACITY", "STALE_GRAD",
    "EVAL_RANDOM", "DESYNC", "NOT_LEARNING",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A training script that is ready to run.

    Attributes:
        model: What an ``Exporter`` is attached to.
        train: The whole training loop, evaluation passes included.
        score: How well the trained model does on data it has not seen; higher is better.
        goal: A score from which on it has learned.
    """

    model: nn.Module
    train: Callable[[], None]
    score: Callable[[], float]
    goal: float


@dataclass(frozen=True)
class Bug:
    """A mistake that was made in public, made again in a small program.

    Attributes:
        make: Builds the program, mended when called with True; its docstring says what is wrong.
        source: Where the mistake was reported.
        title: Title of the report.
        types: Issue types that name what is wrong, the most precise first.
        where: Sites at fault: prefixes of module and parameter names, ``input``, ``target``, ``loss``, ``""`` for the
            model as a whole; ``"*"`` is any module or parameter.
        also: Issue types that are true of the program as well; they count neither as right nor as wrong.
    """

    make: Callable[[bool], Program]
    source: str
    title: str
    types: tuple[str, ...]
    where: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the function that builds it."""
        return self.make.__name__

    def build(self, fixed: bool, seed: int) -> Program:
        """Return the program, with the mistake or mended, for one seed."""
        torch.manual_seed(seed)
        return self.make(fixed)


@dataclass(frozen=True)
class Healthy:
    """A program that looks odd and is right; its docstring says what is odd about it."""

    make: Callable[[], Program]

    @property
    def name(self) -> str:
        """The name of the function that builds it."""
        return self.make.__name__

    def build(self, seed: int) -> Program:
        """Return the program for one seed."""
        torch.manual_seed(seed)
        return self.make()


def loader(size: int, steps: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield shuffled batches, epoch after epoch, until there were ``steps``."""
    done = 0
    while done < steps:
        order = torch.randperm(len(tensors[0]))
        for begin in range(0, len(order) - size + 1, size):
            if done == steps:
                return
            rows = order[begin : begin + size]
            yield tuple(tensor[rows] for tensor in tensors)
            done += 1


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of right classes in evaluation mode; the mode is put back."""
    training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(-1) == y).float().mean().item()
    model.train(training)
    return right


def explained(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of the variance of targets that is explained (R²), in evaluation mode."""
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model(x)
        share = 1 - (out.reshape(y.shape) - y).square().mean() / (y - y.mean(0)).square().mean()
    model.train(training)
    return share.item()


def at_fault(site: str, where: Iterable[str]) -> bool:
    """Whether a site is one of ``where`` or lies below it; ``"*"`` stands for any module or parameter."""
    return any(
        site == prefix
        or (bool(prefix) and site.startswith((f"{prefix}.", f"{prefix}[")))
        or (prefix == "*" and site not in {"", "input", "target", "loss"})
        for prefix in where
    )


def located(sites: tuple[str, ...], where: tuple[str, ...]) -> bool:
    """Whether an issue's first site, or at least half of its sites, are at fault."""
    right = [at_fault(site, where) for site in sites]
    return bool(right) and (right[0] or 2 * sum(right) >= len(right))
