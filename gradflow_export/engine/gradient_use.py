"""Gradients as an optimizer uses them: read before it steps or while it does, and handed to those who judge them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from gradflow_export.hooks.guards import Part
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.instruments.gradients.clipping import ClippingInstrument
from gradflow_export.instruments.gradients.parameters import GradientInstrument
from gradflow_export.instruments.origin import OriginInstrument


class UsedGradients:
    """Reads gradients around a step of an optimizer.

    Args:
        gradients: Reads them.
        origin: Finds where NaN began.
        clipping: Compares with the gradients of the backward pass.
        origin_part: Guards ``origin``.
        clipping_part: Guards ``clipping``.
    """

    def __init__(
        self,
        gradients: GradientInstrument,
        origin: OriginInstrument,
        clipping: ClippingInstrument,
        origin_part: Part,
        clipping_part: Part,
    ) -> None:
        self._gradients, self._origin, self._clipping = gradients, origin, clipping
        self._find_origin, self._compare = origin_part(origin.inspect), clipping_part(clipping.compare)

    @property
    def waits(self) -> bool:
        """Whether :meth:`end` must be called when the optimizer has stepped."""
        return self._gradients.waits

    def read(self, step: OptimizerStep, due: AbstractSet[str]) -> None:
        """Take the gradients of one optimizer; those of a closure when it has stepped, all others before.

        Args:
            step: The optimizer.
            due: Instruments that are due.
        """
        later = not (step.closure or self._clipping.waits)
        self._gradients.read(step, statistics="statistics" in due, histograms="histograms" in due, later=later)
        if not self._gradients.waits:
            self._judge(step, stepped=False)

    def end(self, step: OptimizerStep) -> None:
        """Take what was left for after the step."""
        self._gradients.end(step)
        self._judge(step, stepped=True)

    def _judge(self, step: OptimizerStep, *, stepped: bool) -> None:
        gradients = self._gradients
        if self._origin.is_healthy(gradients.total) and not self._clipping.waits:
            return  # nearly every step: nobody asks for the norms themselves
        norms = gradients.take_norms()
        if norms is not None:
            self._find_origin(step, norms, gradients.total, stepped=stepped)
            self._compare(step, norms)
