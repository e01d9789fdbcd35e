"""Recurrent networks and policies, ill or healthy, watched as a user's loop shows them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.rules.policy import ExcessExploration, PolicyCollapse
from gradflow_export.rules.recurrent import Subcritical, Supercritical

OURS = {
    IssueType.RECURRENT_SUBCRITICAL, IssueType.RECURRENT_SUPERCRITICAL, IssueType.POLICY_COLLAPSE,
    IssueType.EXCESS_EXPLORATION,
}  # fmt: skip


class Sequences(nn.Module):
    """A recurrent core with a head at every step."""

    def __init__(self, kind, hidden=20, **given):
        super().__init__()
        self.core = kind(3, hidden, batch_first=True, **given)
        self.head = nn.Linear(hidden * (2 if self.core.bidirectional else 1), 2)

    def forward(self, x):
        return self.head(self.core(x)[0])


class Loop(nn.Module):
    """The same as a Python loop over a cell."""

    def __init__(self, kind, hidden=20):
        super().__init__()
        self.cell, self.head = kind(3, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        state, out = None, []
        for now in x.unbind(1):
            state = self.cell(now, state)
            out.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(out, 1)


class Policy(nn.Module):
    """A categorical or Gaussian policy."""

    def __init__(self, log_std=None):
        super().__init__()
        self.body, self.pi = nn.Linear(6, 24), nn.Linear(24, 5)
        self.log_std = None if log_std is None else nn.Parameter(torch.full((5,), float(log_std)))

    def forward(self, x):
        out = self.pi(torch.tanh(self.body(x)))
        return Categorical(logits=out) if self.log_std is None else Normal(out, self.log_std.exp())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def watched(model, step, steps=30, lr=1e-3):
    """Train and return what our rules raised."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = step(exporter)
            loss.backward()
            exporter.observe(loss=loss)
            optimizer.step()
    return [issue for issue in exporter.issues if issue.issue_type in OURS]


def recall(model, length=16, lag=1, **given):
    """Train a model to say what came ``lag`` steps before."""

    def step(_exporter):
        x = torch.randn(16, length, 3)
        return F.mse_loss(model(x)[:, lag:], x[:, : length - lag, :2])

    return watched(model, step, **given)


def gate(module, bias, rows):
    """Set one gate's bias."""
    with torch.no_grad():
        module.get_parameter("bias_ih_l0" if hasattr(module, "bias_ih_l0") else "bias_ih")[rows] = bias


def scaled(module, matrix):
    """Set the recurrent weights."""
    with torch.no_grad():
        module.weight_hh_l0.copy_(matrix)


def permutation(width, factor):
    return factor * torch.eye(width)[torch.randperm(width)]


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru", "lstm cell", "saturated"])
def test_a_state_that_forgets_at_once_is_found_where_it_is(kind):
    """Small recurrent weights, a closed forget or update gate, in a layer or a cell, or a saturated tanh."""
    if kind == "lstm cell":
        model = Loop(nn.LSTMCell)
        gate(model.cell, -8.0, slice(20, 40))
    else:
        model = Sequences({"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN))
        if kind == "lstm":
            gate(model.core, -8.0, slice(20, 40))
        elif kind == "gru":
            gate(model.core, -8.0, slice(20, 40))
            gate(model.core, -3.0, slice(0, 20))
        elif kind == "rnn":
            scaled(model.core, 0.2 * torch.linalg.qr(torch.randn(20, 20))[0])
        else:
            scaled(model.core, 0.95 * torch.linalg.qr(torch.randn(20, 20))[0])
            with torch.no_grad():
                model.core.weight_ih_l0.mul_(40)
    (issue,) = recall(model, lag=4)
    assert issue.issue_type is IssueType.RECURRENT_SUBCRITICAL
    assert issue.layer == ("cell" if kind == "lstm cell" else "core")
    assert issue.step == 1


def test_a_frozen_module_is_what_it_was_trained_to_be():
    """A pretrained core with little memory, whose head alone is trained."""
    model = Sequences(nn.RNN)
    scaled(model.core, 0.2 * torch.linalg.qr(torch.randn(20, 20))[0])
    model.core.requires_grad_(False)
    assert recall(model, lag=4) == []


@pytest.mark.parametrize("kind", ["relu", "chaos"])
def test_a_state_that_grows_is_found(kind):
    """A ReLU recurrence above 1, and a tanh recurrence at gain 3."""
    model = Sequences(nn.RNN, 32, nonlinearity="relu" if kind == "relu" else "tanh")
    scaled(model.core, permutation(32, 1.4) if kind == "relu" else torch.randn(32, 32) * 3 / math.sqrt(32))
    if kind == "relu":
        with torch.no_grad():
            model.core.bias_ih_l0.fill_(0.5)
    (issue,) = recall(model, length=25)
    assert (issue.issue_type, issue.layer) == (IssueType.RECURRENT_SUPERCRITICAL, "core")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequences(nn.RNN), lambda: Sequences(nn.LSTM), lambda: Sequences(nn.GRU),
        lambda: Sequences(nn.LSTM, num_layers=2, bidirectional=True), lambda: Loop(nn.GRUCell), lambda: Loop(nn.RNNCell),
    ],
    ids=["rnn", "lstm", "gru", "deep", "gru cell", "rnn cell"],
)  # fmt: skip
def test_networks_as_pytorch_makes_them_are_left_in_peace(make):
    """Default initialisations with a task of short memory raise nothing of ours."""
    assert recall(make(), lr=1e-2) == []


@pytest.mark.parametrize("kind", ["identity", "orthogonal", "remembers"])
def test_networks_made_to_remember_are_left_in_peace(kind):
    """Identity and orthogonal recurrences and a forget bias of 5 sit at the edge, not beyond it."""
    model = (
        Sequences(nn.LSTM if kind == "remembers" else nn.RNN, nonlinearity="relu")
        if kind == "identity"
        else Sequences(nn.LSTM if kind == "remembers" else nn.RNN)
    )
    if kind == "remembers":
        gate(model.core, 5.0, slice(20, 40))
    else:
        scaled(model.core, torch.eye(20) if kind == "identity" else torch.linalg.qr(torch.randn(20, 20))[0])
    assert recall(model, length=25, lag=5, lr=5e-3) == []


def test_a_task_without_memory_is_learned_by_a_network_without():
    """A network whose state forgets, and that learns all the same, heals within the run."""
    model = Sequences(nn.RNN)
    scaled(model.core, 0.25 * torch.linalg.qr(torch.randn(20, 20))[0])

    def step(_exporter):
        x = torch.randn(16, 16, 3)
        return F.mse_loss(model(x), torch.tanh(x[..., :2]))

    found = watched(model, step, steps=80, lr=2e-2)
    assert [issue.open for issue in found] in ([], [False])


def acts(model, steps=30):
    """Train a policy on states, exploring as it does."""
    target = torch.randn(6, 5)

    def step(exporter):
        x = torch.randn(32, 6)
        policy = model(x)
        exporter.observe(policy=policy)
        if isinstance(policy, Categorical):
            return -(policy.probs * (x @ target).softmax(1)).sum(1).mean() - 0.01 * policy.entropy().mean()
        action = policy.sample()
        reward = -(action - x @ target).square().mean(1)
        return -(policy.log_prob(action).mean(1) * (reward - reward.mean())).mean()

    return watched(model, step, steps)


def test_a_policy_that_does_not_explore_is_found():
    """Logits times 300, and a Gaussian of width 0.02, each at the layer it comes from."""
    model = Policy()
    with torch.no_grad():
        model.pi.weight.mul_(300)
    (issue,) = acts(model)
    assert (issue.issue_type, issue.layer) == (IssueType.POLICY_COLLAPSE, "pi")
    (issue,) = acts(Policy(log_std=-4))
    assert (issue.issue_type, issue.layer) == (IssueType.POLICY_COLLAPSE, "log_std")


def test_a_policy_that_explores_at_random_is_found():
    """A Gaussian of width 7."""
    (issue,) = acts(Policy(log_std=2))
    assert (issue.issue_type, issue.layer) == (IssueType.EXCESS_EXPLORATION, "log_std")


@pytest.mark.parametrize("log_std", [None, -0.5, 0.3])
def test_policies_that_explore_are_left_in_peace(log_std):
    """A fresh categorical policy is nearly uniform, a Gaussian has a width around 1: both as they should."""
    assert acts(Policy(log_std)) == []


def test_the_profile_holds_these_rules():
    """The default profile judges recurrent layers and policies."""
    from gradflow_export.profiles import profile

    assert {Subcritical(), Supercritical(), PolicyCollapse(), ExcessExploration()} <= set(profile())


def test_a_misspelt_name_is_told_once(caplog):
    """observe(policies=...) is answered with the name that was meant, and nothing raises."""
    model = Policy()
    with Exporter(model, backends=[MemoryWriter()]) as exporter:
        exporter.watch()
        exporter.observe(policies=1)
        exporter.observe(policies=2, policy={"logit": 1})
    texts = [r.getMessage() for r in caplog.records if "does not know" in r.getMessage()]
    assert len(texts) == 2
    assert "did you mean 'policy'" in texts[0]
    assert "did you mean 'logits'" in texts[1]
