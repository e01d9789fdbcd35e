"""Faulty dense networks: residual stacks, highway, siamese, mixture of experts, adapters, schedules, heavy tails."""

from __future__ import annotations

import itertools
import math

import torch
from common import (
    Lambda,
    Program,
    Stack,
    adamw,
    blobs,
    cut,
    dense,
    entropy_loss,
    fault,
    fill,
    kaiming,
    names,
    sgd,
    squared_loss,
    waves,
)
from parts import Adapter, Experts, Pair, Residual, pairs
from proofs import (
    dead,
    diverges,
    exploding_chain,
    leaks,
    narrow,
    numerical,
    saturated,
    spikes,
    stagnant,
    swinging_norms,
    vanishing,
    zigzag,
)
from torch import Tensor, nn
from torch.nn import functional as F


def pair_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def vanish_leaky_skip() -> Program:
    """Residual blocks whose skip is multiplied by 0.3; LayerNorm hides it from the forward pass."""
    blocks = [Residual(24, 0.3, 0.05, nn.Tanh) for _ in range(14)]
    for block in blocks:
        block.body[0] = nn.Identity()
    m = Stack(list(blocks), nn.Sequential(nn.LayerNorm(24, eps=1e-30), nn.Linear(24, 6)))
    return Program(m, entropy_loss, blobs(d=24), adamw(m, 1e-3), blocks=names("layers", 14))


def vanish_softsign_offsets() -> Program:
    """Twelve softsign layers pushed away from zero by biases: slope 1 / (1 + |x|)^2."""
    m = dense([20] + [32] * 12, nn.Softsign, 6)
    for layer in m.layers:
        fill(3.0, layer[0].bias)
    return Program(m, entropy_loss, blobs(), sgd(m, 0.05, momentum=0.9), blocks=names("layers", 12))


def explode_residual_sum() -> Program:
    """Residual blocks without norm, branch times three."""
    blocks = [Residual(24, 1.0, 3.0) for _ in range(10)]
    for block in blocks:
        block.body[0] = nn.Identity()
        kaiming(block)
    m = Stack(list(blocks), nn.Linear(24, 8))
    return Program(m, squared_loss, waves(d=24), sgd(m, 1e-4), blocks=names("layers", 10))


def explode_restart() -> Program:
    """A warm restart whose peak is a thousand times what the net bears."""
    m = dense([16, 32, 32], nn.ReLU, 8)
    return Program(
        m,
        squared_loss,
        waves(),
        sgd(m, 0.05, momentum=0.9),
        rate=lambda t: 30.0 if t >= 30 else 0.05 * (1 + math.cos(math.pi * (t % 10) / 10)),
        blocks=names("layers", 2),
    )


def explode_bag_of_words() -> Program:
    """Sum of a hundred embeddings and a learning rate far over 2 / curvature."""
    words, m = torch.randint(0, 200, (256, 100)), nn.Sequential(nn.Embedding(200, 8), Lambda(lambda e: e.sum(1)))
    m.append(nn.Linear(8, 1))
    target = torch.randn(200)[words].sum(1, keepdim=True) / 10
    return Program(m, squared_loss, cut(32, words, target), sgd(m, 0.1), steps=30)


def dead_after_one_step() -> Program:
    """Positive inputs and one step with a rate of 20: all hidden biases and weights far below zero."""
    x = torch.rand(320, 20) + 0.5
    y = (x @ torch.randn(20, 1)) + 30
    m = kaiming(dense([20, 32, 32], nn.ReLU, 1))
    return Program(
        m,
        squared_loss,
        cut(32, x, y),
        sgd(m, 1e-3),
        rate=lambda t: 20.0 if t == 5 else 1e-3,
        steps=60,
        blocks=names("layers", 2),
    )


class FunctionalRelu(nn.Module):
    """Three dense layers whose ReLU is a function, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(20, 32), nn.Linear(32, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits."""
        return self.three(F.relu(self.two(F.relu(self.one(x)))))


def dead_functional_relu() -> Program:
    """``F.relu`` in the forward pass, second layer off by its bias."""
    m = FunctionalRelu()
    fill(-25.0, m.two.bias)
    return Program(m, entropy_loss, blobs(), sgd(m, 0.05))


def dead_by_sight(case: object) -> tuple[bool, dict[str, object]]:
    """All second-layer pre-activations are negative for all data, in float64."""
    program = case.build()  # type: ignore[attr-defined]
    m = program.model.double()
    with torch.no_grad():
        top = max(float(m.two(F.relu(m.one(x.double()))).max()) for x, _ in program.batches)
    return top < -10, {"largest pre-activation": top}


def saturate_output_bias() -> Program:
    """A sigmoid output with squared loss and a bias of -12: right never, slope nearly nothing."""
    m = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 6), nn.Sigmoid())
    fill(-12.0, m[2].bias)
    data = [(x, F.one_hot(y, 6).float()) for x, y in blobs()]
    return Program(m, squared_loss, data, sgd(m, 0.1, momentum=0.9))


def saturate_by_rate() -> Program:
    """A tanh network driven into its corners by the first steps of a rate that is too large."""
    m = dense([16, 32, 32, 32], nn.Tanh, 8)
    return Program(
        m,
        squared_loss,
        waves(),
        sgd(m, 0.02),
        rate=lambda t: 60.0 if t < 3 else 0.002,
        steps=50,
        blocks=names("layers", 3),
    )


def nan_distance() -> Program:
    """Square root of a zero distance: at step 11 a pair holds the same picture twice."""
    m, data = Pair(), pairs()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = model.encoder(batch[0][:, 0]), model.encoder(batch[0][:, 1])
        apart = (a - b).square().sum(1).sqrt()
        return (batch[1] * apart + (1 - batch[1]) * (1 - apart).clamp_min(0) + 0 * model.scorer(a).mean()).mean()

    def spoil(t: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = batch[0].clone()
        if t == 11:
            x[3, 1] = x[3, 0]
        return x, batch[1]

    return Program(m, loss, data, adamw(m, 1e-3), spoil=spoil, facts={"step": 11}, steps=20)


def nan_schedule() -> Program:
    """A cosine schedule divides zero by zero at its end, step 12."""
    m = dense([20, 32], nn.GELU, 6)

    def rate(t: int) -> float:
        return 0.05 if t < 12 else math.nan

    return Program(m, entropy_loss, blobs(), sgd(m, 0.05), rate=rate, facts={"step": 12}, steps=20)


def inf_half_expert() -> Program:
    """Experts computed in half precision; the batch of step 9 is over 65504 behind the hidden layer."""
    m = Experts(cast=True)

    def spoil(t: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * (3e6 if t == 9 else 1.0), batch[1]

    return Program(m, entropy_loss, blobs(), adamw(m, 2e-3), spoil=spoil, facts={"step": 9}, steps=20)


def unstable_heavy_tails() -> Program:
    """Squared loss on Cauchy targets with batches of two."""
    x = torch.randn(160, 10)
    y = x @ torch.randn(10, 1) + torch.distributions.Cauchy(0.0, 1.0).sample((160, 1)).clamp(-300, 300)
    y[5::40] = 250.0
    m = dense([10, 24, 24], nn.Tanh, 1)
    return Program(m, squared_loss, cut(2, x, y), sgd(m, 1e-5), steps=80, blocks=names("layers", 2))


def unstable_rare_returns() -> Program:
    """Policy gradient with raw returns, of which one episode in twenty brings a thousand times the rest."""
    m = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))
    states, actions = torch.randn(640, 6), torch.randint(4, (640,))
    returns = torch.rand(640)
    returns[torch.arange(7, 640, 160)] = 2e4

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        chosen = model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])
        return -(chosen[:, 0] * batch[2]).mean()

    return Program(m, loss, cut(8, states, actions, returns), sgd(m, 1e-6), steps=80)


def unstable_momentum_edge() -> Program:
    """Heavy ball over its limit 2 (1 + beta) / curvature on least squares: sign flips and grows."""
    x = torch.randn(80, 12)
    y = x @ torch.randn(12, 1) + 0.1 * torch.randn(80, 1)
    m = nn.Linear(12, 1, bias=False)
    top = float(torch.linalg.eigvalsh((2 * x.T @ x / 80).double())[-1])
    return Program(m, squared_loss, [(x, y)], sgd(m, 1.02 * 2 * 1.5 / top, momentum=0.5), steps=60)


def unstable_valley() -> Program:
    """Least squares of equal curvature at 1.0005 times the largest rate: from wall to wall, never down."""
    x = torch.linalg.qr(torch.randn(64, 8))[0] * 8
    y = x @ torch.ones(8, 1)
    m = nn.Linear(8, 1, bias=False)
    fill(0.0, m.weight)
    return Program(m, squared_loss, [(x, y)], sgd(m, 1.0005), steps=60)


def bottleneck_rank_one() -> Program:
    """One layer of five is a product of rank one."""
    m = dense([16] + [24] * 5, nn.Tanh, 8)
    m.layers[2][0] = nn.Sequential(nn.Linear(24, 1, bias=False), nn.Linear(1, 24))
    return Program(m, squared_loss, waves(), adamw(m, 3e-3), steps=60, blocks=names("layers", 5))


def bottleneck_quantised_code() -> Program:
    """An autoencoder of twelve independent factors through a code of one number, with LayerNorm around."""
    z = torch.randn(320, 12) @ torch.randn(12, 40) / 3
    widths = [40, 32, 1, 32]
    layers = [nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in itertools.pairwise(widths)]
    m = Stack([*layers, nn.Sequential(nn.Linear(32, 32), nn.SiLU())], nn.Linear(32, 40))
    return Program(m, squared_loss, cut(32, z, z), adamw(m, 3e-3), steps=60, blocks=names("layers", 4))


def stagnate_double_zero_adapter() -> Program:
    """Adapters with both factors zero: each hides the other's gradient for ever."""
    m = Stack([nn.Sequential(Adapter(20, 20, down=0.0), nn.ReLU()) for _ in range(3)], nn.Linear(20, 6))
    return Program(m, entropy_loss, blobs(), adamw(m, 1e-2), blocks=names("layers", 3))


def stagnate_new_head() -> Program:
    """The head was replaced after the optimizer was made."""
    m = dense([20, 32, 32], nn.GELU, 10)
    optimizer = adamw(m, 2e-3)
    m.head = nn.Linear(32, 6)
    return Program(m, entropy_loss, blobs(), optimizer, blocks=names("layers", 2))


def stagnate_bf16_norm() -> Program:
    """AdamW at 2e-5 on bfloat16 weights of about one: every update is rounded away."""
    m = dense([20, 32, 32], nn.GELU, 6)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_((torch.rand_like(p) + 0.5) * torch.randn_like(p).sign())
    m.bfloat16()
    data = [(x.bfloat16(), y) for x, y in blobs()]
    return Program(m, entropy_loss, data, adamw(m, 2e-5, weight_decay=0.0), blocks=names("layers", 2))


def stagnate_blind_encoder() -> Program:
    """The siamese encoder runs under ``no_grad``."""
    m = Pair(blind=True)
    return Program(m, pair_loss, pairs(), adamw(m, 3e-3))


def stagnate_warmup_division() -> Program:
    """A warm-up with integer division: the rate stays zero until step 100."""
    m = dense([20, 32, 32], nn.ReLU, 6)
    return Program(
        m, entropy_loss, blobs(), adamw(m, 1e-3), rate=lambda t: 1e-3 * min(t // 100, 1), blocks=names("layers", 2)
    )


def stagnate_unused_expert() -> Program:
    """The router never chooses the third expert, by its bias."""
    m = Experts()
    with torch.no_grad():
        m.router.bias[2] = -60.0
    return Program(m, entropy_loss, blobs(), sgd(m, 0.05))


def spike_wrong_labels() -> Program:
    """A fitted classifier meets one batch whose labels are shifted by one."""
    m = dense([20, 48], nn.ReLU, 6)

    def spoil(t: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], (batch[1] + 1) % 6 if t == 45 else batch[1]

    return Program(m, entropy_loss, blobs(gap=2.0), adamw(m, 1e-2), spoil=spoil, steps=60, facts={"step": 45})


def spike_rate_once() -> Program:
    """AdamW whose schedule has one wrong entry, a hundred times the others."""
    m = dense([16, 32, 32], nn.GELU, 8)
    return Program(
        m,
        squared_loss,
        waves(),
        adamw(m, 5e-3),
        rate=lambda t: 0.5 if t == 34 else 5e-3,
        steps=60,
        facts={"step": 35},
        blocks=names("layers", 2),
    )


def leak_outputs() -> Program:
    """Predictions are kept for a metric at the end of the epoch, without ``detach``."""
    m = dense([32, 256, 256], nn.ReLU, 128)
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        kept.append(out)
        return F.mse_loss(out, batch[1])

    x = torch.randn(1024, 32)
    held = 1024 * (128 + 2 * 256) * 4
    data = [(x, torch.randn(1024, 128) * 0.1 + x.repeat(1, 4))]
    return Program(m, loss, data, sgd(m, 0.1), steps=60, facts={"kept": lambda: len(kept) * held})


def leak_hook() -> Program:
    """A forward hook files every activation under the number of its call."""
    m, shelf = dense([32, 512], nn.ReLU, 8), {}
    m.layers[0].register_forward_hook(lambda _m, _i, o: shelf.__setitem__(len(shelf), o.detach().clone()))
    data = waves(n=4096, d=32, size=1024)
    size = 1024 * 512 * 4
    return Program(m, squared_loss, data, sgd(m, 0.1), steps=70, facts={"kept": lambda: len(shelf) * size})


WILD = "NUMERICAL LOSS_SPIKE UNSTABLE STAGNATION"

CASES = (
    fault("VANISHING", vanish_leaky_skip, vanishing, " ".join(names("layers", 8))),
    fault("VANISHING", vanish_softsign_offsets, vanishing, " ".join(names("layers", 7)), "STAGNATION"),
    fault("EXPLODING", explode_residual_sum, exploding_chain, " ".join(names("layers", 6)), WILD + " DEAD"),
    fault("EXPLODING", explode_restart, diverges, "", WILD + " DEAD"),
    fault("EXPLODING", explode_bag_of_words, diverges, "", WILD),
    fault("DEAD", dead_after_one_step, dead(after=True), "layers.0 layers.1", WILD + " EXPLODING VANISHING BOTTLENECK"),
    fault("DEAD", dead_functional_relu, dead_by_sight, "two one", "STAGNATION VANISHING BOTTLENECK"),
    fault("SATURATION", saturate_output_bias, saturated(), "3", "VANISHING STAGNATION"),
    fault("SATURATION", saturate_by_rate, saturated(after=True), "layers", "UNSTABLE LOSS_SPIKE EXPLODING VANISHING"),
    fault("NUMERICAL", nan_distance, numerical),
    fault("NUMERICAL", nan_schedule, numerical, "", "STAGNATION"),
    fault("NUMERICAL", inf_half_expert, numerical, "", "LOSS_SPIKE STAGNATION UNSTABLE EXPLODING"),
    fault("UNSTABLE", unstable_heavy_tails, swinging_norms, "", "LOSS_SPIKE"),
    fault("UNSTABLE", unstable_rare_returns, swinging_norms, "", "LOSS_SPIKE"),
    fault("UNSTABLE", unstable_momentum_edge, zigzag, "", "EXPLODING LOSS_SPIKE"),
    fault("UNSTABLE", unstable_valley, zigzag),
    fault("BOTTLENECK", bottleneck_rank_one, narrow, "layers.2 layers.3"),
    fault("BOTTLENECK", bottleneck_quantised_code, narrow, "layers.1 layers.2"),
    fault("STAGNATION", stagnate_double_zero_adapter, stagnant, " ".join(names("layers", 3)), "DEAD"),
    fault("STAGNATION", stagnate_new_head, stagnant, "head"),
    fault("STAGNATION", stagnate_bf16_norm, stagnant),
    fault("STAGNATION", stagnate_blind_encoder, stagnant, "encoder"),
    fault("STAGNATION", stagnate_warmup_division, stagnant),
    fault("STAGNATION", stagnate_unused_expert, stagnant, "experts.2"),
    fault("LOSS_SPIKE", spike_wrong_labels, spikes, "", "UNSTABLE EXPLODING"),
    fault("LOSS_SPIKE", spike_rate_once, spikes, "", "UNSTABLE EXPLODING"),
    fault("MEMORY_LEAK", leak_outputs, leaks),
    fault("MEMORY_LEAK", leak_hook, leaks),
)
