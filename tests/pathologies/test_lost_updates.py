"""Models in bfloat16 whose updates are rounded away, and one whose updates arrive."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


def issues(lr, spread, steps=20, warmup=0):
    """Train a bfloat16 classifier whose weights have sizes of 1/2 to 1, and return the issues."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((0.5 + 0.5 * torch.rand_like(p)) * (torch.rand_like(p) - 0.5).sign())
            p.mul_((torch.rand_like(p) > spread).float())
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(64, 16).bfloat16()
    y = x[:, :4].argmax(1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * (1e-6 if step < warmup else 1.0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            exporter.observe(loss=loss)
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.STAGNATION]


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_updates_below_the_spacing_are_stagnation_by_rounding(spread):
    """All weights rest, or all but the few that are zero and take any update: the reason is named, since step 1."""
    found = issues(1e-4, spread)
    assert [(issue.step, issue.open) for issue in found] == [(1, True)]
    assert "rounding" in found[0].message
    assert "float32" in found[0].advice
    assert len(found[0].layers) > 1


def test_updates_that_arrive_are_no_stagnation():
    """The same model at a learning rate at which most updates land."""
    assert issues(0.3, 0.0) == []


def test_a_short_warm_up_is_no_stagnation():
    """Five steps at next to no learning rate lose everything, and are over."""
    assert issues(0.3, 0.0, warmup=5) == []


def test_half_of_a_step_that_is_rounded_away_is_reported_at_medium():
    """Where most entries rest and the large ones move, training is slower than its rate says."""
    found = issues(0.015, 0.0)
    assert [(issue.severity, issue.open) for issue in found] == [(Severity.MEDIUM, True)]
