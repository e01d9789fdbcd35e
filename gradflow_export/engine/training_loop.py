"""What happens on the training thread: instruments are read when an optimizer steps, and the step is handed over."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.checks.missing_step import LonelyPasses
from gradflow_export.engine.gradient_use import UsedGradients
from gradflow_export.engine.held_records import HeldStep
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.optimizer_groups import Partners
from gradflow_export.engine.optimizer_shares import Players
from gradflow_export.engine.pace import Pace
from gradflow_export.engine.quiet_steps import QuietSteps
from gradflow_export.engine.step_timer import StepClock
from gradflow_export.engine.transfer import Bundle, pack
from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.module_hooks import lay_aside
from gradflow_export.hooks.optimizer_steps import OptimizerStep, OptimizerSteps, owned_by_hand
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Instrument
from gradflow_export.instruments.blocks import BlockInstrument
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument
from gradflow_export.instruments.loss import LossInstrument
from gradflow_export.instruments.moments import MomentInstrument
from gradflow_export.instruments.origin import OriginInstrument
from gradflow_export.instruments.runtime import RuntimeInstrument
from gradflow_export.instruments.updates import UpdateInstrument
from gradflow_export.records.step_record import Issue, Note
from gradflow_export.schedule import SETTLING_STEPS, Schedule

_log = logging.getLogger("gradflow_export")

TOLD = 1000
"""Issues of others that may wait for a record; the oldest go first."""


@dataclass(frozen=True)
class Instruments:
    """The instruments of one exporter."""

    blocks: BlockInstrument
    gradients: GradientInstrument
    updates: UpdateInstrument
    loss: LossInstrument
    runtime: RuntimeInstrument
    origin: OriginInstrument
    moments: MomentInstrument
    clipping: ClippingInstrument
    sampled: tuple[Instrument, ...] = ()
    stepped: tuple[Instrument, ...] = ()
    takes: frozenset[str] = frozenset()

    @property
    def armed(self) -> tuple[Instrument, ...]:
        """Those that look on sampled steps only, when they are armed."""
        return (*self.sampled, *self.stepped)

    def rest(self) -> Iterator[Callable[[], None]]:
        """See no calls of the model, of the criterion and of ``backward`` for a while; yield what ends that."""
        code = self.blocks.calls.code
        if code is None or not code.found:  # compiled code was made with the hooks that there were
            others = [placed for tap in self.armed for placed in tap.placed]
            yield lay_aside((*self.origin.placed, *self.loss.placed, *others))
        yield self.loss.rest()

    def hand(self, name: str, value: object) -> None:
        """Hand something over to the instruments that take it."""
        for tap in self.armed:
            if tap.takes == name:
                tap.take(value)

    def observe(self, tensors: dict[str, Any], part: Callable[[str], Part]) -> None:
        """Take what the user hands over by name; what one of them cannot use keeps the others from nothing."""
        for name in self.takes & tensors.keys():
            part(name)(self.hand)(name, tensors[name])
        rest = {name: value for name, value in tensors.items() if name not in self.takes}
        part("observe")(self.loss.observe)(rest)

    @property
    def news(self) -> bool:
        """Whether an instrument holds what no further step may come to report."""
        return any(tap.news for tap in self.armed)

    @property
    def hooked(
        self,
    ) -> tuple[BlockInstrument | LossInstrument | OriginInstrument | ClippingInstrument | Instrument, ...]:
        """Those that see calls."""
        return (self.blocks, *self.armed, self.loss, self.origin, self.clipping)

    def skip(self, step: OptimizerStep) -> None:
        """Forget gradients that are used for nothing; the loss counts."""
        self.gradients.forget(step.optimizer)
        self.blocks.forget()
        self.clipping.forget()
        self.loss.passes.note_step()
        for tap in self.stepped:
            tap.skip(step)

    def arm(self, due: frozenset[str]) -> None:
        """Have those look that are due, and no others."""
        self.loss.want_logits = "logits" in due
        self.clipping.armed = "clipping" in due
        self.blocks.sample_rows = "ranks" in due
        self.blocks.calls.arm(on=bool(due & {"blocks", "ranks"}))
        for tap in self.armed:
            tap.arm(on=tap.instrument in due)


class _Drains(Protocol):
    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""


class TrainingLoop:
    """Follows the user's loop through optimizer hooks and hands one bundle per step to the worker.

    A step ends when every optimizer that took part in the last one has stepped once, or when one of them steps again or
    steps with a parameter that another one has stepped with: so two optimizers that step together make one record, one
    that steps five times as often makes five, and two that own the same parameters make one each.
    """

    def __init__(
        self,
        taps: Instruments,
        schedule: Schedule,
        guard: Guard,
        hand_over: Callable[[Bundle], None],
        lonely: LonelyPasses,
    ) -> None:
        self.taps, self.lonely = taps, lonely
        self.noted: Drained = []  # readings of others, for the next record; of one metric the last counts
        self.told: deque[Issue | Note] = deque(maxlen=TOLD)  # issues and notes, for the record of the step under way
        self.pace = Pace()
        self.quiet = QuietSteps(self, guard)
        self.steps, self.paused = 0, False
        self.alone = True
        self.optimizers: OptimizerSteps | None = None
        self.schedule, self._guard, self._hand_over = schedule, guard, hand_over
        self.open: Bundle | None = None
        self.partners = Partners()
        self._players = Players(self.partners, taps.loss, taps.clipping, taps.hooked, guard.part("loss"))
        self._due: frozenset[str] = frozenset()
        self._recorded = True
        self._collected = 0.0
        self.clock = StepClock()
        self._told = False
        self._step_began = self._stepped_for = 0.0
        # Guarded once: wrapping anew at every step would cost the training thread more than some of the readings.
        part = guard.part
        named: tuple[tuple[str, _Drains], ...] = (
            ("gradients", taps.gradients),
            ("updates", taps.updates),
            ("moments", taps.moments),
            ("loss", taps.loss),
            ("blocks", taps.blocks),
            ("origin", taps.origin),
            *(("" if tap.every_step else tap.instrument, tap) for tap in taps.armed),
        )
        self._drains = [(name, part(name or "passes")(partial(_drain, tap))) for name, tap in named]
        self._due_drains = [drain for _, drain in self._drains]
        self._drain_clipping = part("clipping")(partial(_drain, taps.clipping))
        self._used = UsedGradients(taps.gradients, taps.origin, taps.clipping, part("origin"), part("clipping"))
        self._read_gradients = part("gradients")(self._used.read)
        self._end_gradients = part("gradients")(self._used.end)
        self._updates_before = part("updates")(taps.updates.before)
        self._read_moments = part("moments")(taps.moments.after)
        self._updates_after = part("updates")(taps.updates.after)
        self._looks = frozenset(tap.instrument for tap in taps.stepped)
        self._look_before = [part(tap.instrument)(tap.before) for tap in taps.stepped]
        self._look_after = [part(tap.instrument)(tap.after) for tap in taps.stepped]
        self._read_memory = part("memory")(lambda scalars: scalars.update(taps.runtime.read()))
        self._transfer = part("transfer")(_pack)
        self._settle_updates = part("updates")(partial(taps.updates.settle, self._transfer))
        self._held = HeldStep(taps.stepped, guard, self._transfer, hand_over)
        self._tell_lonely = part("wiring")(lambda bundle: _pack(lonely.begin(), bundle))

    def attach(self) -> contextlib.ExitStack:
        """Attach all instruments and plan the first step; closing the returned stack undoes it."""
        self.taps.loss.on_pass = self.taps.blocks.store.on_backward = self.notice_lonely
        with contextlib.ExitStack() as stack:
            # First of all hooks, so that what other instruments do after the step does not count as the step's time.
            for tap in self.taps.hooked:
                stack.enter_context(tap.attach())
            if self.optimizers is not None:
                stack.enter_context(self.optimizers.attach(self.quiet.steps))
                stack.callback(self.quiet.end)
            self.plan()
            return stack.pop_all()

    def before(self, step: OptimizerStep) -> None:
        """Read gradients as the optimizer will use them, and weights when they are due."""
        self.lonely.over = True
        if not (self.partners.is_sole(step.optimizer) or self._players.admit(step, self.open, self._finish)):
            return
        self._held.begin()
        if not self._recorded:
            return
        if step.closure:
            self.taps.loss.passes.enter()
        else:
            self._read_gradients(step, self._due)
        if "updates" in self._due:
            self._updates_before(step)
        if self._looks_at(step):
            for look in self._look_before:
                look(step)
        self._step_began = time.perf_counter()

    def after(self, step: OptimizerStep) -> None:
        """Read the updates, pack everything, and hand the step over when it is complete."""
        several = self._players.several(step)
        if several and self._players.pass_by(step):
            return
        if self._recorded:
            self._read_after(step)
            if several:
                self._players.use(step)
        self._collect(_learning_rate(step.optimizer))
        if self.open is not None:
            self.open.scaled |= step.scaled
            if not self.alone:
                self.open.layouts.append(step.owned.layout)
        if self._players.step(step, self.open, several=several):
            self._finish()
            if not (self._recorded or self._held.waits) and self.partners.is_sole(step.optimizer):
                self.quiet.begin(step.optimizer)

    def _read_after(self, step: OptimizerStep) -> None:
        """Read what only shows once an optimizer has stepped."""
        if step.closure:  # it holds the backward pass: gradients are there now, and the step cannot be timed
            self._read_gradients(step, self._due)
        else:
            self._stepped_for += time.perf_counter() - self._step_began
        if self._used.waits:
            self._end_gradients(step)
        if "updates" in self._due:
            self._updates_after(step)
        if "moments" in self._due:
            self._read_moments(step)
        if self._looks_at(step):
            for look in self._look_after:
                look(step)

    def _looks_at(self, step: OptimizerStep) -> bool:
        """Whether instruments around this step look at it: one is due, or the optimizer may be new to them."""
        return not self.partners.is_sole(step.optimizer) or not self._looks.isdisjoint(self._due)

    def skip(self, step: OptimizerStep) -> None:
        """Forget the overflowed gradients of a step that a gradient scaler skipped; the loss counts."""
        self.taps.skip(step)

    def step_by_hand(self, model: nn.Module) -> None:
        """End a step that no optimizer hook reports; the updates are those since the last call."""
        if self.partners:
            if not self._told:
                self._told = True
                _log.warning("gradflow: an optimizer's steps are counted by themselves; exporter.step() is ignored.")
            return
        self._held.begin()
        step = OptimizerStep(self, owned_by_hand(model), closure=False, scale=None)
        if self._recorded:
            self._read_gradients(step, self._due)
            self._updates_after(step)
            self._held.step_by_hand(step)
        self._collect({})
        if self.open is not None and not self.alone:
            self.open.layouts.append(step.owned.layout)
        self._finish()
        if "updates" in self._due:
            self._updates_before(step)

    def finish(self, *, last: bool = False) -> None:
        """Hand over a step that is still open, or what was seen since the last one that cannot wait for the next."""
        if self.open is None and self._recorded and self.taps.news:
            self._collect({})
        if self.open is not None:
            self._finish()
        self._held.ask(last=last)
        if last and self.alone and self.pace.make_up():
            self._hand_over(self.quiet.last_step(self._transfer))

    def notice_lonely(self) -> None:
        """Count a backward pass once, as it begins; those that lead to no step make a record for the rules."""
        # What reaches a block while a pass is under way belongs to that pass.
        if self.clock.last is None and self.open is None and not (self.lonely.over or self.taps.loss.passes.under):
            bundle = Bundle(self.steps + 1, time.time())
            self._tell_lonely(bundle)
            if bundle.packed and not self.paused:
                self.steps += 1
                self._hand_over(bundle)

    def _collect(self, scalars: dict[str, float]) -> None:
        """Put what the instruments hold into the open bundle."""
        now = time.perf_counter()
        if self.open is None:
            self.open = Bundle(self.steps + 1, time.time())
        bundle = self.open
        bundle.wall_time = time.time()
        self._collected = now
        if not self._recorded:
            # The step after the first is planned late, so that its forward pass may have been watched in vain.
            for called in self.taps.hooked:
                called.forget()
            return
        self._read_memory(scalars)
        drained, self.noted = self.noted, []
        for drain in self._due_drains:
            drain(drained)
        self.taps.clipping.stepped = True
        if self.taps.clipping.found:
            self._drain_clipping(drained)
        while self.told:
            bundle.told.append(self.told.popleft())
        scalars.update(self.taps.loss.scalars())
        self._transfer(drained, bundle)
        if "learning_rate" in scalars:
            scalars["learning_rate"] = max(scalars["learning_rate"], bundle.scalars.get("learning_rate", 0.0))
        bundle.scalars = {**bundle.scalars, **scalars}

    def _finish(self) -> None:
        """Hand over the open bundle and plan the next step."""
        bundle, self.open = self.open, None
        self.partners.begin()
        self._players.finish()
        self.steps += 1
        planned = self.pace.end()
        if bundle is not None and self._recorded:
            times = {**self.quiet.lap(self._collected, sampled=bool(self._due)), **planned}
            if "blocks" in self._due:
                self.taps.blocks.calls.notice_silence()
            scalars = {**bundle.scalars, **times}
            if self._stepped_for > 0:
                scalars["runtime.optimizer_time"] = self._stepped_for
            if self.optimizers is not None and self.optimizers.skipped:
                scalars["runtime.skipped"] = float(self.optimizers.skipped)
            bundle.scalars = scalars
            bundle.kind = int(bool(self._due)) if self.steps > SETTLING_STEPS else None
            if "updates" in self._due:
                self._settle_updates(bundle)
            self._held.put(bundle)
        self._stepped_for = 0.0
        self.plan()

    def plan(self) -> None:
        """Decide what the next step reads."""
        step = self.steps + 1
        # Other ranks cannot be asked in time, and a reading of one rank alone is none of the whole.
        spacing = self.quiet.spacing(step)
        self._recorded = self.pace.begin(step, self.schedule, spacing=spacing, paused=self.paused, alone=self.alone)
        self.taps.clipping.recorded = self._recorded
        was, self._due = self._due, frozenset()
        if self._recorded:
            stretch = 1 if step <= SETTLING_STEPS else self.clock.stretch
            self._due = self.schedule.due(step, asked=self.pace.dense, stretch=stretch, spacing=spacing)
        if not (was or self._due) and self.steps:
            return  # everything is off already
        # What is watched is drained once more after it was due: a gradient may come late.
        everywhere = self._due | was
        everywhere |= {"blocks"} if "ranks" in everywhere else set()
        self._due_drains = [
            drain for name, drain in self._drains if name in everywhere or name not in self.schedule.intervals
        ]
        self.taps.arm(self._due)


def _pack(drained: Drained, bundle: Bundle) -> None:
    if drained:
        with torch.no_grad():
            bundle.packed.extend(pack(drained))


def _drain(tap: _Drains, into: Drained) -> None:
    into.extend(tap.drain())


def _learning_rate(optimizer: object) -> dict[str, float]:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    rates = [group["lr"] for group in groups if "lr" in group]
    known = [float(rate) for rate in rates if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"]
    return {"learning_rate": max(known)} if known else {}
