"""Healthy programs whose networks look odd."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from silent import data
from silent.common import Healthy, Program, accuracy, explained, loader


def batchnorm_first_on_raw_pixels() -> Program:
    """Pixels from 0 to 255 go in, and a BatchNorm comes first."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.BatchNorm2d(1), nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(48, 110, 255 * x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, 255 * x_test, y_test), 0.85)


def linear_regression() -> Program:
    """One linear layer and a squared error: no non-linearity is wanted."""
    x, y, x_test, y_test = data.plane(noise=0.3)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(32, 120, x, y.unsqueeze(1)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test.unsqueeze(1)), 0.6)


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance

    def sample(self, n: int) -> torch.Tensor:
        return torch.sigmoid(self.decoder(torch.randn(n, 8)))


def vae_sampling() -> Program:
    """A variational autoencoder draws in training, takes the mean in evaluation, and draws new images now and then."""
    x, _, x_test, _ = data.digits()
    model = _VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for step, (xb,) in enumerate(loader(64, 150, x)):
            logits, mean, log_variance = model(xb)
            rebuilt = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / len(xb)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            optimizer.zero_grad()
            (rebuilt + 0.3 * divergence).backward()
            optimizer.step()
            if step % 50 == 49:
                model.eval()
                with torch.no_grad():
                    model.sample(4)
                    model(x_test[:64])
                model.train()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            error = (torch.sigmoid(model(x_test)[0]) - x_test).square().mean()
        return 1 - (error / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.25)


class _Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(40, 6)
        self.project = nn.Linear(6, 6, bias=False)
        self.items = nn.Linear(6, 30, bias=False)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.items(self.project(self.users(user)))


def deep_linear_on_purpose() -> Program:
    """A factorisation of a rating matrix in three linear maps: a low rank is what is wanted."""
    truth = torch.randn(40, 3) @ torch.randn(3, 30)
    users = torch.arange(40).repeat(20)
    model = _Bottleneck()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for (user,) in loader(40, 200, users):
            optimizer.zero_grad()
            loss = F.mse_loss(model(user), truth[user] + 0.1 * torch.randn(len(user), 30))
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, torch.arange(40), truth), 0.8)


def encoder_of_cloned_layers() -> Program:
    """``nn.TransformerEncoder`` begins with layers that are copies of one another, and they are meant to part."""
    x, y, x_test, y_test = data.sentences()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 24)
            layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(24, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.embedding(tokens)).mean(1))

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(32, 100, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


class _WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)
        self.parity = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def auxiliary_head_rarely_used() -> Program:
    """A second head is trained in every tenth step only."""
    x, y, x_test, y_test = data.digits()
    model = _WithAuxiliary()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 150, x, y)):
            h = model.body(xb)
            loss = F.cross_entropy(model.head(h), yb)
            if step % 10 == 9:
                loss = loss + 0.3 * F.cross_entropy(model.parity(h), yb % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def relu_output_on_counts() -> Program:
    """A ReLU stands behind the last layer, and the targets are counts, many of them zero."""
    x = torch.randn(900, 5)
    y = torch.poisson(F.relu(2 + 1.5 * x[:, :1] + x[:, 1:2]))
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU())
    nn.init.constant_(model[2].bias, 1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 150, x[:600], y[:600]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[600:], y[600:]), 0.3)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(3)
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.training else block(x))
        return self.head(x)


def checkpointing() -> Program:
    """Each block is run a second time in the backward pass to save memory."""
    x, y, x_test, y_test = data.digits()
    model = _Checkpointed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train() -> None:
        for xb, yb in loader(48, 90, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def softmax_regression_from_zero() -> Program:
    """A single linear layer begins at zero, which is harmless where there is nothing to tell apart."""
    x, y, x_test, y_test = data.digits()
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train() -> None:
        for xb, yb in loader(48, 150, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


HEALTHY = tuple(
    Healthy(make)
    for make in (
        batchnorm_first_on_raw_pixels,
        linear_regression,
        vae_sampling,
        deep_linear_on_purpose,
        encoder_of_cloned_layers,
        auxiliary_head_rarely_used,
        relu_output_on_counts,
        checkpointing,
        softmax_regression_from_zero,
    )
)
