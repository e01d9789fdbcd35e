"""Changes to layers that are one where several are meant, or several where one is meant."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from gradflow_export.experiments.interventions import EverythingTrained


class OwnLayers(EverythingTrained):
    """Puts a layer of its own into each place of a container that holds one layer several times, and trains it."""

    stays = True

    def root(self, module: nn.Module) -> None:
        """Copy them, with first weights that differ, and without moving the script's own random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            for holder in [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]:
                known: set[int] = set()
                for at in range(len(holder)):
                    if id(holder[at]) in known and next(holder[at].parameters(), None) is not None:
                        holder[at] = copy.deepcopy(holder[at])
                        for part in holder[at].modules():
                            getattr(part, "reset_parameters", bool)()
                        self._known.update((id(weight), weight) for weight in holder[at].parameters())
                        self.acted = True
                    known.add(id(holder[at]))


class KeptLayers(EverythingTrained):
    """Calls in place of each layer that the model makes during a call the one that it made first, and trains it."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._members: set[int] = set()
        self._kept: dict[tuple[Any, ...], nn.Module] = {}
        self._calls = 0

    def root(self, module: nn.Module) -> None:
        """Take note of what it has."""
        self._members.update(map(id, module.modules()))

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Count anew."""
        self._calls = 0
        return super().called(module, args, kwargs)

    def inner(self, module: nn.Module) -> nn.Module:
        """Return the layer of that kind and shape which was called as early in the first call."""
        shapes = tuple(weight.shape for weight in module.parameters())
        if id(module) in self._members or not shapes:
            return module
        self._calls += 1
        first = self._kept.setdefault((type(module), shapes, self._calls), module)
        self.acted |= first is not module
        return first
