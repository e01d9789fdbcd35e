"""Small transformers with one fault of attention each, and healthy ones that come close to it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

WIDTH, WORDS, LENGTH = 24, 8, 10
ATTENTION = {IssueType.ATTENTION_COLLAPSE, IssueType.HEAD_REDUNDANCY, IssueType.RANK_COLLAPSE}


class Attention(nn.Module):
    """Self-attention on PyTorch's own kernel."""

    def __init__(self, heads, *, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-LN block."""

    def __init__(self, heads=4):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(heads)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Former(nn.Module):
    """A small language model."""

    def __init__(self, block=Block, depth=3):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Outside(nn.Module):
    """Attention and MLPs in lists of their own; the skip connections are the model's."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        self.attentions = nn.ModuleList(Attention(4, causal=False) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.embed(x) + self.places
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(F.layer_norm(x, (WIDTH,)))
            x = x + mlp(F.layer_norm(x, (WIDTH,)))
        return self.head(x)


def found(model, *, steps=12, lr=3e-3, factor=1.0, after=None):
    """Train on the task of telling the word before, and return the issues of attention."""
    x = torch.randint(0, WORDS, (64, LENGTH))
    y = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(steps):
            rows = slice(step % 4 * 16, step % 4 * 16 + 16)
            optimizer.zero_grad()
            loss = factor * F.cross_entropy(model(x[rows])[:, 1:].flatten(0, 1), y[rows][:, 1:].flatten())
            loss.backward()
            exporter.observe(loss=loss)
            optimizer.step()
            if after is not None:
                after(step, model)
    return [issue for issue in exporter.issues if issue.issue_type in ATTENTION], loss.item() / factor


def sharpen(layer, factor=20.0):
    """Multiply queries and keys."""
    with torch.no_grad():
        layer.q.weight.mul_(factor)
        layer.k.weight.mul_(factor)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_one_hot_attention_is_named_with_its_layer_at_any_loss_scale(factor):
    """Queries and keys twenty times too large collapse one layer; it alone is named, with numbers and advice."""
    model = Former()
    sharpen(model.blocks[1].attention)
    (issue,), _ = found(model, factor=factor)
    assert (issue.issue_type, issue.layers, issue.step) == (
        IssueType.ATTENTION_COLLAPSE,
        ("blocks.1.attention",),
        1,
    )
    assert issue.value < 0.15
    assert "logits up to" in issue.message
    assert "QK-norm" in issue.advice


def test_attention_that_collapses_during_training_is_found_from_there_on():
    """A layer that was healthy for twelve steps and then breaks, while the loss stands, is named with that time."""
    model = Former()

    def after(step, model):
        if step == 12:
            sharpen(model.blocks[2].attention, 40.0)

    issues, _ = found(model, steps=35, lr=1e-4, after=after)
    assert [(i.issue_type, i.layer) for i in issues] == [(IssueType.ATTENTION_COLLAPSE, "blocks.2.attention")]
    assert 13 <= issues[0].step <= 20


def test_copied_heads_are_redundant():
    """Four heads that start as one are named; that they part later heals the issue."""
    model = Former()
    with torch.no_grad():
        for layer in (model.blocks[0].attention.q, model.blocks[0].attention.k):
            layer.weight.copy_(layer.weight[:6].repeat(4, 1))
            layer.bias.copy_(layer.bias[:6].repeat(4))
    (issue,), _ = found(model, lr=1e-4)
    assert (issue.issue_type, issue.layers) == (IssueType.HEAD_REDUNDANCY, ("blocks.0.attention",))


def test_attention_without_skip_collapses_to_one_token():
    """Six layers of pure attention merge all tokens; the first of them that did is named."""
    model = Former(block=lambda: Attention(4, causal=False), depth=6)
    issues, _ = found(model)
    (issue,) = (i for i in issues if i.issue_type is IssueType.RANK_COLLAPSE)
    assert issue.layer in {"blocks.0", "blocks.1"}
    assert issue.layers[-1] == "blocks.5"
    assert "skip connection" in issue.advice


def test_equal_tokens_at_the_input_are_no_collapse():
    """Where all tokens are nearly the same before attention, attention did not make them so."""
    model = Former()
    with torch.no_grad():
        model.places.mul_(1e-4)
        model.embed.weight.mul_(1e-4).add_(1.0)
    assert found(model, lr=1e-5)[0] == []


def test_attention_with_its_skip_outside_is_no_collapse():
    """What uniform attention gives out is the same for all tokens; with a skip around it the tokens stay apart."""
    model = Outside()
    for layer in model.attentions:
        nn.init.zeros_(layer.q.weight)
        nn.init.zeros_(layer.q.bias)
    assert found(model, lr=1e-5)[0] == []


@pytest.mark.parametrize("start", ["gpt", "zero queries", "one head"])
def test_healthy_transformers_are_left_in_peace(start):
    """Near-uniform attention at the start, whatever made it, and attention that is sharp because it learned."""
    model = Former(block=lambda: Block(1 if start == "one head" else 4), depth=2)
    for module in model.modules():
        if start == "gpt" and isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, 0.02)
        if start == "zero queries" and isinstance(module, Attention):
            nn.init.zeros_(module.q.weight)
            nn.init.zeros_(module.q.bias)
    issues, loss = found(model, steps=60, lr=1e-2)
    assert issues == []
    assert loss < 0.5 * math.log(WORDS)
