"""Backward passes after which no optimizer of the model ever steps."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.metrics.arrays.checksum import checksum
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.records.step_record import RUN_SITE

_log = logging.getLogger("gradflow_export")

LONELY_BACKWARD_PASSES = 20
GATHERING_PASSES = 200
"""Passes whose gradients are added up, after which it is said that no step has come."""
FOLLOWED = 4
MOST = 0.9
"""Share of the parameters that a stranger's copies must have to be taken for copies of this model."""


_UNSEEN = (
    "backward passes and no optimizer step seen. If no torch.optim.Optimizer is used, call exporter.step() once "
    "after each update; if a trainer runs the loop, call it from the end-of-batch callback. If other tensors are "
    "trained in place of the parameters (functional_call), watch nn.ParameterList(tensors) and assign their "
    "gradients to .grad."
)
_WAITING = (
    "backward passes whose gradients were cleared, and the optimizer of these parameters has not stepped: call its "
    "step() before zero_grad()."
)
_COPIED = (
    "steps of an optimizer that holds tensors shaped as this model's parameters, and no step of the model's own. "
    "If the model is trained through them (functional_call, stacked by vmap, a pipeline stage), watch a module "
    "that holds the trained tensors, such as nn.ParameterList(tensors), or pass the model's own parameters to the "
    "optimizer."
)
_GATHERED = (
    "backward passes whose gradients add up, and the optimizer of these parameters has not stepped. Unless gradients "
    "are accumulated over more passes than that, call its step(), then zero_grad()."
)
_TRANSFORMED = (
    "calls of the model inside torch.func (grad, vmap), and no optimizer step seen. If this trains the model, "
    "assign the gradients that torch.func returns to .grad of the parameters, then call exporter.step() after each "
    "update or use an optimizer that holds them; for stacked or copied parameters, watch nn.ParameterList(tensors)."
)
_UNGRADED = (
    "changes of the weights between calls of the model without gradients, and no optimizer step seen. If this is "
    "training (evolution strategies, manual updates), call exporter.step() once after each update."
)


class LonelyPasses:
    """Notices, before the first step, that gradients come and go and the weights stay.

    A loop that accumulates gradients over many passes does not clear them: it is reported after two hundred. One that
    updates weights by hand moves them and is not reported.

    Args:
        model: Returns the model.

    Attributes:
        model: As given.
        over: Whether a step of the model's own has begun, so that there is nothing to notice any more.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self.model = model
        self._before: list[Tensor | None] = []
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.over = self._told = False
        self._passes = self._foreign_steps = self._calls = self._changes = 0
        self._called: int | None = None
        self._stamp: tuple[int, ...] = ()
        self._cleared, self._brought = True, False

    def noticed(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that steps and owns no parameter of the model."""
        if self.over:
            return
        self._foreign.add(optimizer)
        self._foreign_steps += 1
        # Under vmap the model's own passes are not seen.
        if self._foreign_steps == LONELY_BACKWARD_PASSES and self._share() >= MOST:
            self._tell(_COPIED)

    def passed_over(self, module: nn.Module) -> None:
        """Take notice of a call under a function transform, or without gradients: no hook sees what follows from it.

        Args:
            module: One of the model's; those calls are counted that come to the first of them.
        """
        if self.over or self._told or self._foreign_steps or self._passes:
            return
        self._called = id(module) if self._called is None else self._called
        if self._called != id(module):
            return
        if torch.is_grad_enabled():
            self._calls += 1
            if self._calls == LONELY_BACKWARD_PASSES:
                self._tell(_TRANSFORMED)
        elif self._is_changed():
            self._changes += 1
            if self._changes == LONELY_BACKWARD_PASSES:
                self._tell(_UNGRADED)

    def begin(self) -> Drained:
        """Count a backward pass that begins.

        Returns:
            At the twentieth what there is to tell; empty otherwise, where weights move, where no pass brought the
            parameters a gradient, and where gradients are kept while no optimizer steps that holds copies of the
            parameters; of these more at the two hundredth.
        """
        self._passes += 1
        # A pass that is under way was begun by ``torch.autograd.grad``, or leads to tensors that stand in for these.
        self._brought |= torch_private.backward_number() == -1
        if self._passes == 1:
            self._before = self._sums()
        elif self._passes <= LONELY_BACKWARD_PASSES and self._cleared:
            # Waits for the device where gradients were not cleared by None: once, for then they are kept. In the first
            # parameters they arrive last, so that what is found is what earlier passes left.
            gradients = [p.grad for p in itertools.islice(self._trained(), FOLLOWED)]
            self._cleared = not any(g is not None and bool(dense_entries(g).any()) for g in gradients)
        if self._passes == GATHERING_PASSES and not self._cleared and self._rests():
            self._tell(_GATHERED, GATHERING_PASSES)
            return [Clue.by_layer("wiring.gathering_passes", {RUN_SITE: float(self._passes)})]
        if self._passes != LONELY_BACKWARD_PASSES:
            return []
        share, rests = self._share(), self._rests()
        copied = share >= MOST and self._foreign_steps >= LONELY_BACKWARD_PASSES // 2
        if copied:
            self._tell(_COPIED)
        elif not rests or not self._awaited():
            self._tell(_UNSEEN)
        elif self._cleared:
            self._tell(_WAITING)
        if not (copied or (self._cleared and self._brought)) or not rests:
            return []
        found = {"lonely_passes": self._passes, "foreign": share}
        return [Clue.by_layer(f"wiring.{name}", {RUN_SITE: float(value)}) for name, value in found.items()]

    def _tell(self, what: str, passes: int = LONELY_BACKWARD_PASSES) -> None:
        if not self._told:
            self._told = True
            _log.warning("gradflow: %d %s", passes, what)

    def _is_changed(self) -> bool:
        """Whether the first parameter was written to or replaced since the last call; waits for no device."""
        before, first = self._stamp, next(self._trained(), None)
        if type(first) is nn.Parameter:
            self._stamp = torch_private.version(first), first.data_ptr()
        return self._stamp != before != ()

    def _trained(self) -> Iterator[nn.Parameter]:
        model = self.model()
        return (p for p in (() if model is None else model.parameters()) if p.requires_grad)

    def _sums(self) -> list[Tensor | None]:
        """Return a checksum of all entries of each parameter that is trained."""
        return list(map(checksum, self._trained()))

    def _rests(self) -> bool:
        """Whether the parameters are what they were, bit for bit."""
        now, before = self._sums(), self._before
        known = [(a, b) for a, b in zip(now, before, strict=False) if a is not None and b is not None]
        return len(known) == len(now) == len(before) > 0 and all(torch.equal(a, b) for a, b in known)

    def _awaited(self) -> bool:
        """Whether there is an optimizer that holds parameters and has not stepped."""
        mine = set(map(id, self._trained()))
        return any(id(p) in mine for o in instances(Optimizer) for group in o.param_groups for p in group["params"])

    def _share(self) -> float:
        parameters = list(self._trained())
        shapes = Counter(p.shape for p in parameters)
        others = [other.model() for other in instances(LonelyPasses) if other is not self]
        theirs = {id(p) for other in others if other is not None for p in other.parameters()}
        greatest = 0
        for optimizer in list(self._foreign):
            tensors = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in theirs]
            held, stacked = Counter(p.shape for p in tensors), Counter(p.shape[1:] for p in tensors)
            greatest = max(greatest, sum((held & shapes).values()), sum((stacked & shapes).values()))
        return greatest / max(len(parameters), 1)
