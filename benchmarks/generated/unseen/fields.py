"""Families that compute numbers from points: field and experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generated.unseen.grammar import Spec
from generated.unseen.layers import Data, Family, Places, Plain, explained, huber, mse, norm, pseudo_huber, squared


def relief(n: int, g: torch.Generator) -> Data:
    """The height of a wavy field at a place: (n, 2) to (n, 1)."""
    x = torch.rand(n, 2, generator=g) * 2 - 1
    pace, phase = 4 * torch.randn(2, 5, generator=g), 6 * torch.rand(5, generator=g)
    y = torch.sin(x @ pace + phase).sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g)
    return Data((x,), ((y - y.mean()) / y.std(),))


class Siren(nn.Module):
    """A network of sines."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.inlet = nn.Linear(2, w)
        self.hidden = nn.ModuleList(nn.Linear(w, w) for _ in range(spec.depth))
        self.outlet, self.pace = nn.Linear(w, 1), 6.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.pace * self.inlet(x))
        for layer in self.hidden:
            x = torch.sin(2 * layer(x))
        return self.outlet(x)


def siren(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Siren(spec), Places("inlet", [f"hidden.{i}" for i in range(spec.depth)], ["outlet"])


def pieces(n: int, g: torch.Generator) -> Data:
    """A number that follows another rule in each of four regions: (n, 8) to (n, 1)."""
    x = torch.randn(n, 8, generator=g)
    which = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y = (x * torch.randn(4, 8, generator=g)[which]).sum(1, keepdim=True) / 3 + 0.1 * torch.randn(n, 1, generator=g)
    return Data((x,), ((y - y.mean()) / y.std(),))


class Experts(nn.Module):
    """A mixture of experts with soft gates."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        w = spec.width
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(Plain(spec, 8, w), nn.Linear(w, w)) for _ in range(4))
        self.top, self.norm = nn.Linear(w, 1), norm(spec, w)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(self.gate(x), 1)
        each = torch.stack([e(x) for e in self.experts], 1)
        return self.top(self.norm((gates.unsqueeze(2) * each).sum(1)))


def experts(spec: Spec) -> tuple[nn.Module, Places]:
    """Return the network."""
    return Experts(spec), Places("gate", [f"experts.{i}.1" for i in range(4)], ["top"])


FIELDS = {
    "field": Family(relief, siren, (squared, mse, pseudo_huber), explained, "numbers", 2e-3),
    "experts": Family(pieces, experts, (squared, mse, huber), explained, "numbers"),
}
