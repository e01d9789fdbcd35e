"""What the loops of benchmarks/cuda_programs.py have in common: a diary, batches on the GPU, and an ordinary step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GPU = torch.device("cuda")


@dataclass
class Diary:
    """What a loop says of itself: its loss and gradient norm, kept on the device until the end."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)

    def note(self, loss: Tensor, model: nn.Module) -> None:
        """Keep one step's loss and the norm of the gradients as they stand."""
        self.losses.append(loss.detach().double())
        parts = [p.grad.detach() for p in model.parameters() if p.grad is not None]
        parts = [g.coalesce().values() if g.is_sparse else g for g in parts]
        self.norms.append(torch.stack([g.to(GPU).double().square().sum() for g in parts]).sum().sqrt())


Step = Callable[[Diary | None], None]


def images(batch: int = 32) -> tuple[Tensor, Tensor]:
    """Return images and labels."""
    return torch.randn(batch, 3, 32, 32, device=GPU), torch.randint(0, 10, (batch,), device=GPU)


def text(batch: int = 16) -> tuple[Tensor, Tensor]:
    """Return tokens and the next ones."""
    return torch.randint(0, 128, (batch, 64), device=GPU), torch.randint(0, 128, (batch * 64,), device=GPU)


def points(batch: int = 128) -> tuple[Tensor, Tensor]:
    """Return rows and labels."""
    return torch.randn(batch, 64, device=GPU), torch.randint(0, 10, (batch,), device=GPU)


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    run: Any = None,
    *,
    half: torch.dtype | None = None,
    limit: float | None = None,
) -> Step:
    """Return an ordinary step, under autocast to a type and clipped to a limit where they are given."""

    def step(diary: Diary | None) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", half, enabled=half is not None):
            loss = F.cross_entropy((run or model)(x), y)
        loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        if diary is not None:
            diary.note(loss, model)
        optimizer.step()

    return step
