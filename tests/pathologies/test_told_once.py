"""Updates that a declared grid swallows are one issue, with advice about the grid."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


def issues(model, loss, *, steps=60, lr=1e-2, **given):
    """Train, and return the issues about parameters that rest."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch(**given) as exporter:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    return [i for i in exporter.issues if i.issue_type in {IssueType.STAGNATION, IssueType.NOT_TRAINING}]


class OnGrid(nn.Module):
    """Weights that are rounded to a grid where they are used."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.weight = nn.Parameter(torch.round(torch.randn(8, 4) / step) * step)

    def forward(self, x):
        rounded = torch.round(self.weight / self.step) * self.step
        return x @ (self.weight + (rounded - self.weight).detach()).T


@pytest.mark.parametrize("step", [0.1, 2**-6])
def test_advice_on_a_declared_grid_speaks_of_the_grid(step):
    """What stands still is the grid's, not that of a number format, and it is told once."""
    torch.manual_seed(0)
    (found,) = issues(OnGrid(step), lambda model: (model(torch.randn(16, 4)) - 1).square().mean(), lr=1e-6, grids=step)
    assert found.issue_type is IssueType.STAGNATION
    assert "grid" in found.advice
    assert "float" not in found.advice
