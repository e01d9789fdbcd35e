"""What the networks of the unseen half are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.unseen.grammar import Spec

_MODULES = {
    "relu": nn.ReLU, "gelu": nn.GELU, "mish": nn.Mish, "hardswish": nn.Hardswish, "softplus": nn.Softplus,
    "celu": nn.CELU, "tanh": nn.Tanh, "relu6": nn.ReLU6,
}  # fmt: skip

Loss = Callable[..., Tensor]


@dataclass
class Data:
    """Samples of a task; rows of all tensors belong together.

    Attributes:
        inputs: What the model is called with.
        targets: What the loss is called with beside the model's output.
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


@dataclass
class Places:
    """Names of layers by their part in a network.

    Attributes:
        first: Reads the inputs.
        middle: Lie between, in order.
        heads: Give the output.
    """

    first: str
    middle: list[str]
    heads: list[str]


@dataclass(frozen=True)
class Family:
    """A task with the networks and losses that suit it.

    Attributes:
        data: Makes samples.
        model: Makes the network.
        losses: Loss functions of output and targets.
        skill: 1 perfect, 0 the best constant prediction.
        kind: ``classes``, ``binary``, ``numbers`` or what else the targets are.
        rate: Learning rate of Adam that suits it.
    """

    data: Callable[[int, torch.Generator], Data]
    model: Callable[[Spec], tuple[nn.Module, Places]]
    losses: tuple[Loss, ...]
    skill: Callable[..., float]
    kind: str
    rate: float = 3e-3


def act(spec: Spec) -> Callable[[Tensor], Tensor]:
    """Return the drawn activation, a module or a function."""
    if spec.as_module:
        return _MODULES[spec.activation]()
    return torch.tanh if spec.activation == "tanh" else getattr(functional, spec.activation)


def norm(spec: Spec, size: int, channels: int = 0) -> nn.Module:
    """Return the drawn norm over the last dimension, or over ``channels`` dimensions after the channel."""
    if channels:
        kinds = {"batch": nn.BatchNorm1d if channels == 1 else nn.BatchNorm2d, "layer": None, "rms": None}
        if spec.norm == "batch":
            return kinds["batch"](size)
        return nn.GroupNorm(4, size) if spec.norm else nn.Identity()
    if spec.norm == "rms":
        return nn.RMSNorm(size)
    return nn.LayerNorm(size) if spec.norm else nn.Identity()


class Residual(nn.Module):
    """A two-layer block added to what it reads."""

    def __init__(self, spec: Spec, width: int) -> None:
        super().__init__()
        self.norm = norm(spec, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = act(spec), nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Plain(nn.Module):
    """A layer and what follows it."""

    def __init__(self, spec: Spec, a: int, b: int) -> None:
        super().__init__()
        self.map, self.norm, self.act = nn.Linear(a, b), norm(spec, b), act(spec)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.map(x))))


class Heads(nn.Module):
    """Attention by hand, ``causal`` or not."""

    def __init__(self, spec: Spec, width: int, causal: bool) -> None:
        super().__init__()
        self.norm = norm(spec, width) if spec.norm else nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.causal, self.heads, self.dim, self.sharp = causal, 4, -1, 1.0
        self.keep = True

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.sharp * q @ k.transpose(-2, -1) / (w // self.heads) ** 0.5
        if self.causal:
            allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(allowed != (self.keep or not self.training), -1e4)
        out = torch.softmax(scores, self.dim) @ v
        return x + self.o(out.transpose(1, 2).reshape(n, t, w))


def fill(model: nn.Module, how: str) -> None:
    """Fill the weights of matrices and convolutions as drawn."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            if how == "truncated":
                nn.init.trunc_normal_(m.weight, std=m.weight[0].numel() ** -0.5)
            elif how == "he":
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            elif how == "glorot":
                nn.init.xavier_normal_(m.weight)
            if how and m.bias is not None:
                nn.init.zeros_(m.bias)


def explained(out: Tensor, y: Tensor) -> float:
    """Share of the variance that is explained."""
    return float(1 - ((out - y) ** 2).mean() / ((y - y.mean(0)) ** 2).mean()) if out.shape == y.shape else 0.0


def hits(out: Tensor, y: Tensor) -> float:
    """Share of classes named right, above that of the most frequent class."""
    out, y = out.reshape(-1, out.shape[-1]), y.reshape(-1)
    base = float(torch.bincount(y).max()) / len(y)
    return (float((out.argmax(1) == y).float().mean()) - base) / (1 - base)


def signs(out: Tensor, y: Tensor) -> float:
    """Share of yes and no told apart, above that of the more frequent answer."""
    base = max(float(y.mean()), 1 - float(y.mean()))
    return (float(((out > 0) == (y > 0.5)).float().mean()) - base) / (1 - base)


def cross_entropy_by_hand(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy from exponentials, as taught."""
    out, y = out.reshape(-1, out.shape[-1]), y.reshape(-1)
    e = torch.exp(out - out.amax(1, keepdim=True).detach())
    return -(e[torch.arange(len(y)), y] / e.sum(1)).clamp_min(1e-9).log().mean()


def focal(out: Tensor, y: Tensor) -> Tensor:
    """Focal loss."""
    logs = functional.log_softmax(out.reshape(-1, out.shape[-1]), 1)
    own = logs.gather(1, y.reshape(-1, 1)).squeeze(1)
    return -((1 - own.exp()) ** 1.5 * own).mean()


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own."""
    return functional.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def brier(out: Tensor, y: Tensor) -> Tensor:
    """Squared distance of probabilities from the truth."""
    p = torch.softmax(out.reshape(-1, out.shape[-1]), 1)
    return ((p - functional.one_hot(y.reshape(-1), p.shape[1])) ** 2).sum(1).mean()


def binary(out: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own."""
    return functional.binary_cross_entropy_with_logits(out, y)


def binary_by_hand(out: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy from log-sigmoids."""
    return -(y * functional.logsigmoid(out) + (1 - y) * functional.logsigmoid(-out)).mean()


def squared(out: Tensor, y: Tensor) -> Tensor:
    """Squared error by hand."""
    return (out - y).pow(2).mean()


def huber(out: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own."""
    return functional.huber_loss(out, y)


def pseudo_huber(out: Tensor, y: Tensor) -> Tensor:
    """A smooth absolute error by hand."""
    return (torch.sqrt(1 + (out - y) ** 2) - 1).mean()


def mse(out: Tensor, y: Tensor) -> Tensor:
    """PyTorch's own."""
    return functional.mse_loss(out, y)
