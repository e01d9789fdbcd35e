"""Sees normalisations over a single value: ``nn.LayerNorm(1)``, and ``nn.GroupNorm(c, c)`` without positions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.instruments.base import Instrument, Need, Setting
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import values_of
from gradflow_export.rules.history import History

LOOKS = 4
"""Sampled steps in which calls are seen."""


class SingleNormInstrument(Instrument):
    """Counts the values that each mean is taken over, where a layer leaves that to be one.

    Args:
        model: The unwrapped model; only its hooks are kept, and only while calls are seen.
        guard: Wraps the hooks.
    """

    instrument: ClassVar[str] = "wiring"
    interval: ClassVar[int] = 100
    needs: ClassVar[frozenset[Need]] = frozenset({"calls"})

    def __init__(self, model: nn.Module, *, guard: Guard = unguarded) -> None:
        self._guard, self._steps = guard, 0
        self._hooks = [(module, ModuleHook(guard(partial(self._called, name)))) for name, module in _candidates(model)]
        self._armed: contextlib.ExitStack | None = None
        self._most: dict[str, int] = {}

    @classmethod
    def make(cls, setting: Setting) -> SingleNormInstrument:
        """Make one for a model."""
        return cls(setting.model, guard=setting.part(cls.instrument))

    @property
    def modules(self) -> int:
        """How many layers are looked at."""
        return len(self._hooks)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hooks away."""
        stack = super().attach()
        stack.callback(self._hooks.clear)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        on = on and self._steps < LOOKS
        self._steps += on
        if on and self._armed is None:
            self._armed = contextlib.ExitStack()
            self._armed.callback(hook_calls(self._hooks))
        elif not on and self._armed is not None:
            self._armed.close()
            self._armed = None

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        self._most = {}

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        most, self._most = self._most, {}
        return [Clue.by_layer("layer.normalised_values", most)] if most else []

    def _called(self, name: str, module: nn.Module, given: Any, _output: Any) -> None:
        first = given[0] if given else None
        if isinstance(first, Tensor) and torch.is_grad_enabled():
            positions = math.prod(first.shape[2:]) if isinstance(module, nn.GroupNorm) else 1
            self._most[name] = max(self._most.get(name, 0), positions)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers that normalise over one feature, or one channel at all of its positions."""
    for name, module in model.named_modules():
        one = isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape) == 1
        if one or (isinstance(module, nn.GroupNorm) and module.num_channels == module.num_groups):
            yield site_name(name), module


@dataclass(frozen=True, kw_only=True)
class SingleNorm(Check):
    """Report a normalization over a single value: subtracting its own mean gives 0, so the output is always the bias.

    The number of values in each mean is counted, for layers whose settings allow a single one.

    Why it is bad:
        The output of such a layer is always its bias, or 0 without a bias. Nothing computed before it reaches the loss
        through it, and no gradient passes back. The loss still falls, to the level that can be reached without that
        path.

    Example:
        self.norm = nn.LayerNorm(1)  # of a series with one feature, of shape [batch, time, 1]

    Use instead:
        self.register_buffer("mean", x_train.mean())
        self.register_buffer("std", x_train.std())
        x = (x - self.mean) / self.std

    Not reported:
        A layer that normalizes over more than one value in any of its calls, such as ``nn.GroupNorm(c, c)`` for images;
        ``nn.RMSNorm``, which keeps the sign; calls of ``functional.layer_norm``; compiled models.
    """

    patience: int = 2
    heal: int = 100

    name: ClassVar[str] = "single-norm"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("layer.normalised_values",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the calls of this record."""
        layers = tuple(name for name, most in values_of(record, "layer.normalised_values").items() if most == 1)
        if not layers:
            return ()
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.HIGH,
                layers,
                1.0,
                2.0,
                f"{some(layers)} normalizes over a single value: its output is always its bias, and no gradient "
                "passes.",
                "normalize over more than one value: nn.LayerNorm(x.shape[-1]) for several features, "
                "nn.GroupNorm(1, c) for c channels; standardize a single feature with constants, (x - mean) / std.",
                cause="single norm",
            ),
        )
