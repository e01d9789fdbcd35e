"""Batch norm whose running statistics are not those of its batches: EVAL_RANDOM."""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.checks.evaluation.sizes import DIFFERS, SIZES
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import saved
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.module_hooks import ModuleHook, hook_calls
from gradflow_export.hooks.readings import ClueSample, Drained
from gradflow_export.instruments.base import Need, Reader, Setting
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import past, values_of
from gradflow_export.rules.history import History

_GAP, _CALLS, _VALUES, _ARRIVES = "norm.gap", "norm.calls", "norm.values", "norm.arrives"
MOST = 64
"""Layers that are looked at, at most."""
_HARDLY = 0.1
"""Share of ``eps`` above which a feature hardly varies: its running variance takes long to come down from 1."""


class NormInstrument(Reader):
    """Reads how far the batches of each batch norm are from the running statistics that evaluation uses."""

    needs: ClassVar[frozenset[Need]] = frozenset({"calls"})

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        found = [(site_name(name), m) for name, m in setting.model.named_modules() if _keeps(m)]
        self._layers = [(name, weakref.ref(module)) for name, module in found[:: -(-len(found) // MOST) or 1]]
        self._calls: dict[str, list[Tensor]] = {}
        self._told: dict[str, tuple[float, float, float]] = {}

    @property
    def modules(self) -> int:
        """How many layers are looked at."""
        return len(self._layers)

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see calls."""
        layers = [(layer, name) for name, known in self._layers if (layer := known()) is not None]
        until.callback(hook_calls([(m, ModuleHook(self._guard(partial(self._called, name)))) for m, name in layers]))

    def forget(self) -> None:
        """Forget the calls since the last step."""
        super().forget()
        self._calls, self._told = {}, {}

    def drain(self) -> Drained:
        """Give out the statistics of all calls of each layer."""
        self._out = [
            ClueSample(_GAP, name, torch.stack(each).float(), partial(_gap, name, *self._told[name]))
            for name, each in self._calls.items()
        ]
        return super().drain()

    def _called(self, name: str, module: Any, given: Any, output: Any) -> None:
        made = getattr(output, "grad_fn", None)
        mean, scale = (None, None) if made is None else (saved(made, "result1"), saved(made, "result2"))
        if module.training and mean is not None and scale is not None and mean.shape == module.running_mean.shape:
            self._calls.setdefault(name, []).append(torch.stack([mean, scale, module.running_mean, module.running_var]))
            self._told[name] = module.eps, given[0].numel() / len(mean), 8.0 / (module.momentum or 1e-9)


def _keeps(module: nn.Module) -> bool:
    """Whether a module is a batch norm that keeps running statistics."""
    return isinstance(module, torch_private.BatchNorm) and isinstance(module.running_mean, Tensor)


def _gap(name: str, eps: float, values: float, arrives: float, calls: npt.NDArray[Any]) -> dict[str, dict[str, float]]:
    """Return how far the values of calls are from the running statistics, as a shift in standard deviations.

    The Kullback-Leibler divergence of the two normal distributions, the median over features, is that of the shift.

    Args:
        name: Of the layer.
        eps: What the layer adds to a variance.
        values: How many a mean is taken over.
        arrives: Steps in which running statistics arrive.
        calls: Mean, one over the standard deviation, running mean and running variance of each call. Shape:
            ``[calls, 4, features]``.
    """
    mean, scale, running, variance = calls.astype(np.float64).transpose(1, 0, 2)
    with np.errstate(all="ignore"):  # what is not finite is left out
        kept = variance + eps
        share = 1.0 / (np.square(scale) * kept)
        apart = share - 1.0 - np.log(share) + np.square(mean - running) / kept
    gaps = [
        math.sqrt(median(far))
        for each, some in zip(apart, np.square(scale) * eps <= _HARDLY, strict=True)
        if len(far := each[some & np.isfinite(each)])
    ]
    found = {_GAP: sum(gaps) / len(gaps), _CALLS: float(len(calls)), _VALUES: values, _ARRIVES: arrives} if gaps else {}
    return {fact: {name: value} for fact, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class NormStatistics(Check):
    """Report batch norm whose running statistics are not those of the batches that it is trained with.

    In training, batch norm normalizes with the mean and variance of a batch, and in evaluation with their running
    averages. The divergence of the two is given as the shift, in standard deviations, of a normal distribution that has
    the same. Its median over ``readings`` readings, once averages had time to arrive, exceeds ``far``.

    Why it is bad:
        In evaluation, the model is another function than the one that was trained. The training loss says nothing about
        its answers.

    Example:
        x = relu(self.norm(self.conv1(x)))
        x = relu(self.norm(self.conv2(x)))  # one norm at two places: its averages are those of neither

    Use instead:
        x = relu(self.norm1(self.conv1(x)))
        x = relu(self.norm2(self.conv2(x)))

    Not reported:
        Layers without running statistics; functional batch norm; as more than LOW, models that are not evaluated.

    Attributes:
        settle: Minimum number of steps in which running averages arrive.
        longest: Maximum number of such steps; in between, it is eight over the momentum.
        far: Minimum shift, in standard deviations; the square of that of chance, ``2 / values``, is added to its own.
        readings: Number of readings whose median is taken.
        patience: One; the median already requires persistence.
    """

    settle: int = 80
    longest: int = 300
    far: float = 0.5
    readings: int = 5
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.EVAL_RANDOM,)
    evidence: ClassVar[tuple[str, ...]] = (_GAP,)
    remembers: ClassVar[tuple[str, ...]] = (_GAP, SIZES)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the readings of this record and those before it."""
        found = {}
        for site, values in values_of(record, _VALUES).items():
            begin = min(max(values_of(record, _ARRIVES)[site], self.settle), self.longest)
            last = past(history, _GAP, site, since=begin)[-self.readings :]
            if len(last) == self.readings and median(last) > math.hypot(self.far, math.sqrt(2.0 / values)):
                found[site] = median(last)
        if not found:
            return ()
        first = next(iter(found))
        return (
            Finding(
                IssueType.EVAL_RANDOM,
                Severity.MEDIUM if history.at_sites(SIZES).sites else Severity.LOW,
                tuple(found),
                found[first],
                self.far,
                f"the running statistics of {some(tuple(found))}, which evaluation uses, are not those of its batches: "
                f"they differ as much as a shift by {number(found[first])} standard deviations does, in "
                f"{number(values_of(record, _CALLS)[first])} calls a step.",
                "if it is called at several places or for data of several kinds, give each a batch norm of its own; "
                "let the running statistics arrive, with momentum=0.1 in torch, where other libraries write 0.9.",
                cause=DIFFERS,
                origin=DIFFERS,
            ),
        )
