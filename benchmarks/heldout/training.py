"""Healthy dense networks that are hard to leave alone: noise, plateaus, schedules, scales, sparse units, data order."""

from __future__ import annotations

import math
from typing import Any

import torch
from common import (
    Case,
    Lambda,
    Program,
    Stack,
    adamw,
    blobs,
    cut,
    dense,
    entropy_loss,
    fill,
    healthy,
    kaiming,
    names,
    scale,
    sgd,
    squared_loss,
    waves,
    whole_loss,
)
from parts import Adapter, Experts, Pair, Residual, pairs
from proofs import active, fills_up, learns
from torch import Tensor, nn
from torch.nn import functional as F


def ok_label_noise() -> Program:
    """Batches of four; three labels in ten are drawn at random."""
    data = blobs(n=400, size=4)
    for _, y in data:
        y.copy_(torch.where(torch.rand(len(y)) < 0.3, torch.randint(6, y.shape), y))
    m = dense([20, 32], nn.ReLU, 6)
    return Program(m, entropy_loss, data, sgd(m, 0.01, momentum=0.9), steps=200, blocks=names("layers", 1))


def ok_plateau() -> Program:
    """A linear net of two layers with small weights: a saddle for a hundred steps, then a fall."""
    x = torch.linalg.qr(torch.randn(64, 8))[0] * 8
    w = torch.linalg.qr(torch.randn(8, 8))[0]
    m = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    scale(0.01, *m.parameters())
    return Program(m, squared_loss, [(x, x @ w)], sgd(m, 0.25), steps=240)


def plateau(case: Case) -> tuple[bool, dict[str, Any]]:
    """In the first tenth the loss falls by under 3 %, at the end to under a tenth."""
    losses = case.build().train()
    tenth = losses[len(losses) // 10] / losses[0]
    return tenth > 0.97 and losses[-1] < 0.1 * losses[0], {"tenth": tenth, "end": losses[-1] / losses[0]}


def ok_huge_gradients() -> Program:
    """The loss is multiplied by a hundred thousand; Adam does not care."""
    m = kaiming(dense([20, 32, 32, 32], nn.ReLU, 6))
    return Program(
        m, lambda mo, b: 1e5 * entropy_loss(mo, b), blobs(), adamw(m, 2e-3), steps=60, blocks=names("layers", 3)
    )


def ok_tiny_targets() -> Program:
    """Targets of size 1e-4: losses of 1e-8 from the start."""
    m = dense([16, 32], nn.Tanh, 8)
    scale(1e-4, *m.head.parameters())
    data = [(x, 1e-4 * y) for x, y in waves()]
    return Program(m, squared_loss, data, adamw(m, 2e-5, eps=1e-14, weight_decay=0.0), steps=80)


def ok_cyclic_rate() -> Program:
    """A triangular rate between 0.005 and 0.15."""
    m = kaiming(dense([20, 32, 32], nn.ReLU, 6))
    return Program(
        m,
        entropy_loss,
        blobs(),
        sgd(m, 0.1),
        rate=lambda t: 0.005 + 0.145 * abs((t % 20) / 10 - 1),
        steps=100,
        blocks=names("layers", 2),
    )


def ok_warm_restarts() -> Program:
    """AdamW, cosine with warm restarts to zero."""
    m = dense([16, 48, 48], nn.SiLU, 8)
    return Program(
        m,
        squared_loss,
        waves(),
        adamw(m, 5e-3),
        rate=lambda t: 2.5e-3 * (1 + math.cos(math.pi * (t % 25) / 25)),
        steps=100,
        blocks=names("layers", 2),
    )


def ok_long_warmup() -> Program:
    """Two hundred steps whose rate begins at exactly zero and rises linearly."""
    m = dense([20, 32, 32], nn.GELU, 6)
    return Program(m, entropy_loss, blobs(), adamw(m, 1e-3), rate=lambda t: 5e-3 * t / 150, steps=150)


def ok_imbalance() -> Program:
    """One sample in twenty is of the second class: batches of it jump."""
    x = torch.randn(640, 12)
    y = (x[:, 0] + x[:, 1] > 2.3).long()
    m = dense([12, 24, 24], nn.ReLU, 2)
    return Program(m, entropy_loss, cut(16, x, y), sgd(m, 0.1, momentum=0.9), steps=120, blocks=names("layers", 2))


def ok_heavy_tails_huber() -> Program:
    """Student-t noise of two degrees with Huber's loss, which bounds the gradient."""
    x = torch.randn(320, 10)
    y = 3 * x @ torch.randn(10, 1) + torch.distributions.StudentT(2.0).sample((320, 1))
    m = dense([10, 32], nn.ReLU, 1)
    return Program(m, lambda mo, b: F.huber_loss(mo(b[0]), b[1]), cut(16, x, y), adamw(m, 1e-2), steps=120)


def ok_overfit() -> Program:
    """Forty samples learned by heart: loss and gradient go to zero."""
    data = cut(40, torch.randn(40, 20), torch.randint(6, (40,)))
    m = dense([20, 128, 128], nn.ReLU, 6)
    return Program(m, entropy_loss, data, adamw(m, 5e-3, weight_decay=0.0), steps=150, blocks=names("layers", 2))


def ok_converged() -> Program:
    """Linear regression started at its least-squares solution: nothing is left but noise."""
    x = torch.randn(320, 10)
    y = x @ torch.randn(10, 1) + 0.5 * torch.randn(320, 1)
    m = nn.Linear(10, 1, bias=False)
    with torch.no_grad():
        m.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return Program(m, squared_loss, cut(16, x, y), sgd(m, 0.005), steps=80)


def at_optimum(case: Case) -> tuple[bool, dict[str, Any]]:
    """The gradient of the whole loss is zero at the start, and the run stays within 5 % of that loss."""
    program = case.build()
    start = float(whole_loss(program).detach())
    program.train()
    end = float(whole_loss(program).detach())
    x, y = (torch.cat(part).double() for part in zip(*program.batches, strict=True))
    best = float((y - x @ torch.linalg.lstsq(x, y).solution).square().mean())
    return abs(start / best - 1) < 1e-3 and end < 1.05 * start, {"best": best, "start": start, "end": end}


def ok_curriculum() -> Program:
    """At step 60 harder samples come in: the loss doubles and falls again."""
    x = torch.randn(320, 16)
    easy, hard = torch.sin(x[:, :4]), torch.sin(x[:, :4] * 1.3) * 1.2
    m = dense([16, 48, 48], nn.Tanh, 4)
    data = cut(32, x, easy, hard)
    return Program(
        m,
        lambda mo, b: F.mse_loss(mo(b[0]), b[1]),
        data,
        adamw(m, 4e-3),
        spoil=lambda t, b: (b[0], b[2] if t >= 60 else b[1]),
        steps=140,
        blocks=names("layers", 2),
    )


def ok_sorted_data() -> Program:
    """Data half sorted by class: the loss swings with the epoch."""
    x, y = map(torch.cat, zip(*blobs(gap=0.8), strict=True))
    order = (y.float() + 2.5 * torch.rand(len(y))).argsort()
    m = kaiming(dense([20, 32], nn.ReLU, 6))
    return Program(m, entropy_loss, cut(32, x[order], y[order]), sgd(m, 0.03), steps=120)


def ok_accumulate_clip_decay() -> Program:
    """Four micro-batches, clipping at 0.5, weight decay 0.1."""
    m = dense([20, 48, 48], nn.GELU, 6)
    return Program(
        m,
        lambda mo, b: entropy_loss(mo, b) / 4,
        blobs(size=8),
        adamw(m, 3e-3, weight_decay=0.1),
        micro=4,
        clip=0.5,
        steps=60,
        blocks=names("layers", 2),
    )


class Tied(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(8, 30) / 5), nn.Parameter(torch.zeros(30))

    def forward(self, x: Tensor) -> Tensor:
        """Encode and decode."""
        return x @ self.weight.T @ self.weight + self.shift


def ok_tied_autoencoder() -> Program:
    """Eight factors, a code of eight, tied weights."""
    z = torch.randn(256, 8) @ torch.randn(8, 30) / 3
    m = Tied()
    return Program(m, squared_loss, cut(32, z, z), adamw(m, 1e-2, weight_decay=0.0), steps=100)


def ok_adapters() -> Program:
    """LoRA as it should be: the second factor begins at zero, so the first has no gradient in the first step."""
    m = Stack([nn.Sequential(Adapter(20, 20), nn.ReLU()) for _ in range(3)], nn.Linear(20, 6))
    return Program(m, entropy_loss, blobs(), adamw(m, 1e-2), steps=80, blocks=names("layers", 3))


def ok_experts() -> Program:
    """Mixture of four experts that all answer, weighed by a router."""
    m = Experts(soft=True)
    scale(0.1, m.router.weight)
    fill(0.0, m.router.bias)
    return Program(m, entropy_loss, blobs(), adamw(m, 5e-3), steps=100)


class Highway(nn.Module):
    """Carry the input where the gate is shut."""

    def __init__(self, d: int, bias: float) -> None:
        super().__init__()
        self.gate, self.sigmoid, self.body = nn.Linear(d, d), nn.Sigmoid(), nn.Sequential(nn.Linear(d, d), nn.ReLU())
        fill(bias, self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix body and input."""
        g = self.sigmoid(self.gate(x))
        return g * self.body(x) + (1 - g) * x


def ok_highway() -> Program:
    """Eight highway layers whose gates begin shut by a bias of -6: flat by design, they carry the input."""
    m = Stack([nn.Sequential(Highway(24, -6.0)) for _ in range(8)], nn.Linear(24, 6))
    return Program(m, entropy_loss, blobs(d=24, gap=2.0), adamw(m, 1e-2), steps=60, blocks=names("layers", 8))


def ok_sparse_units() -> Program:
    """ReLU with thresholds so high that one output in thirty is on, but each unit on some sample."""
    m = kaiming(dense([20, 160], nn.ReLU, 6))
    fill(-2.0, m.layers[0][0].bias)
    scale(math.sqrt(0.5), m.layers[0][0].weight)
    return Program(m, entropy_loss, blobs(n=1024, gap=0.7), adamw(m, 2e-3), steps=100, blocks=names("layers", 1))


def sparse_alive(case: Case) -> tuple[bool, dict[str, Any]]:
    """At the start and at the end few outputs are on, yet fewer than 10 % of the units are never on."""
    program, figures = case.build(), {}
    for when in ("start", "end"):
        (rate,) = active(program, (nn.ReLU,), lambda _m, o: o > 0).values()
        figures[when] = (float(rate.mean()), float((rate == 0).double().mean()))
        program.train()
    return all(on < 0.15 and off < 0.1 for on, off in figures.values()), figures


def ok_contrastive_margin() -> Program:
    """Siamese hinge: ever more pairs have a loss and a gradient of exactly zero."""
    m = Pair()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = model.encoder(batch[0][:, 0]), model.encoder(batch[0][:, 1])
        apart = (a - b).square().sum(1)
        reach = (batch[1] * (apart - 0.5).clamp_min(0) + (1 - batch[1]) * (2 - apart).clamp_min(0)).mean()
        return reach + 0.01 * F.binary_cross_entropy_with_logits(model.scorer((a - b).square())[:, 0], batch[1])

    return Program(m, loss, pairs(), adamw(m, 3e-3), steps=120)


def ok_heavy_dropout() -> Program:
    """Dropout of 0.6 and batches of eight."""
    m = kaiming(dense([20, 64, 64], nn.ReLU, 6))
    for layer in m.layers:
        layer.append(nn.Dropout(0.6))
    return Program(m, entropy_loss, blobs(size=8), adamw(m, 2e-3), steps=150, blocks=names("layers", 2))


def ok_sum_of_uneven_batches() -> Program:
    """Summed loss; one batch of the epoch has three rows, the others forty."""
    x, y = map(torch.cat, zip(*blobs(n=323), strict=True))
    m = kaiming(dense([20, 32], nn.ReLU, 6))
    data = cut(40, x, y)
    return Program(m, lambda mo, b: F.cross_entropy(mo(b[0]), b[1], reduction="sum"), data, sgd(m, 1e-3), steps=90)


def ok_mixed_losses() -> Program:
    """Cross-entropy and a reconstruction a thousand times as large, one trunk and two heads."""
    m = nn.ModuleDict(
        {"trunk": nn.Sequential(nn.Linear(20, 48), nn.GELU()), "kind": nn.Linear(48, 6), "copy": nn.Linear(48, 20)}
    )

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model["trunk"](batch[0])
        return F.cross_entropy(model["kind"](h), batch[1]) + 1e3 * F.mse_loss(model["copy"](h), batch[0])

    return Program(m, loss, blobs(), adamw(m, 3e-3), steps=80)


def ok_deep_pre_norm() -> Program:
    """Twenty-four residual blocks with LayerNorm in front."""
    m = Stack([Residual(24, act=nn.GELU) for _ in range(24)], nn.Linear(24, 6))
    return Program(m, entropy_loss, blobs(d=24), adamw(m, 1e-3), steps=40, blocks=names("layers", 24))


def ok_selu_deep() -> Program:
    """Sixteen self-normalising layers without norm or skip."""
    m = dense([20] + [48] * 16, nn.SELU, 6)
    for layer in m.layers:
        nn.init.normal_(layer[0].weight, 0, 1 / math.sqrt(layer[0].in_features))
        nn.init.zeros_(layer[0].bias)
    return Program(m, entropy_loss, blobs(), sgd(m, 0.01), steps=60, blocks=names("layers", 16))


def ok_embedding_sum() -> Program:
    """A sum of rare words: most rows have no gradient in most steps."""
    words = torch.randint(0, 600, (320, 12))
    y = torch.randn(600)[words].sum(1, keepdim=True)
    m = nn.Sequential(nn.Embedding(600, 8), Lambda(lambda e: e.sum(1)), nn.Linear(8, 1))
    return Program(m, squared_loss, cut(32, words, y), adamw(m, 1e-2), steps=100)


def ok_ringing_momentum() -> Program:
    """Badly conditioned least squares with heavy ball at the best rate: loss and gradient ring as they fall."""
    x = torch.linalg.qr(torch.randn(64, 10))[0] * 8 * torch.logspace(0, -1, 10)
    y = x @ torch.randn(10, 1)
    m = nn.Linear(10, 1, bias=False)
    return Program(m, squared_loss, [(x, y)], sgd(m, 0.8, momentum=0.8), steps=80)


def ok_cache() -> Program:
    """A cache of activations fills up for thirty steps and is full."""
    m, shelf = dense([32, 256], nn.ReLU, 8), {}

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if len(shelf) < 30:
            shelf[len(shelf)] = output.detach().clone()

    m.layers[0].register_forward_hook(keep)
    data = waves(n=4096, d=32, size=1024)
    size = 1024 * 256 * 4
    return Program(m, squared_loss, data, sgd(m, 0.1), steps=90, facts={"kept": lambda: len(shelf) * size})


CASES = (
    healthy(ok_label_noise, learns(0.8)),
    healthy(ok_plateau, plateau),
    healthy(ok_huge_gradients, learns(0.5)),
    healthy(ok_tiny_targets, learns(0.5)),
    healthy(ok_cyclic_rate, learns(0.5)),
    healthy(ok_warm_restarts, learns(0.5)),
    healthy(ok_long_warmup, learns(0.5)),
    healthy(ok_imbalance, learns(0.5)),
    healthy(ok_heavy_tails_huber, learns(0.5)),
    healthy(ok_overfit, learns(0.01)),
    healthy(ok_converged, at_optimum),
    healthy(ok_curriculum, learns(0.5)),
    healthy(ok_sorted_data, learns(0.6)),
    healthy(ok_accumulate_clip_decay, learns(0.5)),
    healthy(ok_tied_autoencoder, learns(0.3)),
    healthy(ok_adapters, learns(0.5)),
    healthy(ok_experts, learns(0.5)),
    healthy(ok_highway, learns(0.2)),
    healthy(ok_sparse_units, learns(0.8, more=sparse_alive)),
    healthy(ok_contrastive_margin, learns(0.5)),
    healthy(ok_heavy_dropout, learns(0.7)),
    healthy(ok_sum_of_uneven_batches, learns(0.5)),
    healthy(ok_mixed_losses, learns(0.5)),
    healthy(ok_deep_pre_norm, learns(0.5)),
    healthy(ok_selu_deep, learns(0.8)),
    healthy(ok_embedding_sum, learns(0.5)),
    healthy(ok_ringing_momentum, learns(0.01)),
    healthy(ok_cache, fills_up),
)
