"""First and second moments that the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Drained, Pending, stack_scalars
from gradflow_export.instruments.base import Instrument
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.norms import dense_entries, l2_norms
from gradflow_export.metrics.arrays.samples import scattered
from gradflow_export.metrics.moments import (
    Floats,
    epsilon_share,
    moments_of_many,
    ratio_error,
    second_moment_ratio,
    share_error,
)
from gradflow_export.records.catalog import MetricSpec, spec

ENTRIES = 4096
"""Entries of a longer parameter that are looked at, drawn evenly over all."""

PARAMETERS = 64
"""Parameters that are looked at, evenly spaced in registration order when an optimizer owns more."""

NAMES = ("adam_rms", "adam_rms_error", "epsilon_share", "epsilon_share_error")
HORIZONS = ("momentum_steps", "square_steps")
"""Over how many steps the moments are averages."""
_FIRST = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True)
class _Adam:
    """What one parameter's state holds.

    Attributes:
        used: Some entries of the gradient. Shape: ``[n]``.
        second: The second moment at the same entries, not bias-corrected. Shape: ``[n]``.
        correction: ``1 - beta2^t``, on the device where the optimizer counts its steps.
        epsilon: The optimizer's.
        decay: The optimizer's ``beta2``.
        whole: How many entries there are.
    """

    used: Tensor
    second: Tensor
    correction: Tensor
    epsilon: float
    decay: float
    whole: int

    def statistics(self, scale: Tensor | None) -> Tensor:
        """Return ratio and share with their errors, in the order of :data:`NAMES`. Shape: ``[4]``."""
        used = self.used.float() if scale is None else self.used.float() / scale.to(self.used.device)
        correction = self.correction.to(self.second.device, torch.float32)
        second, epsilon = self.second.float() / correction, self.epsilon
        found = (
            second_moment_ratio(used, second, epsilon),
            # One number for all, so that nothing waits for how far the optimizer has come: it only grows to this.
            ratio_error(used, second, epsilon, self.whole, 1.0 / (1.0 - self.decay)),
            epsilon_share(second, epsilon),
            share_error(second, epsilon, self.whole),
        )
        return stack_scalars([value.double() for value in found])


class MomentInstrument(Instrument):
    """Reads the state of the optimizer after its step: of Adam and its kin, and the momentum of SGD."""

    instrument: ClassVar[str] = "moments"
    interval: ClassVar[int] = 100

    def __init__(self) -> None:
        self._out: Drained = []
        self._kept: dict[int, bool] = {}

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(f"parameter.{name}") for name in ("momentum_norm", "state_kept", *HORIZONS, *NAMES))

    def before(self, step: OptimizerStep) -> None:
        """Look which parameters one optimizer has a state for."""
        if self.armed and isinstance(step.optimizer, Optimizer):
            state, parameters = step.optimizer.state, step.owned.parameters
            self._kept = {index: bool(state.get(parameters[index])) for index in _some(parameters)}

    def after(self, step: OptimizerStep) -> None:
        """Read the state of one optimizer right after it stepped."""
        optimizer, owned = step.optimizer, step.owned
        if not self.armed or not isinstance(optimizer, Optimizer):
            return
        first: dict[int, Tensor] = {}
        adam: dict[int, _Adam] = {}
        with torch.no_grad():
            for index in _some(owned.parameters):
                parameter, group = owned.parameters[index], owned.groups[index]
                state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                moment = next((state[name] for name in _FIRST if isinstance(state.get(name), Tensor)), None)
                if moment is not None:
                    first[index] = moment
                found = _read(parameter, state, optimizer.param_groups[group])
                if found is not None:
                    adam[index] = found
            states = [i for i in self._kept if i < len(owned.parameters) and optimizer.state.get(owned.parameters[i])]
            if states:
                self._give("state_kept", step, states, np.array([float(self._kept[index]) for index in states]))
            if first:
                norms = l2_norms([dense_entries(moment) for moment in first.values()])
                self._give("momentum_norm", step, list(first), norms)
                groups = [optimizer.param_groups[owned.groups[index]] for index in first]
                self._give_horizons(step, list(first), [(g, i in adam) for g, i in zip(groups, first, strict=True)])
            if adam:
                some = [found.used.numel() < found.whole for found in adam.values()]
                for name, values in zip(NAMES, _statistics(list(adam.values()), step.scale), strict=True):
                    if not name.endswith("_error") or any(some):
                        self._give(name, step, list(adam), values)

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._out = []

    def drain(self) -> Drained:
        """Give out what was read since the last call."""
        out, self._out = self._out, []
        return out

    def _give_horizons(
        self, step: OptimizerStep, indices: list[int], groups: Sequence[tuple[Mapping[str, Any], bool]]
    ) -> None:
        decays = np.array([_decays(group, squares=squares) for group, squares in groups])
        for name, values in zip(HORIZONS, 1.0 / (1.0 - decays.T), strict=True):
            if (told := values > 1.0).any():
                self._give(name, step, list(compress(indices, told)), values[told])

    def _give(self, name: str, step: OptimizerStep, indices: list[int], values: Tensor | Floats) -> None:
        owned = step.owned
        where = np.asarray(owned.where)[indices]
        self._out.append(Pending(f"parameter.{name}", owned.sites, values, where))


def _some(parameters: Sequence[Tensor]) -> range:
    """Return the places of the parameters that are looked at."""
    return range(0, len(parameters), -(-len(parameters) // PARAMETERS) or 1)


def _pair(group: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the decays of a group's first and second moment; ``None`` unless there are two: Adan has three."""
    betas = group.get("betas")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(isinstance(b, (int, float)) for b in betas):
        return None
    return float(betas[0]), float(betas[1])


def _decays(group: Mapping[str, Any], *, squares: bool) -> tuple[float, float]:
    """Return the decays of the first and of the second moment of a group; 0 where there is none, or it is no number."""
    first, second = (squares and _pair(group)) or (group.get("momentum"), 0.0)
    known = [decay if isinstance(decay, (int, float)) and 0.0 <= decay < 1.0 else 0.0 for decay in (first, second)]
    return float(known[0]), float(known[1])


def _read(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> _Adam | None:
    moment, gradient, steps, decays = state.get("exp_avg_sq"), parameter.grad, state.get("step"), _pair(group)
    if not isinstance(moment, Tensor) or gradient is None or steps is None or decays is None:
        return None
    if moment.layout is not torch.strided or gradient.layout is not torch.strided or local(moment).numel() == 0:
        return None
    count = torch.as_tensor(local(steps) if isinstance(steps, Tensor) else steps, dtype=torch.float64)
    second, used = dense_entries(moment), dense_entries(gradient)
    decay, whole = decays[1], second.numel()
    second, used = _drawn(second), _drawn(used)
    return _Adam(used, second, 1 - decay**count, float(group.get("eps", 1e-8)), decay, whole)


def _drawn(entries: Tensor) -> Tensor:
    flat = entries.reshape(-1)
    count = flat.numel()
    return flat if count <= ENTRIES else flat[scattered(count, ENTRIES).to(flat.device)]


def _statistics(every: Sequence[_Adam], scale: Tensor | None) -> Iterable[Tensor | Floats]:
    """Return ratio and share of each parameter with their errors; on the host all of them by a few operations."""
    on_host = all(found.second.is_cpu and found.correction.is_cpu for found in every)
    if scale is not None or not on_host or any(found.used.shape != found.second.shape for found in every):
        return torch.stack([found.statistics(scale).to(every[0].used.device) for found in every]).unbind(dim=1)
    epsilons, wholes, decays = np.array([(found.epsilon, found.whole, found.decay) for found in every]).T
    used, second, corrections = zip(*((found.used, found.second, found.correction) for found in every), strict=True)
    return moments_of_many(used, second, corrections, epsilons, wholes, decays)
