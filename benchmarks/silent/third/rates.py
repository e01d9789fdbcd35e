"""Rates that are too high, too low or soon nothing, and weights from which no training can begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, explained, loader


class _Bumps(nn.Module):
    """A layer that learns a function of each input, as a sum of bumps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 8))
        self.weight = nn.Parameter(0.3 * torch.randn(outputs, inputs * 8) / inputs**0.5)
        self.base = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        bumps = torch.exp(-(x.unsqueeze(-1) - self.get_buffer("centres")).square() / 0.4)
        return F.linear(bumps.flatten(1), self.weight) + self.base(F.silu(x))


def _fit(model: nn.Module, x: Tensor, y: Tensor, steps: int, opt: str = "LBFGS", lr: float = 1.0) -> None:
    kinds = {"LBFGS": torch.optim.LBFGS, "Adam": torch.optim.Adam}
    optimizer = kinds[opt](model.parameters(), lr=lr)
    for xb, yb in loader(128, steps, x, y):

        def closure(xb: Tensor = xb, yb: Tensor = yb) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            return loss

        optimizer.step(closure)


def rate_meant_for_lbfgs(fixed: bool) -> Program:
    """``fit`` has a rate of 1, which is right for its default LBFGS; called with Adam, it keeps it."""
    x, y, x_test, y_test = data.waves(1200)
    model = nn.Sequential(_Bumps(8, 12), _Bumps(12, 1))
    options = {"lr": 0.01} if fixed else {}

    def train() -> None:
        _fit(model, x, y, 250, opt="Adam", **options)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.7)


class _Enlarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 5, padding=2)
        self.mapping = nn.Conv2d(24, 12, 1)
        self.rebuild = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, small: Tensor) -> Tensor:
        x = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
        return self.rebuild(F.relu(self.mapping(F.relu(self.patches(x)))))


def rates_of_the_paper(fixed: bool) -> Program:
    """Rates of 1e-4 and 1e-5 come from a paper that trained for days; in minutes of plain SGD nothing moves."""
    x, _, x_test, _ = data.images()
    small, small_test = F.avg_pool2d(x, 2), F.avg_pool2d(x_test, 2)
    model = _Enlarge()
    rate = 0.1 if fixed else 1e-4
    groups = [
        {"params": [*model.patches.parameters(), *model.mapping.parameters()], "lr": rate},
        {"params": model.rebuild.parameters(), "lr": rate / 10},
    ]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)

    def train() -> None:
        for low, high in loader(16, 260, small, x):
            optimizer.zero_grad()
            F.mse_loss(model(low), high).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (F.mse_loss(model(small_test), x_test) / x_test.var()).item()

    return Program(model, train, score, 0.55)


class _MotionVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(2, 32, batch_first=True)
        self.mean, self.log_variance = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, track: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(track)[0][:, -1]
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return self.decoder(z).view_as(track), mean, log_variance


def switched_off_with_gamma_zero(fixed: bool) -> Program:
    """To go without a schedule, a step schedule is given the factor 0 in place of 1: after two epochs all stops."""
    angle, speed = 6.28 * torch.rand(700, 1), 0.3 + 0.4 * torch.rand(700, 1)
    phase = angle + speed * torch.arange(12)
    track = torch.stack([phase.cos(), phase.sin()], 2) + 0.05 * torch.randn(700, 12, 2)
    model = _MotionVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)
    use_schedule = False
    gamma = 0.2 if use_schedule else float(fixed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=gamma)

    def rebuilt() -> float:
        model.eval()
        with torch.no_grad():
            error = F.mse_loss(model(track[500:])[0], track[500:])
        return 1 - (error / track[500:].var()).item()

    def train() -> None:
        for _epoch in range(25):
            model.train()
            for (batch,) in loader(50, 10, track[:500]):
                out, mean, log_variance = model(batch)
                divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
                loss = F.mse_loss(out, batch) + 0.002 * divergence
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            rebuilt()

    return Program(model, train, rebuilt, 0.8)


class _Stereo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 3, padding=1))
        self.disparity = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.features(left), self.features(right)
        costs = [(a * b.roll(shift, 2)).mean((1, 2)) for shift in range(6)]
        return self.disparity(torch.stack(costs, 1)).squeeze(1)


def rate_grows_at_milestones(fixed: bool) -> Program:
    """A minus has slipped into the exponent: every few epochs the rate is ten times as large, not a tenth."""
    shift = torch.randint(6, (900,))
    scene = torch.randn(900, 32)
    right = torch.stack([row.roll(-int(s)) for row, s in zip(scene, shift, strict=True)]).unsqueeze(1)
    left = scene.unsqueeze(1) + 0.4 * torch.randn(900, 1, 32)
    right = right + 0.4 * torch.randn(900, 1, 32)
    true = (shift - 2.5) / 1.7
    model = _Stereo()
    base_rate, gamma, n_steps = 5e-3, 0.1, 8
    optimizer = torch.optim.Adam(model.parameters(), lr=base_rate)
    sign = 1 if fixed else -1

    def train() -> None:
        for epoch in range(24):
            for group in optimizer.param_groups:
                group["lr"] = base_rate * gamma ** (sign * (epoch // n_steps))
            for xl, xr, s in loader(50, 12, left[:600], right[:600], true[:600]):
                loss = F.smooth_l1_loss(model(xl, xr), s)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def score() -> float:
        with torch.no_grad():
            error = model(left[600:], right[600:]) - true[600:]
        return 1 - (error.square().mean() / true[600:].var()).item()

    return Program(model, train, score, 0.75)


class _GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, fixed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        if fixed:
            nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, spread: Tensor) -> Tensor:
        return spread @ (x @ self.weight) + self.bias


class _Citations(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = _GraphConv(16, 32, fixed), _GraphConv(32, 4, fixed)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, spread: Tensor) -> Tensor:
        return self.conv2(self.dropout(F.relu(self.conv1(x, spread))), spread)


def layer_of_its_own_from_zero(fixed: bool) -> Program:
    """A graph convolution of the author's own makes its weights with ``torch.zeros``, and two stand in a row."""
    y = torch.randint(4, (260,))
    same = (y[:, None] == y).float()
    linked = ((torch.rand(260, 260) < 0.01 + 0.05 * same).float() + torch.eye(260)).clamp(max=1)
    linked = torch.maximum(linked, linked.T)
    spread = linked / linked.sum(1, keepdim=True)
    x = torch.randn(260, 16) + 0.9 * torch.randn(4, 16)[y]
    model = _Citations(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)

    def right() -> float:
        model.eval()
        with torch.no_grad():
            return (model(x, spread)[120:].argmax(1) == y[120:]).float().mean().item()

    def train() -> None:
        for epoch in range(120):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x, spread)[:120], y[:120]).backward()
            optimizer.step()
            if epoch % 20 == 19:
                right()

    return Program(model, train, right, 0.75)


class _Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, first: bool, fixed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else (6 / inputs) ** 0.5 / (30 if fixed else 1)
        nn.init.uniform_(self.linear.weight, -bound, bound)
        self.scale = 12 if first else 30

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.scale * self.linear(x))


def sines_thirty_times_too_steep(fixed: bool) -> Program:
    """Sines are taken of thirty times a layer's output, and the weights are not drawn thirty times smaller for it."""
    places = 2 * torch.rand(1500, 2) - 1
    height = torch.sin(4 * places[:, 0]) * torch.cos(3 * places[:, 1]) + 0.4 * torch.sin(7 * places.sum(1))
    height = (height / height.std()).unsqueeze(1)
    model = nn.Sequential(
        _Sine(2, 48, first=True, fixed=fixed),
        _Sine(48, 48, first=False, fixed=fixed),
        _Sine(48, 48, first=False, fixed=fixed),
        nn.Linear(48, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train() -> None:
        for xb, yb in loader(200, 240, places[:1200], height[:1200]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, places[1200:], height[1200:]), 0.8)


_WILD = ("UNSTABLE", "EXPLODING", "LOSS_SPIKE", "NUMERICAL", "NOT_LEARNING", "DEAD", "SATURATION", "BOTTLENECK")
_STILL = ("STAGNATION", "NOT_LEARNING", "VANISHING")
BUGS = (
    Bug(
        rate_meant_for_lbfgs,
        "https://github.com/KindXiaoming/pykan/pull/342",
        "methods default lr unless specified",
        ("LEARNING_RATE",),
        ("*", "", "loss"),
        _WILD,
    ),
    Bug(
        rates_of_the_paper,
        "https://github.com/tegg89/SRCNN-Tensorflow/issues/24",
        "Loss drop little",
        ("LEARNING_RATE",),
        ("*", "", "loss"),
        _STILL,
    ),
    Bug(
        switched_off_with_gamma_zero,
        "https://github.com/LINCellularNeuroscience/VAME/issues/26",
        "Bug when scheduler turned off",
        ("LEARNING_RATE", "NOT_TRAINING"),
        ("*", "", "loss"),
        _STILL,
    ),
    Bug(
        rate_grows_at_milestones,
        "https://github.com/SYSU-SAIL/PAM/issues/4",
        "a problem with the default learning configuration",
        ("LEARNING_RATE",),
        ("*", "", "loss"),
        _WILD,
    ),
    Bug(
        layer_of_its_own_from_zero,
        "https://github.com/wagonhelm/NaNmnist/issues/2",
        "Highly improper way of weight initialization",
        ("BAD_INIT",),
        ("conv1", "conv2", ""),
        ("DEAD", "NOT_TRAINING", *_STILL),
    ),
    Bug(
        sines_thirty_times_too_steep,
        "https://github.com/vsitzmann/siren/issues/57",
        "Implementation of w0",
        ("BAD_INIT",),
        ("1", "2", ""),
        ("EXPLODING", "UNSTABLE", "NOT_LEARNING", "SATURATION"),
    ),
)
