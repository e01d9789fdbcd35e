"""Losses of evaluation that rise while those of training fall: OVERFITTING."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.nodes import Op, kind_of, sources
from gradflow_export.autograd_graph.provenance import is_plain
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.module_hooks import ModuleHook, Placed, hook_calls, is_plain_call
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import Floats, supervised
from gradflow_export.rules.history import History, RunSeries

_log = logging.getLogger("gradflow_export")

_SPREAD = 3.0
"""Standard errors of the mean by which a rise must lie above chance; losses of samples scatter as much as they are."""
_SCALED = frozenset((Op.DIV, Op.MUL, Op.MEAN, Op.SUM, Op.VIEW, Op.TO_COPY))
SEARCHES = (1, 4)
"""Steps with an evaluation before them after which loss modules are searched for, while none gave a loss."""
MOST_CRITERIA = 16
"""Loss modules that are watched, at most."""
LOOKS = 8
"""Backward passes among which the loss is looked for in what the model itself gives out."""


class EvaluationLoss(Reader):
    """Reads the loss of passes without gradients: the mean over the samples between two steps.

    Nothing of torch is replaced. The loss is, in this order, what ``exporter.observe(validation_loss=...)`` was called
    with; what the model itself gives out where training calls ``backward`` on it; what a loss module of torch gives out
    that is called after such a pass. Of several loss modules none counts. A loss function that is called outside the
    model, as ``F.cross_entropy(model(x), y)``, leaves no trace in a pass without gradients, and is not read.
    """

    every_step: ClassVar[bool] = True
    takes: ClassVar[str] = "validation_loss"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._criteria = contextlib.ExitStack()
        self._places: dict[int, object] = {}
        self._place: object = None
        self._looks = self._rounds = 0
        self._evaluated = self._after = self._observed = self._refused = False
        self._criterion: weakref.ref[nn.Module] | None = None
        self._several = False
        self._total: Tensor | None = None
        self._samples = 0
        self.placed: list[Placed] = []

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hooks away."""
        stack, model = contextlib.ExitStack(), self._model()
        if model is not None:
            stack.callback(self._stop)
            stack.callback(self._criteria.close)
            self.placed = [hook_calls([(model, ModuleHook(self._guard(self._passed)))])]
            for placed in self.placed:
                stack.callback(placed)
        return stack

    def take(self, value: Any) -> None:
        """Take the loss of an evaluation: a number or a tensor, of which the mean counts."""
        if isinstance(value, Tensor) and value.numel():
            loss = local(value.detach()).float().mean()
        elif isinstance(value, Real):
            loss = torch.tensor(float(value), dtype=torch.float64)
        else:
            if not self._refused:
                self._refused = True
                _log.warning(
                    "gradflow: observe() expects a tensor or a number for 'validation_loss', got %s; it is left out.",
                    type(value).__name__,
                )
            return
        if not self._observed:  # from now on nothing else counts
            self._observed, self._total, self._samples = True, None, 0
        self._add(loss, 1)

    def see(self, root: Tensor) -> None:
        """Look whether a loss is what the model gave out, divided or multiplied by a number or not."""
        places, self._places = self._places, {}
        node: Any = root.grad_fn
        while places and node is not None and self._place is None:
            self._place = places.get(torch_private.sequence_number(node))
            known = sources(node)
            node = known[0] if len(known) == 1 and kind_of(node) in _SCALED else None

    def drain(self) -> Drained:
        """Give out the mean since the last step with a record, where there was a loss."""
        total, samples = self._total, self._samples
        self._total, self._samples = None, 0
        if self._evaluated:
            self._evaluated = self._after = False
            self._rounds += 1
            nothing = total is None and self._place is None and self._criterion is None
            if nothing and self._rounds in SEARCHES and not self._observed:
                self._search()
        if total is None or (self._several and not self._observed):
            return []
        mean = Clue("evaluation.loss", (RUN_SITE,), (total / samples).reshape(1))
        return [mean] if self._observed else [mean, Clue("evaluation.samples", (RUN_SITE,), np.array([float(samples)]))]

    def _passed(self, _model: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._after = False
            if self._place is None and self._looks < LOOKS:
                self._looks += 1
                self._places = {
                    torch_private.sequence_number(value.grad_fn): place
                    for place, value in _entries(output)
                    if _is_loss(value) and value.grad_fn is not None
                }
            return
        if self._observed or not is_plain_call() or self._code.found:
            return
        self._evaluated = self._after = True
        loss = None if self._place is None else dict(_entries(output)).get(self._place)
        if _is_loss(loss):
            self._after = False
            first = next((value for value in given if isinstance(value, Tensor) and value.dim()), None)
            self._add(local(loss.detach()).float(), 1 if first is None else len(first))

    def _search(self) -> None:
        """Watch the calls of the loss modules that there are, but for those of a great many."""
        found = [each for each in instances(torch_private.Loss) if isinstance(each, nn.Module)]
        if 0 < len(found) <= MOST_CRITERIA:
            self._criteria.callback(hook_calls([(each, ModuleHook(self._guard(self._said))) for each in found]))

    def _said(self, criterion: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        if torch.is_grad_enabled() or self._observed or self._place is not None or not self._evaluated:
            return
        known = None if self._criterion is None else self._criterion()
        if not given or not isinstance(given[0], Tensor) or not is_plain(result) or not result.numel():
            return
        self._several |= known is not None and known is not criterion
        self._criterion = weakref.ref(criterion) if known is None else self._criterion
        if self._after and not self._several:
            self._after = False
            samples = len(given[0]) if given[0].dim() else 1
            summed = result.dim() == 0 and getattr(criterion, "reduction", "mean") == "sum"
            mean = local(result.detach()).float().mean()
            self._add(mean / samples if summed else mean, samples)

    def _add(self, mean: Tensor, samples: int) -> None:
        whole = mean * samples
        self._total = whole if self._total is None else self._total.to(whole) + whole
        self._samples += samples

    def _stop(self) -> None:
        self._places, self._total, self._samples = {}, None, 0


def _entries(output: Any) -> list[tuple[object, Any]]:
    """Return what a model gave out, each with where it stands."""
    if isinstance(output, Mapping):
        return list(output.items())
    return list(enumerate(output)) if isinstance(output, list | tuple) else [("", output)]


def _is_loss(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and is_plain(value)


@dataclass(frozen=True, kw_only=True)
class Overfitting(Check):
    """Report runs in which the evaluation loss keeps rising while the training loss falls.

    The evaluation loss is what a torch loss module, or the model itself, returns for passes of the model without
    gradients, averaged over all such passes between two steps; or what ``exporter.observe(validation_loss=...)`` gets.
    The median of its last three values must be above its minimum: by ``rise`` of that, by ``sure`` times its own noise,
    and by more than the standard error of the mean over so few samples; and the rise must continue. The training loss
    must meanwhile have fallen to ``fallen`` of its value. The severity is LOW until ``lost`` of the improvement is lost
    again, because an overconfident model may still become more accurate.

    Why it is bad:
        The model memorizes its training samples. Its predictions for other samples were better before; each further
        step costs time and makes them worse.

    Example:
        for epoch in range(1000):
            train(model)
            with torch.no_grad():
                print(criterion(model(x_val), y_val))  # least at epoch 20

    Use instead:
        best = float("inf")
        for epoch in range(1000):
            train(model)
            with torch.no_grad():
                loss = criterion(model(x_val), y_val)
            if loss < best:
                best = loss
                torch.save(model.state_dict(), "best.pt")

    Not reported:
        The evaluation loss comes from a function, such as ``F.cross_entropy(model(x), y)``, or is handwritten, and is
        not passed to ``observe``; several loss modules; fewer than ``readings`` evaluations; a rise within the noise
        between evaluations; a training loss that also rises; losses whose targets are neither classes nor a single
        number per sample, unless passed to ``observe``.

    Attributes:
        readings: Number of evaluations before anything is reported.
        rise: Minimum rise as a fraction of the minimum.
        sure: Minimum rise in standard deviations of the noise.
        fallen: Maximum training loss, as a fraction of that at the best evaluation.
        gained: Minimum improvement, as a fraction of the first loss, for more than LOW.
        lost: Minimum fraction of that improvement that must be lost again for more than LOW.
    """

    readings: int = 8
    rise: float = 0.25
    sure: float = 5.0
    fallen: float = 0.8
    gained: float = 0.2
    lost: float = 0.5

    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.OVERFITTING,)
    evidence: ClassVar[tuple[str, ...]] = ("evaluation.loss",)
    remembers: ClassVar[tuple[str, ...]] = ("evaluation.loss", "evaluation.samples", "loss", "loss.supervised")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the evaluations so far."""
        said, samples, training = (history.run(n) for n in ("evaluation.loss", "evaluation.samples", "loss"))
        steps, values = said.all()
        if (
            len(values) < self.readings
            or not np.isfinite(values).all()
            or not (samples.count == 0 or supervised(history))
        ):
            return ()
        smooth = np.median(np.lib.stride_tricks.sliding_window_view(values, 3), axis=1)
        at = int(smooth.argmin()) + 1
        best, now = float(smooth[at - 1]), float(smooth[-1])
        few = 0.0 if samples.count == 0 else _SPREAD * now / median(samples.values) ** 0.5
        margin = max(self.rise * best, self.sure * _noise(said.values), few)
        goes_on = now - best >= 0.75 * (float(smooth[at - 1 :].max()) - best)
        if best <= 0 or now - best < margin or not goes_on:
            return ()
        before = _level(training, int(steps[at - 1]), int(steps[at + 1]))
        after = _level(training, int(steps[-3]), int(steps[-1]))
        if not 0 <= after <= self.fallen * before:
            return ()
        first = max(said.first, training.first)
        heart = best <= (1 - self.gained) * first and now - best >= self.lost * (first - best)
        return (
            Finding(
                IssueType.OVERFITTING,
                Severity.MEDIUM if heart else Severity.LOW,
                (RUN_SITE,),
                now / best,
                1 + margin / best,
                f"the evaluation loss rose from {number(best)} at step {int(steps[at])} to {number(now)}, while the "
                f"training loss fell from {number(before)} to {number(after)}: the model memorizes its training "
                "samples.",
                f"keep the weights of about step {int(steps[at])}, which were the best (early stopping); to improve "
                "further, use more or augmented data, weight decay, dropout or a smaller model.",
                since=int(steps[at]),
            ),
        )


def _noise(values: Floats) -> float:
    """Return the standard deviation from one evaluation to the next, whatever the trend."""
    return 1.4826 * median(np.abs(np.diff(values, 2))) / 6**0.5


def _level(loss: RunSeries, begin: int, end: int) -> float:
    """Return the middle of the training losses between two steps, of the nearest where there are few; NaN if none."""
    steps, values = loss.all()
    keep = np.isfinite(values)
    if not keep.any():
        return math.nan
    steps, values = steps[keep], values[keep]
    inside = (steps >= begin) & (steps <= end)
    nearest = np.argsort(np.abs(steps - (begin + end) / 2), kind="stable")[:5]
    return median(values[inside] if inside.sum() >= 5 else values[nearest])
