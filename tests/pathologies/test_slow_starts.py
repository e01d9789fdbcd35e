"""NOT_LEARNING beside a closed-form fit: a loss that falls slowly at first is learning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


def trained(model, steps, rate, seed, batch=48):
    """Train on ten classes by plain SGD; return what is said of learning, and the last loss."""
    torch.manual_seed(seed)
    centres = torch.randn(10, 32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(steps):
            y = torch.randint(10, (batch,))
            x = centres[y] + 0.5 * torch.randn(batch, 32)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    kinds = {IssueType.NOT_LEARNING, IssueType.LEARNING_RATE}
    return [issue for issue in exporter.issues if issue.issue_type in kinds], loss.item()


def deep():
    """Four layers, whose first losses hardly fall."""
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


@pytest.mark.parametrize("rate", [0.02, 0.03])
@pytest.mark.parametrize("seed", [0, 2])
def test_a_loss_that_falls_faster_and_faster_is_no_more_than_a_remark(rate, seed):
    """Plain SGD leaves a plateau late: a straight line through its beginning ends far too high."""
    issues, loss = trained(deep(), 600, rate, seed)
    assert loss < 0.5
    assert all(issue.severity <= Severity.LOW and issue.healed_step is not None for issue in issues)


@pytest.mark.parametrize("rate", [1e-5, 1e-3])
@pytest.mark.parametrize("seed", [0, 2])
def test_a_model_that_stays_where_it_was_is_accused(rate, seed):
    """Nothing is learned at such a rate, and a closed-form fit tells that something could be."""
    issues, loss = trained(deep(), 190, rate, seed)
    assert loss > 2.0
    assert max(issue.severity for issue in issues) >= Severity.MEDIUM


@pytest.mark.parametrize("seed", [0, 3])
def test_a_plateau_that_is_left_is_no_more_than_a_remark(seed):
    """Small weights are left slowly: the gradient grows for a hundred steps before the loss falls."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 1, bias=False)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.15)
    truth, optimizer, losses = torch.randn(8, 1) / 3, torch.optim.SGD(model.parameters(), 0.05), []
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(200):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x @ truth)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.1 < 0.3 < min(losses[:100])
    told = [issue for issue in exporter.issues if issue.issue_type is IssueType.NOT_LEARNING]
    assert all(issue.severity <= Severity.LOW and issue.healed_step is not None for issue in told)
