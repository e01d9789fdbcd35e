"""Healthy programs whose losses and loops look odd."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


def accumulation() -> Program:
    """Gradients of four small batches are added up before each step."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        optimizer.zero_grad()
        for step, (xb, yb) in enumerate(loader(16, 480, x, y)):
            loss = F.cross_entropy(model(xb), yb) / 4
            loss.backward()
            if step % 4 == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Q(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.online(states)


def target_network() -> Program:
    """Q-learning on a walk of six places, with a target network that is a copy, now stale, now fresh."""
    model = _Q()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=1e-2)
    places = torch.eye(6)

    def train() -> None:
        for step in range(250):
            at, move = torch.randint(6, (64,)), torch.randint(2, (64,))
            to = (at + 2 * move - 1).clamp(0, 5)
            reward, done = (to == 5).float(), to == 5
            with torch.no_grad():
                best = model.target(places[to]).max(1).values
                target = reward + 0.8 * torch.where(done, 0.0, best)
            q = model(places[at]).gather(1, move[:, None]).squeeze(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(q, target).backward()
            optimizer.step()
            if step % 25 == 24:
                model.target.load_state_dict(model.online.state_dict())

    def score() -> float:
        with torch.no_grad():
            return (model(places)[:5].argmax(1) == 1).float().mean().item()

    return Program(model, train, score, 1.0)


def mostly_noise() -> Program:
    """Returns of shares: one part in eight can be foretold, and so the loss hardly falls."""
    x = torch.randn(4000, 8)
    signal = x @ torch.randn(8) / 8**0.5
    y = (signal / signal.std() * 0.4 + torch.randn(4000)).unsqueeze(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)

    def train() -> None:
        for xb, yb in loader(64, 200, x[:3000], y[:3000]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[3000:], y[3000:]), 0.04)


def gradient_penalty() -> Program:
    """A critic is held to slope one by a penalty on the gradient of its own output."""
    critic = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    shift = torch.tensor([2.0, 0.0])

    def train() -> None:
        for _ in range(200):
            real, fake = torch.randn(48, 2) * 0.3 + shift, torch.randn(48, 2) * 0.3
            part = torch.rand(48, 1)
            between = (part * real + (1 - part) * fake).requires_grad_(True)
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (critic(torch.randn(500, 2) * 0.3 + shift) - critic(torch.randn(500, 2) * 0.3)).mean().item()

    return Program(critic, train, score, 1.0)


class _Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)


def mean_teacher() -> Program:
    """A student learns from labels and from a teacher that is a moving average of itself."""
    x, y, x_test, y_test = data.digits()
    model = _Teacher()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 150, x, y):
            said = model.student(xb + 0.1 * torch.randn_like(xb))
            with torch.no_grad():
                wanted = model.teacher(xb).softmax(1)
            loss = F.cross_entropy(said, yb) + 0.3 * F.mse_loss(said.softmax(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    old.lerp_(new, 0.05)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def autocast_and_clipping() -> Program:
    """Mixed precision in bfloat16, and gradients clipped in every step."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(48, 120, x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def warmup_from_zero() -> Program:
    """The rate rises from exactly zero for sixty steps and then falls like a cosine."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 60),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
        ],
        [60],
    )

    def train() -> None:
        for xb, yb in loader(48, 160, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            schedule.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def contrastive() -> Program:
    """Two noisy views of each image must find each other among a batch: targets are the numbers of the rows."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def view(x: torch.Tensor) -> torch.Tensor:
        return F.normalize(model(x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)), dim=1)

    def train() -> None:
        for (xb,) in loader(64, 150, x):
            similarity = view(xb) @ view(xb).T / 0.2
            rows = torch.arange(len(xb))
            loss = 0.5 * (F.cross_entropy(similarity, rows) + F.cross_entropy(similarity.T, rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            a, b = F.normalize(model(x_test), dim=1), F.normalize(model(x), dim=1)
            return (y[(a @ b.T).argmax(1)] == y_test).float().mean().item()

    return Program(model, train, score, 0.85)


def lbfgs() -> Program:
    """A quasi-Newton method runs the forward and the backward pass several times in each step."""
    x, y, x_test, y_test = data.plane(noise=0.2)
    x, x_test = torch.cat([x, x.square()], 1), torch.cat([x_test, x_test.square()], 1)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def train() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).squeeze(1), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        for _ in range(60):
            optimizer.step(closure)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.7)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        accumulation,
        target_network,
        mostly_noise,
        gradient_penalty,
        mean_teacher,
        autocast_and_clipping,
        warmup_from_zero,
        contrastive,
        lbfgs,
    )
)
