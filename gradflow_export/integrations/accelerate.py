"""Accelerate: a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import nn

from gradflow_export.exporter import Exporter
from gradflow_export.integrations.base import HEALTH, Session, needed

with needed("accelerate"):
    from accelerate.tracking import GeneralTracker


@final
class GradFlowTracker(GeneralTracker):
    """Watches a model from ``init_trackers`` to ``end_training``.

    ``Accelerator(log_with=[GradFlowTracker(model), "tensorboard"], project_dir=...)``; a tracker is not notified of the
    model, so that it is passed here, before or after ``prepare``. To other trackers the health goes with
    ``accelerator.log({"loss": loss, **tracker.logs()})``.

    Args:
        model: What is trained.
        logdir: Directory for files, such as that of the ``Accelerator``; they lie in ``gradflow`` within it.
        start_step: Steps done before, when training is resumed.
        stop_on: Types of issues at which :attr:`should_stop` is true.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    name = "gradflow"
    requires_logging_directory = False
    main_process_only = False  # every rank is watched; the exporter knows which one writes

    def __init__(
        self,
        model: nn.Module,
        logdir: str | Path | None = None,
        *,
        start_step: int = 0,
        stop_on: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self.session = Session(stop_on, options)
        self._model, self._step = model, start_step
        self._logdir = None if logdir is None else Path(logdir) / "gradflow"

    @property
    def tracker(self) -> Exporter | None:
        """The exporter, as ``get_tracker("gradflow", unwrap=True)`` returns it."""
        return self.session.exporter

    @property
    def should_stop(self) -> bool:
        """Whether an issue of ``stop_on`` is open, on any rank; to be asked on all of them."""
        return self.session.wants_stop()

    def start(self) -> None:
        """Begin; called by ``init_trackers``."""
        self.session.start(self._model, logdir=self._logdir, step=self._step)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Do nothing: the exporter writes its own description."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **more: Any) -> None:
        """Do nothing: the exporter reads what it writes."""

    def logs(self) -> dict[str, float]:
        """Return the health, to be logged with numbers of one's own."""
        return {HEALTH: self.session.health}

    def finish(self) -> None:
        """Close; called by ``end_training``."""
        self.session.close()
