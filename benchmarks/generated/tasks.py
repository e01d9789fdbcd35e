"""What the generated programs learn: small synthetic tasks, each with held-out data and a skill between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

TEST = 400
"""Held-out samples."""


@dataclass
class Data:
    """Training and held-out samples of a task.

    Attributes:
        inputs: All inputs, (n, ...), the last ``TEST`` of them held out.
        targets: All targets, (n, ...).
        kind: ``classes``, ``binary`` or ``numbers``.
        outputs: Size of the model's output.
        tokens: Size of the vocabulary where inputs are token numbers, else 0.
    """

    inputs: Tensor
    targets: Tensor
    kind: str
    outputs: int
    tokens: int = 0

    @property
    def count(self) -> int:
        """Samples to train on."""
        return len(self.inputs) - TEST


def points(n: int, g: torch.Generator) -> Data:
    """Points of eight clusters, two to a class."""
    centres = 2.2 * torch.randn(8, 12, generator=g)
    which = torch.randint(8, (n,), generator=g)
    return Data(centres[which] + torch.randn(n, 12, generator=g), which % 4, "classes", 4)


def teacher(n: int, g: torch.Generator) -> Data:
    """Numbers computed by a fixed random network."""
    x = torch.randn(n, 10, generator=g)
    first, second = torch.randn(10, 16, generator=g) / math.sqrt(10), torch.randn(16, 2, generator=g) / 4
    y = torch.tanh(1.5 * x @ first) @ second
    return Data(x, (y - y.mean(0)) / y.std(0), "numbers", 2)


def rings(n: int, g: torch.Generator) -> Data:
    """Whether a point lies within a shell."""
    x = torch.randn(n, 6, generator=g)
    radius = x.norm(dim=1)
    return Data(x, (radius < radius.median()).float().unsqueeze(1), "binary", 1)


def series(n: int, g: torch.Generator) -> Data:
    """Which of four frequencies a noisy wave has."""
    which = torch.randint(4, (n,), generator=g)
    time = torch.arange(24.0)
    phase, slow = 6.28 * torch.rand(n, 1, generator=g), 0.25 * (1.6 ** which.float()).unsqueeze(1)
    wave = torch.sin(slow * time + phase) + 0.3 * torch.randn(n, 24, generator=g)
    return Data(torch.stack([wave, wave.roll(1, 1)], dim=2), which, "classes", 4)


def running(n: int, g: torch.Generator) -> Data:
    """The weighted sum of a short series."""
    x = torch.randn(n, 12, 3, generator=g)
    weights = 0.8 ** torch.arange(11.0, -1, -1)
    y = torch.einsum("ntc,t->nc", torch.tanh(x), weights).sum(1, keepdim=True)
    return Data(x, (y - y.mean()) / y.std(), "numbers", 1)


def words(n: int, g: torch.Generator) -> Data:
    """Whether more tokens of one kind than of the other stand in a sentence."""
    x = torch.randint(40, (n, 15), generator=g)
    return Data(x, ((x < 20).sum(1) > 7).long(), "classes", 2, tokens=40)


def bars(n: int, g: torch.Generator) -> Data:
    """The direction of a bar in a noisy image of 10 x 10 pixels."""
    which = torch.randint(4, (n,), generator=g)
    row, column = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    angle = (which.float() * math.pi / 4).view(n, 1, 1)
    shift = 4.5 + 1.5 * torch.randn(n, 1, 1, generator=g)
    distance = (row - shift) * torch.cos(angle) + (column - shift) * torch.sin(angle)
    image = torch.exp(-(distance**2)) + 0.25 * torch.randn(n, 10, 10, generator=g)
    return Data(image.unsqueeze(1), which, "classes", 4)


def code(n: int, g: torch.Generator) -> Data:
    """Vectors that lie near a curved surface of four dimensions, to be given back."""
    hidden = torch.randn(n, 4, generator=g)
    x = torch.tanh(hidden @ torch.randn(4, 20, generator=g)) + 0.05 * torch.randn(n, 20, generator=g)
    return Data(x, x.clone(), "numbers", 20)


def chain(n: int, g: torch.Generator) -> Data:
    """Sentences whose next token depends on the two before it."""
    choice = torch.randint(12, (12, 12), generator=g)
    tokens = torch.randint(12, (n, 13), generator=g)
    for t in range(2, 13):
        follows = choice[tokens[:, t - 2], tokens[:, t - 1]]
        keep = torch.rand(n, generator=g) < 0.9
        tokens[:, t] = torch.where(keep, follows, tokens[:, t])
    return Data(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), "classes", 12, tokens=12)


TASKS: Mapping[str, Callable[[int, torch.Generator], Data]] = MappingProxyType(
    {f.__name__: f for f in (points, teacher, rings, series, running, words, bars, code, chain)}
)


def skill(data: Data, answer: Tensor, targets: Tensor) -> float:
    """Return how well a model answers held-out targets: 1 is perfect, 0 is a constant prediction, NaN is not said.

    Args:
        data: The task.
        answer: Outputs for the held-out inputs, (n, ..., outputs).
        targets: What they should be.
    """
    answer = answer.detach().float()
    if not bool(torch.isfinite(answer).all()):
        return 0.0
    if data.kind == "numbers":
        spread = (targets - targets.mean(0)).square().mean()
        return float(1 - (answer.reshape(targets.shape) - targets).square().mean() / spread)
    if data.kind == "binary":
        right = float(((answer.reshape(targets.shape) > 0).float() == targets).float().mean())
        often = float(max(targets.mean(), 1 - targets.mean()))
    else:
        right = float((answer.argmax(-1) == targets).float().mean())
        often = float(functional.one_hot(targets.reshape(-1)).float().mean(0).max())
    return (right - often) / (1 - often)
