"""Sees normalisations over a single value: ``nn.LayerNorm(1)``, and ``nn.GroupNorm(c, c)`` without positions."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls
from gradflow_export.instruments.base import Need, Reader, Setting
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import values_of
from gradflow_export.rules.history import History


class SingleNormInstrument(Reader):
    """Counts the values that each mean is taken over, where a layer leaves that to be one."""

    looks: ClassVar[float] = 4
    needs: ClassVar[frozenset[Need]] = frozenset({"calls"})

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._layers = {name: weakref.ref(module) for name, module in _candidates(setting.model)}

    @property
    def modules(self) -> int:
        """How many layers are looked at."""
        return len(self._layers)

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see calls."""
        layers = [(layer, name) for name, known in self._layers.items() if (layer := known()) is not None]
        until.callback(hook_calls([(m, ModuleHook(self._guard(partial(self._called, name)))) for m, name in layers]))

    def _called(self, name: str, module: nn.Module, given: Any, _output: Any) -> None:
        first = given[0] if given else None
        if isinstance(first, Tensor) and torch.is_grad_enabled():
            positions = math.prod(first.shape[2:]) if isinstance(module, nn.GroupNorm) else 1
            most = self._facts["layer.normalised_values"]
            most[name] = max(most.get(name, 0), positions)


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
