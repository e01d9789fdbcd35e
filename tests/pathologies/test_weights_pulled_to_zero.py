"""LEARNING_RATE for weights that decay faster than they learn; VANISHING in what stands behind a chain of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity


def trained(model, optimizer, steps=120, before=lambda _step: None, apart=2.0):
    """Train on three classes; return the issues."""
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(steps):
            before(step)
            y = torch.randint(3, (32,))
            x = torch.randn(32, 6) + apart * F.one_hot(y, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return exporter.issues


def net(width=24):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 3),
    )  # fmt: skip


def test_weights_that_decay_faster_than_they_learn_are_told():
    """Decay that is the greater part of each step pulls everything to 0, and nothing is learned."""
    model = net()
    issues = trained(model, torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5))
    assert "weights decay" in {issue.cause for issue in issues}


@pytest.mark.parametrize(
    ("factor", "power", "told"), [(0.05, 1, True), (0.5, 2, True), (1e-4, 1, False), (1e-4, 2, False)]
)
def test_a_penalty_in_the_loss_that_pulls_faster_than_the_rest_learns(factor, power, told):
    """The whole loss falls with the weights, and the part that is known stays; a light one lets the model learn."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(160):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            penalty = sum(p.abs().pow(power).sum() for p in model.parameters())
            (F.mse_loss(model(x), x[:, :3] + x[:, 3:]) + factor * penalty).backward()
            optimizer.step()
    assert ("weights decay" in {issue.cause for issue in exporter.issues}) is told


def test_weights_that_begin_to_decay_late_are_told_as_well():
    """What was learned goes with them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def grow(step):
        optimizer.param_groups[0]["weight_decay"] = 0.5 if step > 150 else 0.0

    issues = trained(model, optimizer, steps=230, before=grow)
    (decay,) = [issue for issue in issues if issue.cause == "weights decay"]
    assert decay.step - decay.before <= 152 <= decay.step + 5, "dated by the readings between which it began"


@pytest.mark.parametrize("seed", [0, 2])
def test_a_few_high_losses_of_small_batches_are_no_standstill(seed):
    """Adam takes the decay of weights that have hardly a gradient for one; meanwhile the model learns."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(40, 32), nn.Flatten(), nn.Linear(320, 64), nn.ELU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3, weight_decay=1e-2)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(120):
            x = torch.randint(40, (16, 10))
            optimizer.zero_grad()
            F.cross_entropy(model(x), ((x < 8).sum(1) > 1).long()).backward()
            optimizer.step()
    assert "weights decay" not in {issue.cause for issue in exporter.issues}


@pytest.mark.parametrize("decay", [0.0, 1e-2, 0.1, 10.0])
def test_decay_under_which_a_model_learns_is_left_in_peace(decay):
    """What is usual for AdamW, and even what halves the weights where the loss falls all the same."""
    model = net()
    assert trained(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=decay)) == ()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kind", "lr", "decay"), [(torch.optim.Adagrad, 0.06, 0.01), (torch.optim.SGD, 0.3, 0.02)])
def test_decay_that_outweighs_what_a_solved_task_leaves_of_the_gradient_is_none(kind, lr, decay, seed):
    """Hardly a gradient is left to hold against it once the loss is near 0."""
    torch.manual_seed(seed)
    body = [part for inputs in (6, 24) for part in (nn.Linear(inputs, 24), nn.LayerNorm(24), nn.ReLU())]
    model = nn.Sequential(*body, nn.Linear(24, 3))
    optimizer = kind(model.parameters(), lr=lr, weight_decay=decay)
    issues = trained(model, optimizer, steps=250, apart=4.0)
    assert [issue for issue in issues if issue.severity >= Severity.MEDIUM] == []


class Ratings(nn.Module):
    """A rating is the product of two rows of tables, and a number that all ratings share."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(40, 4), nn.Embedding(30, 4)
        with torch.no_grad():
            self.users.weight.mul_(0.3)
            self.items.weight.mul_(0.3)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1) + self.mean


@pytest.mark.parametrize(("decay", "told"), [(0.3, True), (1e-5, False)])
def test_tables_that_decay_faster_than_they_learn_are_told(decay, told):
    """Also where the loss is written by hand, so that nobody knows the best constant's."""
    torch.manual_seed(0)
    model, users, items = Ratings(), torch.randn(40, 4), torch.randn(30, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2, weight_decay=decay)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for _ in range(150):
            u, i = torch.randint(40, (64,)), torch.randint(30, (64,))
            optimizer.zero_grad()
            (model(u, i) - 3.0 - 0.3 * (users[u] * items[i]).sum(1)).pow(2).mean().backward()
            optimizer.step()
    assert ("weights decay" in {issue.cause for issue in exporter.issues}) is told


class Headed(nn.Module):
    """Blocks in a list, and a head that may be deep."""

    def __init__(self, head):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), head

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def test_a_gradient_that_fades_behind_the_blocks_is_told():
    """Eight sigmoid layers in the head let nothing through, although the chain of blocks before them is healthy."""
    torch.manual_seed(0)
    deep = [layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Sigmoid())]
    for head, told in ((nn.Sequential(*deep, nn.Linear(6, 3)), True), (nn.Linear(6, 3), False)):
        model = Headed(head)
        issues = trained(model, torch.optim.Adam(model.parameters(), lr=3e-3), steps=30)
        assert (IssueType.VANISHING in {issue.issue_type for issue in issues}) is told
