"""Healthy programs whose losses, rates or gradients look like trouble."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


def adversarial_training() -> Program:
    """Each batch is first changed for the worse, by gradients on its pixels, so that the loss never gets small."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def attacked(images: Tensor, labels: Tensor, steps: int = 3, reach: float = 0.15) -> Tensor:
        change = torch.empty_like(images).uniform_(-reach, reach)
        for _ in range(steps):
            change.requires_grad_(True)
            loss = F.cross_entropy(model(images + change), labels)
            (slope,) = torch.autograd.grad(loss, change)
            change = (change.detach() + 0.08 * slope.sign()).clamp(-reach, reach)
        return (images + change).clamp(0, 1).detach()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 160, x, y)):
            model.eval()
            worse = attacked(xb, yb)
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(worse), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, attacked(x_test, y_test), y_test), 0.5)


def restarts_of_a_high_rate() -> Program:
    """The rate falls like a cosine and jumps back to 0.4 four times; each time the loss rises with it."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=50, eta_min=1e-4)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 250, x, y)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb + 0.2 * torch.randn_like(xb)), yb, label_smoothing=0.1).backward()
            optimizer.step()
            scheduler.step()
            if step % 50 == 49:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.9)


def energy_of_what_is_real() -> Program:
    """Real points get a low energy and dreamed ones a high one: the loss is a difference near zero, often negative."""

    def points(n: int) -> Tensor:
        angle = 6.28 * torch.rand(n)
        return torch.stack([angle.cos(), angle.sin()], 1) * (1.5 + 0.08 * torch.randn(n, 1))

    real = points(800)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.0, 0.999))
    memory = 4 * torch.rand(512, 2) - 2

    def dreamed(start: Tensor) -> Tensor:
        model.requires_grad_(False)
        for _ in range(8):
            start = start.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(model(start).sum(), start)
            start = (start - 0.1 * slope.clamp(-1, 1) + 0.05 * torch.randn_like(start)).clamp(-2.5, 2.5)
        model.requires_grad_(True)
        return start.detach()

    def train() -> None:
        for (batch,) in loader(64, 250, real):
            rows = torch.randint(512, (64,))
            fresh = torch.where(torch.rand(64, 1) < 0.1, 4 * torch.rand(64, 2) - 2, memory[rows])
            fake = dreamed(fresh)
            memory[rows] = fake
            low, high = model(batch), model(fake)
            loss = low.mean() - high.mean() + 0.1 * (low.square().mean() + high.square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(points(400)) < model(4 * torch.rand(400, 2) - 2)).float().mean().item()

    return Program(model, train, score, 0.75)


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 40, batch_first=True)
        self.out = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1]).squeeze(1)


def longer_lessons_later() -> Program:
    """Marked numbers are to be added, at first in series of 4 and at last of 16; with each lesson the loss jumps up."""

    def lesson(n: int, length: int) -> tuple[Tensor, Tensor]:
        numbers, marks = torch.rand(n, length), torch.zeros(n, length)
        marks.scatter_(1, torch.rand(n, length).topk(2, 1).indices, 1.0)
        return torch.stack([numbers, marks], 2), 3 * ((numbers * marks).sum(1) - 1)

    model = _Sum()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)

    def train() -> None:
        for length in (4, 8, 12, 16):
            for step in range(70):
                x, y = lesson(64, length)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if step == 69:
                    explained(model, *lesson(200, length))

    return Program(model, train, lambda: explained(model, *lesson(400, 12)), 0.55)


def one_sample_at_a_time() -> Program:
    """A stream is learned one sample at a time, with Adagrad: the loss of a step jumps from nothing to much."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)

    def train() -> None:
        for sample, label in zip(x[:300], y[:300], strict=True):
            loss = F.cross_entropy(model(sample[None]), label[None])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.6)


class _SkipGram(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.inner = nn.Embedding(words, 12, sparse=True)
        self.outer = nn.Embedding(words, 12, sparse=True)
        nn.init.zeros_(self.outer.weight)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        return (self.inner(word).unsqueeze(1) * self.outer(others)).sum(2)


def skip_gram_of_sparse_rows() -> Program:
    """Two tables with sparse gradients and SparseAdam: the second begins at zero, and most rows rest in each step."""
    words, topics = 150, torch.randint(5, (150,))
    often = 1 / (torch.arange(150) + 10.0)
    within = often * (topics[:, None] == topics).float()
    model = _SkipGram(words)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.03)

    def train() -> None:
        for _step in range(300):
            word = torch.multinomial(often, 96, replacement=True)
            near = torch.multinomial(within[word], 1)
            far = torch.multinomial(often, 96 * 5, replacement=True).view(96, 5)
            logits = model(word, torch.cat([near, far], 1))
            true = F.one_hot(torch.zeros(96, dtype=torch.long), 6).float()
            loss = F.binary_cross_entropy_with_logits(logits, true, reduction="none").sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            vectors = F.normalize(model.inner.weight, dim=1)
            nearest = (vectors @ vectors.T - 2 * torch.eye(words)).topk(5, 1).indices
        return (topics[nearest] == topics[:, None]).float().mean().item()

    return Program(model, train, score, 0.75)


class _Priced(nn.Module):
    def __init__(self, prices: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", prices.mean())
        self.register_buffer("deviation", prices.std())
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Mish(), nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1) * self.get_buffer("deviation") + self.get_buffer("mean")


def prices_scaled_in_the_model() -> Program:
    """Targets are prices in full and the squared error begins in the thousands of millions; the model scales inside."""
    x = torch.randn(1000, 6)
    prices = 310_000 + 55_000 * x[:, 0] + 30_000 * (x[:, 1] * x[:, 2]) - 20_000 * x[:, 3].abs()
    prices = prices + 8_000 * torch.randn(1000)
    model = _Priced(prices[:700])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(50, 240, x[:700], prices[:700]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[700:], prices[700:]), 0.75)


class _Shallow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)) for _ in range(5)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for depth, block in enumerate(self.blocks):
            kept = 1 - 0.1 * (depth + 1)
            if not self.training:
                h = h + kept * block(h)
            elif torch.rand(()) < kept:
                h = h + block(h)
        return self.head(h)


def depth_left_to_chance() -> Program:
    """In each step some blocks are left out altogether and get no gradient, the last ones half of the time."""
    x, y, x_test, y_test = data.digits()
    model = _Shallow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 220, x, y)):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            if step % 55 == 54:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.88)


def equation_without_data() -> Program:
    """No target is given: a network is to satisfy u'' = -4u with u(0) = 0, u'(0) = 2, by slopes of its own output."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)

    def slope(of: Tensor, at: Tensor) -> Tensor:
        return torch.autograd.grad(of.sum(), at, create_graph=True)[0]

    def train() -> None:
        for _step in range(300):
            t = (2 * torch.rand(64, 1)).requires_grad_(True)
            u = model(t)
            residual = slope(slope(u, t), t) + 4 * u
            zero = torch.zeros(1, 1, requires_grad=True)
            start = model(zero)
            loss = residual.square().mean() + 20 * start.square().sum() + 20 * (slope(start, zero) - 2).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    t = torch.linspace(0, 2, 100).unsqueeze(1)
    return Program(model, train, lambda: explained(model, t, torch.sin(2 * t)), 0.8)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        adversarial_training,
        restarts_of_a_high_rate,
        energy_of_what_is_real,
        longer_lessons_later,
        one_sample_at_a_time,
        skip_gram_of_sparse_rows,
        prices_scaled_in_the_model,
        depth_left_to_chance,
        equation_without_data,
    )
)
