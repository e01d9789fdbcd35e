"""Penalties that give many tensors the same gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


def test_tensors_that_a_penalty_alone_moves_alike_are_no_copies():
    """Norms that began alike and went apart get one gradient from a penalty: that is no DESYNC."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for step in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), x[:, :3].argmax(1))
            penalty = torch.stack([q.abs().sum() for q in model.parameters()]).sum()
            (loss if step < 20 else 0 * loss + penalty).backward()
            optimizer.step()
    assert [issue for issue in exporter.issues if issue.issue_type is IssueType.DESYNC] == []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("factor", "learns"), [(1e-4, True), (1.0, False)])
def test_a_penalty_that_falls_does_not_hide_that_nothing_is_learned(factor, learns, seed, optimizer):
    """The loss as a whole falls far; the term that is of data stays where a constant would have it."""
    torch.manual_seed(seed)
    truth = torch.randn(25, 3)
    model = nn.Sequential(nn.Linear(25, 40), nn.ReLU(), nn.Linear(40, 3))
    steps = optimizer(model.parameters(), 3e-3 if optimizer is torch.optim.Adam else 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(260):
            x = torch.randn(32, 25)
            loss = functional.cross_entropy(model(x), (x @ truth).argmax(1)) + factor * model[0].weight.abs().sum()
            steps.zero_grad()
            loss.backward()
            steps.step()
    told = [i for i in exporter.issues if i.issue_type is IssueType.NOT_LEARNING and i.severity >= Severity.MEDIUM]
    assert bool(told) is not learns
    assert [issue.healed_step for issue in told if issue.healed_step is not None] == []


class Bounded(nn.Module):
    """A number between -4 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(25, 40), nn.Linear(40, 1)

    def forward(self, x):
        """Return a number of each sample. Shape: ``[batch, 1]``."""
        return 4 * torch.tanh(self.head(torch.relu(self.inner(x))) / 4)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize(("factor", "learns"), [(0.05, True), (-0.05, True), (-1.5, False)])
def test_a_term_that_pays_for_the_others_is_told(factor, learns, seed):
    """A penalty on the answers with the wrong sign lets the loss fall, while its squared error rises."""
    torch.manual_seed(seed)
    truth, model = torch.randn(25, 1) / 5, Bounded()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, verbose=0) as exporter:
        exporter.watch()
        for _ in range(180):
            x = torch.randn(32, 25)
            answers = model(x)
            loss = functional.mse_loss(answers, x @ truth) + factor * answers.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    told = [issue for issue in exporter.issues if issue.severity >= Severity.MEDIUM]
    assert bool(told) is not learns
    assert {issue.issue_type for issue in told} <= {IssueType.NOT_LEARNING, IssueType.DIVERGING}
    assert all("expense" in issue.advice for issue in told if issue.issue_type is IssueType.NOT_LEARNING)
