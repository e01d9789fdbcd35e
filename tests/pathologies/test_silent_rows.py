"""Layers directly behind each other that could be one, each beside rows that are right, seen by ``watch()`` alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Named(nn.Module):
    """Runs its modules by a function of them."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(self, x)


def rows(model, *, images=False, penalty=None):
    """Train ten steps; return the layers of all issues of CAPACITY."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(10):
            x, y = torch.randn(32, 1, 6, 6) if images else torch.randn(32, 6), torch.randint(3, (32,))
            out = model(x)
            loss = F.cross_entropy(out[0], y) + out[1].square().mean() if penalty else F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [set(issue.layers) for issue in exporter.issues if issue.issue_type == IssueType.CAPACITY]


def linear(*widths):
    return [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]


def stack(*between, last=3):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *between, nn.Flatten(), nn.Linear(288, last))


def attention(module, x):
    x = module.entry(x).relu().view(-1, 2, 16)
    q, k, v = module.q(x), module.k(x), module.v(x)
    return module.head(module.mix((q @ k.transpose(1, 2)).softmax(-1) @ v).mean(1))


def residual(module, x):
    x = module.entry(x).relu()
    return module.head(F.layer_norm(x + module.two(module.one(x)), (16,)))


ONE = {
    "a head": (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *linear(16, 12, 3)), {"2", "3"}),
    "dropout between": (
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 3)), {"2", "4"},
    ),
    "normalised between": (
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), {"0", "2"},
    ),
    "an embedding": (
        Named(
            lambda m, x: m.head(m.embedding(m.entry(x).relu())),
            entry=nn.Linear(6, 16), embedding=nn.Linear(16, 8), head=nn.Linear(8, 3),
        ),
        {"embedding", "head"},
    ),
    "feed-forward": (
        Named(residual, entry=nn.Linear(6, 16), one=nn.Linear(16, 64), two=nn.Linear(64, 16), head=nn.Linear(16, 3)),
        {"one", "two"},
    ),
    "a slope of 1": (
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.LeakyReLU(True), nn.Linear(16, 3)), {"2", "4"},
    ),
    "slopes of 1 alone": (nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(1.0), nn.Linear(16, 3)), {"0", "2"}),
    "convolutions": (stack(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), {"0", "1"}),
    "normalised convolutions": (
        stack(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)), {"0", "2", "5"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_two_layers_that_could_be_one_are_capacity(name):
    """Two like layers with nothing that bends between them are told at both, once."""
    model, layers = ONE[name]
    assert rows(model, images="convolutions" in name) == [layers]


TWO = {
    "low rank": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2), nn.Linear(2, 3)),
    "autoencoder": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *linear(16, 4, 16), nn.ReLU(), nn.Linear(16, 3)),
    "a factorised table": Named(
        lambda m, x: m.head(m.project(m.table((x[:, 0] > 0).long()))),
        table=nn.Embedding(20, 6), project=nn.Linear(6, 6), head=nn.Linear(6, 30),
    ),
    "modules that meet": nn.Sequential(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
    ),
    "adapter": Named(
        lambda m, x: m.head(F.relu(m.base(m.entry(x).relu()) + m.b(m.a(m.entry(x).relu())))),
        entry=nn.Linear(6, 16), base=nn.Linear(16, 4), a=nn.Linear(16, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 3),
    ),
    "attention by hand": Named(
        attention, entry=nn.Linear(6, 32), q=nn.Linear(16, 16), k=nn.Linear(16, 16), v=nn.Linear(16, 16),
        mix=nn.Linear(16, 16), head=nn.Linear(16, 3),
    ),
    "attention": Named(
        lambda m, x: m.head(m.attention(*3 * (m.entry(x).relu()[:, None],))[0][:, 0]),
        entry=nn.Linear(6, 16), attention=nn.MultiheadAttention(16, 2, batch_first=True), head=nn.Linear(16, 3),
    ),
    "recurrence": Named(
        lambda m, x: m.head(m.rnn(m.entry(x).view(-1, 2, 8))[0][:, -1]),
        entry=nn.Linear(6, 16), rnn=nn.GRU(8, 8, batch_first=True), head=nn.Linear(8, 3),
    ),
    "a slope that learns": nn.Sequential(nn.Linear(6, 16), nn.PReLU(init=1.0), nn.Linear(16, 3)),
    "depthwise convolutions": stack(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1), nn.ReLU()),
    "kernels in two directions": stack(
        nn.ReLU(), nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), nn.Conv2d(8, 8, (3, 1), padding=(1, 0)), nn.ReLU(),
    ),
    "convolutions and a shuffle": stack(
        nn.ReLU(), nn.Conv2d(8, 32, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.ReLU(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_rows_with_a_purpose_are_left_in_peace(name):
    """A narrow middle, adapters, attention, factored convolutions and tables of low rank raise no CAPACITY."""
    assert rows(TWO[name], images="convolutions" in name or "kernels" in name) == []


def test_a_middle_that_another_loss_takes_is_left_in_peace():
    """What stands between two layers and is penalised as well, as in a variational code, is wanted."""
    model = Named(
        lambda m, x: (m.two(h := m.one(m.entry(x).relu())), h),
        entry=nn.Linear(6, 16), one=nn.Linear(16, 16), two=nn.Linear(16, 3),
    )  # fmt: skip
    assert rows(model, penalty=True) == []
