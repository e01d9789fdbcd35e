"""Changes to layers that are one where several are meant, or several where one is meant."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradflow_export.experiments.interventions import EverythingTrained
from gradflow_export.experiments.mending.treatment import TUNING, Treatment
from gradflow_export.records.issues import IssueType

NARROW = 4
"""Share of the widths around a layer, inverted, from which on it is narrow."""


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


class Detours(EverythingTrained):
    """Leads a linear layer around a narrow one: what that one is given goes to the end of the next one as well."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._before: tuple[nn.Linear, Tensor] | None = None
        self._around: dict[tuple[int, int], nn.Parameter] = {}
        self._generator = torch.Generator().manual_seed(0)

    def root(self, module: nn.Module) -> None:
        """Hook its layers."""
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._after)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin anew."""
        self._before = None
        return super().called(module, args, kwargs)

    def _after(self, layer: nn.Linear, args: Any, output: Tensor) -> Tensor | None:
        before, self._before = self._before, (layer, args[0])
        if before is None or not narrows(before[0], layer) or before[1].shape[:-1] != output.shape[:-1]:
            return None
        self.acted, key = True, (id(before[0]), id(layer))
        if key not in self._around:
            drawn = torch.empty(layer.out_features, before[0].in_features)
            nn.init.kaiming_uniform_(drawn, 5**0.5, generator=self._generator)
            self._around[key] = nn.Parameter(drawn.to(output))
            self._known[id(self._around[key])] = self._around[key]
        return output + functional.linear(before[1], self._around[key])


def narrows(layer: nn.Linear, following: nn.Linear) -> bool:
    """Return whether a linear layer gives far fewer numbers than it takes and than the next one gives."""
    width = layer.out_features
    return width == following.in_features and NARROW * width <= min(layer.in_features, following.out_features)


AROUND = Treatment(
    "a way around narrow layers",
    TUNING,
    Detours,
    "a layer that is far narrower than those around it",
    "hidden = 64  # in place of the few units that everything has to pass; or x + block(x) around them",
    (IssueType.BOTTLENECK, IssueType.CAPACITY),
    lambda facts: facts["narrow"] > 0,
)
