"""Losses of several parts, each of which sees some of what a layer is given."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("boundary", [1, 16])
def test_a_boundary_is_not_all_that_a_layer_is_given(boundary: int, scale: float | None) -> None:
    """The one point of a condition stands beside those of the equation: inputs are told of as they come together."""
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, writer = torch.optim.Adam(field.parameters(), 1e-3), MemoryWriter()
    start = torch.zeros(boundary, 1)
    with Exporter(field, backends=[writer], verbose=0) as exporter:
        exporter.watch()
        for _ in range(3):
            at = torch.rand(64, 1).requires_grad_()
            value = field(at if scale is None else scale * at)
            (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
            loss = (slope + value).pow(2).mean() + (field(start) - 1.0).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    spread = [record.fact("input.std", "0") for record in writer.records]
    alike = [record.fact("input.constant_share", "0") for record in writer.records]
    assert all(value is not None and value > 0.2 for value in spread)
    assert not any(alike)
