"""Healthy programs whose networks look odd."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, loader


def rare_tokens() -> Program:
    """Most words of a large vocabulary occur seldom or never, so that their rows get no gradient in most steps."""
    y = torch.randint(2, (900,))
    common = torch.randint(20, (900, 10)) + 20 * y.unsqueeze(1)
    rare = 40 + (torch.rand(900, 10).pow(4) * 960).long()
    x = torch.where(torch.rand(900, 10) < 0.4, common, rare)
    model = nn.Sequential(nn.EmbeddingBag(1000, 16), nn.Linear(16, 2))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def train() -> None:
        for xb, yb in loader(32, 140, x[:600], y[:600]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x[600:], y[600:]), 0.8)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        nn.init.zeros_(self.net[3].weight)
        nn.init.zeros_(self.net[3].bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


def zero_init_residual() -> Program:
    """The last layer of each residual branch begins at zero, so that the network begins as the identity."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 48), *[_Residual() for _ in range(4)], nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 6, bias=False)
        self.lora_b = nn.Linear(6, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


def lora() -> Program:
    """A network trained on another task is frozen; adapters that begin at zero are trained."""
    x, y, x_test, y_test = data.digits()
    base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    pretraining = torch.optim.Adam(base.parameters(), lr=5e-3)
    for xb, yb in loader(48, 100, x, y):
        pretraining.zero_grad()
        F.cross_entropy(base(xb), yb).backward()
        pretraining.step()
    base.requires_grad_(False)
    base.zero_grad()
    model = nn.Sequential(_LowRank(base[0]), nn.ReLU(), _LowRank(base[2]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train() -> None:
        for xb, yb in loader(48, 160, x.flip(1), y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test.flip(1), y_test), 0.75)


class _TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 32)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embedding(tokens))[0])


def weight_tying() -> Program:
    """A recurrent language model's embedding and head are one parameter."""
    tokens, tokens_test = data.text()
    model = _TiedModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for (batch,) in loader(32, 130, tokens):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, tokens_test[:, :-1], tokens_test[:, 1:]), 0.7)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.gate = nn.Linear(32, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(6))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.stem(x))
        weight, chosen = self.gate(h).softmax(1).max(1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * weight[rows, None])
        return self.head(h + out)


def mixture_of_experts() -> Program:
    """Each sample goes to one of six experts; some experts get few samples, and none at all in many steps."""
    x, y, x_test, y_test = data.digits()
    model = _Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(32, 150, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def large_workable_targets() -> Program:
    """Prices in the hundreds, a bias that begins at their mean, and an optimizer whose rate suits them."""
    x, y, _, _ = data.waves()
    y = 450 + 120 * y
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 1))
    nn.init.constant_(model[2].bias, 450.0)
    with torch.no_grad():
        model[2].weight.mul_(100)
    optimizer = torch.optim.Adam([
        {"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters(), "lr": 1.0},
    ])  # fmt: skip
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(32, 200, x[:450], y[:450]):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (criterion(model(x[450:]), y[450:]) / y[450:].var()).item()

    return Program(model, train, score, 0.5)


class _Unfreezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3))
        self.head = nn.Linear(216, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.stem(x)).flatten(1))


def progressive_unfreezing() -> Program:
    """The head is trained first, then the middle with it, then the whole."""
    x, y, x_test, y_test = data.images()
    model = _Unfreezing()
    model.stem.requires_grad_(False)
    model.middle.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 150, x, y)):
            if step == 40:
                model.middle.requires_grad_(True)
            if step == 80:
                model.stem.requires_grad_(True)
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def label_smoothing() -> Program:
    """A small transformer is trained on smoothed labels, so that its loss stays well above zero."""
    x, y, x_test, y_test = data.sentences()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 24)
            self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True, norm_first=True)
            self.head = nn.Linear(24, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embedding(tokens)).mean(1))

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 110, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


def mse_on_one_hot() -> Program:
    """Classes are learned with a squared error to their one-hot codes."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            criterion(model(xb), F.one_hot(yb, 10).float()).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        rare_tokens,
        zero_init_residual,
        lora,
        weight_tying,
        mixture_of_experts,
        large_workable_targets,
        progressive_unfreezing,
        label_smoothing,
        mse_on_one_hot,
    )
)
