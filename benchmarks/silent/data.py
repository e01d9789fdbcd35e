"""Small data sets, generated or shipped with scikit-learn, drawn anew for each seed."""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F


@functools.cache
def _raw_digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return handwritten digits as flat images of 64 pixels in [0, 1] with classes: to train, to test."""
    x, y = _raw_digits()
    order = torch.randperm(len(x))
    x, y = x[order] / 16, y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the digits with shape ``[N, 1, 8, 8]``."""
    x, y, x_test, y_test = digits()
    return x.view(-1, 1, 8, 8), y, x_test.view(-1, 1, 8, 8), y_test


def rings() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return two classes in the plane, one around the other: no line parts them."""
    x = torch.randn(900, 2)
    y = (x.norm(dim=1) > 1.18).long()
    return x[:600], y[:600], x[600:], y[600:]


def waves(n: int = 900) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a smooth, non-linear regression of eight features on one number of unit scale."""
    x = torch.randn(n, 8)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] * 0.5 + x[:, 3]
    y = (y / y.std()).unsqueeze(1)
    cut = n * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def plane(n: int = 600, features: int = 6, noise: float = 0.1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a linear regression with a little noise, targets of shape ``[N]``."""
    x = torch.randn(n, features)
    y = x @ torch.randn(features) / features**0.5 + noise * torch.randn(n)
    cut = n * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def sentences(n: int = 900, length: int = 12, vocabulary: int = 30) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token sequences of three classes, each of which prefers another third of the vocabulary."""
    y = torch.randint(3, (n,))
    third = vocabulary // 3
    own = torch.randint(third, (n, length)) + third * y.unsqueeze(1)
    x = torch.where(torch.rand(n, length) < 0.4, own, torch.randint(vocabulary, (n, length)))
    cut = n * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def text(n: int = 600, length: int = 12, vocabulary: int = 24) -> tuple[Tensor, Tensor]:
    """Return sequences in which each token is followed by its fixed successor nine times in ten: to train, to test."""
    successor = torch.randperm(vocabulary)
    tokens = torch.randint(vocabulary, (n, length))
    for t in range(1, length):
        jump = torch.rand(n) < 0.1
        tokens[:, t] = torch.where(jump, tokens[:, t], successor[tokens[:, t - 1]])
    return tokens[: n * 2 // 3], tokens[n * 2 // 3 :]


def masks(n: int = 240) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return noisy images with one bright square each, and the square as a mask of 0 and 1: ``[N, 1, 12, 12]``."""
    x, y = 0.3 * torch.randn(n, 1, 12, 12), torch.zeros(n, 1, 12, 12)
    corners = torch.randint(8, (n, 2))
    for i, (row, column) in enumerate(corners.tolist()):
        y[i, 0, row : row + 5, column : column + 5] = 1
    x += y
    cut = n * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def series(n: int = 600, length: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return series ``[N, T, 2]`` with a standardised target that is a weighted sum over time of one channel."""
    x = torch.randn(n, length, 2)
    y = (x[..., 0] * torch.linspace(0.2, 1, length)).sum(1) + 0.3 * x[:, -1, 1]
    y = ((y - y.mean()) / y.std()).unsqueeze(1)
    cut = n * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def arms(n: int = 64) -> tuple[Tensor, Tensor]:
    """Return states of a contextual bandit and the one arm of three that pays in each."""
    x = torch.randn(n, 4)
    return x, (x[:, :3] + F.pad(x[:, 3:], (0, 2))).argmax(1)
