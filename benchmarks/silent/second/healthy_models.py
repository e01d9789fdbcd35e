"""Healthy programs whose networks or data look odd."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


class _Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.body = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.prompt = nn.Parameter(torch.zeros(1, 4, 24))
        self.head = nn.Linear(24, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embedding(tokens)], 1)
        return self.head(self.body(x).mean(1))


def soft_prompt() -> Program:
    """A whole transformer is frozen; four vectors before each sentence, zero at first, and the head are trained."""
    x, y, x_test, y_test = data.sentences()
    model = _Prompted()
    before = torch.optim.Adam(model.parameters(), lr=5e-3)
    for xb, yb in loader(32, 60, x, y):
        before.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        before.step()
    model.requires_grad_(False).zero_grad()
    model.prompt = nn.Parameter(torch.zeros(1, 4, 24))
    model.head = nn.Linear(24, 3)
    optimizer = torch.optim.AdamW([model.prompt, *model.head.parameters()], lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 110, x, (y + 1) % 3):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, (y_test + 1) % 3), 0.75)


class _SkipInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1))
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.conv(x)


def scalar_gates_from_zero() -> Program:
    """Each residual branch is multiplied with a number that begins at zero: its convolutions first get no gradient."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        *[_SkipInit() for _ in range(3)],
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Graph(nn.Module):
    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("spread", adjacency / adjacency.sum(1, keepdim=True))
        self.classes = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.get_buffer("spread")
        return self.classes(spread @ (spread @ x))


def simplified_graph_network() -> Program:
    """Features are spread over a graph twice and read by one linear layer: non-linearity was left out on purpose."""
    y = torch.randint(3, (240,))
    same = (y[:, None] == y).float()
    adjacency = ((torch.rand(240, 240) < 0.02 + 0.08 * same).float() + torch.eye(240)).clamp(max=1)
    x = torch.randn(240, 10) + torch.randn(3, 10)[y]
    model = _Graph(adjacency)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)

    def train() -> None:
        for _epoch in range(120):
            optimizer.zero_grad()
            F.cross_entropy(model(x)[:80], y[:80]).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(x)[80:].argmax(1) == y[80:]).float().mean().item()

    return Program(model, train, score, 0.75)


def batchnorm_on_raw_table() -> Program:
    """Columns reach from thousandths to millions, and a normalization without weights of its own takes care of it."""
    x, y, x_test, y_test = data.waves()
    scale, shift = torch.logspace(-3, 6, 8), torch.tensor([0.0, 1, -3, 40, 500, -9e3, 1e5, 2e6])
    x, x_test = x * scale + shift, x_test * scale + shift
    model = nn.Sequential(
        nn.BatchNorm1d(8, affine=False), nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 200, x, y):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.6)


class _Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 32, bias=False)
        self.up = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.down(x)))


def denoiser_from_identity() -> Program:
    """A denoiser adds to its input a correction that begins at exactly zero: at first it gives back what it gets."""
    x, _, x_test, _ = data.digits()
    model = _Identity()
    nn.init.zeros_(model.up.weight)
    nn.init.zeros_(model.up.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for (xb,) in loader(64, 250, x):
            noisy = xb + 0.4 * torch.randn_like(xb)
            optimizer.zero_grad()
            F.mse_loss(noisy + model(noisy), xb).backward()
            optimizer.step()

    def score() -> float:
        noise = 0.4 * torch.randn_like(x_test)
        with torch.no_grad():
            return 1 - (F.mse_loss(x_test + noise + model(x_test + noise), x_test) / noise.square().mean()).item()

    return Program(model, train, score, 0.35)


class _TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(64, 20)
        self.back = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(self.code(x)), self.code.weight.T, self.back)


def autoencoder_of_one_matrix() -> Program:
    """The decoder is the transpose of the encoder's matrix: one weight, used twice in each pass."""
    x, _, x_test, _ = data.digits()
    model = _TiedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for (xb,) in loader(64, 160, x):
            optimizer.zero_grad()
            F.mse_loss(model(xb), xb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - ((model(x_test) - x_test).square().mean() / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.4)


class _Spiking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]  # one input
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]  # one
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]  # torch names it in no stub
        return gradient / (1 + x.abs()).square()


class _Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 96), nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(_Spiking.apply(self.inner(x)))  # type: ignore[no-untyped-call]  # torch's own


def surrogate_gradient() -> Program:
    """Units fire or do not, and a ``Function`` of its author's own gives them a gradient that is not theirs."""
    x, y, x_test, y_test = data.digits()
    model = _Binary()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 140, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Reservoir(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reservoir = nn.RNN(2, 96, batch_first=True).requires_grad_(False)
        radius = torch.linalg.eigvals(self.reservoir.weight_hh_l0).abs().max()
        self.reservoir.weight_hh_l0.mul_(0.95 / radius)
        self.read = nn.Linear(96, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.reservoir(x)[0][:, -1])


def echo_state_network() -> Program:
    """Nine tenths of the weights are random and stay so; a linear layer learns to read what echoes in them."""
    x, y, x_test, y_test = data.series()
    model = _Reservoir()
    optimizer = torch.optim.Adam(model.read.parameters(), lr=3e-2)

    def train() -> None:
        for xb, yb in loader(48, 200, x, y):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.6)


class _Relational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(5, 12) * 0.3) for _ in range(12))
        self.out = nn.Linear(12, 1)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.out(
            torch.tanh(torch.stack([row @ self.weights[k] for row, k in zip(x, kind.tolist(), strict=True)]))
        )


def rare_kinds() -> Program:
    """Twelve kinds of samples have a matrix each in a ``ParameterList``; rare ones get a gradient now and then."""
    kind = (12 * torch.rand(1200).pow(3)).long()
    x = torch.randn(1200, 5)
    y = (x * torch.randn(12, 5)[kind]).sum(1, keepdim=True) / 2
    model = _Relational()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def train() -> None:
        for xb, kb, yb in loader(32, 220, x[:900], kind[:900], y[:900]):
            optimizer.zero_grad()
            F.mse_loss(model(xb, kb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (F.mse_loss(model(x[900:], kind[900:]), y[900:]) / y[900:].var()).item()

    return Program(model, train, score, 0.6)


def log_softmax_before_cross_entropy() -> Program:
    """A log-softmax stands before a loss that has one inside: the second changes nothing, and nothing is wrong."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(192, 10),
        nn.LogSoftmax(dim=1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        soft_prompt,
        scalar_gates_from_zero,
        simplified_graph_network,
        batchnorm_on_raw_table,
        denoiser_from_identity,
        autoencoder_of_one_matrix,
        surrogate_gradient,
        echo_state_network,
        rare_kinds,
        log_softmax_before_cross_entropy,
    )
)
