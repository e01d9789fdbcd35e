"""Every snippet on TransformerAnalyzer of the gradient-flow document runs as written, with the import changed."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import ArgumentError, ArgumentTypeError, IssueType, TransformerAnalyzer

REFERENCE = """
from gradflow_export import TransformerAnalyzer

analyzer = TransformerAnalyzer(
    model,
    enable_jacobian=False,        # Not needed
    enable_vector_analysis=False, # Not beneficial
    min_entropy_threshold=0.5,    # Attention entropy minimum
    min_diversity_threshold=0.3,  # Head diversity minimum
    track_attention_weights=True  # Capture attention patterns
)

issues, attn_stats = analyzer.analyze(input_fn, loss_fn, steps=20)
"""

PROVIDES = """
provided = [
    attn_stats.attention_entropy_mean,   # Average entropy across heads
    attn_stats.attention_sparsity,       # % of near-zero attention weights
    attn_stats.head_diversity,           # Variance across heads
    attn_stats.rank_collapse_risk,       # LOW/MEDIUM/HIGH
]
analyzer.print_summary(issues, attn_stats)
"""

RECOMMENDED = """
analyzer = TransformerAnalyzer(
    model,
    min_entropy_threshold=0.5,
    min_diversity_threshold=0.3
)
issues, attn_stats = analyzer.analyze(input_fn, loss_fn)
"""


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


@pytest.fixture
def scene():
    """Return the names that the snippets use."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 7, 8, generator=generator), torch.randn(4, 7, 16, generator=generator)
    return {
        "TransformerAnalyzer": TransformerAnalyzer,
        "model": transformer(),
        "input_fn": lambda: x,
        "loss_fn": lambda output: F.mse_loss(output, y),
    }


def test_the_snippets_run_and_a_healthy_transformer_has_no_issue(scene, capsys):
    """Constructor, analyze, result fields and summary, as documented; nothing is wrong with a fresh encoder."""
    exec(REFERENCE, scene)
    exec(PROVIDES, scene)
    assert scene["issues"] == []
    entropy, sparsity, diversity, risk = scene["provided"]
    assert 0.8 < entropy <= 1
    assert 0 <= sparsity < 0.2
    assert 0.6 < diversity < 1.4
    assert risk == "LOW"
    printed = capsys.readouterr().out
    assert "healthy" in printed
    assert "head diversity" in printed
    assert "1.layers.0.self_attn" in printed
    exec(RECOMMENDED, scene)
    assert scene["issues"] == []


def test_the_weights_are_those_of_the_model(scene):
    """Tracked weights of each layer are rows that sum to one, over heads, queries and keys; without tracking, none."""
    _, stats = TransformerAnalyzer(scene["model"]).analyze(scene["input_fn"], scene["loss_fn"], steps=1)
    assert set(stats.attention_weights) == set(stats.layers) == {f"1.layers.{i}.self_attn" for i in range(3)}
    for weights in stats.attention_weights.values():
        assert weights.shape == (4, 7, 7)
        assert weights.sum(axis=-1) == pytest.approx(1.0, abs=1e-5)
    plain = TransformerAnalyzer(scene["model"], track_attention_weights=False)
    assert plain.analyze(scene["input_fn"], scene["loss_fn"], steps=1)[1].attention_weights == {}


def test_model_optimizer_and_generators_are_left_as_they_were(scene):
    """Twenty training steps inside leave weights, gradients, modes, optimizer and random state as they were."""
    model = scene["model"]
    optimizer = torch.optim.Adam(model.parameters())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
    TransformerAnalyzer(model).analyze(scene["input_fn"], scene["loss_fn"], steps=3, optimizer=optimizer)
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(before[0][0].values(), after[0].values(), strict=True))
    assert after[1]["state"] == before[0][1]["state"] == {}
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_collapse_redundancy_and_rank_are_told(scene):
    """Sharpened queries and keys are a collapse, and equal ones in all heads a redundancy, in the layer it befell."""
    layers = scene["model"][1].layers
    with torch.no_grad():
        layers[0].self_attn.in_proj_weight[:32].mul_(30)
        weight = layers[2].self_attn.in_proj_weight
        weight[:16], weight[16:32] = weight[:4].repeat(4, 1), weight[16:20].repeat(4, 1)
    issues, stats = TransformerAnalyzer(scene["model"]).analyze(scene["input_fn"], scene["loss_fn"], steps=5)
    found = {issue.issue_type: issue.layer for issue in issues}
    assert found[IssueType.ATTENTION_COLLAPSE] == "1.layers.0.self_attn"
    assert found[IssueType.HEAD_REDUNDANCY] == "1.layers.2.self_attn"
    assert stats.layers["1.layers.0.self_attn"].entropy < 0.15
    assert stats.layers["1.layers.2.self_attn"].diversity == pytest.approx(0.0, abs=1e-5)


def test_pure_attention_has_a_high_rank_collapse_risk():
    """Without skip connections tokens merge: the risk is HIGH, and the issue names where it began."""

    class Pure(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x, x)[0]
            return x

    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    issues, stats = TransformerAnalyzer(Pure()).analyze(lambda: x, lambda y: y.square().mean() * 1e6, steps=5)
    assert stats.rank_collapse_risk == "HIGH"
    assert IssueType.RANK_COLLAPSE in {issue.issue_type for issue in issues}
    assert list(stats.rank_residuals) == [f"layers.{i}" for i in range(5)]


def test_a_model_without_attention_says_so(capsys):
    """Nothing was seen, so nothing is claimed: every figure is None and the summary says why."""
    analyzer = TransformerAnalyzer(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    issues, stats = analyzer.analyze(lambda: torch.randn(5, 3), lambda y: y.square().mean(), steps=3)
    assert (stats.attention_entropy_mean, stats.head_diversity, stats.rank_collapse_risk) == (None, None, None)
    analyzer.print_summary(issues, stats)
    assert "none seen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"min_entropy_threshold": 1.5}, ArgumentError, "between 0 and 1, got 1.5; None switches it off"),
        ({"min_diversity_threshold": math.nan}, ArgumentError, "between 0 and 2, got nan"),
        ({"min_entropy_threshold": "0.5"}, ArgumentTypeError, "must be a number, got '0.5'; for example"),
    ],
)
def test_unusable_thresholds_are_refused_at_once(arguments, kind, text):
    """The message says what was expected, what came and what to do."""
    with pytest.raises(kind, match=text):
        TransformerAnalyzer(nn.Linear(2, 2), **arguments)
