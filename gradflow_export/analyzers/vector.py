"""The field of gradients around the weights as they are: divergence, curl, coherence, noise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradflow_export.analyzers.objective import Objective
from gradflow_export.hooks.optimizer_steps import names_of
from gradflow_export.metrics.vector import (
    Circulation,
    NoiseScale,
    circulation,
    directional_curl,
    gradient_diversity,
    gradient_field,
    noise_scale,
)
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import number

BATCHES = 8
"""Batches whose gradients are compared."""

ROTATING = 0.5
"""Rotation share above which a game is reported."""


@dataclass(frozen=True)
class VectorFlow:
    """What the field of gradients does around the weights.

    Attributes:
        players: How many losses there are; with one the field is a gradient, which cannot rotate.
        divergence: ``-tr J / d`` of the descent flow, for each parameter; below 0 the flow contracts. NaN where the
            model cannot be differentiated twice.
        expanding: Share of the random directions in which it expands.
        curl: Share of rotation in the Jacobian of the field; 0 for one loss.
        directional_curl: ``||A xi|| / ||xi||``: how strongly the field turns along itself; 0 for one loss.
        coherence: Mean pairwise cosine of the gradients of several batches: 1 aligned, 0 random.
        diversity: ``sum ||g_i||^2 / ||sum g_i||^2`` over the batches.
        noise: Signal and noise of the gradient; ``None`` where the size of a batch is not known.
        note: Why something is missing.

    Source: Balduzzi et al. 2018, arXiv:1802.05642; Mardia and Jupp 2000; McCandlish et al. 2018, arXiv:1812.06162.
    """

    players: int
    divergence: float
    expanding: float
    curl: float
    directional_curl: float
    coherence: float
    diversity: float
    noise: NoiseScale | None
    note: str = ""

    def lines(self) -> list[str]:
        """Return the measurements as text."""
        curl = "0 (single objective)" if self.players == 1 else f"{number(self.curl)} of the Jacobian rotates"
        flow = "contracts" if self.divergence < 0 else "expands" if self.divergence > 0 else "neither way"
        out = [
            "Vector analysis",
            f"  divergence      {number(self.divergence)} per parameter ({flow})",
            f"  curl            {curl}",
            f"  flow coherence  {number(self.coherence)} (1 aligned, 0 random)",
        ]
        if self.noise is not None:
            out.append(f"  noise scale     {number(self.noise.samples)} samples per batch balance signal and noise")
        return [*out, f"  note            {self.note}"] if self.note else out


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose implementations of attention and recurrence that can be differentiated twice."""
    with sdpa_kernel([SDPBackend.MATH]), torch.backends.cudnn.flags(enabled=False):
        yield


def examine_field(model: nn.Module, objective: Objective, batches: int = BATCHES) -> tuple[VectorFlow, list[Issue]]:
    """Measure the field of gradients at the weights as they are.

    Args:
        model: Unwrapped; its trainable parameters are the coordinates of the field.
        objective: Inputs and losses.
        batches: How many batches are compared.

    Returns:
        The measurements, and an issue for a game that mostly rotates.
    """
    trainable: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    players = [trainable] if objective.players is None else [list(player) for player in objective.players]
    found, turning, note = _differentiate(objective, players)
    cosine, diversity, noise = _compare(objective, players, batches)
    single = len(players) == 1
    flow = VectorFlow(
        len(players),
        math.nan if found is None else found.divergence + 0.0,
        math.nan if found is None else found.expanding,
        0.0 if found is None else found.rotation,
        0.0 if single else turning,
        cosine,
        diversity,
        noise,
        note,
    )
    if single or found is None or not found.rotation > ROTATING:
        return flow, []
    known = names_of(model)
    layers = tuple(known[id(player[0])][1] for player in players if id(player[0]) in known) or ("",)
    message = (
        f"{number(100 * found.rotation)} % of the Jacobian of the game is rotation: the players go round each other "
        f"rather than towards a solution."
    )
    advice = (
        "use an extragradient or optimistic step, different learning rates for the players, a gradient penalty on real "
        "data (R1), or average the weights (torch.optim.swa_utils.AveragedModel)."
    )
    severity = Severity.HIGH if found.rotation > 0.9 else Severity.MEDIUM
    return flow, [
        Issue(IssueType.ROTATION, severity, layers[0], 1, found.rotation, ROTATING, message, advice, layers=layers)
    ]


def _differentiate(objective: Objective, players: list[list[Tensor]]) -> tuple[Circulation | None, float, str]:
    try:
        with twice_differentiable():
            _, losses = objective.evaluate(objective.input_fn())
            xi, jacobian = gradient_field(losses, players)
            if not bool(torch.isfinite(xi).all()):
                return None, math.nan, "the gradient is not finite"
            single = len(players) == 1
            turning = 0.0 if single else directional_curl(jacobian, xi)[0]
            return circulation(jacobian, single=single), turning, ""
    except RuntimeError as error:  # an operation without a second derivative, or memory for one
        return None, math.nan, f"no second derivative: {str(error).splitlines()[0]}"


def _compare(objective: Objective, players: list[list[Tensor]], batches: int) -> tuple[float, float, NoiseScale | None]:
    """Return mean pairwise cosine, diversity and noise scale, without keeping more than two gradients at a time."""
    total, units, squares, sizes = None, None, [], []
    for _ in range(batches):
        inputs = objective.input_fn()
        _, losses = objective.evaluate(inputs)
        parts = [
            torch.zeros_like(p) if g is None else g.detach()
            for loss, player in zip(losses, players, strict=True)
            for g, p in zip(
                torch.autograd.grad(loss, player, retain_graph=True, allow_unused=True), player, strict=True
            )
        ]
        flat = torch.cat([part.reshape(-1).to(parts[0]) for part in parts]).double()
        size = float(flat.norm())
        sizes.append(_batch_size(inputs))
        squares.append(size * size)
        unit = flat / size if size > 0 else flat
        total = flat if total is None else total + flat
        units = unit if units is None else units + unit
    if total is None or units is None or batches < 2 or not np.isfinite(squares).all():
        return math.nan, math.nan, None
    length = float(units.norm()) / batches
    whole = float(total.square().sum())
    size = sizes[0]
    noise = None
    if size and all(s == size for s in sizes):
        noise = noise_scale(math.fsum(squares) / batches, whole / batches**2, size, size * batches)
    return (batches * length**2 - 1) / (batches - 1), gradient_diversity(squares, whole), noise


def _batch_size(inputs: Any) -> int:
    """Return the length of the first tensor with a first dimension, 0 when there is none."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else 0
    members = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else ()
    return next((size for member in members if (size := _batch_size(member))), 0)
