"""Backward passes after which no optimizer of the model steps, from the beginning or any more."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import walk
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.metrics.arrays.checksum import checksum
from gradflow_export.metrics.arrays.finite import looks_broken
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.records.issues import Issue, IssueType, Severity
from gradflow_export.records.step_record import RUN_SITE

_log = logging.getLogger("gradflow_export")

LONELY_BACKWARD_PASSES = 20
GATHERING_PASSES = 200
"""Passes whose gradients are added up, after which it is said that no step has come."""
FOLLOWED = 4
EXPECTED = LONELY_BACKWARD_PASSES // 2
"""Passes since the last step that are only counted."""
SEVERAL = 4
"""So many times the most passes that led to one step are waited for before it is said that no more steps come."""
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

_NO_STEP = Issue(
    IssueType.NUMERICAL,
    Severity.CRITICAL,
    "",
    1,
    math.nan,
    0.0,
    f"the loss is NaN or Inf, and after {LONELY_BACKWARD_PASSES} backward passes no optimizer step has followed: "
    "nothing is trained any more. A gradient scaler skips each step whose gradients are not finite.",
    "stop at the first loss that is not finite, assert torch.isfinite(loss), and look at the batch and the inputs of "
    "this step; with torch.amp.GradScaler, a scale that falls at each step says the same.",
    cause="no step follows",
)
"""Its step is the one under way."""


class AwaitedStep:
    """Counts the backward passes since the last step, and says why none will come.

    Losses that stay NaN or Inf are reported, as a gradient scaler skips the steps of all of them. So is an optimizer
    that has stepped and does not any more, where all speaks for it: the model is in training mode, its gradients are
    finite and cleared each time, its weights rest, no other optimizer steps, and the loss is made as it was and of
    nothing that requires a gradient but the parameters, unlike in attacks and in the passes of other players. Only
    where far more passes have come than ever led to a step, gradients and weights are looked at.

    Args:
        model: Returns the model.
        tell: Takes an issue, and once more when it is over.

    Attributes:
        passes: How many have begun since the last step.
        lost: Whether losses were reported since then.
        within: Whether a step is under way: passes until it ends belong to it.
        looks: Whether gradients are looked at when a pass ends.
    """

    def __init__(self, model: Callable[[], nn.Module | None], tell: Callable[[Issue], object]) -> None:
        self._model, self._tell = model, tell
        self.passes = self._from = 0
        self._most = 1
        self.lost = self.within = self._over = self.looks = False
        self._usual: object = None
        self._before: list[Tensor | None] = []

    def step(self, head: object, *, within: bool = False) -> None:
        """Take notice of a step.

        Args:
            head: How the loss of its last pass was made.
            within: Whether it only begins.
        """
        if self.lost and self.passes < LONELY_BACKWARD_PASSES:
            self.lost = False
            self._tell(replace(_NO_STEP, healed_step=1))
        self._most = max(self._most, self.passes)
        self._usual, self.within = head, within
        self._over = self.looks = False
        self.passes = self._from = 0

    def start_over(self, _optimizer: Optimizer | None = None) -> None:
        """Take notice of what says that the passes so far are for something else, as a step of another optimizer."""
        self._from, self.looks = self.passes, False

    def begin(self, roots: Sequence[Tensor], head: object) -> Drained:
        """Take notice of a backward pass that begins, the last that was counted; return what there is to report.

        Args:
            roots: The scalars that it begins at.
            head: How the loss of the pass before was made.
        """
        model = self._model()
        if model is None or self.within:
            return []
        if self.passes % LONELY_BACKWARD_PASSES == 0 and not self.lost and any(map(_is_lost, roots)):
            self.lost = True
            self._tell(_NO_STEP)
            return [Clue.by_layer("wiring.lost_passes", {RUN_SITE: float(self.passes)})]
        count, limit = self.passes - self._from, max(LONELY_BACKWARD_PASSES, SEVERAL * self._most)
        if self._usual is None or self._over or self.lost or count <= limit // 2:
            return []
        if not model.training or not is_cleared(model):
            self.start_over()
        elif not self.looks:
            self.looks, self._before = True, sums_of(model)
        elif count > limit:
            stopped = head == self._usual and are_same(sums_of(model), self._before) and _is_of(model, roots)
            self.start_over()
            self._over = stopped
            return [Clue.by_layer("wiring.stopped_passes", {RUN_SITE: float(self.passes - 1)})] if stopped else []
        return []

    def over(self) -> None:
        """Take notice of the end of a pass: whether it brought finite gradients; waits for the device where asked."""
        model = self._model()
        if self.looks and model is not None:
            gradients = [p.grad for p in trained(model) if p.grad is not None]
            if not gradients or any(map(looks_broken, gradients)):
                self.start_over()


def trained(model: nn.Module | None) -> Iterator[nn.Parameter]:
    """Return the parameters of a model that require a gradient."""
    return (p for p in (() if model is None else model.parameters()) if p.requires_grad)


def sums_of(model: nn.Module | None) -> list[Tensor | None]:
    """Return a checksum of all entries of each parameter that is trained. Shape: scalars."""
    return list(map(checksum, trained(model)))


def are_same(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> bool:
    """Whether parameters are what they were, bit for bit, by their checksums; waits for the device."""
    known = [(a, b) for a, b in zip(now, before, strict=False) if a is not None and b is not None]
    return len(known) == len(now) == len(before) > 0 and all(torch.equal(a, b) for a, b in known)


def is_cleared(model: nn.Module | None) -> bool:
    """Whether gradients are none or zero, by the first parameters, where they arrive last.

    Waits for the device where they were not cleared by ``None``.
    """
    gradients = [p.grad for p in itertools.islice(trained(model), FOLLOWED)]
    return not any(g is not None and bool(dense_entries(g).any()) for g in gradients)


def _is_lost(root: Tensor) -> bool:
    known = not isinstance(root, torch_private.FakeTensor) and root.device.type != "meta"
    return known and looks_broken(root.detach())


def _is_of(model: nn.Module, roots: Sequence[Tensor]) -> bool:
    """Whether of all tensors that require a gradient only parameters of the model lead to a loss."""
    known = set(map(id, model.parameters()))
    leaves = [getattr(node, "variable", None) for node in walk([root.grad_fn for root in roots])]
    return bool(roots) and all(leaf is None or id(leaf) in known for leaf in leaves)


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
            self._before = sums_of(self.model())
        elif self._passes <= LONELY_BACKWARD_PASSES and self._cleared:
            # Waits for the device where gradients were not cleared by None: once, for then they are kept. In the first
            # parameters they arrive last, so that what is found is what earlier passes left.
            self._cleared = is_cleared(self.model())
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
        before, first = self._stamp, next(trained(self.model()), None)
        if type(first) is nn.Parameter:
            self._stamp = torch_private.version(first), first.data_ptr()
        return self._stamp != before != ()

    def _rests(self) -> bool:
        return are_same(sums_of(self.model()), self._before)

    def _awaited(self) -> bool:
        """Whether there is an optimizer that holds parameters and has not stepped."""
        mine = set(map(id, trained(self.model())))
        return any(id(p) in mine for o in instances(Optimizer) for group in o.param_groups for p in group["params"])

    def _share(self) -> float:
        parameters = list(trained(self.model()))
        shapes = Counter(p.shape for p in parameters)
        others = [other.model() for other in instances(LonelyPasses) if other is not self]
        theirs = {id(p) for other in others if other is not None for p in other.parameters()}
        greatest = 0
        for optimizer in list(self._foreign):
            tensors = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in theirs]
            held, stacked = Counter(p.shape for p in tensors), Counter(p.shape[1:] for p in tensors)
            greatest = max(greatest, sum((held & shapes).values()), sum((stacked & shapes).values()))
        return greatest / max(len(parameters), 1)
