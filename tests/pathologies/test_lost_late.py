"""DIVERGING for what begins late: the learning is lost since a step, however noisy the losses of small batches are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


def relapses(change, seed, noise=0.6, steps=500):
    """Train a regression on batches of 16, of which ``change`` makes something else after step 220; return DIVERGING."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    direction = torch.randn(10) / 10**0.5
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(steps):
            x = torch.randn(16, 10)
            y = (x @ direction + noise * torch.randn(16)).unsqueeze(1)
            x, y = change(x, y) if step > 220 else (x, y)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.DIVERGING]


@pytest.mark.parametrize(
    "change",
    [lambda x, y: (0.02 * x, y), lambda x, y: (x, y.roll(1, 0)), lambda x, y: (torch.randn_like(x), y)],
    ids=["inputs lose their scale", "targets of other samples", "inputs are noise"],
)
@pytest.mark.parametrize("seed", range(4))
def test_learning_that_is_lost_late_is_told_with_its_step_in_noise(change, seed):
    """Single batches are answered well by luck, the level of ten is not; a last layer that shrinks is no decay."""
    (issue,) = relapses(change, seed)
    assert (issue.severity >= Severity.MEDIUM, issue.cause, issue.healed_step) == (True, "learning lost", None)
    assert 200 <= issue.step <= 240


@pytest.mark.parametrize(
    "change",
    [lambda x, y: (x, y), lambda x, y: (x, y + 0.4 * torch.randn_like(y)), lambda x, y: (-x, y)],
    ids=["nothing", "noisier targets", "another task that is learned"],
)
@pytest.mark.parametrize("seed", range(4))
def test_noisy_losses_and_harder_data_are_no_loss_of_learning(change, seed):
    """Noise alone, noisier data, and data that are learned anew: at most a remark, that is over once they are."""
    assert all(issue.severity <= Severity.LOW for issue in relapses(change, seed))
