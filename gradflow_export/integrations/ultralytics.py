"""Ultralytics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from gradflow_export.integrations.base import HEALTH, Session, needed

with needed("ultralytics"):
    from ultralytics.engine.model import Model


@final
class GradFlowCallback:
    """Watches the model of each training: ``GradFlowCallback().attach(model)`` before ``model.train(...)``.

    Steps are steps of the optimizer, counted as Ultralytics does for its moving average of the weights, so that they go
    on where a resumed training goes on. Files lie in ``<trainer.save_dir>/gradflow``. The W&B run is the one that is
    open when training begins. Loggers get ``gradflow/health`` with the metrics of each epoch; ``results.csv`` does not.

    Args:
        stop_on: Types of issues at which training stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(self, *, stop_on: Sequence[str] = (), **options: Any) -> None:
        self.session = Session(stop_on, options)

    def attach(self, model: Model) -> GradFlowCallback:
        """Have the events of a model's trainings handled; returns this object."""
        for event, handle in {
            "on_train_start": self._begin,
            "on_train_epoch_start": self._clear,
            "on_train_batch_end": self._batch,
            "on_fit_epoch_end": self._tell,
            "teardown": self._end,
        }.items():
            model.add_callback(event, handle)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a training on several devices takes into its processes: settings, and no exporter."""
        return {"session": self.session.anew()}

    def _begin(self, trainer: Any) -> None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        folder, done = Path(trainer.save_dir) / "gradflow", getattr(trainer.ema, "updates", 0)
        self.session.start(trainer.model, logdir=folder, step=done, run=run)

    def _clear(self, trainer: Any) -> None:
        trainer.metrics.pop(HEALTH, None)  # it would be a further column in results.csv

    def _batch(self, trainer: Any) -> None:
        if self.session.wants_stop():
            trainer.stop = True

    def _tell(self, trainer: Any) -> None:
        trainer.metrics.update(self.session.logs())

    def _end(self, trainer: Any) -> None:
        self.session.close()
