"""Training that is put back: to its first weights, or to what the weights were before a step."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.module_hooks import ModuleHook, hook_loading
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot, slots
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import seen
from gradflow_export.rules.history import History

FOLLOWED = 4
ENTRIES = 256


class ReloadInstrument(Reader):
    """Counts calls of ``load_state_dict`` that put the weights of the first step back, while one optimizer goes on.

    An optimizer that is made anew begins another training, as for the next fold of a cross-validation. While armed it
    reads too how much of a step is still there at the next one: the greatest change of an entry as a share of the
    greatest that the step made. What is pruned or clamped again is a part of the entries, and others stay changed.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._first: list[tuple[Slot, Tensor]] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._back: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._moved: list[tuple[Slot, Tensor, Tensor]] = []
        self._begun: list[Tensor] = []

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hook away."""
        stack, model = super().attach(), self._model()
        if model is not None:
            stack.callback(hook_loading(model, ModuleHook(self._guard(self._loaded))))
        return stack

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
            self._back, self._waiting, self._moved = [], [], []
        elif self._waiting:
            self._back, self._waiting = [*self._back, *self._waiting][-64:], []
        with torch.no_grad():
            moved, self._moved = self._moved, []
            now = [(slot(), before, after) for slot, before, after in moved]
            parts = [
                ((even_sample(p, ENTRIES) - b).abs().amax(), (a - b).abs().amax())
                for p, b, a in now
                if p is not None and p.numel()
            ]
            if parts:
                left, made = (torch.stack(list(sizes)).double().amax() for sizes in zip(*parts, strict=True))
                self._out.append(Clue("wiring.stayed", (RUN_SITE,), (left / made).reshape(1)))
            self._begun = [even_sample(p, ENTRIES).clone() for p in self._followed()] if self.armed else []

    def after(self, step: OptimizerStep) -> None:
        """Remember what a step made of some entries."""
        begun, self._begun = self._begun, []
        held = self._followed()
        if begun and len(held) == len(begun):
            with torch.no_grad():
                made = [even_sample(p, ENTRIES).clone() for p in held]
            self._moved = list(zip((slot for slot, _ in self._first), begun, made, strict=True))

    def _followed(self) -> list[Tensor]:
        return [p for p in (slot() for slot, _ in self._first) if p is not None]

    def skip(self, step: OptimizerStep) -> None:
        """Forget the step."""
        self._begun = []

    def drain(self) -> Drained:
        """Give out how much of a step has stayed, and how often the first weights came back, while that may change."""
        out = super().drain()
        if self._back and self.armed:
            out.append(Clue("wiring.reloads", (RUN_SITE,), torch.stack(self._back).sum().reshape(1).double()))
        return out

    def _loaded(self, _model: nn.Module, _keys: Any, _output: Any = None) -> None:
        pairs = [(p, first) for p, first in ((slot(), first) for slot, first in self._first) if p is not None]
        if not pairs:
            return
        with torch.no_grad():
            same = [(even_sample(p, ENTRIES) == first).all() for p, first in pairs]
            self._waiting.append(torch.stack(same).all())


@dataclass(frozen=True, kw_only=True)
class Reloaded(Check):
    """Report training that is reset to its initial weights repeatedly, or to the previous weights after each step.

    Why it is bad:
        Everything learned since the last reset is lost, and the optimizer continues with moments of weights that no
        longer exist.

    Example:
        for epoch in range(10):
            model.load_state_dict(initial)
            train_one_epoch(model)

    Use instead:
        model.load_state_dict(initial)
        for epoch in range(10):
            train_one_epoch(model)

    Not reported:
        A new optimizer for the reset weights, as for the next fold of a cross-validation; weights other than the
        initial ones, as in early stopping; a single reset; steps after which some entries keep their change, as where
        others are pruned or clamped.

    Attributes:
        times: Minimum number of resets.
        stayed: Maximum fraction of an update that remains at the next step, for an update that is undone.
        readings: Minimum number of readings in which the whole update was undone.
        patience: One; ``times`` already requires persistence.
    """

    times: int = 2
    stayed: float = 0.05
    readings: int = 12
    patience: int = 1
    heal: int = 1000

    name: ClassVar[str] = "reloaded"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("wiring.reloads", "wiring.stayed")
    remembers: ClassVar[tuple[str, ...]] = ("wiring.stayed",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge how often the first weights came back, and what stays of a step."""
        count, shares = seen(record, "wiring.reloads"), history.run("wiring.stayed").values[-self.readings :]
        if len(shares) == self.readings and float(shares.max()) <= self.stayed:
            return (_undone(float(shares.max()), self.stayed),)
        if count is None or not count >= self.times:
            return ()
        message = (
            f"load_state_dict() has restored the initial weights {number(count)} times since training began, with "
            "the same optimizer: what was learned in between is lost."
        )
        advice = (
            "load the initial checkpoint once, before the loop; inside the loop load the latest one: "
            "torch.save(model.state_dict(), path) at the end of each epoch."
        )
        cause = "begins anew"
        return (
            Finding(
                IssueType.NOT_TRAINING, Severity.HIGH, ("",), count, float(self.times), message, advice, cause=cause,
                origin=cause,
            ),
        )  # fmt: skip


def _undone(share: float, limit: float) -> Finding:
    return Finding(
        IssueType.NOT_TRAINING,
        Severity.HIGH,
        ("",),
        share,
        limit,
        f"at most {number(100 * share)} % of each update is left at the next step: other code writes the old "
        "weights, or nearly the old weights, back after step().",
        "find the code that writes to the parameters in between, such as a weight average that is copied into the "
        "model: evaluate a copy with the average, torch.optim.swa_utils.AveragedModel(model), and train the model "
        "itself.",
        cause="taken back",
        origin="taken back",
    )
