"""Healthy programs whose losses or loops look odd."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


class _Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        self.words = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, upper: Tensor, lower: Tensor) -> Tensor:
        a, b = F.normalize(self.image(upper), dim=1), F.normalize(self.words(lower), dim=1)
        return self.logit_scale.exp() * a @ b.T


def two_towers_with_temperature() -> Program:
    """Halves of images find each other; the targets are always 0, 1, 2, ..., and the temperature is learned."""
    x, _, x_test, y_test = data.digits()
    model = _Clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for (xb,) in loader(48, 180, x):
            logits, rows = model(xb[:, :32], xb[:, 32:]), torch.arange(48)
            loss = (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))

    def score() -> float:
        with torch.no_grad():
            best = model(x_test[:, :32], x_test[:, 32:]).argmax(1)
        return (y_test[best] == y_test).float().mean().item()

    return Program(model, train, score, 0.6)


def quantiles() -> Program:
    """Three quantiles are learned at once with a loss of corners; the median loss stays far above zero."""
    x = torch.rand(1500, 1) * 4 - 2
    y = torch.sin(2 * x) + (0.2 + 0.4 * x.abs()) * torch.randn(1500, 1)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    levels = torch.tensor([0.1, 0.5, 0.9])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=260)

    def train() -> None:
        for xb, yb in loader(64, 260, x[:1000], y[:1000]):
            error = yb - model(xb)
            loss = torch.maximum(levels * error, (levels - 1) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    def score() -> float:
        with torch.no_grad():
            below = (y[1000:] < model(x[1000:])).float().mean(0)
        return -(below - levels).abs().max().item()

    return Program(model, train, score, -0.08)


class _Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 24))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x)


def bootstrapped_views() -> Program:
    """A network predicts what its own slow copy says of another view: no labels, no negatives, a negative loss."""
    x, y, x_test, y_test = data.digits()
    model = _Twin()
    trained = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)

    def view(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.15) + 0.1 * torch.randn_like(x)

    def train() -> None:
        for (xb,) in loader(64, 160, x):
            with torch.no_grad():
                wanted = model.target(view(xb))
            loss = -F.cosine_similarity(model.predictor(model.online(view(xb))), wanted).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                    slow.lerp_(fast, 0.02)

    def score() -> float:
        model.eval()
        with torch.no_grad():
            a, b = F.normalize(model(x_test), dim=1), F.normalize(model(x), dim=1)
        return (y[(a @ b.T).argmax(1)] == y_test).float().mean().item()

    return Program(model, train, score, 0.8)


def least_squares_gan() -> Program:
    """Two players with squared errors and an average of the generator: neither loss says how well it goes."""
    g = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
    d = nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    model = nn.ModuleDict({"g": g, "d": d, "average": copy.deepcopy(g).requires_grad_(False)})
    optimizer_g = torch.optim.RMSprop(g.parameters(), lr=1e-3)
    optimizer_d = torch.optim.RMSprop(d.parameters(), lr=2e-3)

    def train() -> None:
        for _ in range(300):
            real, fake = 2 + 0.5 * torch.randn(64, 1), g(torch.randn(64, 3))
            loss_d = (d(real) - 1).square().mean() + d(fake.detach()).square().mean()
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            d.requires_grad_(False)
            optimizer_g.zero_grad()
            (d(fake) - 1).square().mean().backward()
            optimizer_g.step()
            d.requires_grad_(True)
            with torch.no_grad():
                for slow, fast in zip(model["average"].parameters(), g.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)

    def score() -> float:
        with torch.no_grad():
            made = model["average"](torch.randn(1000, 3))
        return -(made.mean() - 2).abs().item()

    return Program(model, train, score, -0.5)


def monte_carlo_dropout() -> Program:
    """In evaluation the dropout alone is switched on again, and thirty answers tell how sure the network is."""
    x, y, x_test, y_test = data.waves()
    model = nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def answers() -> Tensor:
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        with torch.no_grad():
            said = torch.stack([model(x_test) for _ in range(30)])
        model.train()
        return said

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 200, x, y)):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                answers()

    return Program(model, train, lambda: 1 - (F.mse_loss(answers().mean(0), y_test) / y_test.var()).item(), 0.6)


def fine_tuning_with_small_rates() -> Program:
    """A trained network moves to brighter pictures: 2e-5 for the body, 1e-3 for the head; the loss falls a little."""
    x, y, x_test, y_test = data.images()
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(256, 10))
    before = torch.optim.Adam(model.parameters(), lr=5e-3)
    for xb, yb in loader(48, 70, x, y):
        before.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        before.step()
    model.zero_grad()
    optimizer = torch.optim.AdamW([
        {"params": body.parameters(), "lr": 2e-5}, {"params": model[1].parameters(), "lr": 1e-3},
    ])  # fmt: skip

    def train() -> None:
        for xb, yb in loader(48, 140, 0.8 * x + 0.2, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, 0.8 * x_test + 0.2, y_test), 0.88)


def functional_training() -> Program:
    """No optimizer and no ``.grad``: gradients of a function of the parameters, and a step written by hand."""
    x, y, x_test, y_test = data.rings()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    speed = [torch.zeros_like(p) for p in model.parameters()]

    def train() -> None:
        for xb, yb in loader(32, 220, x, y):
            gradients = torch.autograd.grad(F.cross_entropy(model(xb), yb), list(model.parameters()))
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), speed, gradients, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(0.1 * v)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def mixup() -> Program:
    """Pictures and labels are blended two by two, and the loss of a half-and-half picture cannot reach zero."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=130)

    def train() -> None:
        for xb, yb in loader(48, 130, x, y):
            share, order = torch.distributions.Beta(1.0, 1.0).sample(), torch.randperm(len(xb))
            out = model(share * xb + (1 - share) * xb[order])
            loss = share * F.cross_entropy(out, yb) + (1 - share) * F.cross_entropy(out, yb[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def sum_over_pixels() -> Program:
    """The loss is a sum over all pixels of a batch, thousands at first; the rate was chosen for it."""
    x, y, x_test, y_test = data.masks()
    model = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 1, 5, padding=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(16, 160, x, y):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(xb), yb, reduction="sum").backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said, true = model(x_test) > 0, y_test > 0.5
        return (2 * (said & true).sum() / (said.sum() + true.sum())).item()

    return Program(model, train, score, 0.7)


def one_optimizer_for_two_tasks_in_turn() -> Program:
    """Odd steps train one head and even steps the other, so that each head has no gradient half of the time."""
    x, y, x_test, y_test = data.digits()
    body = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
    model = nn.ModuleDict({"body": body, "digit": nn.Linear(48, 10), "ink": nn.Linear(48, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 220, x, y)):
            h = body(xb)
            if step % 2:
                loss = F.mse_loss(model["ink"](h), xb.sum(1, keepdim=True) / 10)
            else:
                loss = F.cross_entropy(model["digit"](h), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model["digit"](body(x_test)).argmax(1) == y_test).float().mean().item()

    return Program(model, train, score, 0.85)


def count_regression() -> Program:
    """Counts are learned by the Poisson likelihood of a logarithm: targets up to fifty, and a loss that is negative."""
    x = torch.randn(1200, 4)
    y = torch.poisson(torch.exp(1.5 + 0.7 * x[:, :1] - 0.5 * x[:, 1:2]).clamp(max=40))
    model = nn.Sequential(nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.PoissonNLLLoss()

    def train() -> None:
        for xb, yb in loader(64, 200, x[:900], y[:900]):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said = model(x[900:]).exp()
        return 1 - (F.mse_loss(said, y[900:]) / y[900:].var()).item()

    return Program(model, train, score, 0.5)


def averaged_weights_for_evaluation() -> Program:
    """At each evaluation an average of the weights is put in, and after it the trained ones come back."""
    x, y, x_test, y_test = data.waves()
    model = nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    average = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def evaluate() -> float:
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        share = explained(model, x_test, y_test)
        model.load_state_dict(own)
        return share

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 220, x, y)):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.05)
            if step % 50 == 49:
                evaluate()

    return Program(model, train, evaluate, 0.6)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        two_towers_with_temperature,
        quantiles,
        bootstrapped_views,
        least_squares_gan,
        monte_carlo_dropout,
        fine_tuning_with_small_rates,
        functional_training,
        mixup,
        sum_over_pixels,
        one_optimizer_for_two_tasks_in_turn,
        count_regression,
        averaged_weights_for_evaluation,
    )
)
