"""Gradients as an optimizer uses them: read before it steps or while it does, and handed to those who judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.instruments.base import Instrument, overrides
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument


class UsedGradients:
    """Reads gradients around a step of an optimizer.

    Args:
        gradients: Reads them.
        clipping: Compares with the gradients of the backward pass.
        others: Of these, those that look at gradients as they are used.
        part: Returns what guards a part by name.
    """

    def __init__(
        self,
        gradients: GradientInstrument,
        clipping: ClippingInstrument,
        others: Sequence[Instrument],
        part: Callable[[str], Part],
    ) -> None:
        self._gradients, self._clipping = gradients, clipping
        self._compare = part("clipping")(clipping.compare)
        looking = [each for each in others if overrides(each, "used")]
        self._looks = [(each.wants, part(each.instrument)(each.used)) for each in looking]

    @property
    def waits(self) -> bool:
        """Whether :meth:`end` must be called when the optimizer has stepped."""
        return self._gradients.waits

    def read(self, step: OptimizerStep, due: AbstractSet[str], *, again: bool = False) -> None:
        """Take the gradients of one optimizer; those of a closure when it has stepped, all others before.

        Args:
            step: The optimizer.
            due: Instruments that are due.
            again: Whether they were read in this step before and are others by now.
        """
        if again:
            self.take_back(step.optimizer)
        later = not (step.closure or self._clipping.waits)
        self._gradients.read(step, statistics="statistics" in due, histograms="histograms" in due, later=later)
        if not self._gradients.waits:
            self._judge(step, stepped=False)
            self._clipping.stepping = not step.closure

    def take_back(self, optimizer: object) -> None:
        """Forget what was read and compared of an optimizer in this step."""
        self._gradients.forget(optimizer)
        self._clipping.take_back()

    def end(self, step: OptimizerStep) -> None:
        """Take what was left for after the step."""
        self._gradients.end(step)
        self._judge(step, stepped=True)

    def _judge(self, step: OptimizerStep, *, stepped: bool) -> None:
        total = self._gradients.total
        wanted = [look for wants, look in self._looks if wants(total)]
        if not wanted and not self._clipping.waits:
            return  # nearly every step: nobody asks for the norms themselves
        norms = self._gradients.take_norms()
        if norms is not None:
            for look in wanted:
                look(step, norms, total, stepped=stepped)
            self._compare(step, norms)
