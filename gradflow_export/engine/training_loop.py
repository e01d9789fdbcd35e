"""What happens on the training thread: instruments are read when an optimizer steps, and the step is handed over."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.checks.missing_step import EXPECTED, AwaitedStep, LonelyPasses
from gradflow_export.engine.gradient_use import UsedGradients
from gradflow_export.engine.held_records import HeldStep
from gradflow_export.engine.instruments import Asked, Instruments, draining, gathered, guarded
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.optimizer_groups import Partners
from gradflow_export.engine.optimizer_shares import Players
from gradflow_export.engine.pace import Pace
from gradflow_export.engine.quiet_steps import QuietSteps
from gradflow_export.engine.step_timer import StepClock
from gradflow_export.engine.transfer import Bundle, pack
from gradflow_export.hooks.backward_listener import Root
from gradflow_export.hooks.optimizer_steps import OptimizerStep, OptimizerSteps, Owned, owned_by_hand
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.backward_passes import MOST_READ
from gradflow_export.instruments.gradients.fingerprints import Fingerprints
from gradflow_export.instruments.hand_updates import HandUpdates
from gradflow_export.records.step_record import Issue, Note
from gradflow_export.schedule import Schedule

Looks = Sequence[Callable[[OptimizerStep], object]]

TOLD = 1000
"""Issues of others that may wait for a record; the oldest go first."""


class TrainingLoop:
    """Follows the user's loop through optimizer hooks and hands one bundle per step to the worker.

    A step ends when every optimizer that took part in the last one has stepped once, or when one of them steps again or
    steps with a parameter that another one has stepped with: so two optimizers that step together make one record, one
    that steps five times as often makes five, and two that own the same parameters make one each.
    """

    def __init__(
        self,
        instruments: Instruments,
        schedule: Schedule,
        guard: Guard,
        hand_over: Callable[[Bundle], None],
        lonely: LonelyPasses,
        awaited: AwaitedStep,
        hand: HandUpdates,
    ) -> None:
        self.instruments, self.lonely, self.awaited, self.hand = instruments, lonely, awaited, hand
        self.noted: Drained = []  # readings of others, for the next record; of one metric the last counts
        self.told: deque[Issue | Note] = deque(maxlen=TOLD)  # issues and notes, for the record of the step under way
        self.pace, self.clock, self.partners = Pace(), StepClock(), Partners()
        self.quiet = QuietSteps(self, guard)
        self.steps, self.paused, self.alone, self.recorded = 0, False, True, True
        self.optimizers: OptimizerSteps | None = None
        self.schedule, self._guard, self._hand_over = schedule, guard, hand_over
        self.open: Bundle | None = None
        part = guard.part
        self._players = Players(self.partners, instruments.loss, instruments.clipping, instruments.hooked, part("loss"))
        self.due: frozenset[str] = frozenset()
        self._compare = guard.part("fingerprints")(partial(_compare, Fingerprints(), self))
        self._step_began = self._stepped_for = self._collected = 0.0
        self._asked = Asked(instruments, schedule.intervals, part)
        self._drain_clipping = draining(instruments.clipping, part("clipping"))
        self._used = UsedGradients(instruments.gradients, instruments.clipping, instruments.armed, part)
        self.read_gradients = part("gradients")(self._used.read)
        self._end_gradients = part("gradients")(self._used.end)
        self._looks = frozenset(each.instrument for each in instruments.stepped)
        self._look_before = guarded(instruments.stepped, "before", part)
        self._look_after = guarded(instruments.stepped, "after", part)
        by_hand = [each for each in instruments.stepped if each.by_hand]
        self._hand_before, self._hand_after = guarded(by_hand, "before", part), guarded(by_hand, "after", part)
        at_pass = guarded([each for each in instruments.stepped if each.at_pass], "before", part)
        hand.on_pass, hand.on_step = partial(_read_pass, self, at_pass), self._step_by_hand
        self.owned_by_hand: Owned | None = None
        self._numbers = gathered(instruments.armed, "numbers", part)
        self._complete = gathered(instruments.armed, "complete", part)
        self._transfer = part("transfer")(_pack)
        self.held = HeldStep(instruments.stepped, guard, self._transfer, hand_over)
        self._tell_lonely = part("wiring")(partial(_notice_pass, self, hand_over))

    def attach(self) -> contextlib.ExitStack:
        """Attach all instruments and plan the first step; closing the returned stack undoes it."""
        self.instruments.blocks.store.on_backward = self.notice_lonely
        self.instruments.loss.on_pass = self.notice_lonely
        with self.hand.attach() as stack:
            # First of all hooks, so that what other instruments do after the step does not count as the step's time.
            for each in self.instruments.hooked:
                stack.enter_context(each.attach())
            if self.optimizers is not None:
                stack.enter_context(self.optimizers.attach(self.quiet.steps))
                stack.callback(self.quiet.end)
            self.plan()
            return stack.pop_all()

    def before(self, step: OptimizerStep) -> None:
        """Read gradients as the optimizer will use them, and weights when they are due."""
        self.lonely.over = self.instruments.loss.roots.used = True
        self.instruments.loss.scale = step.loss_scale
        self.awaited.step(self.instruments.loss.root[0], within=True)
        if self.hand.on:
            self.hand.on = False
            self._used.take_back(self)
        if not (self.partners.is_sole(step.optimizer) or self._players.admit(step, self.open, self._finish)):
            return
        self.held.begin()
        if not self.recorded:
            return
        if step.closure:
            self.instruments.loss.passes.enter()
        else:
            self.read_gradients(step, self.due)
        if self._looks_at(step):
            for look in self._look_before:
                look(step)
        self._step_began = time.perf_counter()

    def after(self, step: OptimizerStep) -> None:
        """Read the updates, pack everything, and hand the step over when it is complete."""
        self.awaited.within = False
        if (several := self._players.several(step)) and self._players.pass_by(step):
            return
        rates = _learning_rates(step.optimizer) if self.recorded else []
        if self.recorded:
            self._read_after(step, rates, several=several)
            if several:
                self._players.use(step)
        self._collect({"learning_rate": max(rates)} if rates else {})
        if self.open is not None:
            self.open.scaled |= step.scaled
            if not self.alone:
                self.open.layouts.append(step.owned.layout)
        if self._players.step(step, self.open, several=several):
            self._finish()
            if not (self.recorded or self.held.waits) and self.partners.is_sole(step.optimizer):
                self.quiet.begin(step.optimizer)

    def _read_after(self, step: OptimizerStep, rates: list[float], *, several: bool) -> None:
        """Read what only shows once an optimizer has stepped."""
        if step.closure:  # it holds the backward pass: gradients are there now, and the step cannot be timed
            self.read_gradients(step, self.due)
        else:
            self._stepped_for += time.perf_counter() - self._step_began
        if self._used.waits:
            self._end_gradients(step)
        if (self.due or several) and self._looks_at(step):
            for look in self._look_after:
                look(step)
        self._compare(step, rates)

    def _looks_at(self, step: OptimizerStep) -> bool:
        """Whether instruments around this step look at it: one is due, or the optimizer may be new to them."""
        return not self.partners.is_sole(step.optimizer) or not self._looks.isdisjoint(self.due)

    def skip(self, step: OptimizerStep) -> None:
        """Forget the overflowed gradients of a step that a gradient scaler skipped; the loss counts."""
        self.awaited.within = False
        self.instruments.skip(step)

    def step_by_hand(self, model: nn.Module) -> None:
        """End a step that the user marks; an update that was found in it was no step of its own."""
        first = self.hand.first
        if self.hand.mark(counted=bool(self.partners)):
            if again := first and self.held.drop():
                self.steps = self.quiet.lapped = self.steps - 1
                self.clock.last = None
            self._step_by_hand(model, looks=not again)

    def _step_by_hand(self, model: nn.Module, *, looks: bool = True) -> None:
        """End a step that no optimizer hook reports; the updates are those since the last one."""
        self.lonely.over = True
        self.awaited.step(self.instruments.loss.root[0])
        self.hand.end(model)
        self.held.begin()
        step = _by_hand(self, model)
        if self.recorded and looks:
            for look in self._hand_after:
                look(step)
            self.held.step_by_hand(step)
            self._compare(step, [])
        self._collect({})
        if self.open is not None and not self.alone:
            self.open.layouts.append(step.owned.layout)
        self._finish()
        for look in self._hand_before:
            look(step)

    def finish(self, *, last: bool = False) -> None:
        """Hand over a step that is still open, or what was seen since the last one that cannot wait for the next."""
        self.hand.look()
        if self.open is None and self.recorded and self.instruments.news:
            self._collect({})
        if self.open is not None:
            self._finish()
        self.held.ask(last=last)
        if last and self.pace.make_up():
            self._hand_over(self.quiet.last_step(self._transfer))

    def notice_lonely(self, roots: Sequence[Root] | None = None) -> None:
        """Count a backward pass once, as it begins; those that lead to no step make a record for the rules."""
        if self.due and self.instruments.loss.passes.begun >= MOST_READ:
            self.due = self.instruments.give_up()
        if roots is not None and self.hand.on:
            self.hand.begin()
        # What reaches a block while a pass is under way belongs to that pass.
        if not self.instruments.loss.passes.under:
            self.awaited.passes += roots is not None
            if self.awaited.passes > EXPECTED or not (self.lonely.over or self.open is not None):
                self._tell_lonely(roots)

    def _collect(self, scalars: dict[str, float]) -> None:
        """Put what the instruments hold into the open bundle."""
        now, first = time.perf_counter(), self.open is None
        if self.open is None:
            self.open = Bundle(self.steps + 1, time.time())
        bundle = self.open
        bundle.wall_time, self._collected = time.time(), now
        if not self.recorded:
            # The step after the first is planned late, so that its forward pass may have been watched in vain.
            for called in self.instruments.hooked if first else ():
                called.forget()
            return
        for _, read in self._numbers:
            read(scalars.update)
        noted, self.noted = self.noted, []
        drained = noted + self._asked.drain()
        self.instruments.clipping.note_step()
        if self.instruments.clipping.found:
            self._drain_clipping(drained)
        while self.told:
            bundle.told.append(self.told.popleft())
        scalars.update(self.instruments.loss.scalars())
        self._transfer(drained, bundle)
        if "learning_rate" in scalars:
            scalars["learning_rate"] = max(scalars["learning_rate"], bundle.scalars.get("learning_rate", -math.inf))
        bundle.scalars = {**bundle.scalars, **scalars}

    def _finish(self) -> None:
        """Hand over the open bundle and plan the next step."""
        bundle, self.open = self.open, None
        self.partners.begin()
        self._players.finish()
        self.steps += 1
        planned = self.pace.end()
        if bundle is not None and self.recorded:
            times = {**self.quiet.lap(self._collected, sampled=bool(self.due)), **planned}
            if "blocks" in self.due:
                self.instruments.blocks.calls.notice_silence()
            bundle.scalars = scalars = {**bundle.scalars, **times}
            if self._stepped_for > 0:
                scalars["runtime.optimizer_time"] = self._stepped_for
            if self.optimizers is not None and self.optimizers.skipped:
                scalars["runtime.skipped"] = float(self.optimizers.skipped)
            bundle.kind = None if self.quiet.fixed else self.pace.kind(bool(self.due))
            drained: Drained = []
            for name, complete in self._complete:
                if name in self.due:
                    complete(drained.extend)
            if drained:
                self._transfer(drained, bundle)
            self.held.put(bundle, wait=self.hand.on and self.hand.first)
        self._stepped_for = 0.0
        self.plan()

    def plan(self) -> None:
        """Decide what the next step reads."""
        step, spacing = self.steps + 1, self.quiet.spacing(self.steps + 1)
        # Other ranks cannot be asked in time, and a reading of one rank alone is none of the whole.
        stretch = 1 if step <= self.schedule.settled else self.clock.stretch
        self.recorded = self.pace.begin(
            step, self.schedule, spacing=spacing, stretch=stretch, paused=self.paused, alone=self.alone
        )
        self.instruments.clipping.recorded = self.recorded
        was, self.due = self.due, frozenset()
        if self.recorded:
            passed = self.pace.passed(self.schedule, self.clock.spacing)
            self.due = self.schedule.due(step, **self.pace.wants, stretch=stretch, spacing=passed)
        self._asked.plan(self.due, was)
        if was or self.due or not self.steps:  # else everything is off already
            self.instruments.arm(self.due)


def _pack(drained: Drained, bundle: Bundle) -> None:
    if drained:
        bundle.packed.extend(pack(drained))


def _notice_pass(loop: TrainingLoop, hand_over: Callable[[Bundle], None], roots: Sequence[Root] | None) -> None:
    """Hand over what is to be said of backward passes without a step as another one begins."""
    # Of what steps beside the first optimizer is known only once one steps again: its step may be open still.
    awaited, bundle = loop.awaited, Bundle(loop.steps + 1 + (loop.open is not None), time.time())
    if loop.paused:
        awaited.start_over()
    elif roots is not None:
        _pack(awaited.begin([root for root, _ in roots], loop.instruments.loss.root[0]), bundle)
    if not (loop.lonely.over or awaited.lost):
        _pack(loop.lonely.begin(), bundle)
    if bundle.packed and not loop.paused:
        while loop.told:
            bundle.told.append(loop.told.popleft())
        if loop.open is not None:
            loop.finish()
        loop.held.release()
        if loop.pace.make_up():  # the last step has no record yet
            hand_over(loop.quiet.last_step(_pack))
        loop.steps += 1
        hand_over(bundle)


def _by_hand(loop: TrainingLoop, model: nn.Module) -> OptimizerStep:
    known, hand = loop.owned_by_hand, loop.hand
    ids = [id(p) for p in hand.trained()]
    if known is None or len(known.sites) != hand.size or [id(p) for p in known.parameters] != ids:
        loop.owned_by_hand = known = owned_by_hand(model)
    return OptimizerStep(loop, known, closure=False, scale=None)


def _read_pass(loop: TrainingLoop, looks: Looks, model: nn.Module, again: bool) -> None:
    """Read gradients at the end of a backward pass, where no optimizer has stepped yet."""
    if loop.recorded:
        step = _by_hand(loop, model)
        loop.read_gradients(step, loop.due, again=again)
        # Where gradients are returned by autograd.grad, none tells which parameters are connected.
        for look in looks if any(p.grad is not None for p in step.owned.parameters) else ():
            look(step)


def _learning_rates(optimizer: object) -> list[float]:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    return [
        float(group["lr"])
        for group in groups
        if "lr" in group and (not isinstance(group["lr"], torch.Tensor) or group["lr"].device.type == "cpu")
    ]


def _compare(fingerprints: Fingerprints, loop: TrainingLoop, step: OptimizerStep, rates: list[float]) -> None:
    """Have the next steps read closely where this one is unlike those before it."""
    gradients, loss = loop.instruments.gradients, loop.instruments.loss
    at = loop.steps + 1
    if fingerprints.is_new(step, at, arrived=gradients.arrived, total=gradients.total, rates=rates, root=loss.root):
        loop.pace.suspect(at, loop.schedule, loop.clock.stretch, spacing=loop.clock.spacing)
