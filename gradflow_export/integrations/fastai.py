"""fastai."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from torch.optim.optimizer import Optimizer

from gradflow_export.integrations.base import Session, needed

with needed("fastai"):
    from fastai.callback.core import Callback, CancelFitException


@final
class GradFlowCallback(Callback):  # type: ignore[misc,unused-ignore]  # fastai is untyped
    """Watches the model of a learner while it is fitted: ``Learner(..., cbs=GradFlowCallback())``.

    Steps are steps of the optimizer, fastai's own or one of torch's; a further ``fit`` goes on counting. Gradients are
    those that the optimizer used, unscaled and clipped. Files lie in ``<learn.path>/gradflow``. A search for a learning
    rate is not watched. The health is ``callback.session.health``: fastai's table has no place for it.

    Args:
        logdir: Directory for files in place of that one.
        stop_on: Types of issues at which fitting stops, such as ``("NUMERICAL", "EXPLODING")``.
        start_step: Steps done before, when a learner is loaded.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        *,
        stop_on: Sequence[str] = (),
        start_step: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.session = Session(stop_on, options)
        self._logdir, self._done, self._by_hand = logdir, start_step, False

    def before_fit(self) -> None:
        """Begin."""
        if hasattr(self.learn, "lr_finder"):
            return
        folder = Path(self.learn.path) / "gradflow" if self._logdir is None else self._logdir
        run = getattr(sys.modules.get("wandb"), "run", None)
        self.session.start(self.learn.model, logdir=folder, step=self._done, run=run)
        self._by_hand = not isinstance(getattr(self.learn.opt, "opt", None), Optimizer)

    def after_step(self) -> None:
        """End a step of an optimizer that is none of torch; stop where that was asked for."""
        if self.session.exporter is not None and not hasattr(self.learn, "lr_finder"):
            if self._by_hand:
                self.session.exporter.step()
            self._done += 1
            if self.session.wants_stop():
                raise CancelFitException

    def after_fit(self) -> None:
        """Close."""
        self.session.close()
