"""BOTTLENECK and COLLAPSE do not depend on how many rows a layer was read from: few samples span few directions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


class Pooled(nn.Module):
    """A recurrent layer over a sequence, whose mean goes to linear layers."""

    def __init__(self, waist: int) -> None:
        super().__init__()
        self.encode, self.rnn = nn.Linear(16, 32), nn.GRU(32, 32, batch_first=True)
        self.mix, self.head = nn.Sequential(nn.Linear(32, waist), nn.LayerNorm(waist)), nn.Linear(waist, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the 64 entries of an image as four words of 16."""
        return self.head(self.mix(self.rnn(self.encode(x.flatten(1).unflatten(1, (4, 16))))[0].mean(1)))


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution with its normalization."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


def convolutional(waist: int) -> nn.Sequential:
    """Return convolutions, whose rows are positions, and linear layers after them, whose rows are samples."""
    linear = nn.Linear(128, waist)
    after = [nn.LayerNorm(waist), nn.ReLU()] if waist > 4 else []
    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        block(1, 16), block(16, 32), pool, block(32, 32), pool, nn.Flatten(), linear, *after, nn.Linear(waist, 4)
    )


def found(model: nn.Module, batch: int, seed: int, steps: int = 12) -> list[tuple[IssueType, str]]:
    """Train on images of four kinds that a net learns, and return what blames a layer."""
    torch.manual_seed(seed)
    kinds = torch.randn(4, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(steps):
            y = torch.randint(0, 4, (batch,))
            optimizer.zero_grad()
            F.cross_entropy(model(kinds[y] + torch.randn(batch, 1, 8, 8)), y).backward()
            optimizer.step()
    kinds_of_issue = {IssueType.BOTTLENECK, IssueType.COLLAPSE}
    return [(issue.issue_type, issue.layer) for issue in exporter.issues if issue.issue_type in kinds_of_issue]


@pytest.mark.parametrize("build", [convolutional, Pooled])
@pytest.mark.parametrize("batch", [2, 3, 8, 64])
@pytest.mark.parametrize("seed", [7, 8])
def test_a_healthy_net_has_no_bottleneck_at_any_size_of_batch(build, batch, seed):
    """The 8 rows of four batches of two span 7 directions at most, beside 512 positions of a convolution."""
    torch.manual_seed(seed)
    assert found(build(64), batch, seed) == []


@pytest.mark.parametrize("batch", [4, 8, 64])
def test_a_layer_of_one_unit_is_a_bottleneck_at_any_size_of_batch(batch):
    """One direction is few in sixteen rows as in many."""
    torch.manual_seed(7)
    assert found(convolutional(1), batch, 7) == [(IssueType.BOTTLENECK, "6")]


def test_one_sample_has_no_spread_that_could_collapse():
    """In batches of one the outputs of linear layers have no variation between samples, while positions have."""
    torch.manual_seed(7)
    assert found(convolutional(64), 1, 7, steps=120) == []
