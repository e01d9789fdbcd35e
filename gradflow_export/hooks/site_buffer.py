"""Scalars of many sites, gathered until a step ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gradflow_export.hooks.readings import Pending, join_scalars
from gradflow_export.metrics.arrays.local import PLAIN

Places = npt.NDArray[np.int64]


class SiteValues:
    """One scalar per site: numbers in an array, and beside it what torch made and may still lie on a device.

    The arrays stay the same for good, so that the C library may write to them.

    Args:
        count: How many sites there are.

    Attributes:
        numbers: Shape: ``[count]``.
        tensors: By site; they stand before the numbers.
        present: Which sites have either. Shape: ``[count]``.
    """

    def __init__(self, count: int) -> None:
        self.numbers = np.zeros(count)
        self.present = np.zeros(count, dtype=np.bool_)
        self.tensors: dict[int, Tensor] = {}

    def put(self, place: int, value: Tensor | float) -> None:
        """Take a scalar; the last counts. What is on the host already is a number from now on."""
        self.present[place] = True
        if isinstance(value, Tensor) and not (value.is_cpu and type(value) in PLAIN):
            self.tensors[place] = value
        else:
            self.tensors.pop(place, None)
            self.numbers[place] = float(value)

    def drop(self, place: int) -> None:
        """Forget one site."""
        self.tensors.pop(place, None)
        self.present[place] = False

    def get(self, place: int) -> Tensor | float:
        """Return what a site has."""
        tensor = self.tensors.get(place)
        return float(self.numbers[place]) if tensor is None else tensor

    def clear(self) -> None:
        """Forget everything."""
        self.present[:], self.tensors = False, {}

    def pending(self, metric: str, sites: tuple[str, ...], order: Places) -> list[Pending]:
        """Return the values as one metric; empty where there are none.

        Args:
            metric: A name of the metric catalogue.
            sites: In this order.
            order: Their places here. Shape: ``[count]``.
        """
        (where,) = self.present[order].nonzero()  # NumPy's Python functions are slow where they are cold
        if not len(where):
            return []
        places = order[where]
        joined = join_scalars([self.get(int(place)) for place in places]) if self.tensors else self.numbers[places]
        return [Pending(metric, sites, joined, where)]
