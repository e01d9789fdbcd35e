"""Small training programs, each ill in one way or healthy, watched from the optimizer step to the issue."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter


class Chain(nn.Module):
    """A chain of linear layers with activations and a head."""

    def __init__(self, depth, act=nn.ReLU, width=24):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), act()) for _ in range(depth))
        self.head = nn.Linear(width, 6)
        for block in self.blocks:
            nn.init.normal_(block[0].weight, 0, math.sqrt((2.0 if act is nn.ReLU else 1.0) / width))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def issues(model, *, steps=30, lr=0.05, scale=1.0, spoil=None, optimizer=None, factor=1.0):
    x = torch.randn(128, 24)
    y = (x @ torch.randn(24, 6)).argmax(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch(blocks=[f"blocks.{i}" for i in range(len(model.blocks))])
        for step in range(steps):
            rows = slice(step % 4 * 32, step % 4 * 32 + 32)
            inputs = x[rows] * scale
            if spoil is not None and step == spoil[0]:
                inputs = inputs * spoil[1]
            loss = factor * F.cross_entropy(model(inputs), y[rows])
            optimizer.zero_grad()
            loss.backward()
            exporter.observe(loss=loss)
            optimizer.step()
    return exporter.issues


def types(found):
    return {issue.issue_type for issue in found}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_deep_sigmoid_chain_vanishes_at_any_loss_scale(factor):
    """Sixteen sigmoid layers pass on a quarter of the gradient each, however the loss is scaled."""
    found = issues(Chain(16, nn.Sigmoid), factor=factor, lr=0.05 / factor)
    assert types(found) == {IssueType.VANISHING}
    assert found[0].layer == "blocks.0"


def test_oversized_weights_explode():
    """Weights at three times their healthy size multiply the gradient in every block."""
    model = Chain(8)
    with torch.no_grad():
        for block in model.blocks:
            block[0].weight.mul_(3)
    assert IssueType.EXPLODING in types(issues(model))


def test_layer_of_dead_units_is_named():
    """A bias of -30 silences a layer: the activation is named, and what follows from it is not called vanishing."""
    model = Chain(4)
    nn.init.constant_(model.blocks[1][0].bias, -30.0)
    found = issues(model)
    assert IssueType.DEAD in types(found)
    assert IssueType.VANISHING not in types(found)
    assert next(i for i in found if i.issue_type is IssueType.DEAD).layer == "blocks.1.1"


def test_one_scaled_layer_is_the_bottleneck():
    """The block whose weights are a thousandth of the others' is named, and only that one."""
    model = Chain(7, nn.Tanh)
    with torch.no_grad():
        model.blocks[3][0].weight.mul_(1e-3)
    found = [i for i in issues(model, steps=15) if i.issue_type is IssueType.BOTTLENECK]
    assert [i.layers for i in found] == [("blocks.3",)]


def test_forgotten_parameters_stagnate_with_the_reason():
    """A block that was never given to the optimizer is named with the reason."""
    model = Chain(3)
    owned = [p for n, p in model.named_parameters() if not n.startswith("blocks.0")]
    found = issues(model, optimizer=torch.optim.SGD(owned, lr=0.05))
    assert types(found) == {IssueType.STAGNATION, IssueType.NOT_TRAINING}
    assert all("optimizer" in issue.message for issue in found)
    assert all(set(issue.layers) == {"blocks.0.0.weight", "blocks.0.0.bias"} for issue in found)


def test_nan_in_one_batch_is_one_issue():
    """A NaN batch at the ninth step is one critical issue that names the input and that step, and no layer."""
    found = issues(Chain(3), spoil=(8, float("nan")))
    assert [(i.issue_type, i.layers, i.step) for i in found] == [(IssueType.NUMERICAL, ("",), 9)]
    assert found[0].cause == "the input of the model, micro-batch 1, step 9, rank 0"


@pytest.mark.parametrize(
    ("act", "settings"),
    [
        (nn.ReLU, {}),
        (nn.Tanh, {"lr": 0.1}),
        (nn.ReLU, {"factor": 1e-8, "lr": 0.05e8}),
        (nn.ReLU, {"factor": 32.0, "lr": 0.05 / 32}),
        (nn.ReLU, {"steps": 150}),
    ],
    ids=["relu", "tanh", "tiny-loss", "summed-loss", "longer"],
)
def test_healthy_programs_raise_nothing(act, settings):
    """Plain networks that learn are left in peace, whatever the scale of their loss."""
    assert issues(Chain(4, act), **settings) == ()
