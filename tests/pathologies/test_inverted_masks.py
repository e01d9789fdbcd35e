"""Attention that is told to look at the padding, however it is written; and masks that only look like such."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, IssueType, MemoryWriter

WORDS, PLACES, WIDTH, HEADS, SAMPLES = 20, 12, 32, 4, 16


class ByHand(nn.Module):
    """Attention as a product, a mask and a softmax; of four dimensions, or with heads and samples in one."""

    def __init__(self, flat: bool, dropout: float) -> None:
        super().__init__()
        self.project, self.flat, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), flat, nn.Dropout(dropout)

    def forward(self, x, ignored):
        """Return as many features. Shapes: ``[batch, places, features]``, ``[batch, places]``."""
        parts = self.project(x).view(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mask = ignored[:, None, None]
        if self.flat:
            parts, mask = parts.flatten(1, 2), ignored.repeat_interleave(HEADS, 0)[:, None]
        q, k, v = parts
        weights = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)).masked_fill(mask, -1e9).softmax(-1)
        y = self.dropout(weights) @ v
        return y.reshape(len(x), HEADS, -1, WIDTH // HEADS).transpose(1, 2).flatten(2)


class Torch(nn.Module):
    """What torch has: a layer of a transformer, its attention with weights, or the function."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, first = kind, kind != "time first"
        self.layer = (
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=dropout, batch_first=first)
            if kind != "weights"
            else nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        )

    def forward(self, x, ignored):
        """Return as many features. Shapes: ``[batch, places, features]``, ``[batch, places]``."""
        if self.kind == "weights":
            return self.layer(x, x, x, key_padding_mask=ignored)[0]
        if self.kind == "time first":
            return self.layer(x.transpose(0, 1), src_key_padding_mask=ignored).transpose(0, 1)
        return self.layer(x, src_key_padding_mask=ignored)


class Model(nn.Module):
    """Words and their places, dropout, attention, and tags of all words or of the first."""

    def __init__(self, kind: str, dropout: float, tags: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(PLACES, WIDTH))
        self.dropout, self.head, self.tags = nn.Dropout(dropout), nn.Linear(WIDTH, 3), tags
        written = kind in {"by hand", "flat"}
        self.attention = ByHand(kind == "flat", dropout) if written else Torch(kind, dropout)

    def forward(self, words, ignored):
        """Return logits. Shape: ``[batch, places, tags]`` or ``[batch, tags]``."""
        y = self.attention(self.dropout(self.words(words) + self.places), ignored)
        return self.head(y if self.tags else y.mean(1))


def found(kind, dropout, *, tags, masks, fill=0):
    """Train for a few steps; return the layers that are said to look at the padding."""
    torch.manual_seed(0)
    model, memory = Model(kind, dropout, tags), MemoryWriter()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Exporter(model, backends=[memory], strict=True) as exporter:
        exporter.watch()
        for _ in range(12):
            real = torch.arange(PLACES) < torch.randint(4, PLACES, (SAMPLES, 1))
            words = torch.randint(1, WORDS, (SAMPLES, PLACES))
            words = words if fill is None else torch.where(real, words, fill)
            logits, answer = model(words, masks(real)), words % 3
            loss = functional.cross_entropy(logits.flatten(0, -2), answer.flatten() if tags else answer[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [each.layers for each in exporter.issues if each.cause == "inverted mask"], exporter.issues


EACH = pytest.mark.parametrize("kind", ["layer", "time first", "weights", "by hand", "flat"])


@EACH
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("tags", [False, True])
def test_attention_to_the_padding(kind, dropout, tags):
    """The keys it keeps are the same in all samples, or nearly so after dropout: it is told at once, and where."""
    (layers,), issues = found(kind, dropout, tags=tags, masks=lambda real: real)
    assert all(name.startswith("attention") for name in layers)
    assert next(each for each in issues if each.cause).issue_type is IssueType.NOT_LEARNING
    assert min(each.step for each in issues) <= 2


@EACH
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("fill", [0, None], ids=["padded", "anything behind the end"])
def test_masks_that_are_right(kind, dropout, fill):
    """Attention to the words is no issue, whatever stands behind them."""
    assert found(kind, dropout, tags=True, masks=lambda real: ~real, fill=fill)[0] == []


@pytest.mark.parametrize("kind", ["weights", "by hand"])
def test_masks_of_chance_or_of_none(kind):
    """What is hidden by chance, as for augmentation, differs as much as what is kept; no mask hides nothing."""
    assert found(kind, 0.1, tags=True, masks=lambda real: torch.rand(real.shape) < 0.3)[0] == []
    assert found(kind, 0.1, tags=True, masks=torch.zeros_like)[0] == []


class Numbers(nn.Module):
    """Features of each place, attention pooled over places, and one answer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.places = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(PLACES, WIDTH))
        self.attention, self.head = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x, ignored):
        """Return answers. Shape: ``[batch]``."""
        h = self.enter(x) + self.places
        return self.head(self.attention(h, h, h, key_padding_mask=ignored)[0].mean(1)).squeeze(1)


@pytest.mark.parametrize(("noise", "inverted", "told"), [(0.0, True, True), (0.0, False, False), (4.0, False, False)])
def test_padding_that_varies_more_than_the_content_is_left_out_rightly(noise, inverted, told):
    """What counts is that the inputs that are kept are the same in all samples, not how much they vary."""
    torch.manual_seed(0)
    model, memory = Numbers(), MemoryWriter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[memory], strict=True) as exporter:
        exporter.watch()
        for _ in range(12):
            real = torch.arange(PLACES) < torch.randint(4, PLACES, (SAMPLES, 1))
            x = torch.where(
                real[..., None], torch.randn(SAMPLES, PLACES, 3) / 2, noise * torch.randn(SAMPLES, PLACES, 3)
            )
            optimizer.zero_grad()
            functional.mse_loss(model(x, real if inverted else ~real), (x * real[..., None]).sum((1, 2))).backward()
            optimizer.step()
    assert ("inverted mask" in {issue.cause for issue in exporter.issues}) is told


@pytest.mark.parametrize("inverted", [True, False])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_token_that_was_added_may_stand_before_the_inputs_or_behind(where, inverted):
    """It is in every sample, and seen in each; the inputs are found beside it."""
    torch.manual_seed(0)
    added, words, head = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
    model = nn.ModuleDict({"words": words, "attention": Torch("weights", 0.0), "head": head})
    model.register_parameter("added", added)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True) as exporter:
        exporter.watch()
        for _ in range(12):
            real = torch.arange(PLACES) < torch.randint(4, PLACES, (SAMPLES, 1))
            tokens = torch.randint(1, WORDS, (SAMPLES, PLACES)) * real
            parts = [added.expand(SAMPLES, -1, -1), words(tokens)]
            masks = [torch.zeros(SAMPLES, 1, dtype=torch.bool), real if inverted else ~real]
            order = slice(None, None, 1 if where == "before" else -1)
            pooled = model["attention"](torch.cat(parts[order], 1), torch.cat(masks[order], 1)).mean(1)
            optimizer.zero_grad()
            functional.cross_entropy(head(pooled), tokens[:, 0] % 3).backward()
            optimizer.step()
    assert ("inverted mask" in {issue.cause for issue in exporter.issues}) is inverted
