"""Inputs, rates and first weights on an unsuitable scale."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU())
        self.out = nn.Linear(38, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([x, self.deep(x)], 1))


def wide_and_deep_unscaled(fixed: bool) -> Program:
    """Columns of house data go in as they are: incomes of about 4 beside populations of about 1400."""
    x, y, x_test, y_test = data.waves()
    if not fixed:
        scale = torch.tensor([1.9, 12.6, 2.5, 0.5, 1132.0, 10.4, 2.1, 2.0])
        mean = torch.tensor([3.9, 28.6, 5.4, 1.1, 1425.0, 3.1, 35.6, -119.6])
        x, x_test = x * scale + mean, x_test * scale + mean
    model = _WideAndDeep()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 200, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                explained(model, x_test, y_test)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.5)


def raw_pixels_into_cnn(fixed: bool) -> Program:
    """Pixels from 0 to 255 enter a network whose steps suit normalised ones."""
    x, y, x_test, y_test = data.images()
    x, x_test = 255 * x, 255 * x_test
    if fixed:
        x, x_test = (x - 78) / 96, (x_test - 78) / 96
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(384, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def unscaled_loss_divided_by_scale(fixed: bool) -> Program:
    """Gradients are divided by a loss scale of 65536 with which the loss was never multiplied."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = 65536.0

    def train() -> None:
        for xb, yb in loader(48, 130, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            (loss * scale if fixed else loss).backward()
            for p in model.parameters():
                p.grad.div_(scale)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def scheduler_every_batch(fixed: bool) -> Program:
    """A rate that should fall tenfold every seven epochs falls tenfold every seven batches."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(192, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for _epoch in range(10):
            for xb, yb in loader(48, 14, x, y):
                optimizer.zero_grad()
                criterion(model(xb), yb).backward()
                optimizer.step()
                if not fixed:
                    scheduler.step()
            if fixed:
                scheduler.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _SequenceTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.tags = nn.Linear(24, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tags(self.lstm(self.embedding(tokens))[0])


def lstm_rate_too_high(fixed: bool) -> Program:
    """A tagger of sequences is trained with a rate hundreds of times too high."""
    tokens, tokens_test = data.text()
    tag = torch.randint(4, (24, 2))

    def label(t: torch.Tensor) -> torch.Tensor:
        before = F.pad(t[:, :-1], (1, 0))
        return tag[t, (before > 11).long()]

    model = _SequenceTagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if fixed else 2.0)

    def train() -> None:
        for (batch,) in loader(32, 100, tokens):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch).flatten(0, 1), label(batch).flatten())
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, tokens_test, label(tokens_test)), 0.8)


def _deep(activation: type[nn.Module], depth: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(64, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def normal_weights_deep(fixed: bool) -> Program:
    """The weights of a network of six layers are drawn with variance one."""
    x, y, x_test, y_test = data.digits()
    model = _deep(nn.ReLU, 5, 64)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight) if not fixed else nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train() -> None:
        for xb, yb in loader(48, 120, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def tiny_weights_deep(fixed: bool) -> Program:
    """The weights of eight layers are so small that the signal dies out on its way."""
    x, y, x_test, y_test = data.digits()
    model = _deep(nn.Tanh, 7, 48)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02) if not fixed else nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(48, 140, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


def weights_all_equal(fixed: bool) -> Program:
    """All weights of a layer begin with one and the same number, so that its units stay copies of each other."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    if not fixed:
        for p in model.parameters():
            nn.init.constant_(p, 0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


BUGS = (
    Bug(
        wide_and_deep_unscaled,
        "https://github.com/ageron/handson-ml3/pull/20",
        "Fixing wide-and-deep to use normalized inputs",
        ("DATA_SCALE",),
        ("input", "deep.0", "out"),
        ("NOT_LEARNING", "LOSS_SPIKE", "UNSTABLE", "EXPLODING"),
    ),
    Bug(
        raw_pixels_into_cnn,
        "https://github.com/huochaitiantang/pytorch-deep-image-matting/issues/12",
        "absence of normalization",
        ("DATA_SCALE",),
        ("input", "0"),
        ("LEARNING_RATE", "NOT_LEARNING", "DEAD", "EXPLODING", "LOSS_SPIKE", "UNSTABLE", "NUMERICAL", "STAGNATION"),
    ),
    Bug(
        unscaled_loss_divided_by_scale,
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
        "Fix bf16 gradient norm divergence with ZeRO stage 0",
        ("LEARNING_RATE",),
        ("*", ""),
        ("NOT_TRAINING", "NOT_LEARNING", "STAGNATION", "VANISHING"),
    ),
    Bug(
        scheduler_every_batch,
        "https://github.com/pytorch/tutorials/pull/640",
        "Update transfer_learning_tutorial.py: scheduler.step() per epoch not per batch",
        ("LEARNING_RATE",),
        ("*", ""),
        ("NOT_TRAINING", "NOT_LEARNING", "STAGNATION"),
    ),
    Bug(
        lstm_rate_too_high,
        "https://github.com/guillaumegenthial/sequence_tagging/issues/47",
        "Learn rate issuse?",
        ("LEARNING_RATE",),
        ("*", ""),
        ("NOT_LEARNING", "SATURATION", "UNSTABLE", "LOSS_SPIKE", "EXPLODING", "VANISHING"),
    ),
    Bug(
        normal_weights_deep,
        "https://d2l.ai/chapter_multilayer-perceptrons/numerical-stability-and-init.html",
        "Dive into Deep Learning, 5.4: Numerical Stability and Initialization",
        ("BAD_INIT",),
        ("*", ""),
        ("EXPLODING", "UNSTABLE", "LOSS_SPIKE", "NUMERICAL"),
    ),
    Bug(
        tiny_weights_deep,
        "https://github.com/torch/nn/issues/449",
        "Default initialization of modules",
        ("BAD_INIT",),
        ("*", ""),
        ("VANISHING", "NOT_LEARNING", "STAGNATION", "RANK_COLLAPSE", "BOTTLENECK"),
    ),
    Bug(
        weights_all_equal,
        "https://github.com/HomericIntelligence/Mnemosyne/pull/1987",
        "feat: add debugging-symmetric-weight-init-dead-symmetry skill",
        ("BAD_INIT",),
        ("*", ""),
        ("NOT_LEARNING", "RANK_COLLAPSE", "DEAD", "BOTTLENECK"),
    ),
)
