"""What instruments give out: values that still lie on the device, and samples for the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pending:
    """Values of one metric that still lie on the device, or on the host already.

    Attributes:
        metric: A name of the metric catalogue.
        sites: All sites of this metric.
        values: One value for each entry of ``where``; an array is the instrument's own. Shape: ``[len(where)]``.
        where: Indices into ``sites`` that a value arrived for; ``None`` means all of them, in order.
        nan_is_missing: Whether NaN says that there is nothing to tell, which only the device knew.
    """

    metric: str
    sites: tuple[str, ...]
    values: Tensor | npt.NDArray[np.floating]
    where: npt.NDArray[np.int64] | None = None
    nan_is_missing: bool = False


@dataclass(frozen=True)
class Clue(Pending):
    """Values of one fact that a check looks at, at the layers of ``where``: they become evidence and no metric.

    Attributes:
        metric: Name of the fact, ``kind.name``.
    """

    @classmethod
    def by_layer(cls, fact: str, values: Mapping[str, float]) -> Clue:
        """Make one of numbers that the host knows, by layer."""
        return cls(fact, tuple(values), np.array(list(values.values())))


Analysed = Mapping[str, Mapping[str, float]]
"""Values by metric and site."""


@dataclass(frozen=True)
class Sample:
    """Raw entries that the worker turns into something: a histogram, an effective rank, or what ``analyse`` returns.

    Attributes:
        metric: What it will become.
        site: The layer or parameter.
        values: Shape: ``[rows, columns]`` or ``[entries]``. With ``analyse``, and as an array, it is the instrument's
            own copy, contiguous, in float32 or float64.
        analyse: Runs on the worker thread with the values on the host, so that the training thread pays for one copy
            only; it may be as slow as the worker can bear. Holds what it needs beside them, but no module or tensor.
    """

    metric: str
    site: str
    values: Tensor | npt.NDArray[np.floating]
    analyse: Callable[[npt.NDArray[Any]], Analysed] | None = None


@dataclass(frozen=True)
class RowSample(Sample):
    """Some rows and columns of an output; their ranks are taken of those of several steps.

    Attributes:
        whole: How many rows and columns there are.
    """

    whole: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class ClueSample(Sample):
    """Raw entries of which ``analyse`` makes evidence: values by fact and layer."""


@dataclass(frozen=True)
class Unread(Sample):
    """What one call has read; the worker makes readings of it, many steps in a row, which takes it less time each.

    Attributes:
        items: Makes them, of nothing that changes later; each with an array of its own.
    """

    items: Callable[[], Drained] = list


Drained = list[Pending | Sample]


def stack_scalars(values: Sequence[Tensor]) -> Tensor:
    """Join scalar tensors of any dtype and device. Shape: ``[len(values)]``, float64 unless all are of one dtype."""
    first = values[0]
    if all(value.dtype is first.dtype and value.device == first.device for value in values):
        return torch.stack(list(values))
    return torch.stack([value.to(first.device, torch.float64) for value in values])


def join_scalars(values: Sequence[Tensor | float]) -> Tensor | npt.NDArray[np.float64]:
    """Join scalars, on the host where all of them are numbers. Shape: ``[len(values)]``."""
    numbers = sum([isinstance(value, float) for value in values])
    if numbers == len(values):
        return np.array(values, dtype=np.float64)
    return stack_scalars([torch.as_tensor(value, dtype=torch.float64 if numbers else None) for value in values])
