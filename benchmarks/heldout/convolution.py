"""Convolutional programs: U-Net, VAE, residual nets with batch norm, depthwise convolutions, transfer learning."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from common import (
    Lambda,
    Program,
    Stack,
    adamw,
    cut,
    entropy_loss,
    fault,
    fill,
    healthy,
    kaiming,
    names,
    pictures,
    scale,
    sgd,
    squared_loss,
)
from proofs import dead, exploding_chain, leaks, learns, narrow, numerical, saturated, spikes, stagnant, vanishing
from torch import Tensor, nn
from torch.nn import functional as F

POOL = (2, 3)


def conv(a: int, b: int, *more: nn.Module, size: int = 3, **options: Any) -> nn.Sequential:
    """Return a convolution that keeps the size, and what follows it."""
    return nn.Sequential(nn.Conv2d(a, b, size, padding=size // 2, **options), *more)


def classifier(layers: list[nn.Module], channels: int, k: int = 4) -> Stack:
    """Return layers with global pooling and a linear head."""
    return Stack(layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, k)))


class Bottle(nn.Module):
    """Residual block with batch norm, ReLU after the sum."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.norm2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Add branch and input."""
        return self.act2(x + self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))


def residual_net(depth: int = 4, c: int = 10) -> Stack:
    """Return a residual net for pictures of one channel."""
    return classifier([conv(1, c, nn.ReLU()), *(Bottle(c) for _ in range(depth))], c)


class UNet(nn.Module):
    """Two levels down, two up, with skips."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            conv(1, c, nn.ReLU()),
            conv(c, 2 * c, nn.ReLU()),
            conv(2 * c, 2 * c, nn.ReLU()),
        )
        self.up2, self.up1, self.out = conv(4 * c, c, nn.ReLU()), conv(2 * c, c, nn.ReLU()), nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a mask's logits."""
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = F.interpolate(self.middle(F.max_pool2d(b, 2)), scale_factor=2)
        u = F.interpolate(self.up2(torch.cat([m, b], 1)), scale_factor=2)
        return self.out(self.up1(torch.cat([u, a], 1)))


def masks(n: int = 96, side: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Smooth fields with noise, and where they are positive."""
    field = F.avg_pool2d(torch.randn(n, 1, side + 4, side + 4), 5, stride=1)
    return cut(12, 4 * field + 0.3 * torch.randn_like(field), (field > 0).float())


def mask_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


class Vae(nn.Module):
    """Variational autoencoder with a fixed stream of noise of its own."""

    def __init__(self, side: int = 8, code: int = 4, width: float = 1.0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.moments = nn.Linear(6 * (side // 2) ** 2, 2 * code)
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.Tanh(), nn.Linear(48, side * side))
        scale(width, self.decoder[0].weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstruction, mean and log variance."""
        mean, log_variance = self.moments(self.encoder(x)).chunk(2, -1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(len(x))).to(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()).view_as(x), mean, log_variance


def vae_loss(model: nn.Module, batch: tuple[Tensor, ...], weight: float = 0.05) -> Tensor:
    out, mean, log_variance = model(batch[0])
    divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(-1).mean()
    return F.mse_loss(out, batch[0]) + weight * divergence


class Depthwise(nn.Module):
    """Depthwise and pointwise convolution."""

    def __init__(self, c: int, norm: bool = True) -> None:
        super().__init__()
        self.depth, self.point = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.Conv2d(c, c, 1)
        self.norm, self.act = nn.BatchNorm2d(c) if norm else nn.Identity(), nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        """Filter each channel, then mix them."""
        return self.act(self.norm(self.point(self.depth(x))))


def vanish_hourglass() -> Program:
    """Fourteen convolutions without norm or skip, weights a fifth of what they need."""
    m = classifier([conv(1 if i == 0 else 8, 8, nn.ELU()) for i in range(14)], 8)
    kaiming(m)
    scale(0.2, *(layer[0].weight for layer in m.layers))
    return Program(m, entropy_loss, pictures(), sgd(m, 0.05, momentum=0.9), blocks=names("layers", 14))


def explode_depthwise() -> Program:
    """Nine depthwise-separable blocks without norm, each with a gain of about four."""
    m = classifier([conv(1, 8), *(Depthwise(8, norm=False) for _ in range(9))], 8)
    for block in list(m.layers)[1:]:
        block.act = nn.LeakyReLU(0.3)
        kaiming(block)
        scale(2.0, block.depth.weight, block.point.weight)
    return Program(m, entropy_loss, pictures(), sgd(m, 1e-3), blocks=names("layers", 1, 10), steps=30)


def dead_batch_norm() -> Program:
    """The first ReLU of a residual branch sits behind a batch norm with bias -7."""
    m = residual_net()
    fill(-7.0, m.layers[2].norm1.bias)
    return Program(m, entropy_loss, pictures(), sgd(m, 0.05, momentum=0.9), blocks=names("layers", 1, 5))


def saturate_hardtanh() -> Program:
    """Convolutions with Hardtanh, whose inputs are raw pixels of 0 to 255."""
    data = [(40 * x + 10, y) for x, y in pictures()]
    m = classifier([conv(1 if i == 0 else 10, 10, nn.Hardtanh()) for i in range(3)], 10)
    kaiming(m)
    return Program(m, entropy_loss, data, sgd(m, 0.002), blocks=names("layers", 3), steps=30)


def saturate_vae_decoder() -> Program:
    """The tanh layer of a VAE's decoder with weights two hundred times too large."""
    m = Vae(width=400.0)
    return Program(m, vae_loss, pictures(), adamw(m, 1e-3))


def inf_log_variance() -> Program:
    """At step 14 a batch is in wrong units: the exponential of the VAE's log variance overflows."""
    m = Vae()

    def spoil(t: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * (1e6 if t == 14 else 1.0), batch[1]

    return Program(m, vae_loss, pictures(), adamw(m, 1e-3), spoil=spoil, steps=24, facts={"step": 14})


def bottleneck_one_channel() -> Program:
    """A fully convolutional denoiser of three channels whose third layer has one."""
    clean = torch.randn(96, 3, 6, 6)
    channels = [3, 10, 10, 1, 10, 10]
    layers = [conv(a, b, nn.Tanh(), size=1) for a, b in itertools.pairwise(channels)]
    m = Stack(list(layers), nn.Conv2d(10, 3, 1))
    data = cut(12, clean + 0.1 * torch.randn_like(clean), clean)
    return Program(m, squared_loss, data, adamw(m, 5e-3), blocks=names("layers", 5), steps=50)


def stagnate_replaced_convolution() -> Program:
    """The middle convolution was replaced after the optimizer was made."""
    m = classifier([conv(1 if i == 0 else 8, 8, nn.GroupNorm(2, 8), nn.ReLU()) for i in range(3)], 8)
    optimizer = sgd(m, 0.05)
    m.layers[1][0] = nn.Conv2d(8, 8, 3, padding=1)
    return Program(m, entropy_loss, pictures(), optimizer, blocks=names("layers", 3))


def spike_pixel_range() -> Program:
    """One batch of a regression comes with pixels of 0 to 255."""
    x = torch.rand(128, 1, 6, 6)
    m = Stack([conv(1, 8, nn.ReLU()), conv(8, 8, nn.ReLU())], nn.Sequential(nn.Flatten(), nn.Linear(288, 1)))

    def spoil(t: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * (255 if t == 37 else 1), batch[1]

    data = cut(16, x, x.mean(POOL) * 4)
    return Program(
        m, squared_loss, data, adamw(m, 3e-3), spoil=spoil, steps=56, facts={"step": 37}, blocks=names("layers", 2)
    )


def spike_divergence_weight() -> Program:
    """The weight of a VAE's divergence is ten thousand for one step."""
    m, now = Vae(), {"t": 0}

    def spoil(t: int, batch: Any) -> Any:
        now["t"] = t
        return batch

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return vae_loss(model, batch, 500.0 if now["t"] == 33 else 0.05)

    return Program(m, loss, pictures(), adamw(m, 2e-3), spoil=spoil, steps=56, facts={"step": 33})


def leak_pictures() -> Program:
    """Every batch with its feature maps is kept in a list for a film of the training."""
    m, film = residual_net(2, 8), []
    x, y = torch.randn(128, 1, 24, 24), torch.randint(4, (128,))

    def finish(_t: int) -> None:
        with torch.no_grad():
            film.append(m.layers[0](x).clone())

    size = 128 * 8 * 24 * 24 * 4
    facts = {"kept": lambda: len(film) * size}
    return Program(m, entropy_loss, cut(16, x, y), sgd(m, 0.02), finish=finish, facts=facts, steps=50)


def ok_residual_net() -> Program:
    """Residual net with batch norm, momentum and a step schedule."""
    m = residual_net()
    return Program(
        m,
        entropy_loss,
        pictures(),
        sgd(m, 0.1, momentum=0.9, weight_decay=5e-4),
        rate=lambda t: 0.05 if t < 40 else 0.005,
        steps=60,
        blocks=names("layers", 1, 5),
    )


def ok_zero_residual() -> Program:
    """The last batch norm of each branch begins at zero: the branches have no gradient in the first step."""
    m = residual_net()
    fill(0.0, *(block.norm2.weight for block in list(m.layers)[1:]))
    return Program(m, entropy_loss, pictures(), sgd(m, 0.1, momentum=0.9), steps=80, blocks=names("layers", 1, 5))


def ok_depthwise() -> Program:
    """Depthwise-separable blocks with batch norm and Hardswish."""
    m = classifier([conv(1, 12), *(Depthwise(12) for _ in range(4))], 12)
    for block in list(m.layers)[1:]:
        block.point = nn.Conv2d(12, 12, 1, bias=False)
    return Program(m, entropy_loss, pictures(), adamw(m, 5e-3), steps=60, blocks=names("layers", 1, 5))


def ok_unet() -> Program:
    """U-Net with skips, segmenting noisy fields."""
    m = UNet()
    return Program(m, mask_loss, masks(), adamw(m, 1e-2), steps=60)


def ok_vae_warmup() -> Program:
    """VAE whose weight of the divergence rises over the first forty steps, and the loss with it."""
    m, now = Vae(), {"t": 0}

    def spoil(t: int, batch: Any) -> Any:
        now["t"] = t
        return batch

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return vae_loss(model, batch, 0.05 * min(now["t"] / 40, 1))

    return Program(m, loss, pictures(), adamw(m, 5e-3), spoil=spoil, steps=100)


def ok_transfer() -> Program:
    """A frozen backbone with its batch norm in evaluation, a trainable head of two layers."""
    m = residual_net(2, 24)
    m.layers.requires_grad_(False).eval()
    m.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
    return Program(m, entropy_loss, pictures(), adamw(m, 1e-2), steps=80)


def ok_fitting_code() -> Program:
    """A convolutional autoencoder whose narrow code has as many numbers as the pictures have factors."""
    x = (torch.randn(128, 5) @ torch.randn(5, 64) / 2).view(128, 1, 8, 8)
    layers = [nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 6), nn.Tanh())]
    layers += [nn.Sequential(nn.Linear(6, 32), nn.Tanh())]
    m = Stack(list(layers), nn.Sequential(nn.Linear(32, 64), nn.Unflatten(1, (1, 8, 8))))
    return Program(m, squared_loss, cut(16, x, x), adamw(m, 1e-2), steps=150, blocks=names("layers", 3))


def ok_raw_pixels() -> Program:
    """Pixels of 0 to 255, batch norm first: nothing of their size is left."""
    data = [(60 * x + 128, y) for x, y in pictures()]
    m = classifier([nn.Sequential(nn.BatchNorm2d(1), conv(1, 10, nn.ReLU6())), conv(10, 10, nn.ReLU6())], 10)
    return Program(m, entropy_loss, data, adamw(m, 1e-2), steps=110, blocks=names("layers", 2))


def ok_time_series() -> Program:
    """Causal dilated one-dimensional convolutions with weight norm and residual sums."""
    x = torch.randn(96, 1, 32)
    y = F.conv1d(F.pad(x, (6, 0)), torch.randn(1, 1, 7) / 2)

    def block(a: int, d: int) -> nn.Module:
        layer = nn.Conv1d(a, 12, 3, dilation=d)
        return nn.Sequential(
            Lambda(lambda v: F.pad(v, (2 * d, 0))), nn.utils.parametrizations.weight_norm(layer), nn.ReLU()
        )

    m = Stack([block(1, 1), block(12, 2), block(12, 4)], nn.Conv1d(12, 1, 1))
    return Program(m, squared_loss, cut(12, x, y), adamw(m, 1e-2), steps=100, blocks=names("layers", 3))


WILD = "NUMERICAL LOSS_SPIKE UNSTABLE STAGNATION DEAD"

CASES = (
    fault("VANISHING", vanish_hourglass, vanishing, " ".join(names("layers", 8)), "STAGNATION"),
    fault("EXPLODING", explode_depthwise, exploding_chain, " ".join(names("layers", 1, 7)), WILD),
    fault("DEAD", dead_batch_norm, dead(), "layers.2", "STAGNATION"),
    fault("SATURATION", saturate_hardtanh, saturated(), "layers.0", "VANISHING UNSTABLE"),
    fault("SATURATION", saturate_vae_decoder, saturated(), "decoder", "UNSTABLE EXPLODING"),
    fault("NUMERICAL", inf_log_variance, numerical, "", "LOSS_SPIKE STAGNATION"),
    fault("BOTTLENECK", bottleneck_one_channel, narrow, "layers.2 layers.3"),
    fault("STAGNATION", stagnate_replaced_convolution, stagnant, "layers.1.0"),
    fault("LOSS_SPIKE", spike_pixel_range, spikes, "", "UNSTABLE EXPLODING"),
    fault("LOSS_SPIKE", spike_divergence_weight, spikes, "", "UNSTABLE EXPLODING"),
    fault("MEMORY_LEAK", leak_pictures, leaks),
    healthy(ok_residual_net, learns(0.3)),
    healthy(ok_zero_residual, learns(0.6)),
    healthy(ok_depthwise, learns(0.3)),
    healthy(ok_unet, learns(0.5)),
    healthy(ok_vae_warmup, learns(0.9)),
    healthy(ok_transfer, learns(0.7)),
    healthy(ok_fitting_code, learns(0.1)),
    healthy(ok_raw_pixels, learns(0.5)),
    healthy(ok_time_series, learns(0.2)),
)
