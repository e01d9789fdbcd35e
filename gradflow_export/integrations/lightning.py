"""Lightning, as ``lightning.pytorch`` or as ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from gradflow_export.integrations.base import HEALTH, Session, needed

_NAMES = ("lightning.pytorch", "pytorch_lightning")
with needed("lightning"):
    # The one that the program uses: each has a Callback of its own.
    _lightning = importlib.import_module(next((name for name in _NAMES if name in sys.modules), _NAMES[0]))
    _loggers = importlib.import_module(f"{_lightning.__name__}.loggers")


@final
class GradFlowCallback(_lightning.Callback):  # type: ignore[name-defined, misc]
    """Watches a ``LightningModule`` while it is fitted.

    ``Trainer(..., callbacks=[GradFlowCallback()])``. Steps are ``trainer.global_step``, files lie in ``gradflow``
    within ``trainer.log_dir``, the W&B run is that of a ``WandbLogger``, and ``gradflow/health`` is among the metrics of all
    loggers.

    Args:
        stop_on: Types of issues at which training stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(self, *, stop_on: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        self.session = Session(stop_on, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "gradflow"  # log_dir is asked for on all ranks
        runs = [logger.experiment for logger in trainer.loggers if isinstance(logger, _loggers.WandbLogger)]
        run = runs[0] if runs and trainer.is_global_zero else None
        self.session.start(pl_module, logdir=folder, step=trainer.global_step, run=run)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:
        """Log the health; stop training where that was asked for."""
        pl_module.log(HEALTH, self.session.health, on_step=True, on_epoch=False, rank_zero_only=True, batch_size=1)
        if self.session.wants_stop():
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close."""
        self.session.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close."""
        self.session.close()
