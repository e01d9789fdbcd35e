"""Families with images, series and sets: mixer, segment, tags, gratings, forecast, graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.unseen.grammar import Spec
from generated.unseen.layers import (
    Data,
    Family,
    Heads,
    Places,
    Plain,
    Residual,
    act,
    binary,
    binary_by_hand,
    brier,
    cross_entropy,
    cross_entropy_by_hand,
    explained,
    focal,
    hits,
    huber,
    mse,
    norm,
    pseudo_huber,
    signs,
    squared,
)


def patches(n: int, g: torch.Generator) -> Data:
    """One of five patterns, or its negative, among noise: (n, 12, 8)."""
    patterns, y = torch.randn(5, 12, 8, generator=g), torch.randint(5, (n,), generator=g)
    sign = torch.randint(2, (n, 1, 1), generator=g) * 2.0 - 1
    x = sign * patterns[y] * 0.9 + 0.8 * torch.randn(n, 12, 8, generator=g)
    return Data((x,), (y,))


class Mixer(nn.Module):
    """An MLP-mixer."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.embed = nn.Linear(8, w)
        self.token = nn.ModuleList(Residual(spec, 12) for _ in range(spec.depth))
        self.channel = nn.ModuleList(Residual(spec, w) for _ in range(spec.depth))
        self.out = nn.Linear(w, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for t, c in zip(self.token, self.channel, strict=True):
            x = c(t(x.transpose(1, 2)).transpose(1, 2))
        return self.out(x.mean(1))


def mixer(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Mixer(spec), Places("embed", [f"channel.{i}" for i in range(spec.depth)], ["out"])


def bumps(n: int, g: torch.Generator) -> Data:
    """Where in a noisy series of 32 values a bump of one of two widths lies: (n, 1, 32)."""
    t = torch.arange(32.0)
    at, wide = 4 + 24 * torch.rand(n, 2, 1, generator=g), 1.5 + 3 * torch.rand(n, 2, 1, generator=g)
    height = torch.tensor([1.6, -1.6]).view(1, 2, 1)
    each = torch.exp(-(((t - at) / wide) ** 2))
    x = (each * height).sum(1) + 0.35 * torch.randn(n, 32, generator=g)
    return Data((x.unsqueeze(1),), ((each[:, 0] > 0.5).float(),))


class UNet(nn.Module):
    """A small one-dimensional U-Net."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = 16
        self.enter = nn.Conv1d(1, w, 5, padding=2)
        self.shrink = nn.Conv1d(w, 2 * w, 5, stride=2, padding=2)
        self.deep = nn.ModuleList(nn.Conv1d(2 * w, 2 * w, 3, padding=1) for _ in range(min(spec.depth, 2)))
        self.norms = nn.ModuleList(norm(spec, 2 * w, 1) for _ in range(min(spec.depth, 2)))
        self.grow = nn.ConvTranspose1d(2 * w, w, 4, stride=2, padding=1)
        self.leave = nn.Conv1d(2 * w, 1, 3, padding=1)
        self.act, self.drop = act(spec), nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.act(self.enter(x))
        x = self.act(self.shrink(wide))
        for conv, scale in zip(self.deep, self.norms, strict=True):
            x = x + self.drop(self.act(scale(conv(x))))
        return self.leave(torch.cat([self.act(self.grow(x)), wide], 1)).squeeze(1)


def unet(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return UNet(spec), Places("enter", ["shrink", *(f"deep.{i}" for i in range(min(spec.depth, 2)))], ["leave"])


def dice(out: Tensor, y: Tensor) -> Tensor:
    """Dice and cross-entropy, half each."""
    p = torch.sigmoid(out)
    overlap = (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)
    return 0.5 * (1 - overlap).mean() + 0.5 * functional.binary_cross_entropy_with_logits(out, y)


def sets(n: int, g: torch.Generator) -> Data:
    """Which of four prototypes are near one of ten points: (n, 10, 6)."""
    x, prototypes = torch.randn(n, 10, 6, generator=g), torch.randn(4, 6, generator=g)
    has = torch.rand(n, 4, generator=g) < 0.45
    for k in range(4):
        spot = 2 * k + torch.randint(2, (n,), generator=g)
        near = 1.6 * prototypes[k] + 0.35 * torch.randn(n, 6, generator=g)
        rows = torch.nonzero(has[:, k])[:, 0]
        x[rows, spot[rows]] = near[rows]
    return Data((x,), (has.float(),))


class SetNet(nn.Module):
    """Points that attend to each other, pooled by learned weights."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.lift = nn.Linear(6, w)
        self.attend = nn.ModuleList(Heads(spec, w, False) for _ in range(min(spec.depth, 2)))
        self.mlp = nn.ModuleList(Residual(spec, w) for _ in range(min(spec.depth, 2)))
        self.score, self.tags = nn.Linear(w, 4), nn.Linear(4 * w, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for a, m in zip(self.attend, self.mlp, strict=True):
            x = m(a(x))
        weights = torch.softmax(self.score(x), 1)
        return self.tags((weights.transpose(1, 2) @ x).flatten(1))


def set_net(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return SetNet(spec), Places("lift", [f"mlp.{i}" for i in range(min(spec.depth, 2))], ["tags"])


def waves(n: int, g: torch.Generator) -> Data:
    """Direction of a grating in a noisy image: (n, 1, 10, 10)."""
    y = torch.randint(6, (n,), generator=g)
    r, c = torch.meshgrid(torch.arange(10.0), torch.arange(10.0), indexing="ij")
    angle = (y * math.pi / 6).view(n, 1, 1)
    phase, pace = 6.28 * torch.rand(n, 1, 1, generator=g), 0.9 + 0.5 * torch.rand(n, 1, 1, generator=g)
    x = torch.sin(pace * (r * angle.cos() + c * angle.sin()) + phase) + 1.1 * torch.randn(n, 10, 10, generator=g)
    return Data((x.unsqueeze(1),), (y,))


class Separable(nn.Module):
    """A depthwise and a pointwise convolution around which a skip runs."""

    def __init__(self, spec: Spec, w: int) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(w, w, 3, padding=1, groups=w), nn.Conv2d(w, w, 1)
        self.norm, self.act = norm(spec, w, 2), act(spec)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.pointwise(self.depthwise(x))))


class Gratings(nn.Module):
    """A residual network with separable convolutions."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = 16
        self.conv = nn.Conv2d(1, w, 5, stride=2, padding=2)
        self.body = nn.ModuleList(Separable(spec, w) for _ in range(min(spec.depth, 2)))
        self.act, self.drop, self.fc = act(spec), nn.Dropout(spec.dropout), nn.Linear(w, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        for block in self.body:
            x = block(x)
        return self.fc(self.drop(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


def gratings(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Gratings(spec), Places("conv", [f"body.{i}.pointwise" for i in range(min(spec.depth, 2))], ["fc"])


def futures(n: int, g: torch.Generator) -> Data:
    """The next four values of a sum of two waves: (n, 18, 1) to (n, 4)."""
    t = torch.arange(22.0)
    pace = torch.tensor([0.35, 0.9]) * (0.85 + 0.3 * torch.rand(n, 2, generator=g))
    phase, size = 6.28 * torch.rand(n, 2, generator=g), 0.4 + torch.rand(n, 2, generator=g)
    x = (size[..., None] * torch.sin(pace[..., None] * t + phase[..., None])).sum(1)
    seen = x[:, :18] + 0.1 * torch.randn(n, 18, generator=g)
    return Data((seen.unsqueeze(2),), (x[:, 18:].clone(),))


class Forecaster(nn.Module):
    """A recurrent network that reads a series and names what follows."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        kind = (nn.GRU, nn.LSTM, nn.RNN)[spec.variant % 3]
        self.rnn = kind(1, spec.width, batch_first=True)
        self.dense = nn.ModuleList(Plain(spec, spec.width, spec.width) for _ in range(min(spec.depth, 2)))
        self.ahead = nn.Linear(spec.width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(x)[0][:, -1]
        for layer in self.dense:
            h = layer(h)
        return self.ahead(h)


def forecaster(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Forecaster(spec), Places("rnn", [f"dense.{i}.map" for i in range(min(spec.depth, 2))], ["ahead"])


def graphs(n: int, g: torch.Generator) -> Data:
    """A number for each of eight nodes, from its neighbours: (n, 8, 4) and (n, 8, 8) to (n, 8)."""
    x = torch.randn(n, 8, 4, generator=g)
    upper = (torch.rand(n, 8, 8, generator=g) < 0.35).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    weights = torch.randn(4, generator=g)
    own, around = torch.tanh(x @ weights), (edges @ torch.relu(x)).sum(2) / 4
    y = own - around * x[..., 0].sign() * 0.5 + 0.2 * torch.randn(n, 8, generator=g)
    return Data((x, edges), ((y - y.mean()) / y.std(),))


class GraphNet(nn.Module):
    """Message passing over a dense matrix of edges."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.node = nn.Linear(4, w)
        self.self_maps = nn.ModuleList(nn.Linear(w, w) for _ in range(min(spec.depth, 3)))
        self.edge_maps = nn.ModuleList(nn.Linear(w, w, bias=False) for _ in range(min(spec.depth, 3)))
        self.norms = nn.ModuleList(norm(spec, w) for _ in range(min(spec.depth, 3)))
        self.read, self.act = nn.Linear(w, 1), act(spec)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        mean = edges / edges.sum(2, keepdim=True).clamp_min(1) ** 0.5
        h = self.act(self.node(x))
        for own, other, scale in zip(self.self_maps, self.edge_maps, self.norms, strict=True):
            h = h + self.act(scale(own(h) + mean.to(h.dtype) @ other(h)))
        return self.read(h).squeeze(2)


def graph(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return GraphNet(spec), Places("node", [f"self_maps.{i}" for i in range(min(spec.depth, 3))], ["read"])


VISION = {
    "mixer": Family(patches, mixer, (cross_entropy, focal, cross_entropy_by_hand, brier), hits, "classes"),
    "segment": Family(bumps, unet, (binary, dice, binary_by_hand), signs, "binary"),
    "tags": Family(sets, set_net, (binary_by_hand, binary), signs, "binary"),
    "gratings": Family(waves, gratings, (cross_entropy, focal, cross_entropy_by_hand), hits, "classes"),
    "forecast": Family(futures, forecaster, (squared, huber, mse, pseudo_huber), explained, "numbers"),
    "graph": Family(graphs, graph, (squared, pseudo_huber, mse), explained, "numbers"),
}
