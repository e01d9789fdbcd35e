"""A training script with a mistake, for the last part of ``gradflow demo --tour``: gradients are never cleared."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 80


def train() -> None:
    """Train a classifier on two rings; ``optimizer.zero_grad()`` is missing."""
    torch.manual_seed(0)
    points = torch.randn(512, 2)
    inside = (points.square().sum(1) < 1.4).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(STEPS):
        rows = torch.randint(len(points), (64,))
        loss = nn.functional.cross_entropy(model(points[rows]), inside[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    train()
