"""Logits that are bounded before a cross-entropy, made and used in every way that users write, beside what is in order."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

SOFTMAX = {
    "softmax": lambda h: h.softmax(1),
    "written out": lambda h: (p := h.exp()) / p.sum(1, keepdim=True),
    "dropout behind": lambda h: F.dropout(h.softmax(1), 0.2),
    "mean of two": lambda h: (h.softmax(1) + (-h).softmax(1)) / 2.0,
    "of a logarithm": lambda h: h.log_softmax(1).exp(),
    "kept finite": lambda h: torch.nan_to_num(h.softmax(1)),
    "scaled down": lambda h: h.softmax(1) / 2.0,
}
SIGMOID = {
    "sigmoid": torch.sigmoid,
    "limited": lambda h: torch.sigmoid(h).clamp(1e-3, 1.0 - 1e-3),
    "hard": F.hardsigmoid,
    "of two heads": lambda h: torch.cat([torch.sigmoid(h[:, :1]), torch.sigmoid(h[:, 1:])], 1),
    "less a half": lambda h: torch.sigmoid(h) - 0.5,
    "spread": lambda h: 2.0 * torch.sigmoid(h) - 1.0,
}
TANH = {
    "tanh": torch.tanh,
    "hard": F.hardtanh,
    "clamped": lambda h: h.clamp(-1.0, 1.0),
    "times a gate": lambda h: h.tanh() * h.sigmoid(),
}
MADE = {f"{what}: {how}": make for what, ways in (("softmax", SOFTMAX), ("sigmoid", SIGMOID), ("tanh", TANH))
        for how, make in ways.items()}  # fmt: skip
SOUND = {
    "as they are": lambda h: h,
    "soft cap": lambda h: 30.0 * torch.tanh(h / 30.0),
    "pointer": lambda h: 10.0 * torch.tanh(h),
    "wide clamp": lambda h: h.clamp(-20.0, 20.0),
    "sharpened": lambda h: h.sigmoid() * 16.0,
    "logarithms": lambda h: h.log_softmax(1),
    "leaky": F.leaky_relu,
}
CROSS = {
    "cross_entropy": F.cross_entropy,
    "smoothed": lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1),
    "nll": lambda s, y: F.nll_loss(s.log_softmax(1), y),
    "by hand": lambda s, y: (s.logsumexp(1) - s[torch.arange(len(y)), y]).mean(),
    "Categorical": lambda s, y: -torch.distributions.Categorical(logits=s).log_prob(y).mean(),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def causes(make, loss, outputs=4, steps=6):
    """Train with what is made of a layer's outputs; return what is wrong with the loss."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(steps):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            loss(make(model(x)), x[:, :4].argmax(1)).backward()
            optimizer.step()
    return {issue.cause for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS}


@pytest.mark.parametrize(
    ("how", "loss"), [*zip(MADE, itertools.cycle(CROSS)), *zip(MADE, itertools.cycle([*CROSS][2:]))]
)
def test_bounded_logits_of_classes_are_told(how, loss):
    """Whatever bounds them, and however the cross-entropy is written."""
    assert causes(MADE[how], CROSS[loss]) == {f"{how.partition(':')[0]} before cross-entropy"}


@pytest.mark.parametrize(
    ("how", "loss"), [*zip(SOUND, itertools.cycle(CROSS)), *zip(SOUND, itertools.cycle([*CROSS][2:]))]
)
def test_logits_that_reach_far_are_in_order(how, loss):
    """Bounds within which an answer can be sure."""
    assert causes(SOUND[how], CROSS[loss]) == set()


BINARY = {
    "with logits": F.binary_cross_entropy_with_logits,
    "softplus": lambda s, y: (F.softplus(s) - s * y).mean(),
    "logsigmoid": lambda s, y: -(y * F.logsigmoid(s) + (1.0 - y) * F.logsigmoid(-s)).mean(),
    "signed": lambda s, y: F.softplus(-s * (2.0 * y - 1.0)).mean(),
    "several labels": F.multilabel_soft_margin_loss,
}


@pytest.mark.parametrize("loss", BINARY)
@pytest.mark.parametrize("what", ["sigmoid", "tanh", None])
def test_bounded_logits_of_two_are_told(what, loss):
    """However their cross-entropy is written; logits that are not bounded are in order."""
    make = {"sigmoid": lambda h: F.dropout(h.sigmoid(), 0.1), "tanh": F.hardtanh, None: lambda h: h}[what]
    found = causes(make, lambda s, y: BINARY[loss](s, F.one_hot(y, 4).float()))
    assert found == (set() if what is None else {f"{what} before binary cross-entropy with logits"})


@pytest.mark.parametrize(
    "made", [F.softplus, torch.exp, torch.abs, torch.square, F.relu6, lambda h: F.dropout(h.relu())]
)
def test_a_logit_of_two_that_cannot_be_negative_is_told(made):
    """Whatever keeps it from being so: the probability is at least a half."""
    found = causes(made, lambda s, y: F.binary_cross_entropy_with_logits(s, F.one_hot(y, 4).float()))
    assert found == {"ReLU before binary cross-entropy with logits"}


@pytest.mark.parametrize("behind", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(0.2), nn.LeakyReLU(), nn.Identity()])
def test_logits_in_nll_are_told_by_what_they_are(behind):
    """A logarithm of a probability is never above 0, whatever stands behind the last layer."""
    assert causes(behind, F.nll_loss, steps=12) == {"logits given to nll_loss"}


def test_the_least_value_is_that_of_the_bounds():
    """Of three classes and a width of 1 it is 0.551."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Hardsigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(32, 6)), torch.randint(3, (32,))).backward()
            optimizer.step()
    (issue,) = (issue for issue in exporter.issues if issue.issue_type is IssueType.WRONG_LOSS)
    assert f"{math.log1p(2.0 * math.exp(-1.0)):.3f}" in issue.message


TWICE = {
    "as they are": lambda p: p,
    "limited": lambda p: p.clamp(1e-3, 1.0 - 1e-3),
    "dropout": lambda p: F.dropout(p, 0.1),
    "joined": lambda p: torch.cat([p[:, :2], p[:, 2:]], 1),
}


@pytest.mark.parametrize("between", TWICE)
@pytest.mark.parametrize("kind", [torch.sigmoid, lambda h: h.softmax(1)])
def test_probabilities_of_probabilities_are_told_whatever_stands_between(kind, between):
    """A second sigmoid or softmax, in the loss or in the model; probabilities of logits are in order."""

    def loss(p, y):
        return F.binary_cross_entropy(p, F.one_hot(y, 4).float())

    assert "probabilities of probabilities" in causes(lambda h: kind(TWICE[between](kind(h))), loss)
    assert "probabilities of probabilities" not in causes(lambda h: kind(TWICE["dropout"](h)), loss)
