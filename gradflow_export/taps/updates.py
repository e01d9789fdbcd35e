"""What the optimizer really did: weights before and after its step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.local import PLAIN, local
from gradflow_export.metrics.norms import dense_entries, l2_norms
from gradflow_export.metrics.onepass import usable_interface
from gradflow_export.metrics.samples import even_sample
from gradflow_export.native.changes import ROW, ChangeReader, taken
from gradflow_export.native.outputs import Interface
from gradflow_export.taps.base import Drained, Pending
from gradflow_export.taps.optimizers import OptimizerStep, Owned

ENTRIES = 2**20
"""Entries copied in one step: models up to this size are measured exactly, larger ones by an even sample."""
SKETCH = 2**11
"""Entries of one parameter that are enough, where not all are taken."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class _Plan:
    """What is read of one optimizer's parameters by the C library, looked up once.

    Args:
        owned: Plain parameters.
        interface: For the C library.
        limit: Entries of each that are read at most.
    """

    def __init__(self, owned: Owned, interface: Interface, limit: int) -> None:
        self.owned = weakref.ref(owned)
        sizes = [p.numel() for p in owned.parameters]
        strides = [_stride(p, limit) for p in owned.parameters]
        counts = [taken(size, stride) for size, stride in zip(sizes, strides, strict=True)]
        scales = [math.sqrt(size / max(count, 1)) for size, count in zip(sizes, counts, strict=True)]
        self.sizes = np.array(sizes, dtype=np.float64)
        room = max(p.element_size() for p in owned.parameters)
        self.reader = ChangeReader(interface, strides, counts, room, scales)
        self.kept = False
        self._flags = b""
        self.trained = np.zeros(0)
        """1 for each parameter that is trained, else 0; the same array while nothing changes."""

    def look(self, owned: Owned) -> None:
        """See which parameters are trained."""
        flags = bytes(map(_REQUIRES_GRAD, owned.parameters))
        if flags != self._flags:
            self._flags, self.trained = flags, np.frombuffer(flags, dtype=np.uint8).astype(np.float64)


def _stride(parameter: Tensor, limit: int) -> int:
    """Return out of how many rows of entries one is taken, so that at most about ``limit`` are."""
    stride = max(-(-parameter.numel() // limit), 1)
    width = parameter.shape[-1] if parameter.dim() else 1
    # A stride that divides the width would follow a few columns only.
    while stride > 1 and math.gcd(stride, width // math.gcd(width, ROW)) > 1:
        stride -= 1
    return stride


class UpdateTap:
    """Weight norms, update norms and what each parameter's learning rate is."""

    def __init__(self, model: Callable[[], nn.Module | None], entries: int = ENTRIES) -> None:
        self._model = model
        self._entries = entries
        self._before: weakref.WeakKeyDictionary[object, list[Tensor]] = weakref.WeakKeyDictionary()
        self._plans: weakref.WeakKeyDictionary[object, _Plan] = weakref.WeakKeyDictionary()
        self._out: Drained = []

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        names = ("weight_norm", "update_norm", "update_ratio", "learning_rate", "trainable", "numel")
        return tuple(spec(f"parameter.{name}") for name in names)

    def before(self, step: OptimizerStep) -> None:
        """Copy the weights, or an even sample of them, before the step."""
        self._keep(step)

    def after(self, step: OptimizerStep) -> None:
        """Compare with the weights after the step."""
        self._compare(step)

    def _keep(self, step: OptimizerStep) -> None:
        plan = self._plan(step)
        if plan is not None:
            # Asked for now, because the gradients were just read and what tells it lies beside them.
            plan.look(step.owned)
            plan.kept = plan.reader.keep(step.owned.parameters)
        if plan is None or not plan.kept:
            with torch.no_grad():
                self._before[step.optimizer] = [view.clone() for view in self._views(step)]

    def _compare(self, step: OptimizerStep) -> None:
        plan = self._plans.get(step.optimizer)
        if plan is None or not plan.kept or plan.owned() is not step.owned:
            self._compare_by_torch(step)
            return
        plan.kept = False
        norms = plan.reader.compare(step.owned.parameters)
        if norms is None:
            return
        owned = step.owned
        weights, changes = norms
        self._out.append(Pending("parameter.weight_norm", owned.sites, weights, owned.where))
        self._out.append(Pending("parameter.update_norm", owned.sites, changes, owned.where))
        if len(owned.where) == len(owned.sites):
            self._out.append(Pending("parameter.trainable", owned.sites, plan.trained, owned.where))
            self._out.append(Pending("parameter.numel", owned.sites, plan.sizes, owned.where))
        else:
            self._describe(owned.sites)
        self._tell_rates(step)

    def _plan(self, step: OptimizerStep) -> _Plan | None:
        """Return what the C library reads of an optimizer, ``None`` where torch must read it."""
        if not isinstance(step.optimizer, Optimizer):
            return None
        known = self._plans.get(step.optimizer)
        if known is not None and known.owned() is step.owned:
            return known
        self._plans.pop(step.optimizer, None)
        interface = usable_interface()
        if interface is None or not {type(p) for p in step.owned.parameters} <= PLAIN:
            return None
        plan = self._plans[step.optimizer] = _Plan(step.owned, interface, self._limit(step))
        return plan

    def _limit(self, step: OptimizerStep) -> int:
        """Return how many entries of one parameter are read."""
        parameters = step.owned.parameters
        if sum(local(p).numel() for p in parameters) <= self._entries:
            return self._entries
        return max(min(self._entries // len(parameters), SKETCH), 1)

    def _compare_by_torch(self, step: OptimizerStep) -> None:
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
            self._tell_rates(step)

    def _tell_rates(self, step: OptimizerStep) -> None:
        if not isinstance(step.optimizer, Optimizer):
            return
        owned = step.owned
        # An optimizer of somebody's own may have no learning rate.
        known = [g.get("lr", math.nan) for g in step.optimizer.param_groups]
        values: Tensor | npt.NDArray[np.float64]
        if all(isinstance(rate, (int, float)) for rate in known):
            values = np.array(known, dtype=np.float64)[owned.groups]
        else:
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
        limit = self._limit(step)
        if limit == self._entries:
            return [dense_entries(p).reshape(-1) for p in step.owned.parameters]
        return [even_sample(dense_entries(p), limit) for p in step.owned.parameters]
