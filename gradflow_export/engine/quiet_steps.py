"""Steps between two records: the optimizer's hooks count them, and every other hook of ours does nothing."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer

from gradflow_export.checks.missing_step import LONELY_BACKWARD_PASSES
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.transfer import Bundle
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import listen
from gradflow_export.hooks.optimizer_hooks import PassedSteps
from gradflow_export.hooks.optimizer_steps import Owned
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.gradients.glance import Glance
from gradflow_export.records.lost import UNSEEN
from gradflow_export.records.step_record import Note

if TYPE_CHECKING:
    from gradflow_export.engine.training_loop import TrainingLoop

PAUSED = 1 << 60
"""Steps that are passed by at most while recording is paused."""

GLANCES = 6
"""Of the steps between two records at most so many are glanced at, and those that follow a stray one: together they
cost less than a record. What is seldom used is slow: a glance of 10 us in a row takes 120 us between steps of 8 ms."""


class QuietSteps:
    """Passes steps by until the next one that makes a record, and times what lies between two records.

    Args:
        loop: Whose steps.
        guard: Its hooks rest meanwhile.

    Attributes:
        steps: Counts them.
        lapped: The last step whose time was taken.
        fixed: Whether that step was recorded whatever the budget leaves.
    """

    def __init__(self, loop: TrainingLoop, guard: Guard) -> None:
        self.steps = PassedSteps()
        self.lapped, self.fixed = 0, True
        self._loop, self._guard = loop, guard
        self._resting = contextlib.ExitStack()
        self._glances: weakref.WeakKeyDictionary[Optimizer, Glance] = weakref.WeakKeyDictionary()
        self._part = guard.part("glances")
        self._read_last = guard.part("the last weights", rests=False)(self._ask_last)
        self._wake = guard.part("passes between two records", rests=False)(self.end)
        self._most, self._at, self._unused, self._thread = LONELY_BACKWARD_PASSES, 0, 0, 0
        self._left: Drained = []  # by optimizers that are gone
        self._left_at = 0

    def spacing(self, step: int) -> int:
        """Return of how many steps one is recorded: the first ones depend on no clock."""
        return 1 if step <= self._loop.schedule.settled else self._loop.pace.spacing(self._loop.clock.spacing)

    def begin(self, optimizer: object) -> None:
        """Pass by the steps before the next record; their optimizer is the only one there is."""
        loop = self._loop
        step = loop.steps + 1
        count = PAUSED if loop.paused else loop.schedule.next_recorded(step, self.spacing(step)) - step
        if count > 0 and loop.optimizers is not None and isinstance(optimizer, Optimizer):
            self._at = self._unused = 0
            self._thread = threading.get_ident()
            if not loop.paused:
                self._resting.enter_context(listen(self))
            self._resting.enter_context(self._guard.suspended())
            for end in loop.instruments.rest():
                self._resting.callback(end)
            first = count if loop.paused or loop.clock.spacing == 1 else count % self._between
            self.steps.begin(
                count, optimizer, loop.optimizers.strangers, self._passed, glance=self._glance, first=first
            )

    def see(self, _tensors: Any, _gradients: Any) -> None:
        """Count a backward pass of the process; where many come and no step does, look at all again.

        Nothing else would notice that training has stopped. Where it had not, twice as many are waited for next time.
        """
        passed = self.steps.passed
        self._unused = self._unused + 1 if passed == self._at else 1
        self._at = passed
        if self._unused > self._most and self._thread == threading.get_ident() and not self.steps.inside:
            self._most *= 2
            self._wake()

    def over(self, seconds: float | None) -> None:
        """Take no notice of the end of a backward pass."""

    @property
    def _between(self) -> int:
        """Steps from one glance to the next."""
        return -(-self._loop.clock.spacing // GLANCES)

    def _glance(self, optimizer: Optimizer) -> int:
        """Look at a step that is passed by; return when to look again, 0 where the next are to be recorded instead."""
        later = PAUSED
        if "glances" in self._guard.failures:
            return later
        loop, began = self._loop, time.perf_counter()
        at = loop.steps + self.steps.passed + 1
        try:
            if optimizer not in self._glances:
                self._glances[optimizer] = Glance(optimizer)
            glance = self._glances[optimizer]
            model = loop.hand.model()
            with torch_private.no_functions():
                seen = glance.sees(optimizer, at, None if model is None else model.training)
            looks = seen and loop.pace.suspect(at, loop.schedule, loop.clock.stretch, spacing=loop.clock.spacing)
            later = 0 if looks else 1 if glance.doubts else self._between
        except Exception as error:
            self._part.failed(error)
        self._part.took(time.perf_counter() - began)
        return later

    def pause(self, *, on: bool) -> None:
        """Record nothing from the next step on, or with ``on=False`` go on."""
        self.end()
        self._loop.paused = on
        self._loop.awaited.start_over()
        if self._loop.open is None:  # no optimizer has stepped yet: what was planned can change
            self._loop.plan()

    def end(self) -> None:
        """Look at steps again from the next one on."""
        self.steps.end()

    def _passed(self, count: int) -> None:
        loop, began = self._loop, time.perf_counter()
        self._resting.close()
        loop.pace.pass_by(count, loop.steps + 1, loop.schedule, paused=loop.paused)
        for called in loop.instruments.hooked:
            called.forget()
        loop.steps += count
        loop.plan()
        self._part.took(time.perf_counter() - began)  # no guard is around this

    def leave(self, owned: Owned) -> None:
        """Keep what weights an optimizer leaves that is gone: nobody may hold its parameters when the run is closed.

        Where optimizers come and go this is done no more often than records are made.

        Args:
            owned: Its parameters.
        """
        loop = self._loop
        at = loop.steps + self.steps.passed
        apart = loop.schedule.every * loop.clock.spacing
        if not (self.steps.passed or loop.pace.left_out) or self._left_at < at < self._left_at + apart:
            return
        self._left = self._left if self._left_at == at else []
        self._left_at = at
        self._read_last(self._left, [owned])

    def last_step(self, transfer: Callable[[Drained, Bundle], None]) -> Bundle:
        """Return what is known of the last step, which was passed by: not its loss, but the weights that it left."""
        loop = self._loop
        bundle = Bundle(loop.steps, time.time())
        drained = self._left if self._left_at == loop.steps else []
        optimizers = loop.optimizers
        self._read_last(drained, () if optimizers is None else optimizers.owned)
        if not drained:
            text = f"the end was not seen: nothing was read after step {max(loop.pace.last, 0)}"
            bundle.told.append(Note(UNSEEN, text, loop.steps))
        transfer(drained, bundle)
        if optimizers is not None:
            bundle.layouts.extend(optimizers.layouts())
        return bundle

    def _ask_last(self, into: Drained, owned: Sequence[Owned]) -> None:
        for each in self._loop.instruments.armed:
            into.extend(each.last(owned))

    def lap(self, now: float, *, sampled: bool) -> dict[str, float]:
        """Return the times of a recorded step, and of those passed by before it.

        Args:
            now: Time at its end, in seconds.
            sampled: Whether an instrument with an interval was read.
        """
        loop = self._loop
        steps, self.lapped = loop.steps - self.lapped, loop.steps
        fixed = loop.steps <= loop.schedule.settled
        spent = self._guard.spent
        pace = loop.pace
        shows = loop.steps <= loop.schedule.shown_until and loop.schedule.shows(loop.steps)
        self.fixed = fixed or shows
        return loop.clock.lap(
            now, spent, sampled=sampled, steps=steps, worker=pace.spent, fixed=fixed, shows=shows, credit=pace.on_credit
        )
