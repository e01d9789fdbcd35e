"""Losses that stay NaN while a gradient scaler skips every step are told, and a NaN is dated by the losses."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, IssueType, MemoryWriter


def trained(broken, *, steps=60, accumulate=1, watch=True):
    """Train under a gradient scaler with NaN in the batches that ``broken`` names; return the model and its issues."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, scaler = torch.optim.Adam(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0).watch() if watch else None
    for batch in range(steps * accumulate):
        x = torch.randn(8, 6)
        x[0, 0] = torch.nan if batch in broken else x[0, 0]
        scaler.scale((model(x) - x[:, 1:2]).pow(2).mean() / accumulate).backward()
        if (batch + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if exporter is not None:
        exporter.close()
    return model, [] if exporter is None else [i for i in exporter.issues if i.issue_type is IssueType.NUMERICAL]


@pytest.mark.parametrize("begins", [1, 30])
def test_a_run_whose_losses_stay_nan_is_not_healthy(begins):
    """It is dated to the step that is never made."""
    _, (issue,) = trained(range(begins, 10**6))
    assert (issue.step, issue.open) == (begins + 1, True)
    assert "no optimizer step" in issue.message


@pytest.mark.parametrize("count", [1, 5, 15])
def test_a_few_steps_that_a_scaler_skips_are_its_work(count):
    """So it finds its scale."""
    assert trained(range(30, 30 + count))[1] == []


def test_it_is_over_when_steps_follow():
    _, (issue,) = trained(range(20, 45))
    assert (issue.step, issue.healed_step is not None) == (21, True)


def test_accumulation_over_many_passes_is_none_and_bits_are_the_same():
    (model, issues), (alone, _) = trained((), steps=5, accumulate=64), trained((), steps=5, accumulate=64, watch=False)
    assert issues == []
    ends = zip(model.parameters(), alone.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in ends)


@pytest.mark.parametrize("begins", [2, 13, 40, 57])
def test_a_nan_is_dated_to_the_step_after_the_last_finite_loss(begins):
    """Although what tells its place is not read in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Exporter(model, backends=[MemoryWriter()], strict=True, budget=None, verbose=0).watch() as exporter:
        for step in range(1, 61):
            x = torch.randn(16, 8)
            x[0, 0] = torch.nan if step == begins else x[0, 0]
            optimizer.zero_grad()
            (model(x) - x[:, 1:2]).pow(2).mean().backward()
            optimizer.step()
    (issue,) = (each for each in exporter.issues if each.issue_type is IssueType.NUMERICAL)
    assert (issue.step, issue.before) == (begins, 0)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("where", ["input", "loss"])
def test_where_a_nan_begins_is_told_of_the_first_call_of_a_closure(most, where):
    """By the second call weights are NaN because of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer, batch = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=most), torch.randn(32, 8)
    with Exporter(model, backends=[MemoryWriter()], strict=True, budget=None, verbose=0).watch() as exporter:
        for step in range(1, 31):
            x, root = batch.clone(), -1.0 if step == 20 and where != "input" else 1.0
            x[0, 0] = torch.nan if step == 20 and where == "input" else x[0, 0]

            def closure(x=x, root=root):
                optimizer.zero_grad()
                loss = (model(x) - x[:, 1:2]).pow(2).mean() * torch.tensor(root).sqrt()
                loss.backward()
                return loss

            optimizer.step(closure)
    (issue,) = (each for each in exporter.issues if each.issue_type is IssueType.NUMERICAL)
    assert (issue.step, "in the weights" in issue.message) == (20, False)
