"""Loops of every kind over one model that has a bit of everything, for ``truth.py``: what their records should say.

A metric that is right where training is plain may be wrong where gradients are sparse, accumulated, clipped or scaled,
where several optimizers step, or where a parameter is shared. So each kind of loop trains this model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from truth_cases import RUN, Heads, Told, residual, told_of_rows

KINDS = ("dense", "sparse", "accumulated", "clipped", "AMP", "several optimizers", "shared parameter")
"""Kinds of loops that every metric is compared in."""

POINTS = 24
"""Steps after which the path of the weights is judged first."""

WIDTH = 6


def kinds_of(loop: Any) -> set[str]:
    """Return the kinds that a loop is of."""
    named = [name for name, _ in loop.model.named_parameters(remove_duplicate=False)]
    found = {
        "sparse": any(getattr(module, "sparse", False) for module in loop.model.modules()),
        "accumulated": len(loop.batches[0]) > 1,
        "clipped": loop.clip is not None,
        "AMP": loop.autocast is not None or loop.scaler is not None,
        "several optimizers": len(loop.optimizers) > 1,
        "shared parameter": len(named) > len(list(loop.model.parameters())),
    }
    return {kind for kind, here in found.items() if here} or {"dense"}


class Everything(nn.Module):
    """Attention, a recurrent layer, a bounded and a rectified activation between an embedding and a head.

    Args:
        sparse: Whether the gradient of the embedding is.
        shared: Whether the head has the matrix of the embedding.
    """

    def __init__(self, *, sparse: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Embedding(20, WIDTH, sparse=sparse), nn.Linear(WIDTH, 20, bias=not shared)
        self.blocks = nn.ModuleList(
            [
                Heads(),
                Heads(),
                nn.GRU(WIDTH, WIDTH, batch_first=True),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            ]
        )
        if shared:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. Shape: ``[batch, 20]``."""
        first, second, recurrent, bounded, rectified = self.blocks
        states, _ = recurrent(second(first(self.first(x))))
        out: Tensor = self.head(rectified(bounded(states[:, -1])))
        return out


class Small(nn.Module):
    """So few weights that all of them are followed."""

    def __init__(self, *, sparse: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Embedding(4, 2, sparse=sparse), nn.Linear(2, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()) for _ in range(2))
        if shared:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. Shape: ``[batch, 4]``."""
        out: Tensor = self.head(self.blocks[1](self.blocks[0](self.first(x).mean(dim=1))))
        return out


def attended(model: nn.Module, inputs: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Tensor]]:
    """Return queries and keys of each attention at the weights of the forward pass, in the precision it computes in."""
    found = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Heads) and name in inputs:
                linear = module.qkv
                rows = 3 * nn.functional.linear(inputs[name][0], linear.weight, linear.bias)
                parts = [part.unflatten(-1, (3, 2)).transpose(1, 2) for part in rows.chunk(3, dim=-1)]
                found[name] = parts[:2]
    return found


def of_attention(kept: Mapping[str, Sequence[Tensor]], ends: Mapping[str, tuple[Tensor, Tensor]]) -> Told:
    """Return what the attention of one micro-batch of two samples does.

    Args:
        kept: Queries and keys by module.
        ends: Input and output of each of these modules.
    """
    out: Told = {}
    for name, (query, key) in kept.items():
        told_of_rows(out, name, query.detach().double(), key.detach().double())
        for which, tokens in zip(("input", "rank"), ends[name], strict=True):
            out.setdefault(f"block.{which}_residual", {})[name] = residual(tokens.detach().double())
    return out


def policies(logits: Tensor) -> list[Any]:
    """Return the distributions that are observed of one micro-batch."""
    return [Categorical(logits=logits), {"std": logits.float().exp()}]


def of_policy(seen: Sequence[Any], head: str) -> Told:
    """Return how much the policies of one micro-batch explore.

    Args:
        seen: As :func:`policies` made them.
        head: The layer that the logits come from.
    """
    logs, spread = (seen[0].logits.detach().double(), seen[1]["std"].detach().double())
    p = logs.softmax(-1)
    entropy = float(-(p * p.log()).sum(-1).mean() / math.log(p.shape[-1]))
    return {
        "policy.entropy": {RUN: entropy},
        "policy.head_entropy": {head: entropy},
        "policy.std": {RUN: float(spread.mean())},
        "policy.head_std": {head: float(spread.mean())},
        "policy.gaussian_entropy": {RUN: float((0.5 * (2 * math.pi * math.e * spread.square()).log()).mean())},
    }


class Path:
    """The path of all weights, each optimizer's in units of its own spread; sparse gradients are of no path."""

    def __init__(self) -> None:
        self._points: list[list[tuple[list[float], list[float]]]] = []
        self._sites: list[str] = []

    def add(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
        """Take weights and gradients before a step.

        Args:
            optimizers: Those that step.
            names: Of the parameters, by identity.
        """
        point, self._sites = [], []
        for optimizer in optimizers:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            if any(p.grad.is_sparse for p in every):
                continue
            sides = [torch.cat([t.detach().double().flatten() for t in side]).tolist()
                     for side in (every, [p.grad for p in every])]  # fmt: skip
            point.append((sides[0], sides[1]))
            self._sites.append(names[id(every[0])])
        self._points.append(point)

    def told(self) -> Told:
        """Return what the path of as many points as are judged at once does; nothing at any other."""
        sites = self._sites
        if len(self._points) != POINTS:
            return {}
        places, pulls = (
            [np.array([point[player][side] for point in self._points]) for player in range(len(sites))]
            for side in (0, 1)
        )
        apart = [place - place.mean(axis=0) for place in places]
        radii = [math.sqrt((a**2).sum(axis=1).mean()) for a in apart]
        units = [radius / math.sqrt(a.shape[1]) for radius, a in zip(radii, apart, strict=True)]
        centred = np.concatenate([a / unit for a, unit in zip(apart, units, strict=True)], axis=1)
        scaled = np.concatenate([g * unit for g, unit in zip(pulls, units, strict=True)], axis=1)
        plain = np.concatenate(pulls, axis=1)
        moves = np.diff(centred, axis=0)
        lengths = np.linalg.norm(moves, axis=1)
        left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
        plane = left[:, :2] * sizes[:2]
        turns = np.diff(np.unwrap(np.arctan2(plane[:, 1], plane[:, 0])))
        distances, half = (plane**2).sum(axis=1), POINTS // 2
        directions = plain / np.linalg.norm(plain, axis=1, keepdims=True)
        cosines = (moves[1:] * moves[:-1]).sum(axis=1) / lengths[1:] / lengths[:-1]
        effort = (lengths * np.linalg.norm(scaled[1:], axis=1)).sum()
        values = {
            "flow.winding": abs(turns.sum()) / math.tau,
            "flow.plane": (sizes[:2] ** 2).sum() / (sizes**2).sum(),
            "flow.growth": math.sqrt(distances[half:].mean() / distances[:half].mean()),
            "flow.work": (moves * scaled[1:]).sum() / effort,
            "flow.straightness": np.linalg.norm(moves.sum(axis=0)) / lengths.sum(),
            "flow.turning": np.arccos(cosines).mean(),
            "gradient.coherence": np.mean([a @ b for a, b in itertools.combinations(directions, 2)]),
        }
        told: Told = {name: {RUN: float(value)} for name, value in values.items()}
        told["flow.radius"] = dict(zip(sites, radii, strict=True))
        return told
