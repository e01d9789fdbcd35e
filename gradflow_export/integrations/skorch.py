"""skorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, final

from gradflow_export.integrations.base import HEALTH, Session, needed

with needed("skorch"):
    from skorch.callbacks import Callback


@final
class GradFlowCallback(Callback):  # type: ignore[misc,unused-ignore]  # skorch is untyped
    """Watches the module of a net while it is fitted: ``NeuralNet(..., callbacks=[GradFlowCallback()])``.

    Steps are the batches that ``net.history`` holds, so that ``partial_fit`` goes on counting, also with a history that
    was loaded. ``gradflow/health`` is in the history of each epoch and in the table that skorch prints.

    Args:
        logdir: Directory for files; by default that of :class:`~gradflow_export.Exporter`.
        stop_on: Types of issues at which fitting stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, *, stop_on: Sequence[str] = (), **options: Any
    ) -> None:
        self.session = Session(stop_on, options)
        self._logdir = logdir

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **more: Any) -> None:  # noqa: N803 - skorch's names
        """Begin."""
        done = sum("train_loss" in batch for epoch in net.history for batch in epoch["batches"])
        run = getattr(sys.modules.get("wandb"), "run", None)
        self.session.start(net.module_, logdir=self._logdir, step=done, run=run)

    def on_batch_end(self, net: Any, batch: Any = None, training: bool = False, **more: Any) -> None:
        """Stop where that was asked for, as skorch's own early stopping does."""
        if training and self.session.wants_stop():
            raise KeyboardInterrupt

    def on_epoch_end(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **more: Any) -> None:
        """Add the health to the row of the epoch."""
        net.history.record(HEALTH, self.session.health)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **more: Any) -> None:  # noqa: N803 - skorch's names
        """Close."""
        self.session.close()
