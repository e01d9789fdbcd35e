"""Healthy programs that look odd: passes, losses and states that a monitor sees seldom."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, loader


def sharpness_aware() -> Program:
    """Each step climbs to where the loss is worst nearby, takes the gradient there, and comes back before it steps."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(48, 130, x, y):
            F.cross_entropy(model(xb), yb).backward()
            with torch.no_grad():
                gradients = [p.grad.clone() for p in model.parameters()]
                norm = torch.stack([g.norm() for g in gradients]).norm() + 1e-12
                climbs = [0.05 * g / norm for g in gradients]
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.add_(climb)
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            with torch.no_grad():
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.sub_(climb)
            optimizer.step()
            optimizer.zero_grad()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.9)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength  # type: ignore[attr-defined]  # a context takes any attribute
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradients[0], None  # type: ignore[attr-defined]  # as above


class _DomainAdversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.label, self.domain = nn.Linear(32, 10), nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, x: Tensor, strength: float = 0.0) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.label(h), self.domain(_Reverse.apply(h, strength))


def domain_adversarial() -> Program:
    """A gradient is turned round on its way back, so that features hide their origin; that loss is meant to stay up."""
    x, y, x_test, y_test = data.digits()
    other, other_test = 1 - x.flip(0), 1 - x_test
    other_y = y.flip(0)
    model = _DomainAdversarial()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for step, (xb, yb, ob, oy) in enumerate(loader(48, 220, x, y, other, other_y)):
            strength = 0.3 * step / 220
            said, origin = model(torch.cat([xb, ob]), strength)
            known = torch.rand(48) < 0.3
            labels = torch.cat([yb, torch.where(known, oy, -100)])
            domains = torch.cat([torch.zeros(48), torch.ones(48)]).long()
            loss = F.cross_entropy(said, labels, ignore_index=-100) + F.cross_entropy(origin, domains)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(torch.cat([x_test, other_test]))[0].argmax(1) == y_test.repeat(2)).float().mean().item()

    return Program(model, train, score, 0.8)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.weight, self.mean, self.log_std = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> torch.distributions.MixtureSameFamily:
        h = self.body(x)
        parts = torch.distributions.Normal(self.mean(h), self.log_std(h).clamp(-3, 1).exp())
        return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=self.weight(h)), parts)


def mixture_density() -> Program:
    """One input has several answers, and a mixture is learned: components may fall idle, the loss goes below zero."""
    t = torch.rand(1200, 1)
    x = t + 0.3 * torch.sin(6.28 * t) + 0.05 * torch.randn(1200, 1)
    model = _Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 280)

    def train() -> None:
        for xb, tb in loader(96, 280, x[:900], t[:900]):
            loss = -model(xb).log_prob(tb.squeeze(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    def score() -> float:
        with torch.no_grad():
            return model(x[900:]).log_prob(t[900:].squeeze(1)).mean().item()

    return Program(model, train, score, 0.6)


def parity_after_a_plateau() -> Program:
    """The parity of three bits among twenty, drawn anew in each step: a third of the time nothing falls, then all."""
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (n, 20)).float() * 2 - 1
        return x, (x[:, 1] * x[:, 4] * x[:, 8] > 0).float()

    def train() -> None:
        for _ in range(300):
            x, y = draw(128)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()

    def score() -> float:
        x, y = draw(1000)
        with torch.no_grad():
            return ((model(x) > 0).float() == y).float().mean().item()

    return Program(model, train, score, 0.9)


def meta_learned_sines() -> Program:
    """Each step adapts the weights to three tasks without touching them, and learns from how well that went."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = 4 * torch.rand(30, 1) - 2
        y = (0.5 + torch.rand(())) * torch.sin(1.5 * x + 3.14 * torch.rand(()))
        return x[:10], y[:10], x[10:], y[10:]

    def adapted(x: Tensor, y: Tensor, *, through: bool) -> dict[str, Tensor]:
        weights = dict(model.named_parameters())
        for _ in range(3):
            loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=through)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return weights

    def train() -> None:
        for _ in range(200):
            loss = torch.zeros(())
            for _ in range(3):
                x, y, x_query, y_query = task()
                weights = adapted(x, y, through=True)
                loss = loss + F.mse_loss(torch.func.functional_call(model, weights, (x_query,)), y_query) / 3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        errors = []
        for _ in range(60):
            x, y, x_query, y_query = task()
            said = torch.func.functional_call(model, adapted(x, y, through=False), (x_query,))
            errors.append(F.mse_loss(said, y_query) / y_query.var())
        return 1 - torch.stack(errors).median().item()

    return Program(model, train, score, 0.6)


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(40, 32)
        self.enter, self.middle, self.leave = nn.Linear(2, 64), nn.Linear(96, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.enter(x))
        return self.leave(F.silu(self.middle(torch.cat([h, self.time(t)], 1))))


def small_diffusion() -> Program:
    """Noise is learned from noised points: the loss has a high floor, hardly a trend, and targets that are random."""
    angle = 6.28 * torch.rand(2000)
    points = torch.stack([angle.cos(), angle.sin()], 1) * 1.4
    kept = torch.cumprod(1 - torch.linspace(0.01, 0.25, 40), 0)
    model = _Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.97))

    def train() -> None:
        for (xb,) in loader(256, 300, points):
            t, noise = torch.randint(40, (256,)), torch.randn(256, 2)
            share = kept[t, None]
            loss = F.mse_loss(model(share.sqrt() * xb + (1 - share).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)

    def score() -> float:
        x = torch.randn(500, 2)
        with torch.no_grad():
            for t in range(39, -1, -1):
                noise = average(x, torch.full((500,), t))
                clean = (x - (1 - kept[t]).sqrt() * noise) / kept[t].sqrt()
                before = kept[t - 1] if t else torch.ones(())
                x = before.sqrt() * clean + (1 - before).sqrt() * noise
        return -(x.norm(dim=1) - 1.4).abs().mean().item()

    return Program(model, train, score, -0.3)


def labels_mostly_random() -> Program:
    """Three labels of five are drawn by lot: the loss stays near that of guessing, and the network learns still."""
    x, y, x_test, y_test = data.digits()
    y = torch.where(torch.rand(len(y)) < 0.6, torch.randint(10, y.shape), y)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 180)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(64, 180, x, y)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()
            if step % 45 == 44:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


class _Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
        self.codes: Tensor
        self.sums: Tensor
        self.counts: Tensor
        self.register_buffer("codes", 0.3 * torch.randn(32, 4))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).view(-1, 4)
        chosen = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            one_hot = F.one_hot(chosen, 32).float()
            self.counts.lerp_(one_hot.sum(0), 0.05)
            self.sums.lerp_(one_hot.T @ z.detach(), 0.05)
            self.codes.copy_(self.sums / (self.counts[:, None] + 1e-3))
        quantized = self.codes[chosen]
        commitment = F.mse_loss(z, quantized)
        return self.decoder((z + (quantized - z).detach()).view(-1, 32)), commitment


def vector_quantized() -> Program:
    """A codebook that no optimizer holds follows by averages; gradients jump over the choice of a code."""
    x, _, x_test, _ = data.digits()
    model = _Quantized()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for (xb,) in loader(64, 220, x):
            rebuilt, commitment = model(xb)
            loss = F.mse_loss(rebuilt, xb) + 0.1 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            return 1 - (F.mse_loss(model(x_test)[0], x_test) / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.3)


class _Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject, self.again = nn.Linear(2, 32), nn.Linear(32, 32, bias=False)
        self.read = nn.Linear(32, 2)

    def turn(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.again(z) + self.inject(x))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), 32)
        with torch.no_grad():
            for _ in range(12):
                z = self.turn(z, x)
        return self.read(self.turn(z, x))


def fixed_point_without_graph() -> Program:
    """A layer runs into its fixed point without a graph, and the gradient takes the last turn only, on purpose."""
    x, y, x_test, y_test = data.rings()
    model = _Equilibrium()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(40, 180, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.88)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        sharpness_aware,
        domain_adversarial,
        mixture_density,
        parity_after_a_plateau,
        meta_learned_sines,
        small_diffusion,
        labels_mostly_random,
        vector_quantized,
        fixed_point_without_graph,
    )
)
