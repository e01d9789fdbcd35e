"""Whether parameters that seem to rest have changed by a bit since the last reading, by any writer."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.hooks.members import member_parameters
from gradflow_export.hooks.readings import Drained, Pending, join_scalars
from gradflow_export.metrics.arrays.checksum import checksum

WALKS = 8
"""Of so many readings of which an optimizer moved every parameter, at one the model is asked anew for what it has."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class Checksums:
    """Compares the checksums of parameters at one reading with those at the reading before.

    Version counters miss what is written through ``.data``, and an optimizer is not all that moves a parameter. What an
    optimizer is known to have moved needs no checksum, so that of a model that trains nothing is read.

    Args:
        model: Returns the model, ``None`` where it is gone.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._known: dict[str, tuple[int, torch.device, Tensor]] = {}
        self._begun = False
        self._trusted = 0  # readings in a row for which the model was not asked

    def begin(self) -> None:
        """Take the first checksums, before the first step that is read."""
        if self._begun:
            return
        self._begun = True
        for site, parameter in self._named():
            if parameter.requires_grad:
                self._keep(site, parameter)

    def compare(self, moved: set[str], whole: Pending | None = None) -> Drained:
        """Return which parameters have changed since the last call.

        Args:
            moved: Those that an optimizer moved by more than nothing.
            whole: The answer, where an optimizer moved every parameter there was when it was last looked at. A walk of
                the model, by which a later one is found, takes longer than the arithmetic of small parameters.
        """
        if whole is not None:
            self._trusted = (self._trusted + 1) % WALKS
            if self._trusted and not self._known:
                return [whole]
            moved.update(whole.sites)
        named = self._named()
        sites = tuple([site for site, _ in named])
        if sites and not self._known and moved.issuperset(sites) and all(map(_REQUIRES_GRAD, [p for _, p in named])):
            return [Pending("parameter.changed", sites, np.ones(len(sites)), np.arange(len(sites), dtype=np.int64))]
        found: dict[int, Tensor | float] = {
            place: 1.0 for place, site in enumerate(sites) if site in moved and named[place][1].requires_grad
        }
        if self._known or len(found) < len(sites):
            found = dict(sorted({**found, **self._rest(named, moved)}.items()))
        if not sites:
            return []
        # A reading that knows of none is one all the same: the next one covers the steps since it, not those before.
        where = np.fromiter(found, dtype=np.int64, count=len(found))
        return [Pending("parameter.changed", sites, join_scalars(list(found.values())), where)]

    def _rest(self, named: list[tuple[str, Tensor]], moved: set[str]) -> dict[int, Tensor | float]:
        """Return by place whether the trained parameters that no optimizer moved have changed, where that is known."""
        found: dict[int, Tensor | float] = {}
        for place, (site, parameter) in enumerate(named):
            if not (parameter.requires_grad and parameter.numel()):
                continue
            before = self._known.pop(site, None)
            if site in moved:
                continue
            now = self._keep(site, parameter)
            if before is not None and now is not None and before[:2] == (id(parameter), now.device):
                changed = now != before[2]
                found[place] = float(changed) if now.device.type == "cpu" else changed.double()
        return found

    def _named(self) -> list[tuple[str, Tensor]]:
        model = self._model()
        return [] if model is None else member_parameters(model)

    def _keep(self, site: str, parameter: Tensor) -> Tensor | None:
        with torch.no_grad():
            now = checksum(parameter)
        if now is not None:
            self._known[site] = (id(parameter), now.device, now)
        return now
