"""Bounds of what a node can give out hold for whatever enters, however operations are put together."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export.autograd_graph.bounds import before_logits, bounds_of

ONE = (
    torch.sigmoid, torch.tanh, torch.relu, torch.sin, torch.cos, F.softplus, F.elu, F.hardtanh, F.relu6, F.hardsigmoid,
    F.logsigmoid, torch.exp, torch.abs, torch.square, torch.neg, torch.nan_to_num, torch.reciprocal, F.gelu, F.silu,
    lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.clamp(-0.5, 2.0), lambda x: x.clamp(min=0.0),
    lambda x: x.clamp(max=1.0), lambda x: 3.0 * x, lambda x: x / -2.0, lambda x: x + 1.0, lambda x: 1.0 - x,
    lambda x: x - 0.5, lambda x: F.dropout(x, 0.3), lambda x: x * torch.randn(4, 5), lambda x: F.threshold(x, 0.1, -7.0),
    lambda x: x.t().reshape(4, 5), lambda x: x.flip(0)[:, [0, 1, 1, 2, 4]], lambda x: x.exp() / x.exp().sum(-1, True),
    lambda x: x**3, lambda x: x.square().sqrt(), lambda x: x.mean(1, keepdim=True).expand(4, 5), F.leaky_relu,
    lambda x: F.interpolate(x[None], 5, mode="linear")[0], lambda x: torch.maximum(x, torch.zeros(())),
    lambda x: torch.where(torch.rand(4, 5) < 0.5, x, torch.full((), 9.0)), lambda x: x.masked_fill(x > 0.3, -9.0),
)  # fmt: skip
TWO = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.div,
    lambda a, b: torch.cat([a, b])[2:6], lambda a, b: torch.stack([a, b])[1], lambda a, b: (a + b) / 2.0,
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.where(torch.rand(4, 5) < 0.5, a, b),
    lambda a, b: torch.add(a, b, alpha=3.0), lambda a, b: torch.sub(a, b, alpha=-2.0),
)  # fmt: skip


def composed(draw, depth):
    """Return what random operations make of a layer's outputs."""
    if depth == 0:
        return 10.0 ** draw.uniform(-1, 2) * nn.Linear(5, 5)(torch.randn(4, 5))
    if draw.random() < 0.3:
        return draw.choice(TWO)(composed(draw, depth - 1), composed(draw, depth - 1))
    return draw.choice(ONE)(composed(draw, depth - 1))


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_bounds_hold(depth):
    """Of two hundred compositions none leaves its bounds, and bounds are known of many."""
    known = 0
    for seed in range(200):
        torch.manual_seed(seed)
        made = composed(random.Random(seed), depth)
        low, high, width = bounds_of(made.grad_fn)
        known += width < float("inf") or low >= 0
        values = made.detach().double()
        values = values[values.isfinite()]
        if len(values):
            slack = 1e-5 * (1.0 + float(values.abs().max()))
            assert low - slack <= values.min() <= values.max() <= high + slack, seed
            assert values.max() - values.min() <= width + slack, seed
    assert known >= 30


def test_bounds_are_as_narrow_as_they_should_be():
    """Of what users write before a loss."""
    x = nn.Linear(5, 5)(torch.randn(4, 5))
    for made, expected in (
        (torch.sigmoid(x), (0.0, 1.0, 1.0)),
        (2.0 * torch.sigmoid(x), (0.0, 2.0, 2.0)),
        (2.0 * torch.sigmoid(x) - 1.0, (-float("inf"), float("inf"), 2.0)),
        ((torch.sigmoid(x) + torch.sigmoid(-x)) / 2.0, (0.0, 1.0, 1.0)),
        (x.exp() / x.exp().sum(-1, keepdim=True), (-float("inf"), float("inf"), float("inf"))),  # of two exponentials
        (torch.cat([torch.sigmoid(x), torch.tanh(x)]), (-1.0, 1.0, 2.0)),
        (30.0 * torch.tanh(x / 30.0), (-30.0, 30.0, 60.0)),
        (torch.relu(x), (0.0, float("inf"), float("inf"))),
        (x.clamp(-1.0, 0.5), (-1.0, 0.5, 1.5)),
        (torch.tanh(x) * torch.sigmoid(x), (-1.0, 1.0, 2.0)),
        (x, (-float("inf"), float("inf"), float("inf"))),
    ):
        assert bounds_of(made.grad_fn) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_the_least_loss_is_that_of_the_bounds(scale):
    """Of a positive whose logit is a scaled sigmoid, and of three classes; nothing bounds the outputs of a layer."""
    x = nn.Linear(5, 3)(torch.randn(4, 5))
    made = (scale * torch.sigmoid(x)).grad_fn
    assert list(before_logits(made).values()) == pytest.approx([math.log1p(math.exp(-scale))])
    assert list(before_logits(made, 3).values()) == pytest.approx([math.log1p(2.0 * math.exp(-scale))])
    assert before_logits(x.grad_fn) == before_logits(x.grad_fn, 3) == {}
