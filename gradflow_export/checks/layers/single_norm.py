"""Sees normalisations over one value or two: ``nn.LayerNorm(1)``, and ``nn.BatchNorm1d`` of batches of two."""

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

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls
from gradflow_export.instruments.base import Need, Reader, Setting
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, some
from gradflow_export.rules.evidence import NORMED_AWAY, values_of
from gradflow_export.rules.history import History

FEW = 2
"""Values of which a normalization leaves nothing but their order."""


class SingleNormInstrument(Reader):
    """Counts the values that each mean is taken over, where a layer leaves them to be one or two."""

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
        if isinstance(first, Tensor) and torch.is_grad_enabled() and (means := _means(module, first)):
            most = self._facts["layer.normalised_values"]
            most[name] = max(most.get(name, 0), first.numel() // means)


def _means(module: nn.Module, given: Tensor) -> int:
    """Return how many means a layer takes of what it is given, 0 where it uses others."""
    if isinstance(module, nn.LayerNorm):
        return given.numel() // math.prod(module.normalized_shape)
    if isinstance(module, nn.GroupNorm):
        return given.shape[0] * module.num_groups
    return given.shape[1] if given.dim() > 1 and (module.training or module.running_mean is None) else 0


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers that normalise over one or two features, or channels, or over the batch of one process."""
    for name, module in model.named_modules():
        few = isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape) <= FEW
        few |= isinstance(module, nn.GroupNorm) and module.num_channels <= FEW * module.num_groups
        if few or (isinstance(module, torch_private.BatchNorm) and not isinstance(module, nn.SyncBatchNorm)):
            yield site_name(name), module


@dataclass(frozen=True, kw_only=True)
class SingleNorm(Check):
    """Report a normalization over one value, whose output is its bias, or over two, which leaves only their order.

    The number of values in each mean is counted, for layers whose settings allow so few, and for batch norm.

    Why it is bad:
        A single value minus its own mean is 0. Nothing computed before such a layer reaches the loss through it, and no
        gradient passes back. Of two values, one becomes 1 and the other -1, however far apart they are, and next to no
        gradient passes. The loss still falls, to the level that can be reached without that path.

    Example:
        self.norm = nn.LayerNorm(1)  # of a series with one feature, of shape [batch, time, 1]

    Use instead:
        self.register_buffer("mean", x_train.mean())
        self.register_buffer("std", x_train.std())
        x = (x - self.mean) / self.std

    Not reported:
        A layer that normalizes over more values in any of its calls, such as ``nn.GroupNorm(c, c)`` for images, or
        batch norm whose last batch alone is small; ``nn.RMSNorm``, which keeps the sign; ``nn.SyncBatchNorm``; calls of
        ``functional.layer_norm``; compiled models.
    """

    patience: int = 2
    heal: int = 100

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("layer.normalised_values",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the calls of this record."""
        counts = values_of(record, "layer.normalised_values")
        fewest = min(counts.values(), default=math.inf)
        if fewest > FEW:
            return ()
        layers = tuple(name for name, most in counts.items() if most == fewest)
        what, left = (
            ("a single value", "is always its bias") if fewest == 1 else ("two values", "only tells their order")
        )
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.HIGH,
                layers,
                fewest,
                FEW,
                f"{some(layers)} normalizes over {what}: its output {left}, and no gradient passes.",
                "normalize over more values: nn.LayerNorm(x.shape[-1]) for several features, nn.GroupNorm(1, c) for c "
                "channels, larger batches for batch norm; standardize a single feature with constants, (x - mean) / "
                "std.",
                cause=NORMED_AWAY,
                origin=NORMED_AWAY,
            ),
        )
