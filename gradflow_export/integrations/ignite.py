"""PyTorch-Ignite."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

from torch import nn

from gradflow_export.integrations.base import HEALTH, Session, needed

with needed("pytorch-ignite"):
    from ignite.engine import Engine, Events


@final
class GradFlowHandler:
    """Watches a model while an engine trains it: ``GradFlowHandler(model).attach(trainer)``.

    ``gradflow/health`` is in ``engine.state.metrics`` after each iteration, where ignite's loggers find it.

    Args:
        model: What is trained.
        logdir: Directory for files; by default that of :class:`~gradflow_export.Exporter`.
        steps_per_update: Iterations between two steps of the optimizer, where gradients are accumulated; ignite counts
            iterations.
        stop_on: Types of issues at which the engine is terminated, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type.
    """

    def __init__(
        self,
        model: nn.Module,
        logdir: str | os.PathLike[str] | None = None,
        *,
        steps_per_update: int = 1,
        stop_on: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.session = Session(stop_on, options)
        self._model, self._logdir, self._per_update = model, logdir, steps_per_update

    def attach(self, engine: Engine) -> GradFlowHandler:
        """Have an engine's events handled; returns this object."""
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._iterate)
        for event in (Events.COMPLETED, Events.TERMINATE):
            engine.add_event_handler(event, self._end)
        return self

    def _begin(self, engine: Engine) -> None:
        self.session.start(self._model, logdir=self._logdir, step=engine.state.iteration // self._per_update)

    def _iterate(self, engine: Engine) -> None:
        engine.state.metrics[HEALTH] = self.session.health
        if self.session.wants_stop():
            engine.terminate()

    def _end(self, _engine: Engine) -> None:
        self.session.close()
