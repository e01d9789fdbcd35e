"""What every tap is, and the data it gives out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, Protocol

from gradflow_export.hooks.readings import Drained

if TYPE_CHECKING:
    from gradflow_export.hooks.optimizer_steps import OptimizerStep


class Tap(Protocol):
    """One instrument.

    Hooks return ``None`` and own only their own handles. A tap never waits for the device: no ``.item()``, ``.cpu()``
    or ``.tolist()``. A tap with hooks of its own also has ``attach() -> ExitStack``; after that stack is closed the
    model is exactly as it was. The others are told when to read.
    """

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""


class SampledTap(Tap, Protocol):
    """A tap that sees calls on sampled steps only, when it is armed, and costs nothing on the others."""

    instrument: ClassVar[str]
    """The name of its interval in ``gradflow_export.schedule.INTERVALS``."""

    @property
    def modules(self) -> int:
        """How many modules it reads; 0 when the model has none, and the tap is then left out."""

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack disarms the tap and gives up everything it holds."""

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""


class SteppedTap(SampledTap, Protocol):
    """A sampled tap that looks at parameters around the steps of an optimizer; the loop tells it of them."""

    def before(self, step: OptimizerStep) -> None:
        """Look before an optimizer steps."""

    def after(self, step: OptimizerStep) -> None:
        """Look after it has stepped."""

    def skip(self, step: OptimizerStep) -> None:
        """Forget what was looked at before a step that a gradient scaler skipped."""
