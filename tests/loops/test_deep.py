"""Modules that lie so deep inside each other that Python's recursion limit is near."""

import re
import sys

import pytest
import torch
from torch import nn

from gradflow_export.hooks.members import nested


class Around(nn.Module):
    """A scale around another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.inner(x) * self.scale


def model_of(levels):
    """Return a layer with so many modules around it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    for _ in range(levels):
        model = Around(model)
    return model


def train(model, steps=3):
    """Train some steps; return losses and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def trains(levels):
    """Whether so deep a model trains without an exporter."""
    try:
        train(model_of(levels), 1)
    except RecursionError:
        return False
    return True


@pytest.fixture
def limit():
    """Put the recursion limit back."""
    before = sys.getrecursionlimit()
    yield before
    sys.setrecursionlimit(before)


def test_the_deepest_model_that_trains_unwatched_trains_watched(limit, watching, recorded, said):
    """The same bits; one line says what is not read, the rest is; with the recursion limit that it names, all is."""
    low, high = limit // 8, limit // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle) else (low, middle)
    low -= 2  # what the test itself takes for a call more
    bare = train(model_of(low))
    model = model_of(low)
    exporter = watching(model)
    assert all(map(torch.equal, train(model), bare))
    records = recorded(exporter)
    assert len(records) == 3
    assert all(r.value("gradient.total_norm") > 0 and r.value("update.total_norm") > 0 for r in records)
    assert not any("block.output_rms" in r.metrics for r in records)
    (line,) = said("recursion limit")
    sys.setrecursionlimit(int(re.search(r"setrecursionlimit\((\d+)\)", line)[1]))
    model = model_of(low)
    exporter = watching(model)
    assert all(map(torch.equal, train(model), bare))
    assert "block.output_rms" in recorded(exporter)[-1].metrics
    assert len(said("recursion limit")) == 1


def test_depth_counts_the_longest_way_down():
    """A module with a second name higher up, or that lies in one of its own parts, is as deep as its deepest place."""
    chain = model_of(40)
    _, plain = nested(chain)
    middle = chain
    for _ in range(20):
        middle = middle.inner
    chain.shortcut = middle
    middle.up = chain
    modules, limit = nested(chain)
    assert limit == plain
    assert {id(m) for m in modules} == {id(m) for m in chain.modules()}
    assert len(modules) == 41
