"""Losses of several parts, each of which sees some of what a layer is given."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


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


@pytest.mark.parametrize("boundary", [8, 64])
def test_a_condition_asks_for_one_number(boundary: int) -> None:
    """The targets of a condition beside an equation are all the same on purpose; those of all samples are not."""
    for equation in (True, False):
        torch.manual_seed(0)
        field = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
        with Exporter(field, backends=[MemoryWriter()], synchronous=True) as exporter:
            exporter.watch()
            for _ in range(40):
                at = torch.rand(64, 1).requires_grad_()
                value = field(at)
                (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
                loss = nn.functional.mse_loss(field(torch.rand(boundary, 1)), torch.ones(boundary, 1))
                if equation:
                    loss = loss + nn.functional.mse_loss(slope, -value)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert (IssueType.BAD_TARGETS in {issue.issue_type for issue in exporter.issues}) is not equation
