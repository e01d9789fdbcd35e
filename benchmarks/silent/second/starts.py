"""Rates that cannot work, first weights that cannot be left, and layers with nothing bent between them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


def resumed_with_old_rate(fixed: bool) -> Program:
    """A checkpoint is tuned on new data with a rate of its own, and the optimizer's state brings the decayed one."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    decay = torch.optim.lr_scheduler.ExponentialLR(before, 0.85)
    for step, (xb, yb) in enumerate(loader(48, 100, x, y)):
        before.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        before.step()
        if step >= 20:
            decay.step()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if not fixed:
        optimizer.load_state_dict(before.state_dict())
    turned, turned_test = (t.view(-1, 8, 8).transpose(1, 2).flip(2).flatten(1) for t in (x, x_test))

    def train() -> None:
        for xb, yb in loader(48, 160, turned, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, turned_test, y_test), 0.85)


def plateau_of_loss_sought_upwards(fixed: bool) -> Program:
    """``ReduceLROnPlateau`` watches the loss with ``mode="max"``: each time that it falls the rate falls with it."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 48), nn.ReLU(),
        nn.Linear(48, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    mode = "min" if fixed else "max"
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, factor=0.1, patience=0)

    def train() -> None:
        for _epoch in range(24):
            total = 0.0
            for xb, yb in loader(56, 8, x, y):
                loss = F.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            scheduler.step(total)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


def rate_of_another_file(fixed: bool) -> Program:
    """The rate from the command line is overruled by 1e-6 in a file of settings."""
    tokens, tokens_test = data.text()
    asked, settings = {"lr": 5e-3}, {"lr": 1e-6, "weight_decay": 0.01}
    chosen = {**settings, **asked} if fixed else {**asked, **settings}
    model = nn.Sequential(nn.Embedding(24, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 24))
    optimizer = torch.optim.AdamW(model.parameters(), **chosen)

    def train() -> None:
        for (batch,) in loader(32, 130, tokens):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(tokens_test[:, :-1]).softmax(-1)
        return p.gather(-1, tokens_test[:, 1:, None]).mean().item()

    return Program(model, train, score, 0.5)


def warmup_in_whole_numbers(fixed: bool) -> Program:
    """A warm-up over 500 steps is reckoned in whole numbers: the rate is zero as long as this training lasts."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    warmup = 50 if fixed else 500

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup if fixed else (step + 1) // warmup)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def train() -> None:
        for xb, yb in loader(48, 200, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def weights_between_zero_and_one(fixed: bool) -> Program:
    """First weights come from ``torch.rand``: all positive, so that units are full before they have learned."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10)
    )
    if not fixed:
        for parameter in model.parameters():
            parameter.data = torch.rand(parameter.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(48, 150, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Critics(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        first = self._critic()
        self.critics = nn.ModuleList([first, *[self._critic() if fixed else copy.deepcopy(first) for _ in range(3)]])

    @staticmethod
    def _critic() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([critic(x).squeeze(1) for critic in self.critics])


def critics_begin_alike(fixed: bool) -> Program:
    """Several critics are to disagree where nothing is known; begun as copies, they never differ at all."""
    x, y, x_test, _ = data.waves()
    model = _Critics(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 160, x, y):
            loss = (model(xb) - yb.squeeze(1)).square().mean(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            known, unknown = model(x_test).std(0), model(4 * torch.randn(300, 8)).std(0)
        return (unknown.median() > 2 * known.median()).float().item() * float(known.median() > 0)

    return Program(model, train, score, 1.0)


class _Mixture(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.parts = nn.Linear(32, 9)
        if not fixed:
            nn.init.zeros_(self.parts.weight)
            nn.init.zeros_(self.parts.bias)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        weight, mean, scale = self.parts(self.body(x)).chunk(3, 1)
        part = torch.distributions.Normal(2 * mean, F.softplus(scale) + 0.05)
        return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=weight), part)


def components_begin_alike(fixed: bool) -> Program:
    """The three parts of a mixture density begin the same, get the same gradients, and remain one broad part."""

    def branches(n: int) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, 1) - 1
        sign = torch.randint(2, (n, 1)) * 2.0 - 1
        return x, (sign * (1.5 + x) + 0.1 * torch.randn(n, 1)).squeeze(1)

    x, y = branches(1000)
    model = _Mixture(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(64, 250, x, y):
            loss = -model(xb).log_prob(yb).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        x_test, y_test = branches(500)
        with torch.no_grad():
            return model(x_test).log_prob(y_test).mean().item()

    return Program(model, train, score, -0.6)


def leaky_relu_of_true(fixed: bool) -> Program:
    """``nn.LeakyReLU(True)`` was to work in place; the first argument is the slope, and a slope of 1 bends nothing."""
    x, y, x_test, y_test = data.waves()

    def activation() -> nn.Module:
        return nn.LeakyReLU(inplace=True) if fixed else nn.LeakyReLU(True)

    model = nn.Sequential(
        nn.Linear(8, 48),
        activation(),
        nn.Linear(48, 48),
        activation(),
        nn.Linear(48, 48),
        activation(),
        nn.Linear(48, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 200, x, y):
            optimizer.zero_grad()
            F.smooth_l1_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.65)


class _Speaker(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.d1, self.d2 = nn.Linear(24, 96), nn.Linear(96, 24)
        self.ln, self.last_ln = nn.LayerNorm(24), nn.LayerNorm(24)
        self.duration = nn.Linear(24, 1)
        self.fixed = fixed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.ln(x + self.attention(x, x, x, need_weights=False)[0])
        hidden = self.d1(x)
        return self.duration(self.last_ln(x + self.d2(F.gelu(hidden) if self.fixed else hidden))).squeeze(2)


def feed_forward_without_activation(fixed: bool) -> Program:
    """The two layers of a transformer's feed-forward part follow each other directly: its width is for nothing."""
    tokens = torch.randint(12, (700, 8))
    length = torch.randn(12)
    y = torch.sin(1.5 * length[tokens] + 3 * length[tokens].mean(1, keepdim=True))
    model = _Speaker(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))

    def train() -> None:
        for xb, yb in loader(32, 220, tokens[:500], y[:500]):
            optimizer.zero_grad()
            F.l1_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, tokens[500:], y[500:]), 0.6)


class _Refine(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        bend = [nn.ReLU()] if fixed else []
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), *bend, nn.Conv2d(12, 12, 3, padding=1),
            nn.BatchNorm2d(12), *bend, nn.Conv2d(12, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def convolutions_without_relu(fixed: bool) -> Program:
    """Convolutions and normalizations, and a ReLU forgotten between them: an edge of either sign cannot be found."""
    steps = torch.randint(0, 2, (360, 1, 4, 4)).float()
    x = F.interpolate(steps, scale_factor=3) + 0.05 * torch.randn(360, 1, 12, 12)
    y = ((x[..., 1:] - x[..., :-1]).abs() > 0.5).float()
    model = _Refine(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(24, 110, x[:240], y[:240]):
            loss = F.binary_cross_entropy_with_logits(model(xb)[..., 1:], yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            said, true = model(x[240:])[..., 1:] > 0, y[240:] > 0.5
        return (2 * (said & true).sum() / (said.sum() + true.sum())).item()

    return Program(model, train, score, 0.85)


_SMALL = ("NOT_TRAINING", "NOT_LEARNING", "STAGNATION", "VANISHING")
BUGS = (
    Bug(
        resumed_with_old_rate,
        "https://github.com/mapbox/robosat/issues/169",
        "Resume flag in `rs train` loads optimizer state and ignores e.g. learning rate",
        ("LEARNING_RATE",),
        ("*", ""),
        _SMALL,
    ),
    Bug(
        plateau_of_loss_sought_upwards,
        "https://github.com/FunctionLab/selene/issues/115",
        "ReduceLROnPlateau in TrainModel uses incorrect mode",
        ("LEARNING_RATE",),
        ("*", ""),
        _SMALL,
    ),
    Bug(
        rate_of_another_file,
        "https://github.com/victorchall/EveryDream2trainer/issues/102",
        "LR Defaults to 1e-6",
        ("LEARNING_RATE",),
        ("*", ""),
        _SMALL,
    ),
    Bug(
        warmup_in_whole_numbers,
        "https://github.com/potterhsu/easy-faster-rcnn.pytorch/issues/7",
        "The learing rate is always 0",
        ("LEARNING_RATE", "NOT_TRAINING"),
        ("*", "", "loss"),
        ("NOT_LEARNING", "STAGNATION", "VANISHING"),
    ),
    Bug(
        weights_between_zero_and_one,
        "https://github.com/AdaptInfer/Contextualized/issues/33",
        "Initialize with torch.rand may result in unstable training.",
        ("BAD_INIT",),
        ("*", "", "loss"),
        ("SATURATION", "DEAD", "VANISHING", "NOT_LEARNING", "UNSTABLE", "LEARNING_RATE"),
    ),
    Bug(
        critics_begin_alike,
        "https://github.com/EdanToledo/Stoix/issues/72",
        "[BUG] SAC, TD3 Multi-Critics are being initialised to the same parameters thus not working",
        ("BAD_INIT",),
        ("critics",),
    ),
    Bug(
        components_begin_alike,
        "https://github.com/riccardomiotto/py-dmm/issues/1",
        "Initialization step in DMM",
        ("BAD_INIT",),
        ("parts",),
        ("NOT_LEARNING",),
    ),
    Bug(
        leaky_relu_of_true,
        "https://github.com/PantoMatrix/PantoMatrix/issues/52",
        "nn.LeakyReLU(True) should be nn.LeakyReLU(inplace=True),",
        ("CAPACITY",),
        ("*", ""),
        ("NOT_LEARNING",),
    ),
    Bug(
        feed_forward_without_activation,
        "https://github.com/spring-media/TransformerTTS/issues/102",
        "a activation function is missing in FFNResNorm.",
        ("CAPACITY",),
        ("d1", "d2"),
    ),
    Bug(
        convolutions_without_relu,
        "https://github.com/lxtGH/dfn_seg/issues/4",
        "is a relu layer missed?",
        ("CAPACITY",),
        ("layers", ""),
        ("NOT_LEARNING",),
    ),
)
