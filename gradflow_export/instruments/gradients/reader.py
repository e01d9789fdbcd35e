"""All gradients of one optimizer, and a few entries of its weights, by one call of the C library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import Owned
from gradflow_export.instruments.path import Followed
from gradflow_export.metrics.arrays.one_pass import tensor_reader
from gradflow_export.metrics.arrays.sketch import signs
from gradflow_export.metrics.direction import BUCKETS, EXACT, Products, evenly_chosen
from gradflow_export.native.tensors import HEAD, Sums, TensorReader

Floats = npt.NDArray[np.float64]
GRADIENT = attrgetter("grad")
_VERSION = torch_private.version
_PLAIN = frozenset({Tensor})
CHECKED = 256
"""Entries of each of a few gradients that are looked at before the optimizer steps."""
LATER_ENTRIES = 2**20
"""Least number of entries for which a thread of its own is worth starting: of fewer the training thread reads as fast
as it starts one, waits for it and looks whether somebody wrote to the gradients meanwhile."""


@dataclass(frozen=True)
class Sketch:
    """What one reading of an optimizer's gradients gave, on the host.

    Attributes:
        rows: Norms, then those of ``metrics.entries.ENTRY_STATISTICS`` or none. Shape: ``[1 or 6, gradients]``.
        where: Places of the parameters that have a gradient. Shape: ``[gradients]``.
        products: Those of the gradients before and now; ``None`` the first time. Known when the rows are.
        path: Followed entries of weights, then of their gradients; ``None`` where they cannot be had.
        total: Sum of all norms: not finite if one is not; ``None`` where it and the rows are still being read.
    """

    rows: Floats
    where: npt.NDArray[np.int64]
    products: Products | None
    path: Floats | None
    total: float | None


class GradientReader:
    """Reads the gradients of one optimizer at every step; what does not change between steps is looked up once.

    Args:
        owned: The optimizer's parameters.
        followed: Entries of weights and gradients that are followed.
    """

    def __init__(self, owned: Owned, followed: Sequence[Followed]) -> None:
        self.owned = owned
        self._followed = followed
        self._absent: tuple[int, ...] | None = None
        self._reader: TensorReader | None = None
        self._weights: list[Tensor] = []
        self._where = owned.where
        self._direct = sum(p.numel() for p in owned.parameters) <= EXACT
        sizes = [0, *(p.numel() for p in owned.parameters)]
        self._places = list(accumulate(sizes))[:-1] if self._direct else list(range(len(owned.parameters)))
        self._buckets = sum(sizes) if self._direct else BUCKETS
        self._sampled = 0
        self._begun: tuple[list[Tensor], list[int], Sketch] | None = None
        self.long = sum(p.numel() for p in owned.parameters) >= LATER_ENTRIES
        """Whether reading takes longer than it takes to start a thread for it."""

    def read(self, *, everything: bool, later: bool = False) -> Sketch | None:
        """Read the gradients as they are now.

        Args:
            everything: Whether to take the statistics of the entries too, not only the norms.
            later: Whether all but ``path`` may be read while the optimizer steps, up to :meth:`end`.
                Where the sample of the gradients is not finite, or there is none before it, it is not.

        Returns:
            What was read; ``None`` where torch must read it: gradients that are not plain, contiguous, real, floating
            and on the CPU, or none at all.
        """
        gradients: list[Tensor | None] = list(map(GRADIENT, self.owned.parameters))
        kinds = set(map(type, gradients))
        absent: tuple[int, ...] = ()
        if kinds != _PLAIN:
            if kinds != {Tensor, type(None)}:
                return None
            absent = tuple(place for place, gradient in enumerate(gradients) if gradient is None)
        arrived: list[Any] = gradients if not absent else [gradient for gradient in gradients if gradient is not None]
        if absent != self._absent:
            self._plan(absent)
        reader, self._begun = self._reader, None
        if reader is None:
            return None
        compares, every = reader.compares, [*arrived, *self._weights]
        values = reader.begin(every, everything=everything) if later and compares else None
        begun = values is not None and (math.isfinite(values[4]) or not reader.end())
        if values is None:
            values = reader.read(every, everything=everything)
        if values is None:
            reader.forget()
            return None
        start, end = HEAD + self._sampled, HEAD + reader.copied
        path = values[start:end] if self._weights else None
        products = Products(values[None, :3], summed=not self._direct) if compares else None
        rows = values[end:].reshape(-1, len(arrived))
        sketch = Sketch(rows, self._where, products, path, None if begun else float(values[3]))
        if begun:
            self._begun = arrived, list(map(_VERSION, arrived)), sketch
        return sketch

    def end(self) -> Sketch | None:
        """Wait for what was left for later.

        Returns:
            The whole; ``None`` where somebody has changed the gradients meanwhile.
        """
        begun, self._begun = self._begun, None
        if begun is None or self._reader is None or not self._reader.end():
            return None
        arrived, versions, sketch = begun
        if list(map(_VERSION, arrived)) != versions:
            return None
        return replace(sketch, total=float(sketch.rows[0].sum()))

    def forget(self) -> None:
        """Compare the next gradients with none."""
        self.end()
        if self._reader is not None:
            self._reader.forget()

    def _plan(self, absent: tuple[int, ...]) -> None:
        """Choose what is copied, now that other parameters have a gradient than before."""
        self._absent = absent
        missing = set(absent)
        arrived = [p for place, p in enumerate(self.owned.parameters) if place not in missing]
        self._where = np.delete(self.owned.where, list(absent)) if absent else self.owned.where
        places = {id(p): place for place, p in enumerate(arrived)}
        copies = []
        for parameter in evenly_chosen(arrived):
            stride = max(-(-parameter.numel() // CHECKED), 1)
            copies.append((places[id(parameter)], stride, -(-parameter.numel() // stride)))
        self._sampled = sum(count for _, _, count in copies)
        together = all(id(entry.parameter) in places and entry.parameter.is_contiguous() for entry in self._followed)
        self._weights = [entry.parameter for entry in self._followed] if together else []
        weights = [(len(arrived) + n, e.stride, e.count) for n, e in enumerate(self._followed)]
        pulls = [(places.get(id(e.parameter), 0), e.stride, e.count) for e in self._followed]
        if together:
            copies += [*weights, *pulls]
        # What is not there counts as 0, so that sums of other gradients than before can be compared too.
        kept = [place for number, place in enumerate(self._places) if number not in missing]
        before, wide = self._reader, any(p.dtype is torch.float64 for p in arrived)
        self._reader = tensor_reader(
            len(arrived) + len(self._weights),
            len(arrived),
            copies,
            self._sampled,
            Sums(kept, signs(), self._buckets, self._direct, wide),
            sum(p.numel() for p in arrived),
        )
        if before is not None and self._reader is not None:
            self._reader.follow(before)
