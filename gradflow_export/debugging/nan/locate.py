"""Where NaN or Inf of one step began: module by module as the exporter finds it, then operation by operation."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.debugging.nan.batch import BatchState
from gradflow_export.debugging.nan.trace import Culprit, trace
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned
from gradflow_export.hooks.readings import Pending
from gradflow_export.instruments.origin import OriginInstrument
from gradflow_export.rules.base import some

_log = logging.getLogger("gradflow_export")

TRACES = 3
"""Steps of a run whose backward pass is repeated."""

_WORDS = (
    ("origin.input", "in the input of the model"),
    ("origin.weights", "in the weights of {}, which were so before the forward pass"),
    ("origin.forward", "in the forward pass at {}"),
    ("origin.loss", "in the loss: every output of the model was finite"),
    ("origin.backward", "in the backward pass at {}"),
)


@dataclass(frozen=True)
class Origin:
    """Where the first NaN or Inf of a step arose.

    Attributes:
        kind: ``"input"``, ``"weights"``, ``"forward"``, ``"loss"``, ``"backward"``, or ``""`` where it is not known.
        words: The same in a few words.
        sites: Modules or parameters concerned.
        culprit: The operation of the backward pass, where it was that.
        readings: For the exporter's record.
    """

    kind: str = ""
    words: str = ""
    sites: tuple[str, ...] = ()
    culprit: Culprit | None = None
    readings: list[Pending] = field(default_factory=list)


class Locator:
    """Repeats failing steps to find where NaN or Inf began; until then it remembers the inputs of the step.

    Args:
        model: The unwrapped model; held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._origin = OriginInstrument(self._model, rerun=True)
        self._hooks = self._origin.attach()
        self._left = TRACES

    def find(self, named: Sequence[tuple[str, Tensor]], norms: Tensor, batch: BatchState | None) -> Origin:
        """Look at a step before its update.

        Args:
            named: Parameters that have a gradient.
            norms: Their norms, in the same order.
            batch: The step's forward passes.

        Returns:
            An empty origin while everything is finite, or nothing could be found.
        """
        model = self._model()
        readings: list[Pending] = []
        if model is not None and named:
            self._origin.used(_as_step(model, named, self), norms, None, stepped=False)
            readings = [item for item in self._origin.drain() if isinstance(item, Pending)]
        self._origin.forget()
        found = next((item for item in readings), None)
        if found is None or model is None:
            return Origin()
        words = dict(_WORDS)[found.metric].format(some(found.sites, 1))
        kind = found.metric.removeprefix("origin.")
        culprit = self._operation(model, batch) if kind == "backward" else None
        if culprit is not None:
            words += f", by {culprit.operation}"
        return Origin(kind, words, tuple(site for site in found.sites if site), culprit, readings)

    def _operation(self, model: nn.Module, batch: BatchState | None) -> Culprit | None:
        if batch is None or not self._left:
            return None
        self._left -= 1
        for call in batch.calls:
            try:
                culprit = trace(model, call)
            except Exception as error:
                _log.warning("gradflow: the failing pass could not be repeated: %s: %s", type(error).__name__, error)
                return None
            if culprit is not None:
                return culprit
        return None

    def close(self) -> None:
        """Take the hooks away."""
        self._hooks.close()


def _as_step(model: nn.Module, named: Sequence[tuple[str, Tensor]], who: object) -> OptimizerStep:
    places = {id(p): place for place, p in enumerate(model.parameters())}
    sites = tuple(site_name(name) for name, _ in model.named_parameters())
    mine = tuple(p for _, p in named if id(p) in places)
    where = np.array([places[id(p)] for p in mine], dtype=np.int64)
    return OptimizerStep(who, Owned(sites, where, mine, np.zeros_like(where)), closure=False, scale=None)


def names_of(model: nn.Module, parameters: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Return parameters with their names in the model; ``"parameter 3"`` for those that are none of its own."""
    known = {id(p): site_name(name) for name, p in model.named_parameters()}
    return [(known.get(id(p), f"parameter {place}"), p) for place, p in enumerate(parameters)]


def norms_of(named: Sequence[tuple[str, Tensor]], read: Tensor) -> list[float]:
    """Return norms as numbers, none where there is no parameter."""
    return [float(value) for value in read.tolist()] if named else []


NO_NORMS = torch.zeros(0, device="cpu")
"""Norms of no gradients."""
