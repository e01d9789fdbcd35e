"""The three training programs that instruments are timed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """200 thin layers: the worst case, 400 small tensors and a short step."""

    def __init__(self, depth: int = 200, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.activations = nn.ModuleList(nn.ReLU() for _ in range(depth - 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = x + 0.1 * activation(layer(x))
        out: Tensor = self.head(x)
        return out


class ConvBlock(nn.Module):
    """A residual block of two convolutions with batch normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(channels), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu2(x + self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))
        return out


class Cnn(nn.Module):
    """A residual network of 2.4 M parameters on 32 x 32 images."""

    def __init__(self, channels: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class GptBlock(nn.Module):
    """A pre-LN transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class Gpt(nn.Module):
    """A character transformer of 17.9 M parameters."""

    def __init__(
        self, width: int = 384, heads: int = 6, depth: int = 10, vocabulary: int = 128, length: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True)
class Workload:
    """One training program.

    Attributes:
        name: Word used in tables.
        model: Makes the model.
        batch: Makes inputs and targets for a batch size.
        size: Batch size when timed.
        steps: Timed steps of an exporter: one whole cycle of its intervals.
        rival_steps: Timed steps of an instrument that does the same every step.
        optimizer: Makes the optimizer of the model's parameters.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    size: int
    steps: int
    rival_steps: int
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = _adamw


def workloads() -> tuple[Workload, ...]:
    """Return the workloads, shortest step first."""
    return (
        Workload("mlp", Mlp, lambda n: (torch.randn(n, 64), torch.randint(0, 10, (n,))), 128, 200, 40),
        Workload("cnn", Cnn, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))), 6, 100, 12),
        Workload("gpt", Gpt, lambda n: (torch.randint(0, 128, (n, 64)), torch.randint(0, 128, (n * 64,))), 8, 100, 8),
    )
