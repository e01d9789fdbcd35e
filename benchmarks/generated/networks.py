"""The networks of generated programs, built from a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.grammar import Recipe
from generated.tasks import Data

_MODULES = {
    "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
}  # fmt: skip


class Block(nn.Module):
    """A layer with norm, activation and dropout, with a way around it where that was drawn."""

    def __init__(self, layer: nn.Module, recipe: Recipe, size: int, around: bool) -> None:
        super().__init__()
        self.layer, self.around = layer, around
        batch_norm = nn.BatchNorm2d if isinstance(layer, nn.Conv2d) else nn.BatchNorm1d
        if recipe.norm == "batch":
            self.norm: nn.Module = batch_norm(size)
        elif recipe.norm == "layer":
            self.norm = nn.GroupNorm(1, size) if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else nn.LayerNorm(size)
        else:
            self.norm = nn.Identity()
        self.activation: Callable[[Tensor], Tensor]
        if recipe.functional:
            self.activation = getattr(
                torch if recipe.activation in {"tanh", "sigmoid"} else functional, recipe.activation
            )
        else:
            self.activation = _MODULES[recipe.activation]()
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(self.activation(self.norm(self.layer(x))))
        return out + x if self.around and out.shape == x.shape else out


class Network(nn.Module):
    """A stem, blocks and a head; ``reads`` says what lies between blocks and head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, reads: str) -> None:
        super().__init__()
        self.stem, self.blocks, self.head, self.reads = stem, nn.ModuleList(blocks), head, reads
        self.before: Callable[[Tensor], Tensor] = lambda x: x
        self.before_head: Callable[[Tensor], Tensor] = lambda x: x
        self.after_head: Callable[[Tensor], Tensor] = lambda x: x

    def body(self, x: Tensor) -> Tensor:
        """Return what the head reads."""
        x = self.stem(self.before(x))
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        if self.reads == "last":
            return x[:, -1]
        if self.reads == "mean":
            return x.mean(1)
        return x.flatten(2).mean(2) if self.reads == "pixels" else x

    def forward(self, x: Tensor) -> Tensor:
        return self.after_head(self.head(self.before_head(self.body(x))))


class Turned(nn.Module):
    """Channels first, as convolutions over time want them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Places(nn.Module):
    """Adds learned positions."""

    def __init__(self, first: nn.Module, length: int, width: int) -> None:
        super().__init__()
        self.first, self.place = first, nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.place


class Encoder(nn.Module):
    """A transformer layer, causal where each position has a target."""

    def __init__(self, width: int, recipe: Recipe, causal: bool) -> None:
        super().__init__()
        kind = recipe.activation if recipe.activation in {"relu", "gelu"} else "gelu"
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, recipe.dropout, kind, batch_first=True, norm_first=recipe.depth > 2
        )
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.layer(x, src_mask=mask, is_causal=self.causal)


def network(recipe: Recipe, data: Data) -> Network:
    """Return the model of a recipe, initialised."""
    w, x = recipe.width, data.inputs
    around = "residual" in recipe.body
    each = data.targets.dim() > 1 and data.kind == "classes"
    stem: nn.Module
    blocks: list[nn.Module]
    if recipe.body in {"plain", "residual"}:
        stem = nn.Linear(x.shape[1], w)
        blocks = [Block(nn.Linear(w, w, recipe.bias), recipe, w, around) for _ in range(recipe.depth)]
        model = Network(stem, blocks, nn.Linear(w, data.outputs), "")
    elif recipe.body == "autoencoder":
        sizes = [x.shape[1], w, max(8, w // 4), w]
        blocks = [Block(nn.Linear(a, b, recipe.bias), recipe, b, False) for a, b in itertools.pairwise(sizes)]
        model = Network(nn.Identity(), blocks, nn.Linear(w, data.outputs), "")
    elif recipe.body == "recurrent":
        size = w if data.tokens else x.shape[2]
        stem = nn.Embedding(data.tokens, w) if data.tokens else nn.Identity()
        cell = getattr(nn, recipe.cell)
        deep = recipe.dropout if recipe.depth > 1 else 0.0
        blocks = [cell(size, w, recipe.depth, batch_first=True, dropout=deep)]
        model = Network(stem, blocks, nn.Linear(w, data.outputs), "" if each else "last")
    elif recipe.body == "convolution":
        sizes = [x.shape[2]] + [w] * recipe.depth
        blocks = [
            Block(nn.Conv1d(a, b, 5, padding=2, bias=recipe.bias), recipe, b, False)
            for a, b in itertools.pairwise(sizes)
        ]
        model = Network(Turned(), blocks, nn.Linear(w, data.outputs), "pixels")
    elif recipe.body == "transformer":
        first = nn.Embedding(data.tokens, w) if data.tokens else nn.Linear(x.shape[2], w)
        blocks = [Encoder(w, recipe, each) for _ in range(recipe.depth)]
        model = Network(Places(first, x.shape[1], w), blocks, nn.Linear(w, data.outputs), "" if each else "mean")
    elif recipe.body == "bag":
        blocks = [Block(nn.Linear(w, w, recipe.bias), recipe, w, False) for _ in range(recipe.depth)]
        model = Network(nn.EmbeddingBag(data.tokens, w), blocks, nn.Linear(w, data.outputs), "")
    else:
        sizes = [w // 2 or 1] * (recipe.depth + 1)
        blocks = [
            Block(nn.Conv2d(a, b, 3, padding=1, bias=recipe.bias), recipe, b, around)
            for a, b in itertools.pairwise(sizes)
        ]
        model = Network(nn.Conv2d(1, sizes[0], 3, 2, 1), blocks, nn.Linear(sizes[-1], data.outputs), "pixels")
    _initialise(model, recipe)
    return model


def _initialise(model: Network, recipe: Recipe) -> None:
    fill = {"xavier": nn.init.xavier_uniform_, "kaiming": nn.init.kaiming_normal_, "orthogonal": nn.init.orthogonal_}
    if recipe.init in fill:
        for layer in model.modules():
            if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                fill[recipe.init](layer.weight)
