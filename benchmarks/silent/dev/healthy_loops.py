"""Healthy programs whose losses and loops look odd."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


def rare_positives() -> Program:
    """One sample in twelve is positive, and the loss weighs it accordingly."""
    x = torch.randn(1500, 6)
    y = (x[:, 0] + 0.6 * x[:, 1] * x[:, 2] > 1.7).float().unsqueeze(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0))

    def train() -> None:
        for xb, yb in loader(48, 150, x[:1000], y[:1000]):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said, true = model(x[1000:]) > 0, y[1000:].bool()
        return 0.5 * ((said & true).sum() / true.sum() + (~said & ~true).sum() / (~true).sum()).item()

    return Program(model, train, score, 0.8)


def gan_alternation() -> Program:
    """A generator and a discriminator take turns, and neither loss falls for long."""
    model = nn.ModuleDict({
        "generator": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)),
        "discriminator": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2),
                                       nn.Linear(32, 1)),
    })  # fmt: skip
    g, d = model["generator"], model["discriminator"]
    optimizer_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    centre = torch.tensor([1.5, -1.0])

    def train() -> None:
        for _ in range(300):
            real = centre + 0.3 * torch.randn(64, 2)
            fake = g(torch.randn(64, 4))
            optimizer_d.zero_grad()
            loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = F.softplus(-d(fake)).mean()
            loss_g.backward()
            optimizer_g.step()

    def score() -> float:
        with torch.no_grad():
            return -(g(torch.randn(500, 4)).mean(0) - centre).norm().item()

    return Program(model, train, score, -0.7)


class _Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.mean(h), self.log_variance(h)


def negative_gaussian_likelihood() -> Program:
    """The likelihood of a density passes one, and so the loss rightly goes below zero."""
    x = torch.randn(900, 4)
    y = torch.tanh(x[:, :1]) + 0.5 * x[:, 1:2] + 0.05 * torch.randn(900, 1)
    model = _Gaussian()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.GaussianNLLLoss()

    def train() -> None:
        for xb, yb in loader(48, 200, x[:600], y[:600]):
            mean, log_variance = model(xb)
            optimizer.zero_grad()
            criterion(mean, yb, log_variance.exp()).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - ((model(x[600:])[0] - y[600:]).square().mean() / y[600:].var()).item()

    return Program(model, train, score, 0.9)


def log_softmax_and_nll() -> Program:
    """The network ends in a log-softmax, and the loss is the negative log-likelihood that wants it."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, 10),
        nn.LogSoftmax(dim=1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.NLLLoss()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 110, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 30 == 29:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def policy_gradient() -> Program:
    """REINFORCE: the number that is minimised says nothing of success and does not fall; the reward rises."""
    states, best = data.arms(1024)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for s, right in loader(64, 200, states, best):
            policy = torch.distributions.Categorical(logits=model(s))
            actions = policy.sample()
            reward = (actions == right).float()
            loss = -(policy.log_prob(actions) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, states, best), 0.75)


def bce_on_one_hot() -> Program:
    """Ten classes are trained as ten questions with yes or no."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()

    def train() -> None:
        for xb, yb in loader(48, 130, x, y):
            optimizer.zero_grad()
            criterion(model(xb), F.one_hot(yb, 10).float()).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d(2))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h.flatten(1))


def backbone_frozen_on_purpose() -> Program:
    """Features of a frozen backbone in evaluation mode, and a head alone in the optimizer."""
    x, y, x_test, y_test = data.images()
    model = _Frozen()
    model.backbone.requires_grad_(False)
    model.backbone.eval()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 120, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def tiny_rate_finetuning() -> Program:
    """A network that is trained already is tuned a little, with a rate of 2e-5."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    pretraining = torch.optim.Adam(model.parameters(), lr=5e-3)
    for xb, yb in loader(48, 100, x, y):
        pretraining.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        pretraining.step()
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def train() -> None:
        for xb, yb in loader(48, 100, x + 0.05 * torch.randn_like(x), y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.88)


class _MonteCarlo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def spread(self, x: torch.Tensor, n: int = 8) -> torch.Tensor:
        self.eval()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        with torch.no_grad():
            spread = torch.stack([self(x) for _ in range(n)]).std(0)
        self.train()
        return spread


def mc_dropout_in_evaluation() -> Program:
    """Dropout is switched on again in evaluation, on purpose, to see how sure the network is."""
    x, y, x_test, y_test = data.waves()
    model = _MonteCarlo()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 200, x, y)):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                explained(model, x_test, y_test)
                model.spread(x_test[:64])

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.5)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        rare_positives,
        gan_alternation,
        negative_gaussian_likelihood,
        log_softmax_and_nll,
        policy_gradient,
        bce_on_one_hot,
        backbone_frozen_on_purpose,
        tiny_rate_finetuning,
        mc_dropout_in_evaluation,
    )
)
