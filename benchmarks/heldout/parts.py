"""Parts of dense programs: residual blocks, adapters, mixture of experts, siamese pairs."""

from __future__ import annotations

import torch
from common import (
    cut,
)
from torch import Tensor, nn


class Residual(nn.Module):
    """``skip * x + branch * f(x)``."""

    def __init__(self, d: int, skip: float = 1.0, branch: float = 1.0, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.skip, self.branch = skip, branch
        self.body = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), act(), nn.Linear(d, d))

    def forward(self, x: Tensor) -> Tensor:
        """Add both paths."""
        return self.skip * x + self.branch * self.body(x)


class Adapter(nn.Module):
    """A frozen linear layer with a trainable product of two thin matrices beside it."""

    def __init__(self, d: int, out: int, rank: int = 4, up: float = 0.0, down: float = 0.3) -> None:
        super().__init__()
        self.base = nn.Linear(d, out).requires_grad_(False)
        self.down = nn.Parameter(down * torch.randn(rank, d))
        self.up = nn.Parameter(up * torch.randn(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter to the base."""
        return self.base(x) + x @ self.down.T @ self.up.T


class Experts(nn.Module):
    """A router and experts, of which the best one answers, weighed by its probability, or all."""

    def __init__(self, d: int = 20, k: int = 6, n: int = 4, cast: bool = False, soft: bool = False) -> None:
        super().__init__()
        self.router, self.cast, self.soft = nn.Linear(d, n), cast, soft
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, k)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        """Send each row to one expert, or to all."""
        if self.soft:
            shares = self.router(x).softmax(-1)
            return sum(shares[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), self.experts[0][2].out_features)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                value = expert(x[rows])
                value = value.half().to(x.dtype) if self.cast else value
                out = out.index_add(0, rows, value * weight[rows, None])
        return out


class Pair(nn.Module):
    """One encoder for both sides of a pair."""

    def __init__(self, d: int = 12, blind: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 8))
        self.scorer, self.blind = nn.Linear(8, 1), blind

    def forward(self, pair: Tensor) -> Tensor:
        """Return the logit that both sides are of one kind."""
        with torch.set_grad_enabled(not self.blind):
            a, b = self.encoder(pair[:, 0]), self.encoder(pair[:, 1])
        return self.scorer((a - b).square()).squeeze(1)


def pairs(n: int = 256, d: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Pairs near each other or not."""
    a, y = torch.randn(n, d), torch.randint(2, (n,)).float()
    b = torch.where(y[:, None] > 0, a + 0.3 * torch.randn(n, d), torch.randn(n, d))
    return cut(32, torch.stack([a, b], 1), y)
