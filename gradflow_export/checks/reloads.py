"""Training that is put back to its first weights."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_hooks import ModuleHook, hook_loading
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot, slots
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.instruments.base import Instrument, Setting
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import seen
from gradflow_export.rules.history import History

FOLLOWED = 4
ENTRIES = 256


class ReloadInstrument(Instrument):
    """Counts calls of ``load_state_dict`` that put the weights of the first step back, while one optimizer goes on.

    An optimizer that is made anew begins another training, as for the next fold of a cross-validation.

    Args:
        model: The unwrapped model; only weak references are kept.
        guard: Wraps the hook.
    """

    instrument: ClassVar[str] = "wiring"
    interval: ClassVar[int] = 100

    def __init__(self, model: nn.Module, *, guard: Guard = unguarded) -> None:
        self._model = weakref.ref(model)
        self._guard = guard
        self._first: list[tuple[Slot, Tensor]] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._back: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._armed = False

    @classmethod
    def make(cls, setting: Setting) -> ReloadInstrument:
        """Make one for a model."""
        return cls(setting.model, guard=setting.part(cls.instrument))

    @property
    def modules(self) -> int:
        """Nothing is read for each module."""
        return 1

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hook away."""
        stack = contextlib.ExitStack()
        model = self._model()
        stack.callback(self._first.clear)
        if model is not None:
            stack.callback(hook_loading(model, ModuleHook(self._guard(self._loaded))))
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more."""
        self._armed = on

    def before(self, step: OptimizerStep) -> None:
        """Remember the first weights, and whether the optimizer is still the same."""
        if not isinstance(step.optimizer, Optimizer):
            return
        if self._optimizer is None or self._optimizer() is not step.optimizer:
            self._optimizer = weakref.ref(step.optimizer)
            plain = [p for p in step.owned.parameters if p.requires_grad and not hasattr(p, "placements")]
            with torch.no_grad():
                # Weights, which training changes at every step, rather than what may be 0 throughout.
                largest = sorted(plain, key=lambda p: -p.numel())[:FOLLOWED]
                model = self._model()
                places = {} if model is None else {id(p): slot for slot, p in slots(model)}
                kept = [(places[id(p)], p) for p in largest if id(p) in places]
                self._first = [(slot, even_sample(p, ENTRIES).clone()) for slot, p in kept]
            self._back, self._waiting = [], []
        elif self._waiting:
            self._back, self._waiting = [*self._back, *self._waiting][-64:], []

    def after(self, step: OptimizerStep) -> None:
        """Read nothing."""

    def skip(self, step: OptimizerStep) -> None:
        """Read nothing."""

    def drain(self) -> Drained:
        """Give out how often the first weights came back, while that may have changed."""
        if not self._back or not self._armed:
            return []
        total = torch.stack(self._back).sum()
        return [Clue("wiring.reloads", (RUN_SITE,), total.reshape(1).double())]

    def forget(self) -> None:
        """Keep everything: it concerns the whole run."""

    def _loaded(self, _model: nn.Module, _keys: Any, _output: Any = None) -> None:
        pairs = [(p, first) for p, first in ((slot(), first) for slot, first in self._first) if p is not None]
        if not pairs:
            return
        with torch.no_grad():
            same = [(even_sample(p, ENTRIES) == first).all() for p, first in pairs]
            self._waiting.append(torch.stack(same).all())


@dataclass(frozen=True, kw_only=True)
class Reloaded(Check):
    """Find training that begins anew from its first weights again and again, under the same optimizer.

    Why it is bad:
        What was learned since the last time is lost, and the optimizer goes on with moments of weights that are gone.

    Example:
        for epoch in range(10):
            model.load_state_dict(initial)
            train_one_epoch(model)

    Use instead:
        model.load_state_dict(initial)
        for epoch in range(10):
            train_one_epoch(model)

    Not reported:
        A new optimizer begins with the weights, as for the next fold of a cross-validation; weights that are not the
        first ones, as of an early stop; once.

    Attributes:
        times: Least number of times.
        patience: One; the times are the patience.
    """

    times: int = 2
    patience: int = 1
    heal: int = 1000

    name: ClassVar[str] = "reloaded"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("wiring.reloads",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:  # noqa: ARG002 - one signature
        """Judge how often the first weights came back."""
        count = seen(record, "wiring.reloads")
        if count is None or not count >= self.times:
            return ()
        message = (
            f"load_state_dict() has put the first weights back {number(count)} times since training began, and the "
            "same optimizer goes on: what was learned in between is lost."
        )
        advice = (
            "load the first checkpoint once, before the loop; within it load what was saved last: "
            "torch.save(model.state_dict(), path) at the end of each epoch."
        )
        cause = "begins anew"
        return (
            Finding(
                IssueType.NOT_TRAINING, Severity.HIGH, ("",), count, float(self.times), message, advice, cause=cause,
                origin=cause,
            ),
        )  # fmt: skip
