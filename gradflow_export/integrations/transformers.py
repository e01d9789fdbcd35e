"""Hugging Face ``Trainer``, and what inherits it: TRL, sentence-transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from gradflow_export.integrations.base import Session, needed

with needed("transformers"):
    from transformers import TrainerCallback
    from transformers.integrations import INTEGRATION_TO_CALLBACK


@final
class GradFlowCallback(TrainerCallback):
    """Watches the model of a ``Trainer`` while it trains.

    ``Trainer(..., callbacks=[GradFlowCallback()])``, or ``report_to=["gradflow", ...]`` once this module was imported:
    before other reports, so that they show ``gradflow/health`` too.

    Steps go on where a resumed training goes on. Files lie in ``gradflow`` within ``TENSORBOARD_LOGGING_DIR``, or else
    ``<output_dir>/runs``. The W&B run is that of the ``Trainer``. A hyperparameter search gets a folder for each trial.

    Args:
        stop_on: Types of issues at which training stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(self, *, stop_on: Sequence[str] = (), **options: Any) -> None:
        self.session = Session(stop_on, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Begin."""
        folder = Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs") / "gradflow"
        run = getattr(sys.modules.get("wandb"), "run", None) if "wandb" in args.report_to else None
        self.session.start(model, logdir=folder / (state.trial_name or ""), step=state.global_step, run=run)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop training where that was asked for."""
        if self.session.wants_stop():
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Add the health to what is logged, and to the log history."""
        if logs is not None:
            logs.update(self.session.logs())
            if state.log_history:
                state.log_history[-1].update(self.session.logs())

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close."""
        self.session.close()


INTEGRATION_TO_CALLBACK["gradflow"] = GradFlowCallback
