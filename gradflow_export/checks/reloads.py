"""Training that is put back: weights that other code writes, so that nothing of the optimizer's updates is left."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.module_hooks import ModuleHook, hook_loading
from gradflow_export.hooks.optimizer_hooks import always, listen
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot, slots, tensors_at
from gradflow_export.hooks.readings import Clue
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.local import PLAIN
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import falls_again, seen
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

FOLLOWED = 4
ENTRIES = 256
WRITES = 2
"""Writes in a row of which the one that kept most counts."""
SETTLING = 100
"""First steps, around which entries are compared; later a version and an address show a write, for less."""
STRETCH = 256
"""Steps that are followed from each write on."""


class ReloadInstrument(Reader):
    """Reads what is left of the optimizer's updates where other code writes to the weights between two of its steps.

    Of the change since one such write, the next one keeps a share: nothing, where a checkpoint is loaded again; half,
    where slow weights follow. An optimizer that is made anew begins another training, as for the next fold of a
    cross-validation. What is pruned or clamped again is a part of the entries, and others stay changed.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._part, self._slots = setting.part(self.instrument), list[Slot]()
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._steps = self._writes = self._rest = 0
        self._mark: tuple[int, int] | None = None
        self._since = self._left = torch.zeros(0)
        self._kept = torch.ones(WRITES)
        self._following = contextlib.ExitStack()

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack takes the hooks away."""
        stack, model = super().attach(), self._model()
        stack.callback(self._following.close)
        if model is not None:
            stack.callback(hook_loading(model, ModuleHook(self._guard(lambda *_: self._follow(STRETCH)))))
        self._follow(SETTLING)
        return stack

    def _follow(self, steps: int) -> None:
        """Look at so many steps; a hook that rests at most of them would not."""
        if not self._rest:
            self._mark = None
            self._following.callback(listen(always(self._begins, self._part), always(self._ends, self._part)))
        self._rest = steps

    def before(self, step: OptimizerStep) -> None:
        """Choose what is followed of an optimizer that is new; of another one give out what the last writes kept."""
        if not isinstance(step.optimizer, Optimizer):
            return
        if self._optimizer() is not step.optimizer:
            self._optimizer, self._steps, self._mark = weakref.ref(step.optimizer), 0, None
            mine, model = {id(p) for p in step.owned.parameters if _is_plain(p)}, self._model()
            held = [] if model is None else [(slot, p) for slot, p in slots(model) if id(p) in mine]
            # Weights, which training changes at every step, rather than what may be 0 throughout.
            largest = sorted(held, key=lambda each: -each[1].numel())[:FOLLOWED]
            self._slots = [slot for slot, p in largest if p.device == largest[0][1].device]
            self._since, self._left = self._entries(), torch.zeros(0)
            self._kept = torch.ones(WRITES, device=self._since.device)
        if self.armed:
            self._writes = 0
            self._out.append(Clue("wiring.kept", (RUN_SITE,), self._kept.amax().reshape(1).double()))

    def _begins(self, optimizer: Optimizer) -> None:
        """Compare the weights that a step begins with, most of which are those that the last one left."""
        if self._optimizer() is not optimizer or not self._slots:
            return
        written = self._mark is not None and self._mark != self._marked()
        self._writes += written
        if written:
            self._follow(STRETCH)
        if written or self._steps <= SETTLING:
            self._see(self._entries())

    def _see(self, now: Tensor) -> None:
        """Compare the weights with those that the last step left; no device is waited for."""
        if len(now) != len(self._left) or not len(now):
            self._since = now
            return
        written, share = (now != self._left).any(), _share(self._since, self._left, now)
        self._kept = torch.where(written, torch.cat([self._kept[1:], share]), self._kept)
        self._since = torch.where(written, now, self._since)

    def _ends(self, optimizer: Optimizer) -> None:
        if self._optimizer() is not optimizer or not self._slots:
            return
        self._steps, self._mark, self._rest = self._steps + 1, self._marked(), self._rest - 1
        # Where others write at each step, a few writes tell all, until it is read again.
        follows = self._steps <= SETTLING or 0 < self._writes <= WRITES
        self._left = self._entries() if follows and self._rest else torch.zeros(0)
        if not self._rest:
            self._following.close()

    def _marked(self) -> tuple[int, int]:
        largest = self._slots[0]()
        return (0, 0) if largest is None else (torch_private.version(largest), largest.data_ptr())

    def _entries(self) -> Tensor:
        """Return some entries of the followed weights, a copy."""
        with torch.no_grad():
            entries = [even_sample(p, ENTRIES).float() for p in tensors_at(self._slots) if p is not None]
            return torch.cat(entries) if entries else torch.zeros(0)


def _is_plain(p: Tensor) -> bool:
    stored = type(p) in PLAIN and p.layout is torch.strided  # what has no storage has no address either
    return stored and p.requires_grad and p.numel() > 0 and p.is_floating_point()


def _share(before: Tensor, made: Tensor, now: Tensor) -> Tensor:
    """Return what is left of a change: the greatest of an entry, as a share of the greatest that was made."""
    left = (now - before).abs().amax() / (made - before).abs().amax()
    return torch.nan_to_num(left, nan=1.0, posinf=1.0).reshape(1)


@dataclass(frozen=True, kw_only=True)
class Reloaded(Check):
    """Report weights that other code writes between steps, so that nothing is left of what the optimizer changed.

    Of the change of the weights since one such write, the next one must keep at most ``stayed``, several times in a
    row, and the loss may not fall beyond its noise. A checkpoint that is loaded again keeps nothing, whichever it is.

    Why it is bad:
        Everything learned in between is lost, and the optimizer continues with moments of weights that no longer exist.

    Example:
        for epoch in range(10):
            model.load_state_dict(initial)
            train_one_epoch(model)

    Use instead:
        model.load_state_dict(initial)
        for epoch in range(10):
            train_one_epoch(model)

    Not reported:
        A new optimizer for the reset weights, as for the next fold of a cross-validation; a single reset; weights that
        are written for an evaluation and put back; slow weights that follow the others, as of Lookahead; writes after
        which some entries keep their change, as where others are pruned or clamped; a loss that falls all the same, or
        has fallen to a tenth of its first value.

    Attributes:
        stayed: Maximum fraction of the change since the last write that remains.
        patience: One; several writes already require persistence.
    """

    stayed: float = 0.05
    patience: int = 1
    heal: int = 1000

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_TRAINING,)
    evidence: ClassVar[tuple[str, ...]] = ("wiring.kept",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge what was kept at the last writes."""
        kept = seen(record, "wiring.kept")
        if kept is None or not kept <= self.stayed or solved(history):  # nothing is left to move towards
            return ()
        if falls_again(history, record.step - history.seen // 2):
            return ()
        return (
            Finding(
                IssueType.NOT_TRAINING,
                Severity.HIGH,
                ("",),
                kept,
                self.stayed,
                f"other code than the optimizer writes to the weights between steps; of their change since the write "
                f"before, at most {number(100 * kept)} % is left, {WRITES} times in a row: what was learned is lost.",
                "find the code that writes to the parameters: load a checkpoint once, before the loop, and the latest "
                "one inside it; evaluate a copy with the weight average, torch.optim.swa_utils.AveragedModel(model), "
                "and train the model itself.",
                cause="taken back",
                origin="taken back",
            ),
        )
