"""Gradient clipping: all together, entry by entry, row by row against the weights, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradflow_export.debugging.nan.config import GradientClippingConfig
from gradflow_export.debugging.nan.faults import writable
from gradflow_export.metrics.arrays.norms import dense_entries, l2_norms

Named = Sequence[tuple[str, Tensor]]
"""Parameters that have a gradient, by name."""


_SURELY = 0.999
"""Share of the greatest norm below which the library, which reads the gradients again, need not be asked."""


@dataclass(frozen=True)
class Clipped:
    """What clipping did in one step.

    Attributes:
        mode: As in the configuration.
        before: L2 norm of all gradients together before it.
        after: The same after it.
        share: Share of the rows, entries, layers, or of the one whole, that was clipped.
    """

    mode: str
    before: float
    after: float
    share: float

    @property
    def scale(self) -> float:
        """What is left of the norm: 1 without clipping."""
        return self.after / self.before if self.before > 0 else 1.0

    def as_dict(self) -> dict[str, float | str | bool]:
        """Return the figures and whether anything was clipped."""
        return {
            "mode": self.mode, "clipped": self.share > 0, "scale": self.scale, "share": self.share,
            "norm_before": self.before, "norm_after": self.after,
        }  # fmt: skip


def clip(named: Named, config: GradientClippingConfig, norms: Sequence[float]) -> Clipped:
    """Clip gradients in place.

    Args:
        named: Parameters with a gradient, which must be finite.
        config: How.
        norms: L2 norm of each gradient.

    Returns:
        What was done.

    Source: ``"norm"`` Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; ``"adaptive"`` Brock et al. 2021,
    arXiv:2102.06171, equation 3.
    """
    before = math.hypot(*norms)
    if config.mode == "none" or not named:
        return Clipped(config.mode, before, before, 0.0)
    parameters = [p for _, p in named]
    with torch.no_grad():
        if config.mode == "norm":
            share = _norm(parameters, config, norms)
        elif config.mode == "value":
            share = _value(parameters, config.clip_value)
        elif config.mode == "adaptive":
            share = _adaptive(named, config)
        else:
            layers: dict[str, list[int]] = {}
            for place, (name, _) in enumerate(named):
                layers.setdefault(name.rpartition(".")[0], []).append(place)
            each = (
                _norm([parameters[i] for i in members], config, [norms[i] for i in members])
                for members in layers.values()
            )
            share = sum(each) / len(layers)
    if share and config.mode == "norm" and config.norm_type == 2:
        return Clipped(config.mode, before, before * min(1.0, config.max_norm / (before + 1e-6)), share)
    if not share:
        return Clipped(config.mode, before, before, 0.0)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return Clipped(config.mode, before, math.hypot(*l2_norms(gradients).tolist()), share)


def _norm(parameters: list[Tensor], config: GradientClippingConfig, norms: Sequence[float]) -> float:
    """Scale gradients down together; return 1.0 where that was needed."""
    if config.norm_type == 2 and math.hypot(*norms) < _SURELY * config.max_norm:
        return 0.0
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return _norm_of_sparse(parameters, config)
    total = nn.utils.clip_grad_norm_(parameters, config.max_norm, config.norm_type)
    return float(float(total) > config.max_norm)


def _norm_of_sparse(parameters: list[Tensor], config: GradientClippingConfig) -> float:
    # What the library does, which has no norm of sparse tensors.
    gradients = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(dense_entries(g), config.norm_type) for g in gradients]
    total = float(torch.linalg.vector_norm(torch.stack(norms), config.norm_type))
    if total <= config.max_norm:
        return 0.0
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(config.max_norm / (total + 1e-6))
    return 1.0


def _value(parameters: list[Tensor], most: float) -> float:
    """Bring every entry into a range; return the share that was outside."""
    outside = entries = 0
    for p in parameters:
        values = writable(p)
        if values is None:
            continue
        outside += int((values.abs() > most).sum())
        entries += values.numel()
        values.clamp_(-most, most)
    return outside / max(entries, 1)


def _adaptive(named: Named, config: GradientClippingConfig) -> float:
    """Scale each row down to a share of the norm of its weights; return the share of rows."""
    clipped = rows = 0
    for name, p in named:
        gradient = p.grad
        if gradient is None or gradient.is_sparse or name.startswith(config.exclude):
            continue
        size, most = unit_norms(gradient), config.clip_factor * unit_norms(p.detach()).clamp_min(config.eps)
        wrong = size > most
        gradient.mul_(torch.where(wrong, most / size.clamp_min(1e-30), 1.0).to(gradient.dtype))
        clipped += int(wrong.sum())
        rows += wrong.numel()
    return clipped / max(rows, 1)


def unit_norms(tensor: Tensor) -> Tensor:
    """Return the L2 norm of each unit: each row of a weight, over all it takes in; of a vector, all of it.

    Args:
        tensor: Shape: ``[out, ...]``.

    Returns:
        Float32 or wider. Shape: ``[out, 1, ...]``, scalar for a vector.

    Source: Brock et al. 2021, arXiv:2102.06171, section 4.
    """
    wide = tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
    within = tuple(range(1, tensor.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(wide, dim=within, keepdim=within is not None)
    return norms


def gradient_stats(total: int, norms: Sequence[float]) -> Mapping[str, float | int | None]:
    """Return the five gradient statistics of a step record; ``None`` where no gradient arrived.

    Args:
        total: Number of parameter tensors.
        norms: L2 norm of each gradient that arrived.
    """
    known: dict[str, float | int | None] = {"total_parameters": total, "parameters_with_grad": len(norms)}
    if not norms:
        return {**known, "mean_norm": None, "std_norm": None, "total_norm": None}
    mean = math.fsum(norms) / len(norms) if all(map(math.isfinite, norms)) else sum(norms)
    spread = [(norm - mean) ** 2 for norm in norms]
    return {
        **known, "mean_norm": mean, "std_norm": math.sqrt(sum(spread) / len(norms)), "total_norm": math.hypot(*norms),
    }  # fmt: skip
