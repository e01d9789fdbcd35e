"""What held-out programs are made of: the program and the case, data, small layers, and float64 twins of a model.

These programs were written by an examiner who had not read the rules that are judged on them.
"""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LABELS = (
    "HEALTHY",
    "VANISHING",
    "EXPLODING",
    "DEAD",
    "SATURATION",
    "NUMERICAL",
    "UNSTABLE",
    "BOTTLENECK",
    "STAGNATION",
    "LOSS_SPIKE",
    "ATTENTION_COLLAPSE",
    "HEAD_REDUNDANCY",
    "RANK_COLLAPSE",
    "POLICY_COLLAPSE",
    "EXCESS_EXPLORATION",
    "RECURRENT_SUBCRITICAL",
    "RECURRENT_SUPERCRITICAL",
    "ROTATION",
    "MEMORY_LEAK",
)

Batches = list[tuple[Tensor, Tensor]]


def silent(_phase: str, _program: Program) -> None:
    """Take no notice of a step."""


@dataclass
class Program:
    """One small training run, as a user would write it.

    Attributes:
        model: What is trained.
        loss: Model and batch to scalar loss.
        batches: Batches in their order; they are gone through again and again.
        optimizer: What steps.
        steps: Length of the run.
        blocks: Names of the blocks, from input to output.
        micro: Micro-batches per step.
        rate: Learning rate of each step.
        spoil: Step and batch to the batch that is used.
        clip: Largest total norm of the gradient.
        finish: Called after each step.
        turn: The whole step, where it is not the usual one.
        players: Of games, the parameters of each player.
        losses: Of games, model to the loss of each player.
        policy: Model to its distribution over actions, ``logits`` or ``std``.
        facts: What a proof needs to know.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    optimizer: Any
    steps: int = 40
    blocks: list[str] | None = None
    micro: int = 1
    rate: Callable[[int], float] | None = None
    spoil: Callable[[int, Any], Any] | None = None
    clip: float | None = None
    finish: Callable[[int], None] | None = None
    turn: Callable[[Program, int, Callable[..., None]], float] | None = None
    players: list[list[nn.Parameter]] | None = None
    losses: Callable[[nn.Module], list[Tensor]] | None = None
    policy: Callable[[nn.Module], dict[str, Tensor]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def step(self, t: int, tap: Callable[..., None] | None = None) -> dict[str, float]:
        """Train one step; ``tap`` is called after the backward pass and after the optimizer."""
        tap = tap or silent
        if self.turn is not None:
            return {"loss": self.turn(self, t, tap)}
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(t)
        self.optimizer.zero_grad()
        total = 0.0
        for k in range(self.micro):
            batch = self.batches[(t * self.micro + k) % len(self.batches)]
            loss = self.loss(self.model, batch if self.spoil is None else self.spoil(t, batch))
            loss.backward()
            total += float(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        tap("backward", self)
        self.optimizer.step()
        if self.finish is not None:
            self.finish(t)
        tap("step", self)
        return {"loss": total}

    def train(self) -> list[float]:
        """Run to the end and return the losses."""
        return [self.step(t)["loss"] for t in range(self.steps)]


Proof = Callable[["Case"], tuple[bool, dict[str, Any]]]


@dataclass
class Case:
    """A program, what is true of it, and the proof of that.

    Attributes:
        label: What is wrong, or ``HEALTHY``.
        make: Builds the program from torch's global random state.
        proof: Whether the label is true of a replicate, with figures.
        where: Prefixes of the layers at fault.
        also: Labels that are true as well, as consequence or description.
        note: What is special.
        replicate: The replicate that ``program`` builds.
    """

    label: str
    make: Callable[[], Program]
    proof: Proof
    where: tuple[str, ...] = ("",)
    also: frozenset[str] = frozenset()
    note: str = ""
    replicate: int = 0

    def __post_init__(self) -> None:
        if unknown := {self.label, *self.also} - set(LABELS):
            raise ValueError(f"labels must be among LABELS, got {unknown}.")

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.make.__name__

    def build(self, replicate: int | None = None) -> Program:
        """Return a fresh program of a replicate."""
        chosen = self.replicate if replicate is None else replicate
        torch.manual_seed(zlib.crc32(f"{self.name}/{chosen}".encode()) % 2**31)
        return self.make()

    def verify(self, replicate: int) -> tuple[bool, dict[str, Any]]:
        """Prove the label of one replicate."""
        self.replicate = replicate
        try:
            good, figures = self.proof(self)
        finally:
            self.replicate = 0
        return bool(good), figures


def fault(
    label: str, make: Callable[[], Program], proof: Proof, where: str = "", also: str = "", note: str = ""
) -> Case:
    """Return a case; ``where`` and ``also`` are lists of words."""
    return Case(label, make, proof, tuple(where.split()) or ("",), frozenset(also.split()), note)


def healthy(make: Callable[[], Program], proof: Proof, also: str = "", note: str = "") -> Case:
    """Return a healthy case."""
    return fault("HEALTHY", make, proof, also=also, note=note)


def cut(size: int, *tensors: Tensor) -> list[Any]:
    """Cut tensors into batches."""
    return list(zip(*(t.split(size) for t in tensors), strict=True))


def blobs(n: int = 320, d: int = 20, k: int = 6, size: int = 32, gap: float = 1.2) -> Batches:
    """Classes that are normal clouds round random centres."""
    centres, y = gap * torch.randn(k, d), torch.randint(k, (n,))
    return cut(size, centres[y] + torch.randn(n, d), y)


def waves(n: int = 320, d: int = 16, k: int = 8, size: int = 32, noise: float = 0.05) -> Batches:
    """Smooth functions of an input, with noise."""
    x = torch.randn(n, d)
    y = torch.sin(x @ torch.randn(d, k) / math.sqrt(d)) + noise * torch.randn(n, k)
    return cut(size, x, y)


def pictures(n: int = 128, k: int = 4, side: int = 8, size: int = 16, channels: int = 1) -> Batches:
    """Small pictures of classes with a pattern each."""
    patterns, y = torch.randn(k, channels, side, side), torch.randint(k, (n,))
    return cut(size, patterns[y] + 0.7 * torch.randn(n, channels, side, side), y)


def entropy_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def squared_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of every token."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def kaiming(model: nn.Module) -> nn.Module:
    """Give weights the variance that ReLU needs, and biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def scale(factor: float, *parameters: Tensor) -> None:
    """Multiply parameters in place."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)


def fill(value: float, *parameters: Tensor) -> None:
    """Set parameters in place."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


def names(prefix: str, *numbers: int) -> list[str]:
    """Return names of numbered modules: all below the first number, or those between the two."""
    return [f"{prefix}.{i}" for i in range(*numbers)]


class Stack(nn.Module):
    """Layers one after the other, with names ``layers.0`` and on, and a head."""

    def __init__(self, layers: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x: Tensor) -> Tensor:
        """Go through all layers."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def dense(widths: Sequence[int], act: Callable[[], nn.Module], out: int) -> Stack:
    """Return fully connected layers of the given widths."""
    layers = [nn.Sequential(nn.Linear(a, b), act()) for a, b in itertools.pairwise(widths)]
    return Stack(list(layers), nn.Linear(widths[-1], out))


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.function(x)


def sgd(model: nn.Module, lr: float, **more: Any) -> torch.optim.SGD:
    """Return SGD over what is trainable."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **more)


def adamw(model: nn.Module, lr: float, **more: Any) -> torch.optim.AdamW:
    """Return AdamW over what is trainable."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, **more)


def wide(value: Any) -> Any:
    """Return floating tensors in float64, in any nest of tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: wide(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(wide(entry) for entry in value)
    return value


def twin(program: Program) -> nn.Module:
    """Return a copy of the model in float64."""
    return copy.deepcopy(program.model).double()


def whole_loss(program: Program, model: nn.Module | None = None) -> Tensor:
    """Return the float64 loss over all batches, dropout and batch statistics as in training, with a fixed seed."""
    model = twin(program) if model is None else model
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.stack([program.loss(model, wide(batch)) for batch in program.batches]).mean()
