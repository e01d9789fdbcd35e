"""Networks that cannot say what they are asked, whatever their weights."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent.common import Bug, Program, accuracy, explained, loader


class _Tabular(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, 4) for n in (5, 7))
        sizes, layers = (13, 64, 64, 32), []
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out)]
            layers += [nn.ReLU(), nn.Dropout(0.05)] if fixed else [nn.Dropout(0.05)]
        self.mlp = nn.Sequential(*layers)
        self.out = nn.Linear(32, 2)

    def forward(self, row: Tensor) -> Tensor:
        columns = [embed(row[:, i].long()) for i, embed in enumerate(self.embeds)]
        return self.out(self.mlp(torch.cat([*columns, row[:, 2:]], 1)))


def tabular_mlp_of_linear_layers(fixed: bool) -> Program:
    """Linear, BatchNorm and Dropout thrice over, and no activation anywhere: interactions of columns stay unseen."""
    numbers = torch.randn(1400, 5)
    first, second = torch.randint(5, (1400,)), torch.randint(7, (1400,))
    slope = torch.tensor([1.5, -1.5, 1.0, -1.0, 2.0])[first]
    y = (slope * numbers[:, 0] + numbers[:, 1] * numbers[:, 2] + 0.3 * numbers[:, 3] > 0).long()
    x = torch.cat([first[:, None].float(), second[:, None].float(), numbers], 1)
    model = _Tabular(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=220)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(64, 220, x[:1000], y[:1000])):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()
            if step % 44 == 43:
                accuracy(model, x[1000:], y[1000:])

    return Program(model, train, lambda: accuracy(model, x[1000:], y[1000:]), 0.75)


class _Waveform(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24 if fixed else 1)
        self.project = nn.Linear(1, 24)
        self.position = nn.Parameter(0.02 * torch.randn(16, 24))
        self.encoder = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.classify = nn.Linear(24, 3)
        self.fixed = fixed

    def forward(self, signal: Tensor) -> Tensor:
        h = self.norm(self.project(signal)) if self.fixed else self.project(self.norm(signal))
        return self.classify(self.encoder(h + self.position).mean(1))


def layer_norm_of_one_channel(fixed: bool) -> Program:
    """A signal of one channel is put through ``LayerNorm(1)`` first, which makes every number the same."""
    y = torch.randint(3, (800,))
    phase = torch.arange(16) * 0.4 * torch.tensor([0.5, 1.5, 4.0])[y, None] + 6.28 * torch.rand(800, 1)
    x = (phase.sin() + 0.1 * torch.randn(800, 16)).unsqueeze(2)
    model = _Waveform(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(40, 240, x[:560], y[:560]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x[560:], y[560:]), 0.8)


class _GraphGRU(nn.Module):
    def __init__(self, ring: Tensor, fixed: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 16)
        self.cell = nn.GRUCell(16, 24)
        self.linear = nn.Linear(24, 1)
        self.ring, self.fixed = ring, fixed

    def forward(self, x: Tensor) -> Tensor:
        h = None
        for t in range(x.shape[1]):
            around = torch.stack([x[:, t], x[:, t] @ self.ring], 2)
            state = self.cell(torch.relu(self.mix(around)).flatten(0, 1), h)
            h = state if self.fixed else None
        return self.linear(state).view(x.shape[0], -1)


def graph_state_never_handed_on(fixed: bool) -> Program:
    """A recurrent graph network goes through time, and each of its steps begins without the state of the last."""
    ring = 0.5 * (torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0))
    x = torch.randn(400, 6, 8)
    fading = 0.8 ** torch.arange(5, -1, -1)
    y = (x * fading[:, None]).sum(1) + 0.7 * (x[:, :4] @ ring).sum(1)
    y = y / y.std()
    model = _GraphGRU(ring, fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(20, 160, x[:280], y[:280]):
            optimizer.zero_grad()
            F.l1_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[280:], y[280:]), 0.75)


BUGS = (
    Bug(
        tabular_mlp_of_linear_layers,
        "https://github.com/somepago/saint/issues/23",
        "MLP is equivalent to a single linear layer",
        ("CAPACITY",),
        ("mlp", ""),
        ("NOT_LEARNING", "BOTTLENECK"),
    ),
    Bug(
        layer_norm_of_one_channel,
        "https://github.com/pytorch/pytorch/issues/108956",
        "nn.LayerNorm outputs zeros for single column batch",
        ("CAPACITY", "NOT_TRAINING", "DEAD", "NOT_LEARNING"),
        ("norm", "project", "input", ""),
        ("VANISHING", "STAGNATION", "BOTTLENECK", "BAD_TARGETS"),
    ),
    Bug(
        graph_state_never_handed_on,
        "https://github.com/benedekrozemberczki/pytorch_geometric_temporal/issues/145",
        "GConvGRU hidden state not passed",
        ("CAPACITY", "NOT_TRAINING"),
        ("cell", ""),
        ("NOT_LEARNING", "VANISHING", "STAGNATION", "RECURRENT_SUBCRITICAL"),
    ),
)
