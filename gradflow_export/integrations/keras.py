"""Keras 3 on its torch backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, final

from gradflow_export.errors import ArgumentError
from gradflow_export.integrations.base import Session, needed

with needed("keras"):
    import keras


@final
class GradFlowCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]  # keras is untyped
    """Watches a model while it is fitted: ``model.fit(..., callbacks=[GradFlowCallback()])``.

    Steps are ``optimizer.iterations``, which go on over several calls of ``fit`` and after loading. Gradients are those
    of the batch, before Keras averages or clips them. ``gradflow/health`` is in the history of each epoch.

    Args:
        logdir: Directory for files; by default that of :class:`~gradflow_export.Exporter`.
        stop_on: Types of issues at which fitting stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type, or Keras runs on another backend than torch.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, *, stop_on: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__()
        if keras.config.backend() != "torch":
            raise ArgumentError(
                f"this callback expects Keras on torch, got {keras.config.backend()}; set KERAS_BACKEND=torch before "
                "keras is imported."
            )
        self.session = Session(stop_on, options)
        self._logdir = logdir

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        self.session.start(self.model, logdir=self._logdir, step=int(self.model.optimizer.iterations), run=run)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a step: the optimizer is none of torch."""
        if self.session.exporter is not None:
            self.session.exporter.step()
        if self.session.wants_stop():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the health to the row of the epoch."""
        if logs is not None:
            logs.update(self.session.logs())

    def on_train_end(self, logs: Any = None) -> None:
        """Close."""
        self.session.close()
