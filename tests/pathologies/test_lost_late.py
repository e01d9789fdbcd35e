"""DIVERGING for what begins late: the learning is lost since a step, however noisy the losses of small batches are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.records.issues import Severity


def relapses(change, seed, noise=0.6, steps=320):
    """Train a regression on batches of 16, of which ``change`` makes something else after step 150; return DIVERGING."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    direction = torch.randn(10) / 10**0.5
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(steps):
            x = torch.randn(16, 10)
            y = (x @ direction + noise * torch.randn(16)).unsqueeze(1)
            x, y = change(x, y) if step > 150 else (x, y)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type is IssueType.DIVERGING]


@pytest.mark.parametrize(
    "change",
    [lambda x, y: (0.02 * x, y), lambda x, y: (x, y.roll(1, 0)), lambda x, y: (torch.randn_like(x), y)],
    ids=["inputs lose their scale", "targets of other samples", "inputs are noise"],
)
@pytest.mark.parametrize("seed", range(2))
def test_learning_that_is_lost_late_is_told_with_its_step_in_noise(change, seed):
    """Single batches are answered well by luck, the level of ten is not; a last layer that shrinks is no decay."""
    (issue,) = relapses(change, seed)
    assert (issue.severity >= Severity.MEDIUM, issue.cause, issue.healed_step) == (True, "learning lost", None)
    assert 130 <= issue.step <= 170


@pytest.mark.parametrize(
    "change",
    [lambda x, y: (x, y), lambda x, y: (x, y + 0.4 * torch.randn_like(y)), lambda x, y: (-x, y)],
    ids=["nothing", "noisier targets", "another task that is learned"],
)
@pytest.mark.parametrize("seed", range(2))
def test_noisy_losses_and_harder_data_are_no_loss_of_learning(change, seed):
    """Noise alone, noisier data, and data that are learned anew: at most a remark, that is over once they are."""
    assert all(issue.severity <= Severity.LOW for issue in relapses(change, seed))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [3e-4, 1e-3])
def test_fine_tuning_on_other_texts_loses_no_learning(rate, seed):
    """The loss leaps with the data, above the best constant's, and falls since: the model learns what is new."""
    torch.manual_seed(seed)
    chains = [torch.softmax(3.0 * torch.randn(24, 24), 1) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(24, 48), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 24))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(480):
            if step == 250:
                optimizer = torch.optim.AdamW(model.parameters(), rate)
            words = torch.randint(24, (256,))
            after = torch.multinomial(chains[step >= 250][words], 1)[:, 0]
            optimizer.zero_grad()
            F.cross_entropy(model(words), after).backward()
            optimizer.step()
    assert not [issue for issue in exporter.issues if issue.severity > Severity.LOW]


@pytest.mark.parametrize("seed", range(2))
def test_a_player_that_loses_to_a_better_one_has_lost_no_learning(seed):
    """What a critic sees is made by another network that learns: its loss rises to that of a guess, as it should."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    makes, judges = (torch.optim.Adam(part.parameters(), 2e-3, betas=(0.5, 0.999)) for part in (maker, critic))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    with Exporter(critic, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(420):
            angle = torch.randint(8, (64, 1)) * torch.pi / 4
            real = 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            noise = torch.randn(64, 4)
            makes.zero_grad()
            F.mse_loss(critic(maker(noise)), ones).backward()
            makes.step()
            made = maker(noise)
            judges.zero_grad()
            (F.mse_loss(critic(real), ones) + F.mse_loss(critic(made.detach()), zeros)).mul(0.5).backward()
            judges.step()
    assert not [issue for issue in exporter.issues if issue.severity > Severity.LOW]
