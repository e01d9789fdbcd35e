"""Parts of transformers: attention written out, fused and as a module; blocks; models."""

from __future__ import annotations

import math
from typing import Any

import torch
from common import (
    cut,
)
from torch import Tensor, nn
from torch.nn import functional as F


class Written(nn.Module):
    """Multi-head attention written with einsum and softmax, as in ViT code."""

    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.q, self.k, self.v, self.out = heads, *(nn.Linear(d, d) for _ in range(4))

    def weights(self, x: Tensor) -> Tensor:
        """Return the attention of all heads."""
        q, k = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k))
        return (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        v = self.v(x).unflatten(-1, (self.heads, -1))
        return self.out(torch.einsum("bhij,bjhd->bihd", self.weights(x), v).flatten(-2))


class Masked(Written):
    """The same, blind to padding."""

    padding: Tensor

    def weights(self, x: Tensor) -> Tensor:
        """Return attention to what is not padding."""
        q, k = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        return scores.masked_fill(self.padding[:, None, None], -math.inf).softmax(-1)


class Fused(Written):
    """The same through scaled_dot_product_attention; with memory, across; with a mask, local."""

    def __init__(self, d: int = 32, heads: int = 4, window: int = 0, causal: bool = False) -> None:
        super().__init__(d, heads)
        self.window, self.causal = window, causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Attend to the memory, or to the sequence itself."""
        m = x if memory is None else memory
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, y in ((self.q, x), (self.k, m), (self.v, m))
        )
        mask = None
        if self.window:
            place = torch.arange(x.shape[1])
            mask = (place[:, None] - place).abs() <= self.window
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(out.transpose(1, 2).flatten(-2))


class Multi(nn.Module):
    """nn.MultiheadAttention that returns its weights, averaged over heads."""

    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(d, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, and throw the weights away."""
        return self.mha(x, x, x, need_weights=True)[0]


class Block(nn.Module):
    """Attention and a small MLP, norm in front, each with a residual sum times ``skip``."""

    def __init__(self, attention: nn.Module, d: int = 32, skip: float = 1.0, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.attention, self.skip = attention, skip
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 64), act(), nn.Linear(64, d))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then think."""
        x = self.skip * x + self.attention(self.norm1(x))
        return self.skip * x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    """Embedding, learned places, blocks, head for each token."""

    def __init__(self, blocks: list[nn.Module], words: int = 12, length: int = 12, d: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, d), nn.Parameter(0.3 * torch.randn(length, d))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.LayerNorm(d), nn.Linear(d, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each token."""
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """Patches of two by two pixels, a class token, blocks, a head."""

    def __init__(self, blocks: list[nn.Module], d: int = 32) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(1, d, 2, stride=2), nn.Parameter(torch.randn(1, 1, d))
        self.place, self.blocks = nn.Parameter(0.3 * torch.randn(17, d)), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each picture."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Translator(nn.Module):
    """Queries that read a memory of tokens by cross-attention, two layers."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embed, self.place, self.query = (
            nn.Embedding(12, d),
            nn.Parameter(torch.randn(12, d)),
            nn.Parameter(torch.randn(6, d)),
        )
        self.cross = nn.ModuleList(Fused(d) for _ in range(2))
        self.norm, self.head = nn.ModuleList(nn.LayerNorm(d) for _ in range(2)), nn.Linear(d, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of six answers."""
        memory = self.embed(x) + self.place
        y = self.query.expand(len(x), -1, -1)
        for cross, norm in zip(self.cross, self.norm, strict=True):
            y = y + cross(norm(y), memory)
        return self.head(y)


def reverse(n: int = 64, length: int = 12) -> list[Any]:
    """Say the sequence backward."""
    x = torch.randint(12, (n, length))
    return cut(16, x, x.flip(1))


def encoder(depth: int = 3, norm_first: bool = True, dropout: float = 0.0) -> Tokens:
    """Return a model whose blocks are nn.TransformerEncoderLayer."""
    return Tokens(
        [nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=norm_first) for _ in range(depth)]
    )


class Bare(nn.Module):
    """Attention with a weak skip and no MLP."""

    def __init__(self, attention: nn.Module, skip: float, norm: bool = False, d: int = 32) -> None:
        super().__init__()
        self.attention, self.skip, self.norm = attention, skip, nn.LayerNorm(d) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return self.norm(self.skip * x + self.attention(x))


class Pooled(nn.Module):
    """Replace every token by the mean of all."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Pool and spread."""
        return self.mix(x.mean(1, keepdim=True)).expand_as(x)
