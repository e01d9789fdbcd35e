"""A narrow layer is one too narrow where targets vary in more directions than it gives out, and not before."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


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
