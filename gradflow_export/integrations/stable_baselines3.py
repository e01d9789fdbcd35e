"""Stable-Baselines3."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from gradflow_export.integrations.base import HEALTH, Session, needed

with needed("stable-baselines3"):
    from stable_baselines3.common.callbacks import BaseCallback


@final
class GradFlowCallback(BaseCallback):
    """Watches the policy of an algorithm while it learns: ``model.learn(..., callback=GradFlowCallback())``.

    Steps are steps of the optimizer; a second ``learn(..., reset_num_timesteps=False)`` goes on counting. Files lie in
    ``gradflow`` within the directory of the algorithm's logger, whose rows have ``gradflow/health``.

    Args:
        stop_on: Types of issues at which learning stops, such as ``("NUMERICAL", "POLICY_COLLAPSE")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(self, *, stop_on: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        self.session = Session(stop_on, options)

    def _on_training_start(self) -> None:
        folder, before = self.logger.get_dir(), self.session.exporter
        # num_timesteps is that of the environments; it is 0 unless learning goes on.
        done = before.current_step - 1 if before is not None and self.model.num_timesteps else 0
        run = getattr(sys.modules.get("wandb"), "run", None)
        self.session.start(
            self.model.policy, logdir=None if folder is None else Path(folder) / "gradflow", step=done, run=run
        )

    def _on_step(self) -> bool:
        self.logger.record(HEALTH, self.session.health)
        return not self.session.wants_stop()

    def _on_training_end(self) -> None:
        self.session.close()
