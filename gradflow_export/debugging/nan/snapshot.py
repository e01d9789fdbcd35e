"""The last good state of a training run: weights, buffers, optimizer state, generators, schedulers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.debugging.nan.batch import BatchState
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.hooks import torch_private
from gradflow_export.metrics.arrays.norms import l2_norms

Pair = tuple[str, Tensor]


class Loops:
    """Learning-rate schedulers and the gradient scaler, which step beside the optimizer.

    Args:
        schedulers: Those that step once after each optimizer step, together with the learning rates they set.
        scaler: A ``torch.amp.GradScaler``, or ``None``.

    Raises:
        ArgumentTypeError: The schedulers are no list, or one of them is none.
    """

    def __init__(self, schedulers: Sequence[Any], scaler: Any) -> None:
        listed = schedulers if isinstance(schedulers, (list, tuple)) else [None]
        if not all(hasattr(scheduler, "state_dict") and hasattr(scheduler, "optimizer") for scheduler in listed):
            raise ArgumentTypeError(
                f"schedulers must be a list of learning-rate schedulers, got {schedulers!r}; for example "
                "schedulers=[scheduler]."
            )
        self._schedulers = tuple(schedulers)
        self._scaler = scaler

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._schedulers) + (self._scaler is not None)

    def save(self) -> Any:
        """Return a copy of their state, and of the settings of their optimizers' parameter groups."""
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        groups = [[_settings(group) for group in s.optimizer.param_groups] for s in self._schedulers]
        return states, groups, None if self._scaler is None else dict(self._scaler.state_dict())

    def restore(self, saved: Any) -> None:
        """Put back what :meth:`save` returned."""
        states, groups, scaling = saved
        for scheduler, state, settings in zip(self._schedulers, states, groups, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
            for group, before in zip(scheduler.optimizer.param_groups, settings, strict=True):
                for key, value in before.items():
                    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = copy.deepcopy(value)
        if scaling:
            self._scaler.load_state_dict(scaling)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


class Snapshot:
    """Copies of everything an update changes, made in place from one time to the next.

    Args:
        optimizer: Its parameters and their state are kept; held weakly.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._weights: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self._known: list[Tensor] = []
        self._batch: BatchState | None = None
        self.loops: Any = None
        self.taken = False

    @property
    def bytes(self) -> int:
        """Memory that the copies take."""
        held = [*self._weights, *(v for state in self._states for v in state.values() if isinstance(v, Tensor))]
        if self._batch is not None:
            held += [buffer for _, _, buffer in self._batch.buffers]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def save(self, batch: BatchState | None, loops: Any) -> None:
        """Copy the state as it is now.

        Args:
            batch: Buffers and generators as they were before the step under way.
            loops: State of schedulers and scaler.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        parameters = parameters_of(optimizer)
        same = len(parameters) == len(self._known) and all(
            one is p for one, p in zip(self._known, parameters, strict=True)
        )
        if not same:
            self._known = parameters
            self._weights = [p.detach().clone() for p in parameters]
            self._states = [{} for _ in parameters]
        else:
            _copy(self._weights, [p.detach() for p in parameters])
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for p, held in zip(parameters, self._states, strict=True):
            state = optimizer.state.get(p, {})
            for key in held.keys() - state.keys():
                del held[key]
            for key, value in state.items():
                if _alike(held.get(key), value):
                    into.append(held[key])
                    out_of.append(value)
                else:
                    held[key] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        _copy(into, out_of)
        self._batch = None if batch is None else BatchState(batch.random_states, batch.buffers)
        self.loops = loops
        self.taken = True

    def restore(self) -> None:
        """Put everything back but schedulers and scaler, which step after this."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for p, weight, held in zip(self._known, self._weights, self._states, strict=True):
            with torch.no_grad():
                p.copy_(weight)
            if not held:
                optimizer.state.pop(p, None)
                continue
            state = optimizer.state[p]
            for key in state.keys() - held.keys():
                del state[key]
            for key, value in held.items():
                if isinstance(value, Tensor) and _alike(state.get(key), value):
                    state[key].copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        if self._batch is not None:
            self._batch.restore()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, over all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _alike(one: object, other: object) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)
    )


def _copy(into: list[Tensor], out_of: list[Tensor]) -> None:
    if into:
        with torch.no_grad():
            torch_private.copy_all(into, out_of)


def broken_weights(named: Iterable[Pair]) -> list[str]:
    """Return the names of parameters that hold NaN or Inf; looks at all of them once."""
    pairs = [(name, p.detach()) for name, p in named if p.is_floating_point() and p.numel()]
    return _broken(pairs)


def broken_state(named: Iterable[Pair], optimizer: Optimizer) -> list[str]:
    """Return the names of parameters whose optimizer state holds NaN or Inf."""
    pairs = [
        (name, value)
        for name, p in named
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    ]
    return list(dict.fromkeys(_broken(pairs)))


def _broken(pairs: list[Pair]) -> list[str]:
    if not pairs:
        return []
    finite = l2_norms([tensor for _, tensor in pairs]).isfinite().tolist()
    return [name for (name, _), well in zip(pairs, finite, strict=True) if not well]
