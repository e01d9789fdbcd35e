"""The end of a run is judged: what was spared because it might still come has not come."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


class Warming(torch.optim.lr_scheduler.LambdaLR):
    """A rate that rises for so many steps."""

    def __init__(self, optimizer, steps):
        super().__init__(optimizer, lambda step: min((step + 1) / steps, 1.0) ** 2)


def trained(seed, steps, warmup, fails=False):
    """Train on ten classes; return the records, and what is said of learning."""
    torch.manual_seed(seed)
    centres = torch.randn(10, 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, memory = torch.optim.SGD(model.parameters(), 0.05), MemoryWriter()
    schedule = Warming(optimizer, warmup)
    with contextlib.suppress(ZeroDivisionError), Exporter(model, backends=[memory], strict=True).watch() as exporter:
        for _ in range(steps):
            y = torch.randint(10, (48,))
            optimizer.zero_grad()
            F.cross_entropy(model(centres[y] + 0.5 * torch.randn(48, 32)), y).backward()
            optimizer.step()
            schedule.step()
        assert steps / (not fails)
    kinds = {IssueType.NOT_LEARNING, IssueType.LEARNING_RATE}
    return memory.records, [issue for issue in exporter.issues if issue.issue_type in kinds]


@pytest.mark.parametrize("seed", [0, 2])
def test_a_warm_up_that_outlasts_the_run_is_told_at_its_end(seed):
    """While the rate rises nothing is more than a remark; the last record tells what has become of it."""
    records, issues = trained(seed, 300, 1000)
    (issue,) = [issue for issue in issues if issue.issue_type is IssueType.NOT_LEARNING]
    told = [(record.step, each.severity) for record in records for each in record.issues if each.key == issue.key]
    assert told[0] == (issue.step, Severity.LOW)
    assert told[-1] == (records[-1].step, Severity.MEDIUM)
    assert records[-1].step > 300


@pytest.mark.parametrize("seed", [0, 2])
def test_a_run_that_was_broken_off_is_not_judged_as_if_it_had_ended(seed):
    _, issues = trained(seed, 300, 1000, fails=True)
    assert [issue.severity for issue in issues if issue.issue_type is IssueType.NOT_LEARNING] == [Severity.LOW]


@pytest.mark.parametrize("steps", [125, 180, 300])
def test_a_warm_up_that_ends_in_time_is_none(steps):
    _, issues = trained(0, steps, 60)
    assert all(issue.severity < Severity.MEDIUM for issue in issues)
