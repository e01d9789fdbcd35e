"""The parts a loss is the sum of, handed over by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradflow_export.hooks.readings import Drained, Pending, stack_scalars

_log = logging.getLogger("gradflow_export")

MOST = 64
"""Components that are kept apart; a name made up anew at every step must not fill the memory."""


class LossComponents:
    """Sums each component over the micro-batches of a step, on the device."""

    def __init__(self) -> None:
        self._sites: tuple[str, ...] = ()
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._told = False

    def add(self, components: Mapping[str, Any]) -> None:
        """Take the components of one micro-batch: tensors or numbers by name."""
        for key, value in components.items():
            name = str(key)
            if name not in self._sites:
                if len(self._sites) >= MOST:
                    self._complain(f"observe(components=...) takes {MOST} names")
                    continue
                self._sites += (name,)
            try:
                one = value.detach().mean() if isinstance(value, Tensor) else torch.tensor(float(value))
            except (TypeError, ValueError, RuntimeError):
                self._complain(
                    f"observe(components=...) expects tensors or numbers, got {type(value).__name__} for {name!r}"
                )
                continue
            one = one if one.dtype is torch.float64 else one.to(torch.float32)
            known = self._sums.get(name)
            self._sums[name] = one if known is None else known + one.to(known)
            self._counts[name] = self._counts.get(name, 0) + 1

    def drain(self) -> Drained:
        """Give out the mean of each component and its share of all of them."""
        if not self._sums:
            return []
        where = [place for place, name in enumerate(self._sites) if name in self._sums]
        names = [self._sites[place] for place in where]
        values = stack_scalars([self._sums[name] / self._counts[name] for name in names])
        sizes = values.abs()
        shares = sizes / sizes.sum()
        self.forget()
        place = np.array(where, dtype=np.int64)
        return [
            Pending("loss.component", self._sites, values, place),
            Pending("loss.component_share", self._sites, shares, place, nan_is_missing=True),
        ]

    def forget(self) -> None:
        """Forget what was added since the last drain; the names stay."""
        self._sums, self._counts = {}, {}

    def _complain(self, text: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("gradflow: %s, and leaves out what cannot be used.", text)
