"""What the optimizer really did: weights before and after its step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.local import local
from gradflow_export.metrics.norms import dense_entries, l2_norms
from gradflow_export.metrics.samples import even_sample
from gradflow_export.taps.base import Drained, Pending
from gradflow_export.taps.optimizers import OptimizerStep

ENTRIES = 4 * 2**20
"""Entries copied in one step: models up to this size are measured exactly, larger ones by an even sample."""


class UpdateTap:
    """Weight norms, update norms and what each parameter's learning rate is."""

    def __init__(self, model: Callable[[], nn.Module | None], entries: int = ENTRIES) -> None:
        self._model = model
        self._entries = entries
        self._before: weakref.WeakKeyDictionary[object, list[Tensor]] = weakref.WeakKeyDictionary()
        self._out: Drained = []

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        names = ("weight_norm", "update_norm", "update_ratio", "learning_rate", "trainable", "numel")
        return tuple(spec(f"parameter.{name}") for name in names)

    def before(self, step: OptimizerStep) -> None:
        """Copy the weights, or an even sample of them, before the step."""
        with torch.no_grad():
            self._before[step.optimizer] = [view.clone() for view in self._views(step)]

    def after(self, step: OptimizerStep) -> None:
        """Compare with the weights after the step."""
        before = self._before.pop(step.optimizer, None)
        if before is None:
            return
        owned = step.owned
        with torch.no_grad():
            after = self._views(step)
            if [v.shape for v in after] != [v.shape for v in before]:
                return
            # In half precision the difference itself would be rounded.
            wide = [v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for v in before]
            updates = [a.to(b) - b for a, b in zip(after, wide, strict=True)]
            held = [local(p) for p in owned.parameters]
            grown = [math.sqrt(p.numel() / max(b.numel(), 1)) for p, b in zip(held, before, strict=True)]
            complex_parts = [2.0 if p.is_complex() else 1.0 for p in held]
            scale = torch.tensor([g * math.sqrt(c) for g, c in zip(grown, complex_parts, strict=True)])
            weights, changes = l2_norms(wide), l2_norms(updates)
            scale = scale.to(weights)
            self._out.append(Pending("parameter.weight_norm", owned.sites, weights * scale, owned.where))
            self._out.append(Pending("parameter.update_norm", owned.sites, changes * scale, owned.where))
            self._describe(owned.sites)
            if not isinstance(step.optimizer, Optimizer):
                return
            # An optimizer of somebody's own may have no learning rate.
            known = [g.get("lr", math.nan) for g in step.optimizer.param_groups]
            rates = torch.stack([torch.as_tensor(rate, dtype=torch.float64) for rate in known])
            values = rates[torch.from_numpy(owned.groups).to(rates.device)]
            self._out.append(Pending("parameter.learning_rate", owned.sites, values, owned.where, nan_is_missing=True))

    def drain(self) -> Drained:
        """Give out what was measured since the last call."""
        out, self._out = self._out, []
        return out

    def _describe(self, sites: tuple[str, ...]) -> None:
        model = self._model()
        parameters = [] if model is None else list(model.parameters())
        if len(parameters) != len(sites):
            return
        trainable = torch.tensor([float(p.requires_grad) for p in parameters])
        sizes = torch.tensor([float(p.numel()) for p in parameters], dtype=torch.float64)
        self._out.append(Pending("parameter.trainable", sites, trainable))
        self._out.append(Pending("parameter.numel", sites, sizes))

    def _views(self, step: OptimizerStep) -> list[Tensor]:
        parameters = step.owned.parameters
        if sum(local(p).numel() for p in parameters) <= self._entries:
            return [dense_entries(p).reshape(-1) for p in parameters]
        share = max(self._entries // len(parameters), 1)
        return [even_sample(dense_entries(p), share) for p in parameters]
