"""Keeps the record of a step back until the next forward pass has shown what came of its update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.transfer import Bundle
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Instrument, overrides


class HeldStep:
    """Hands steps over in order, one step late where an update is still to show.

    Args:
        instruments: Of these, those that wait for forward passes are asked.
        guard: Wraps what they do.
        transfer: Packs readings into a bundle.
        hand_over: Takes a finished step.
    """

    def __init__(
        self,
        instruments: Sequence[Instrument],
        guard: Guard,
        transfer: Callable[[Drained, Bundle], None],
        hand_over: Callable[[Bundle], None],
    ) -> None:
        self._instruments = [each for each in instruments if overrides(each, "settle")]
        self._settle = [guard.part(each.instrument)(each.settle) for each in self._instruments]
        self._by_hand = [guard.part(each.instrument)(each.after) for each in self._instruments]
        self._transfer, self._hand_over = transfer, hand_over
        self._held: Bundle | None = None
        self._trains: threading.Thread | None = None

    @property
    def waits(self) -> bool:
        """Whether a step is held."""
        return self._held is not None

    def begin(self) -> None:
        """Hand over the step that is held: an optimizer is about to step, in this thread."""
        if self._instruments:
            self._trains = threading.current_thread()
            self.release()

    def put(self, bundle: Bundle, *, wait: bool = False) -> None:
        """Hand over a step, now or once its update has shown.

        Args:
            bundle: The step.
            wait: Whether to hold it in any case, until the next.
        """
        self.release()
        if wait or any(each.waits for each in self._instruments):
            self._held = bundle
        else:
            self._hand_over(bundle)

    def drop(self) -> bool:
        """Forget the step that is held; return whether there was one."""
        held, self._held = self._held, None
        for each in self._instruments if held is not None else ():
            each.drain()
        return held is not None

    def release(self) -> None:
        """Hand over the step that is held, if there is one: no further forward pass belongs to it."""
        bundle, self._held = self._held, None
        if bundle is None:
            return
        drained: Drained = []
        for each, settle in zip(self._instruments, self._settle, strict=True):
            settle()
            drained.extend(each.drain())
        self._transfer(drained, bundle)
        self._hand_over(bundle)

    def ask(self, *, last: bool) -> None:
        """Hand over the step that is held, if nobody can be training meanwhile.

        A thread that asks while another one trains would read weights in the middle of a step; it learns of the step
        once the next one has begun.

        Args:
            last: No further step will begin.
        """
        if last or self._trains is threading.current_thread() or self._trains is None or not self._trains.is_alive():
            self.release()

    def step_by_hand(self, step: OptimizerStep) -> None:
        """Report a step that no optimizer made."""
        for after in self._by_hand:
            after(step)
