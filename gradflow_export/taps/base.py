"""What every tap is, and the data it gives out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.catalog import MetricSpec

if TYPE_CHECKING:
    from gradflow_export.taps.optimizers import OptimizerStep


@dataclass(frozen=True)
class Pending:
    """Values of one metric that still lie on the device, or on the host already.

    Attributes:
        metric: A name of the metric catalogue.
        sites: All sites of this metric.
        values: One value for each entry of ``where``; an array is the tap's own. Shape: ``[len(where)]``.
        where: Indices into ``sites`` that a value arrived for; ``None`` means all of them, in order.
        nan_is_missing: Whether NaN says that there is nothing to tell, which only the device knew.
    """

    metric: str
    sites: tuple[str, ...]
    values: Tensor | npt.NDArray[np.floating]
    where: npt.NDArray[np.int64] | None = None
    nan_is_missing: bool = False


Analysed = Mapping[str, Mapping[str, float]]
"""Values by metric and site."""


@dataclass(frozen=True)
class Sample:
    """Raw entries that the worker turns into something: a histogram, an effective rank, or what ``analyse`` returns.

    Attributes:
        metric: What it will become.
        site: The layer or parameter.
        values: Shape: ``[rows, columns]`` or ``[entries]``. With ``analyse``, and as an array, it is the tap's own
            copy, contiguous, in float32 or float64.
        analyse: Runs on the worker thread with the values on the host, so that the training thread pays for one copy
            only; it may be as slow as the worker can bear. Holds what it needs beside them, but no module or tensor.
    """

    metric: str
    site: str
    values: Tensor | npt.NDArray[np.floating]
    analyse: Callable[[npt.NDArray[Any]], Analysed] | None = None


Drained = list[Pending | Sample]
Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a hook so that an error in it never reaches the user's loop."""


class Part:
    """Wraps the hooks of one part; one that is called too often to be wrapped asks and tells it instead.

    This one lets errors through; an exporter's keeps them from the user's loop.

    Attributes:
        off: Whether hooks are to do nothing.
    """

    def __init__(self) -> None:
        self.off = False

    def __call__(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook, wrapped."""
        return hook

    def failed(self, error: Exception) -> None:
        """Take an error out of a hook that is not wrapped."""
        raise error

    def took(self, seconds: float) -> None:
        """Count the time of hooks that are not wrapped."""


def unguarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook as it is; for use outside an exporter."""
    return hook


def stack_scalars(values: Sequence[Tensor]) -> Tensor:
    """Join scalar tensors of any dtype and device. Shape: ``[len(values)]``, float64 unless all are of one dtype."""
    first = values[0]
    if all(value.dtype is first.dtype and value.device == first.device for value in values):
        return torch.stack(list(values))
    return torch.stack([value.to(first.device, torch.float64) for value in values])


def join_scalars(values: Sequence[Tensor | float]) -> Tensor | npt.NDArray[np.float64]:
    """Join scalars, on the host where all of them are numbers. Shape: ``[len(values)]``."""
    numbers = sum(isinstance(value, float) for value in values)
    if numbers == len(values):
        return np.array(values, dtype=np.float64)
    return stack_scalars([torch.as_tensor(value, dtype=torch.float64 if numbers else None) for value in values])


class Tap(Protocol):
    """One instrument.

    Hooks return ``None`` and own only their own handles. A tap never waits for the device: no ``.item()``, ``.cpu()``
    or ``.tolist()``. A tap with hooks of its own also has ``attach() -> ExitStack``; after that stack is closed the
    model is exactly as it was. The others are told when to read.
    """

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""


class SampledTap(Tap, Protocol):
    """A tap that sees calls on sampled steps only, when it is armed, and costs nothing on the others."""

    instrument: ClassVar[str]
    """The name of its interval in ``gradflow_export.schedule.INTERVALS``."""

    @property
    def modules(self) -> int:
        """How many modules it reads; 0 when the model has none, and the tap is then left out."""

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack disarms the tap and gives up everything it holds."""

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""


class SteppedTap(SampledTap, Protocol):
    """A sampled tap that looks at parameters around the steps of an optimizer; the loop tells it of them."""

    def before(self, step: OptimizerStep) -> None:
        """Look before an optimizer steps."""

    def after(self, step: OptimizerStep) -> None:
        """Look after it has stepped."""

    def skip(self, step: OptimizerStep) -> None:
        """Forget what was looked at before a step that a gradient scaler skipped."""
