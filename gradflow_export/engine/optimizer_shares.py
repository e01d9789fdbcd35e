"""Gives each of several optimizers what is its own: backward passes, their losses, and calls of clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gradflow_export.engine.optimizer_groups import Joins, Partners
from gradflow_export.engine.transfer import Bundle
from gradflow_export.hooks.guards import Guard
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.loss import LossInstrument


class _Forgets(Protocol):
    def forget(self) -> None:
        """Forget what was collected."""


class Players:
    """Called around the steps of an optimizer that is not the only one.

    Args:
        partners: The optimizers.
        loss: Sees backward passes.
        clipping: Sees clipping.
        hooked: All that see calls.
        guard: Wraps what may fail.
    """

    def __init__(
        self,
        partners: Partners,
        loss: LossInstrument,
        clipping: ClippingInstrument,
        hooked: Sequence[_Forgets],
        guard: Guard,
    ) -> None:
        self._partners, self._loss, self._clipping, self._hooked = partners, loss, clipping, hooked
        self.use, self._leave_out = guard(self._use), guard(self._forget)

    def several(self, step: OptimizerStep) -> bool:
        """Whether it must be found out which backward pass is whose."""
        return self._loss.passes.scan or not self._partners.is_sole(step.optimizer)

    def admit(self, step: OptimizerStep, open_: Bundle | None, finish: Callable[[], None]) -> bool:
        """Make room for an optimizer that begins to step; False for another model's that shares parameters.

        Args:
            step: The optimizer.
            open_: The open record, if there is one; what is another model's is forgotten there.
            finish: Called where the optimizer begins a new record.
        """
        how = self._partners.admit(step)
        if open_ is not None and how is Joins.ANEW:
            finish()
        elif open_ is not None and how is Joins.INSTEAD:
            self._loss.finish()
            open_.players.clear()
        return how is not Joins.GUEST

    def pass_by(self, step: OptimizerStep) -> bool:
        """Forget what belongs to the step of another model's optimizer that shares parameters; False for one's own."""
        partner = self._partners.partner(step.optimizer)
        if partner is not None and not partner.guest:
            return False
        self._leave_out(step)
        return True

    def _forget(self, step: OptimizerStep) -> None:
        if self._loss.passes.pass_by(step.owned):
            for called in self._hooked:
                if called is not self._loss:
                    called.forget()

    def _use(self, step: OptimizerStep) -> None:
        """Have an optimizer that has stepped use the passes and the calls of clipping that are its own."""
        partner = self._partners.partner(step.optimizer)
        if partner is not None:
            self._loss.passes.scan = True
            self._loss.use(partner.number, self._partners.sites, step.owned)
            self._clipping.restrict(step.owned)

    def step(self, step: OptimizerStep, open_: Bundle | None, *, several: bool) -> bool:
        """Note a step in the record it belongs to; True when that is complete."""
        complete = self._partners.step(step.optimizer)
        if several:
            self._note(step, open_)
        return complete

    def _note(self, step: OptimizerStep, open_: Bundle | None) -> None:
        partner = self._partners.partner(step.optimizer)
        if partner is not None and open_ is not None:
            open_.players[partner.number] = step.owned.where, partner.steps
            open_.players_sites = self._partners.sites
        self._loss.passes.settle(several=self._partners.several)

    def finish(self) -> None:
        """Begin a new record."""
        self._loss.finish()
        self._clipping.finish()
