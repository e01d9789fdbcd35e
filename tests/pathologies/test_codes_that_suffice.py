"""A narrow layer is one too narrow where targets vary in more directions than it gives out, and not before."""

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.metrics.batches import dimension


def told(code, hidden, seed, *, copies):
    """Return the layers named as too narrow: data of ``hidden`` numbers each, seen through forty, behind ``code``."""
    torch.manual_seed(seed)
    basis = torch.randn(hidden, 40)
    model = nn.Sequential(
        nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, code), nn.Linear(code, 32), nn.Tanh(), nn.Linear(32, 40)
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(40):
            x = torch.tanh(torch.randn(64, hidden) @ basis) + 0.05 * torch.randn(64, 40)
            y = x if copies else x.flip(1)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [issue.layers for issue in exporter.issues if issue.issue_type is IssueType.BOTTLENECK]


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("code", "hidden"), [(3, 3), (4, 4), (4, 3)])
@pytest.mark.parametrize("copies", [True, False])
def test_a_code_as_wide_as_the_targets_vary_is_none_too_narrow(code, hidden, copies, seed):
    assert told(code, hidden, seed, copies=copies) == []


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("copies", [True, False])
def test_one_number_for_sixteen_is_too_narrow(copies, seed):
    assert told(1, 16, seed, copies=copies) == [("2",)]


def curve(count):
    """Points of a circle that is wound up: one number each, in eight directions."""
    turns = 6.28 * torch.rand(count, 1) * torch.arange(1, 5)
    return torch.cat([turns.sin(), turns.cos()], 1)


def sheet(count):
    """Points of a surface of two dimensions, in ten directions."""
    places = 3.0 * torch.rand(count, 2) @ torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    return torch.cat([places.sin(), places.cos()], 1)


def cloud(count):
    """Points of a space of sixteen numbers."""
    return torch.randn(count, 16)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("data", [curve, sheet, cloud])
def test_a_code_for_a_curved_surface_need_not_be_as_wide_as_its_directions(data, seed):
    """Two numbers are enough for a curve and for a sheet, and not for a cloud."""
    torch.manual_seed(seed)
    wide = data(1).shape[1]
    model = nn.Sequential(
        nn.Linear(wide, 64), nn.Tanh(), nn.Linear(64, 2), nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, wide)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(40):
            x = data(64)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    found = [issue for issue in exporter.issues if issue.issue_type is IssueType.BOTTLENECK]
    assert bool(found) == (data is cloud)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [64, 256])
def test_the_dimension_of_a_surface_is_counted(dimensions, count):
    """However it is bent and turned, within its error; few points tell none."""
    random = np.random.default_rng(dimensions)
    places = random.uniform(size=(count, dimensions)) @ random.normal(size=(dimensions, 12))
    points = np.concatenate([np.sin(places), places**2], axis=1)
    assert dimension(points) == pytest.approx(dimensions, abs=3.0 * dimensions / count**0.5 + 0.15 * dimensions)
    assert dimension(points[:20]) == np.inf
    assert dimension(np.repeat(points[:1], count, axis=0)) == np.inf
