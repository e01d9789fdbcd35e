"""Images whose channels lie last, and are reshaped instead of permuted."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.metrics.batches import interleaved


def pictures(count, channels, size=20, noise=0.3):
    """Smooth surfaces, another one in each channel. Shape: ``[count, size, size, channels]``."""
    places = torch.linspace(0.0, 1.0, size)
    ways = 3.0 * torch.randn(count, 2, 1, 1, channels)
    surface = torch.sin(ways[:, 0] * places[:, None, None] + ways[:, 1] * places[:, None] + torch.arange(channels))
    return surface + noise * torch.randn(count, size, size, channels)


def found(layout, channels, size=20):
    """Train a convolution; return the issues of the loss."""
    torch.manual_seed(channels)
    model = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(12):
            x = pictures(32, channels, size)
            y = (x.mean((1, 2, 3)) > 0).long()
            optimizer.zero_grad()
            F.cross_entropy(model(layout(x)), y).backward()
            optimizer.step()
    return [(issue.issue_type, issue.layers) for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS]


def reshaped(x):
    return x.reshape(len(x), x.shape[3], *x.shape[1:3])


def permuted(x):
    return x.permute(0, 3, 1, 2)


LAYOUTS = {
    "permuted": permuted,
    "permuted and copied": lambda x: permuted(x).contiguous(),
    "noise": lambda x: torch.randn_like(permuted(x)),
    "one colour": lambda x: torch.ones_like(permuted(x)),
    "alternating": lambda x: permuted(x) * (-1.0) ** torch.arange(x.shape[2]),
    "gray": lambda x: permuted(x)[:, :1].expand(-1, x.shape[3], -1, -1),
}


@pytest.mark.parametrize("channels", [3, 4])
def test_channels_that_lie_side_by_side_are_told_at_the_first_layer(channels):
    assert found(reshaped, channels) == [(IssueType.WRONG_LOSS, ("0",))]


@pytest.mark.parametrize("size", [20, 21])
@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_that_lie_one_by_one_are_none(layout, channels, size):
    assert found(LAYOUTS[layout], channels, size) == []


@pytest.mark.parametrize("scale", [1e-3, 1.0, 255.0])
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_the_score_has_the_sign_of_what_it_tells(channels, scale):
    torch.manual_seed(0)
    x = scale * pictures(64, channels).double()
    assert interleaved(reshaped(x).flatten(1).numpy(), channels) > 10.0
    assert interleaved(permuted(x).flatten(1).numpy(), channels) < 0.0
    assert interleaved(x[:8].flatten(1).numpy(), channels) == 0.0
    assert abs(interleaved(np.random.default_rng(0).normal(size=(64, 1200)), channels)) < 5.0
