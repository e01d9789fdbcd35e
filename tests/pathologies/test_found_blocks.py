"""Models whose blocks nobody named: two heads, actor and critic, siblings with a margin, and real narrow places."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


def issues(model, loss, *, steps=25, lr=1e-2):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(model)
            exporter.observe(loss=value)
            value.backward()
            optimizer.step()
    return exporter.issues


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_two_losses_of_different_size_on_one_trunk_are_healthy():
    """Classes and a reconstruction a thousand times as large, on two heads, raise nothing."""
    m = nn.ModuleDict(
        {"a": nn.Linear(16, 32), "b": nn.Linear(32, 32), "kind": nn.Linear(32, 4), "copy": nn.Linear(32, 16)}
    )
    x, y = torch.randn(64, 16), torch.randint(4, (64,))

    def loss(m):
        h = m["b"](m["a"](x).relu()).relu()
        return F.cross_entropy(m["kind"](h), y) + 1e3 * F.mse_loss(m["copy"](h), x)

    assert issues(m, loss) == ()


class Branched(nn.Module):
    """A trunk, and beside it a narrow branch that only weighs what the trunk gives."""

    def __init__(self, kind):
        super().__init__()
        self.kind, wide = kind, 48
        self.trunk = nn.Sequential(nn.Linear(16, wide), nn.ReLU())
        self.branch = nn.Sequential(nn.Linear(wide, 32), nn.Tanh())
        self.beside = nn.Sequential(nn.Linear(wide, 32), nn.Sigmoid()) if kind == "two branches" else None
        self.score = nn.Linear(32, 1)
        self.last = nn.Linear(1 if kind == "all of it" else wide, 4)

    def forward(self, x):
        h = self.trunk(x)
        weights = self.score(self.branch(h) if self.beside is None else self.branch(h) * self.beside(h))
        if self.kind in {"attention", "two branches"}:
            return self.last((weights.softmax(1) * h).sum(1))
        h, weights = h.mean(1), weights.mean(1)
        return self.last(weights if self.kind == "all of it" else weights.sigmoid() * h)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("kind", ["attention", "two branches", "gate", "all of it"])
def test_a_narrow_branch_beside_a_trunk_loses_nothing(kind, seed):
    """Scores of attention pooling and gates have one output; where everything passes through it, it is a bottleneck."""
    torch.manual_seed(seed)
    m = Branched(kind)
    x, y = torch.randn(256, 6, 16), torch.randint(4, (256,))
    x[torch.arange(256), 0, y] += 4.0
    found = {issue.issue_type for issue in issues(m, lambda m: F.cross_entropy(m(x), y), lr=1e-3)}
    assert (IssueType.BOTTLENECK in found) == (kind == "all of it")


def test_value_of_a_critic_beside_a_policy_is_no_bottleneck():
    """A critic's one output, called after the actor's five, loses nothing that anybody needs."""
    m = nn.ModuleDict(
        {
            name: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, out))
            for name, out in (("critic", 1), ("actor", 5))
        }
    )
    x, y, value = torch.randn(64, 6), torch.randint(5, (64,)), torch.randn(64)

    def loss(m):
        return F.mse_loss(m["critic"](x)[:, 0], value) + F.cross_entropy(m["actor"](x), y)

    assert issues(m, loss) == ()


def test_layer_of_one_unit_in_the_middle_is_a_bottleneck_and_the_output_of_one_unit_is_not():
    """Of a network found by itself the narrow layer is named, at whose output sixteen directions become one."""
    widths = [16, 32, 1, 32, 1]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    m, x = nn.Sequential(*layers[:-1]), torch.randn(64, 16)
    y = torch.sin(x @ torch.randn(16, 1))
    found = [i for i in issues(m, lambda m: F.mse_loss(m(x), y), lr=1e-3) if i.issue_type is IssueType.BOTTLENECK]
    assert [issue.layers for issue in found] == [("2",)]


def test_chain_that_vanishes_is_found_without_names_of_blocks():
    """Ten small layers one after the other vanish, though between two heads nothing is compared."""
    layers = [nn.Linear(16, 16) for _ in range(10)]
    for layer in layers:
        nn.init.normal_(layer.weight, 0, 0.05)
    m = nn.ModuleDict({"body": nn.Sequential(*layers), "one": nn.Linear(16, 3), "two": nn.Linear(16, 3)})
    m["stem"] = nn.Embedding(20, 16)
    x, y = torch.randint(20, (64,)), torch.randint(3, (64,))

    def loss(m):
        h = m["body"](m["stem"](x))
        return F.cross_entropy(m["one"](h), y) + F.cross_entropy(m["two"](h), y)

    assert IssueType.VANISHING in {issue.issue_type for issue in issues(m, loss)}


class Added(nn.Module):
    """One layer with a skip connection around it."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + 0.3 * torch.tanh(self.layer(x))


@pytest.mark.parametrize("place", [1, 5, 8])
def test_a_damping_layer_among_residual_layers_is_the_one_accused(place):
    """What stands around a layer belongs to it: neither a neighbour's skip connection nor the head is blamed."""
    x = torch.randn(256, 16)
    y = (x[:, 0] + x[:, 1] > 0).long()
    body = [Added(16) for _ in range(9)]
    assert issues(nn.Sequential(*body, nn.Linear(16, 2)), lambda m: F.cross_entropy(m(x), y)) == ()
    body[place] = nn.Linear(16, 16)
    body[place].weight.data *= 0.002
    told = issues(nn.Sequential(*body, nn.Linear(16, 2)), lambda m: F.cross_entropy(m(x), y), lr=1e-3)
    assert [layer for i in told if i.issue_type is IssueType.BOTTLENECK for layer in i.layers] == [str(place)]
