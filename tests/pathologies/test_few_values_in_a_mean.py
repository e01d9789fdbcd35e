"""Normalisations that are taken over one value or two leave nothing but their order."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


def found(norm, batch, shape=(6,), last=None, steps=12):
    """Train a layer before a norm and one after it; return the layers that are reported, by their names."""
    torch.manual_seed(0)
    size = torch.Size(shape).numel()
    first = nn.Sequential(nn.Linear(6, size), nn.Unflatten(1, shape))
    model = nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(size, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(steps):
            x = torch.randn(last if last and step % 3 == 2 else batch, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    return [layer for issue in exporter.issues if issue.issue_type is IssueType.CAPACITY for layer in issue.layers]


@pytest.mark.parametrize(
    ("norm", "batch", "shape"),
    [
        (nn.BatchNorm1d(6), 2, (6,)),
        (nn.BatchNorm1d(6, track_running_stats=False), 2, (6,)),
        (nn.BatchNorm2d(6), 2, (6, 1, 1)),
        (nn.BatchNorm1d(3), 1, (3, 2)),
        (nn.LayerNorm(2), 16, (3, 2)),
        (nn.LayerNorm(1), 16, (6, 1)),
        (nn.GroupNorm(3, 6), 16, (6,)),
        (nn.GroupNorm(6, 6), 16, (6, 2)),
    ],
)
def test_of_two_values_their_order_is_left(norm, batch, shape):
    assert found(norm, batch, shape) == ["1"]


@pytest.mark.parametrize(
    ("norm", "batch", "shape", "last"),
    [
        (nn.BatchNorm1d(6), 3, (6,), None),
        (nn.BatchNorm1d(6), 16, (6,), 2),  # the last batch of an epoch
        (nn.BatchNorm2d(6), 2, (6, 2, 1), None),
        (nn.BatchNorm1d(6).eval(), 2, (6,), None),
        (nn.LayerNorm(3), 16, (2, 3), None),
        (nn.GroupNorm(6, 6), 16, (6, 3), None),
        (nn.GroupNorm(2, 6), 1, (6,), None),
    ],
)
def test_of_more_values_more_is_left(norm, batch, shape, last):
    """And of few, where the running statistics of others are used."""
    mode = norm.training
    norm.train = lambda _mode=True: norm
    assert norm.training == mode
    assert found(norm, batch, shape, last) == []
