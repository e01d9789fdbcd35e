"""A checksum of parameters of which every rank should hold the same."""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.instruments.base import Cost, Instrument, Need, Setting
from gradflow_export.metrics.arrays.local import local, shards
from gradflow_export.metrics.arrays.norms import dense_entries
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.catalog import MetricSpec, spec

ENTRIES = 128
"""Evenly spaced entries of each parameter that go into its checksum."""

AT_ONCE = 64
"""Parameters read in one step; the others have their turn at the next ones."""


def checksum(entries: Tensor) -> Tensor:
    """Return ``sum_i cos(i) w_i`` in float64, which is the same bits for the same entries. Shape: ``[n]``; scalar."""
    wide = entries.double()
    return torch.dot(wide, torch.arange(wide.numel(), dtype=torch.float64, device=wide.device).cos())


class ReplicaInstrument(Instrument):
    """Reads, before an optimizer steps, checksums of the parameters that lie whole on each rank, while it is armed.

    Nothing is compared here: each rank tells its own sums, and rank 0 looks at how far they are apart.

    Args:
        model: Where the parameters are; nothing of it is kept.
    """

    instrument: ClassVar[str] = "replicas"
    interval: ClassVar[int] = 50
    cost: ClassVar[Cost] = "P"
    needs: ClassVar[frozenset[Need]] = frozenset({"ranks"})

    def __init__(self, model: nn.Module) -> None:
        self._modules = sum(1 for _ in model.parameters())
        self._turn: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._armed = False
        self._out: Drained = []

    @classmethod
    def make(cls, setting: Setting) -> ReplicaInstrument:
        """Make one for a model."""
        return cls(setting.model)

    @property
    def modules(self) -> int:
        """How many parameters are read in one step."""
        return min(self._modules, AT_ONCE)

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return (spec("parameter.replica_gap"),)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more."""
        self._armed = on

    def drain(self) -> Drained:
        """Give out what was read since the last call."""
        out, self._out = self._out, []
        return out

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._out = []

    def after(self, step: OptimizerStep) -> None:
        """Read nothing: a step may leave copies apart for a moment."""

    def skip(self, step: OptimizerStep) -> None:
        """Keep what was read: copies are equal whether the step was taken or not."""

    def before(self, step: OptimizerStep) -> None:
        """Read the weights that an optimizer is about to change."""
        if not self._armed:
            return
        owned = step.owned
        whole = [place for place, parameter in enumerate(owned.parameters) if _is_replica(parameter)]
        if not whole:
            return
        turn = self._turn.get(step.optimizer, 0)
        self._turn[step.optimizer] = turn + 1
        turns = -(-len(whole) // AT_ONCE)
        chosen = whole[turn % turns :: turns]
        with torch.no_grad():
            sums = [checksum(even_sample(dense_entries(local(owned.parameters[place])), ENTRIES)) for place in chosen]
        values = torch.stack([value.to(sums[0].device) for value in sums])
        self._out.append(Pending("parameter.replica_gap", owned.sites, values, np.asarray(owned.where)[chosen]))


def _is_replica(parameter: Tensor) -> bool:
    # Megatron and its kin split plain tensors and leave this mark on them.
    plain = parameter.layout is torch.strided and not getattr(parameter, "tensor_model_parallel", False)
    return plain and shards(parameter) == 1 and parameter.numel() > 0
