"""How the weights begin: their gain, and whether the units of a layer are copies of each other."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.local import shards
from gradflow_export.metrics.norms import l2_norms
from gradflow_export.taps.base import Drained, Pending
from gradflow_export.taps.discover import site_name
from gradflow_export.taps.optimizers import OptimizerStep

LATER = 8
"""Armed step at which rows are compared once more."""
MATRICES = 256
"""Weights that are looked at."""

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)


class InitialTap:
    """Reads the weights of layers before the first step, and compares their rows again a few steps later.

    Args:
        model: The unwrapped model; only weak references to its weights are kept.
    """

    instrument: ClassVar[str] = "wiring"

    def __init__(self, model: nn.Module) -> None:
        self._weights = {
            site_name(f"{name}.{key}".lstrip(".")): weakref.ref(weight)
            for name, module in model.named_modules()
            if isinstance(module, _LAYERS)
            for key, weight in module.named_parameters(recurse=False)
            if weight.dim() >= 2 and weight.shape[0] >= 2 and weight[0].numel() >= 2
        }
        self._armed = False
        self._steps = 0
        self._out: Drained = []

    @property
    def modules(self) -> int:
        """How much is read does not matter: it is read twice."""
        return 1

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        return spec("parameter.initial_gain"), spec("parameter.row_spread")

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = contextlib.ExitStack()
        stack.callback(self._weights.clear)
        stack.callback(self.forget)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more."""
        self._armed = on

    def before(self, step: OptimizerStep) -> None:
        """Read the weights that an optimizer has not changed yet, and once more after a few steps."""
        if not self._armed or self._steps >= LATER:
            return
        self._steps += 1
        if self._steps not in {1, LATER}:
            return
        mine = {id(p) for p in step.owned.parameters}
        named = [(name, weight) for name, weight in self._held() if id(weight) in mine or self._steps == LATER]
        if not named:
            return
        sites = tuple(name for name, _ in named)
        with torch.no_grad():
            if self._steps == 1:
                self._out.append(_pending("parameter.initial_gain", sites, _gains([weight for _, weight in named])))
            self._out.append(_pending("parameter.row_spread", sites, [_spread(weight) for _, weight in named]))

    def after(self, step: OptimizerStep) -> None:
        """Read nothing: what begins is read before the step."""

    def skip(self, step: OptimizerStep) -> None:
        """Keep what was read: a skipped step changes no weight."""

    def drain(self) -> Drained:
        """Give out what was read since the last call."""
        out, self._out = self._out, []
        return out

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._out = []

    def _held(self) -> list[tuple[str, Tensor]]:
        held = [(name, reference()) for name, reference in self._weights.items()]
        there: list[tuple[str, Tensor]] = [(name, weight) for name, weight in held if weight is not None]
        return [(n, w) for n, w in there if w.requires_grad and w.is_floating_point() and shards(w) == 1][:MATRICES]


def _gains(weights: list[Tensor]) -> list[Tensor]:
    """Return the root mean square of each weight times the root of its number of inputs. Shape of each: scalar."""
    # What many tensors are read by makes no copy of a large one.
    norms = l2_norms(weights).double()
    return [norm / math.sqrt(weight.shape[0]) for norm, weight in zip(norms, weights, strict=True)]


def _spread(weight: Tensor) -> Tensor:
    """Return the greatest difference from the first row, as a share of the greatest entry. Shape: scalar, float64."""
    flat = weight.reshape(weight.shape[0], -1)
    low, high = torch.aminmax(flat, dim=0)  # by columns, as a difference of all entries would be as large as they are
    return (torch.maximum(high - flat[0], flat[0] - low).amax() / torch.maximum(high, -low).amax()).double()


def _pending(metric: str, sites: tuple[str, ...], values: list[Tensor]) -> Pending:
    return Pending(metric, sites, torch.stack([v.to(values[0].device) for v in values]), nan_is_missing=True)
