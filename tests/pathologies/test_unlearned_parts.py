"""Columns of targets and terms of a loss that are not learned while others are."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity

PARTS = {IssueType.NOT_LEARNING, IssueType.BAD_TARGETS}


def trained(model, loss_of, steps=270, lr=0.05):
    """Train with momentum while watched; return the issues of more than LOW."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True) as exporter:
        exporter.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return [issue for issue in exporter.issues if issue.severity > Severity.LOW]


def mlp(outputs):
    """Return a network of two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def plane(count=64):
    """Return inputs and two targets that follow from them."""
    x = torch.randn(count, 6)
    return x, torch.stack([x[:, 0] - x[:, 1], x[:, 2] + x[:, 3].abs()], dim=1)


@functools.cache
def weighed(weights, whole):
    """Train with a weight for each of two columns, once for all tests; return the issues."""

    def loss(model):
        x, y = plane()
        return whole * (torch.tensor(weights) * (model(x) - y).square()).mean()

    return trained(mlp(2), loss, lr=0.05 / whole)


@pytest.mark.parametrize(
    ("column", "weights", "whole"),
    [(0, (1e-5, 1.0), 1.0), (1, (1.0, 1e-5), 1.0), (0, (1e-5, 1.0), 1e-3), (0, (1e-5, 1.0), 1e3)],
)
def test_a_column_without_weight_is_named(column, weights, whole):
    """Whichever it is, and whatever the whole loss is multiplied by; with equal weights nothing is said."""
    found = weighed(weights, whole)
    assert [(issue.issue_type, issue.layers) for issue in found] == [(IssueType.NOT_LEARNING, (f"4[{column}]",))]
    assert weighed((1.0, 1.0), whole) == []


class Heads(nn.Module):
    """One body and two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.one, self.other = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        """Return classes and a number."""
        h = self.body(x)
        return self.one(h), self.other(h)


@pytest.mark.parametrize("turned", [True, False])
def test_a_term_without_weight_is_named(turned):
    """Whichever comes first in the sum."""

    def loss(model, weight):
        x, y = plane()
        classes, value = model(x)
        terms = [functional.cross_entropy(classes, x[:, :3].argmax(1)), weight * functional.mse_loss(value, y[:, 1:])]
        return sum(terms[::-1] if turned else terms)

    found = trained(Heads(), lambda model: loss(model, 1e-6))
    assert [(issue.issue_type, issue.layers) for issue in found] == [(IssueType.NOT_LEARNING, ("other",))]
    assert trained(Heads(), lambda model: loss(model, 0.3)) == []


@pytest.mark.parametrize("kind", ["noise", "mask"])
def test_what_cannot_be_learned_is_not_reported(kind):
    """A column of noise, and one that a mask takes out of the loss."""

    def loss(model):
        x, y = plane()
        if kind == "noise":
            return functional.mse_loss(model(x), torch.cat([y[:, :1], torch.randn(64, 1)], dim=1))
        mask = torch.cat([torch.ones(64, 1), (torch.rand(64, 1) < 0.02).float()], dim=1)
        return (mask * (model(x) - y).square()).sum() / mask.sum()

    assert trained(mlp(2), loss) == []


@pytest.mark.parametrize("kept", [True, False])
def test_inputs_mirrored_without_their_targets(kept):
    """The first target changes its sign with the inputs that are mirrored; where it keeps its own, it is random."""

    def loss(model):
        x, y = plane()
        y[:, 0] = 2.0 * x[:, 0] + x[:, 1]
        signs = torch.where(torch.rand(64) < 0.5, -1.0, 1.0)
        x[:, :2] *= signs[:, None]
        y[:, 0] *= 1.0 if kept else signs
        return functional.mse_loss(model(x), y)

    found = trained(mlp(2), loss)
    assert [issue.issue_type for issue in found] == [IssueType.BAD_TARGETS] * kept
    assert all("4[0]" in issue.message and "sign" in issue.message for issue in found)


class _Turned(torch.autograd.Function):
    """Passes values on, and gradients with a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class Fair(nn.Module):
    """A task, and a critic that the body is to hide a group from."""

    def __init__(self, turned):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 4), nn.Tanh())
        self.task, self.critic = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
        self.turned = turned

    def forward(self, x):
        """Return an answer and scores of groups."""
        h = self.body(x)
        return self.task(h), self.critic(_Turned.apply(h, -1.0) if self.turned else h)


@pytest.mark.parametrize("turned", [True, False])
def test_a_part_whose_gradient_is_turned_round_is_meant_to_be_high(turned):
    """The body hides what the critic asks for; without the reversal, a critic that counts nothing is told as before."""

    def loss(model):
        group, y = torch.randint(3, (128,)), torch.randn(128, 1)
        mixed = torch.cat([y + 0.4 * torch.randn(128, 4), group[:, None] - 1.0 + 0.6 * torch.randn(128, 6)], 1)
        said, scores = model(mixed)
        task = functional.binary_cross_entropy_with_logits(said, (y > 0).float())
        return task + (1.0 if turned else 1e-3) * functional.cross_entropy(scores, group)

    found = {issue.issue_type for issue in trained(Fair(turned), loss, steps=420)}
    assert (IssueType.NOT_LEARNING in found) is not turned
