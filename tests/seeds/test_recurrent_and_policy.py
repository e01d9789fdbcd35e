"""RecurrentAnalyzer and RLPolicyAnalyzer as the gradient-flow-analysis document describes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    IssueSeverity,
    IssueType,
    RecurrentAnalyzer,
    RLPolicyAnalyzer,
)

RECURRENT = """
from gradflow_export import RecurrentAnalyzer

analyzer = RecurrentAnalyzer(
    model,
    enable_jacobian=True,         # ESSENTIAL for spectral radius
    enable_vector_analysis=False, # Not beneficial for RNNs
    optimal_radius=0.9,           # Target spectral radius
    critical_band=0.15,           # Acceptable deviation
    track_hidden_states=True      # Capture temporal dynamics
)

issues, dynamics = analyzer.analyze(input_fn, loss_fn, steps=20)
analyzer.print_summary(issues, dynamics)

dynamics.spectral_radius          # Eigenvalue magnitude
dynamics.criticality              # SUBCRITICAL/CRITICAL/SUPERCRITICAL
dynamics.effective_memory_length  # Timesteps until gradient decays
dynamics.temporal_decay_rate      # Per-step gradient decay
"""

RECOMMENDED = """
analyzer = RecurrentAnalyzer(
    model,
    enable_jacobian=True,        # Enabled by default
    optimal_radius=0.9
)
"""

POLICY = """
from gradflow_export import RLPolicyAnalyzer

analyzer = RLPolicyAnalyzer(
    model,
    enable_jacobian=False,        # Not needed for policies
    enable_vector_analysis=False, # Not beneficial
    min_entropy_threshold=0.5,    # Minimum exploration level
    min_std_threshold=0.1,        # Continuous action std min
    max_std_threshold=2.0,        # Continuous action std max
    track_distributions=True      # Capture action distributions
)

issues, stats = analyzer.analyze(
    input_fn, loss_fn, steps=20,
    action_extractor=action_extractor
)

stats.discrete_entropy_normalized  # 0-1, higher = more exploration
stats.continuous_std_mean          # Action space coverage
stats.entropy_collapse_risk        # LOW/MEDIUM/HIGH
stats.exploration_adequacy         # TOO_LOW/ADEQUATE/TOO_HIGH
"""

STANDARD = {nn.RNN: "RNN", nn.LSTM: "LSTM", nn.GRU: "GRU"}


class Sequences(nn.Module):
    """A recurrent core with a head at every step."""

    def __init__(self, kind=nn.LSTM, **given):
        super().__init__()
        self.rnn, self.head = kind(4, 12, batch_first=True, **given), nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Policy(nn.Module):
    """A categorical or Gaussian policy with a value."""

    def __init__(self, log_std=None, scale=1.0):
        super().__init__()
        self.body, self.pi, self.value = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)
        self.log_std = None if log_std is None else nn.Parameter(torch.full((4,), float(log_std)))
        with torch.no_grad():
            self.pi.weight.mul_(scale)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.pi(h), None if self.log_std is None else self.log_std.exp(), self.value(h)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def recurrent(model, steps=5, optimizer=None, **given):
    """Analyse as the document does."""
    x, y = torch.randn(8, 16, 4), torch.randn(8, 16, 2)
    analyzer = RecurrentAnalyzer(model, **given)
    return analyzer, *analyzer.analyze(
        lambda: x, lambda output: F.mse_loss(output, y), steps=steps, optimizer=optimizer
    )


def policy(model, steps=5, **given):
    """Analyse as the document does."""
    x = torch.randn(32, 6)

    def action_extractor(output):
        logits, std, value = output
        return (logits, None, None, value) if std is None else (None, std, logits, value)

    analyzer = RLPolicyAnalyzer(model, **given)
    return analyzer, *analyzer.analyze(
        lambda: x,
        lambda output: (
            output[0].square().mean() + output[2].square().mean() + (0 if output[1] is None else output[1].mean())
        ),
        steps=steps,
        action_extractor=action_extractor,
    )


def test_the_documents_snippets_run_as_written():
    """Both references and the recommendation run with nothing changed but the import, and leave their results."""
    x, states = torch.randn(4, 9, 4), torch.randn(8, 6)
    names = {"model": Sequences(), "input_fn": lambda: x, "loss_fn": lambda output: output.square().mean()}
    exec(RECURRENT + RECOMMENDED, names)
    assert names["dynamics"].criticality == "SUBCRITICAL"
    names = {
        "model": Policy(),
        "input_fn": lambda: states,
        "loss_fn": lambda output: output[0].square().mean(),
        "action_extractor": lambda output: (output[0], output[1], None, output[2]),
    }
    exec(POLICY, names)
    assert names["stats"].exploration_adequacy == "ADEQUATE"


def test_the_documented_arguments_are_the_defaults():
    """The constructor call that the document prints is the default one."""
    given = {
        "enable_jacobian": True, "enable_vector_analysis": False, "optimal_radius": 0.9, "critical_band": 0.15,
        "track_hidden_states": True,
    }  # fmt: skip
    _, issues, dynamics = recurrent(Sequences())
    torch.manual_seed(0)
    _, again, same = recurrent(Sequences(), **given)
    assert (issues, dynamics.layers) == (again, same.layers)
    given = {
        "enable_jacobian": False, "enable_vector_analysis": False, "min_entropy_threshold": 0.5,
        "min_std_threshold": 0.1, "max_std_threshold": 2.0, "track_distributions": True,
    }  # fmt: skip
    torch.manual_seed(0)
    first = policy(Policy())
    torch.manual_seed(0)
    second = policy(Policy(), **given)
    assert (first[1], first[2].entropies) == (second[1], second[2].entropies)


@pytest.mark.parametrize("kind", STANDARD)
def test_dynamics_hold_what_the_document_lists(kind, capsys):
    """Radius, criticality, memory and decay are numbers that belong together, and the summary prints them."""
    analyzer, issues, dynamics = recurrent(Sequences(kind))
    assert 0.2 < dynamics.spectral_radius < 1.1
    assert dynamics.criticality == "SUBCRITICAL"
    assert dynamics.effective_memory_length == pytest.approx(math.log(0.1) / math.log(dynamics.temporal_decay_rate))
    assert set(dynamics.layers) == {"rnn"}
    assert dynamics.hidden_states["rnn"].shape == (16, 4, 24 if kind is nn.LSTM else 12)
    assert {issue.issue_type for issue in issues} <= {IssueType.RECURRENT_SUBCRITICAL}
    assert all(issue.severity is IssueSeverity.LOW for issue in issues), "what PyTorch starts with is a remark"
    analyzer.print_summary(issues, dynamics)
    assert "rnn: SUBCRITICAL, spectral radius" in capsys.readouterr().out


def test_hidden_states_are_those_of_the_module():
    """What is tracked is what the module gave out, and nothing is kept when it is not wanted."""
    model, x = Sequences(nn.GRU), torch.randn(8, 16, 4)
    _, dynamics = RecurrentAnalyzer(model).analyze(lambda: x, lambda output: output.square().mean(), steps=1)
    outputs = model.rnn(x)[0].detach().transpose(0, 1)[:, :4]
    np.testing.assert_allclose(dynamics.hidden_states["rnn"], outputs, atol=1e-5)
    analyzer = RecurrentAnalyzer(model, track_hidden_states=False)
    assert analyzer.analyze(lambda: x, lambda output: output.square().mean(), steps=1)[1].hidden_states == {}


def test_a_cell_that_forgets_at_once_is_found():
    """A forget-gate bias of -8 is SUBCRITICAL in the module that has it, and not merely a remark."""
    model = Sequences()
    with torch.no_grad():
        model.rnn.bias_ih_l0[12:24] = -8.0
    _, issues, dynamics = recurrent(model)
    issue = next(i for i in issues if i.issue_type is IssueType.RECURRENT_SUBCRITICAL)
    assert (issue.layer, issue.severity) == ("rnn", IssueSeverity.HIGH)
    assert dynamics.effective_memory_length < 2


def test_growing_states_are_found():
    """A ReLU recurrence at 1.5 times a permutation is SUPERCRITICAL, memory does not end."""
    model = Sequences(nn.RNN, nonlinearity="relu")
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(1.5 * torch.eye(12)[torch.randperm(12)])
        model.rnn.bias_ih_l0.fill_(1.0)
    _, issues, dynamics = recurrent(model)
    assert IssueType.RECURRENT_SUPERCRITICAL in {i.issue_type for i in issues}
    assert dynamics.criticality == "SUPERCRITICAL"
    assert dynamics.effective_memory_length == math.inf


def test_a_state_of_low_rank_is_found():
    """A recurrence through one direction is told of with its effective rank."""
    model = Sequences(nn.RNN)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(torch.outer(torch.ones(12), torch.ones(12)) / 12)
    _, issues, _ = recurrent(model)
    issue = next(i for i in issues if i.issue_type is IssueType.RANK_COLLAPSE)
    assert issue.value == pytest.approx(1 / 12, rel=0.05)


def test_an_orthogonal_recurrence_within_the_band_is_healthy():
    """Inside the band, with more than ten steps of memory, nothing is found; the band moves with its arguments."""
    model = Sequences(nn.RNN)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(0.97 * torch.linalg.qr(torch.randn(12, 12))[0])
        model.rnn.weight_ih_l0.mul_(0.2)
    _, issues, dynamics = recurrent(model)
    assert dynamics.criticality == "CRITICAL"
    assert issues == []
    _, issues, dynamics = recurrent(model, optimal_radius=0.5, critical_band=0.1)
    assert dynamics.criticality == "SUPERCRITICAL"


def test_without_jacobians_only_the_base_issues_are_found():
    """enable_jacobian=False leaves the numbers empty, and a model without recurrent layers says so."""
    model = Sequences()
    with torch.no_grad():
        model.rnn.bias_ih_l0[12:24] = -8.0
    _, issues, dynamics = recurrent(model, enable_jacobian=False)
    assert dynamics.spectral_radius is None
    assert IssueType.RECURRENT_SUBCRITICAL not in {i.issue_type for i in issues}
    analyzer = RecurrentAnalyzer(nn.Sequential(nn.Linear(4, 2)))
    issues, dynamics = analyzer.analyze(lambda: torch.randn(8, 4), lambda output: output.square().mean(), steps=2)
    assert dynamics.lines() == ["recurrent layers: none seen (own recurrences and parametrized weights cannot be read)"]


def test_the_model_is_left_as_it_was():
    """Weights, gradients, modes and generators are the same after an analysis with an optimizer."""
    model = Sequences(num_layers=2, dropout=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    analyzer = RecurrentAnalyzer(model)
    x = torch.zeros(4, 9, 4)
    analyzer.analyze(lambda: x, lambda output: output.square().mean(), 3, torch.optim.Adam(model.parameters(), 0.1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_policy_statistics_hold_what_the_document_lists(capsys):
    """A fresh categorical policy explores: entropy near 1, low risk, adequate; distributions of the last pass are kept."""
    analyzer, issues, stats = policy(Policy())
    assert issues == []
    assert 0.9 < stats.discrete_entropy_normalized <= 1
    assert stats.continuous_std_mean is None
    assert (stats.entropy_collapse_risk, stats.exploration_adequacy) == ("LOW", "ADEQUATE")
    assert set(stats.distributions) == {"logits", "value"}
    assert stats.distributions["logits"].shape == (32, 4)
    analyzer.print_summary(issues, stats)
    assert "collapse risk LOW, exploration ADEQUATE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "kind", "layer", "risk", "adequacy"),
    [
        ({"scale": 300}, IssueType.POLICY_COLLAPSE, "pi", "HIGH", "TOO_LOW"),
        ({"scale": 12}, IssueType.POLICY_COLLAPSE, "pi", "MEDIUM", "TOO_LOW"),
        ({"log_std": -4}, IssueType.POLICY_COLLAPSE, "log_std", "HIGH", "TOO_LOW"),
        ({"log_std": -2.5}, IssueType.POLICY_COLLAPSE, "log_std", "MEDIUM", "TOO_LOW"),
        ({"log_std": 2}, IssueType.EXCESS_EXPLORATION, "log_std", "LOW", "TOO_HIGH"),
    ],
    ids=["certain", "declining", "narrow", "narrowing", "wide"],
)
def test_too_little_and_too_much_exploration_are_found(model, kind, layer, risk, adequacy):
    """Each fault is found with the grade the document names and the layer the distribution comes from."""
    _, issues, stats = policy(Policy(**model))
    found = [issue for issue in issues if issue.issue_type in {IssueType.POLICY_COLLAPSE, IssueType.EXCESS_EXPLORATION}]
    assert [(issue.issue_type, issue.layer) for issue in found] == [(kind, layer)]
    assert (stats.entropy_collapse_risk, stats.exploration_adequacy) == (risk, adequacy)
    assert found[0].severity >= IssueSeverity.MEDIUM


def test_gaussian_statistics_and_thresholds():
    """A healthy Gaussian policy passes, and a threshold that is moved moves the verdict."""
    _, issues, stats = policy(Policy(log_std=-0.5))
    assert issues == []
    assert stats.continuous_std_mean == pytest.approx(math.exp(-0.5), rel=1e-5)
    assert stats.continuous_entropy == pytest.approx(0.5 * math.log(2 * math.pi * math.e) - 0.5, rel=1e-5)
    _, issues, _ = policy(Policy(log_std=-0.5), max_std_threshold=0.5)
    assert [issue.issue_type for issue in issues] == [IssueType.EXCESS_EXPLORATION]
    assert policy(Policy(log_std=-0.5), track_distributions=False)[2].distributions == {}


def test_without_an_extractor_nothing_is_said_of_the_policy():
    """The base issues are found, the statistics are empty and say what to pass."""
    analyzer = RLPolicyAnalyzer(Policy(scale=300))
    x = torch.randn(8, 6)
    issues, stats = analyzer.analyze(lambda: x, lambda output: output[0].square().mean(), steps=2)
    assert stats.entropy_collapse_risk is None
    assert IssueType.POLICY_COLLAPSE not in {issue.issue_type for issue in issues}
    assert "pass action_extractor" in stats.lines()[0]


def test_bad_arguments_are_named():
    """The message says what was expected, what came and what to do."""
    with pytest.raises(ArgumentTypeError, match="optimal_radius must be a number, got '1'"):
        RecurrentAnalyzer(Sequences(), optimal_radius="1")
    with pytest.raises(ArgumentError, match="critical_band must be a number of at least 0, got -1"):
        RecurrentAnalyzer(Sequences(), critical_band=-1)
    with pytest.raises(ArgumentTypeError, match="min_std_threshold must be a number, got None"):
        RLPolicyAnalyzer(Policy(), min_std_threshold=None)
    with pytest.raises(ArgumentError, match="max_std_threshold must be a number of at least 0"):
        RLPolicyAnalyzer(Policy(), max_std_threshold=-2)
    x = torch.randn(8, 6)
    analyzer = RLPolicyAnalyzer(Policy())
    with pytest.raises(ArgumentTypeError, match="action_extractor must be a function, got int"):
        analyzer.analyze(lambda: x, lambda output: output[0].mean(), action_extractor=3)
    with pytest.raises(ArgumentError, match=r"must return \(logits, std, mean, value\), got tuple of 3"):
        analyzer.analyze(lambda: x, lambda output: output[0].mean(), action_extractor=lambda output: output)
