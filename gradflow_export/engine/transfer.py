"""One packed copy per device takes all of a step's values to the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks.readings import Drained, Pending, Sample, Unread
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.records.step_record import Issue, Note


@dataclass(frozen=True)
class Packed:
    """Several values in one host tensor that may still be on its way.

    Attributes:
        items: What lies in it, in order.
        host: Shape: ``[total entries]``.
        arrived: CUDA event to wait for, ``None`` when the tensor is already there.
    """

    items: tuple[Pending | Sample, ...]
    host: Tensor
    arrived: Any = None

    def unpack(self) -> Iterator[tuple[Pending | Sample, npt.NDArray[Any]]]:
        """Yield each item with its values, waiting for the copy first. Shape: that of the item's tensor."""
        if self.arrived is not None:
            self.arrived.synchronize()
        flat, start = self.host.numpy(), 0
        for item in self.items:
            shape = tuple(item.values.shape)
            end = start + math.prod(shape)
            yield item, flat[start:end].reshape(shape)
            start = end


@dataclass(frozen=True)
class Held:
    """Values that instruments gave out on the host: nothing to copy.

    Attributes:
        items: Each with an array of its own.
    """

    items: tuple[Pending | Sample, ...]

    def unpack(self) -> Iterator[tuple[Pending | Sample, npt.NDArray[Any]]]:
        """Yield each item with its values. Shape: that of the item's array."""
        for item in self.items:
            for each in item.items() if isinstance(item, Unread) else (item,):
                yield each, np.asarray(each.values)


@dataclass
class Bundle:
    """All that the training thread hands over for one step.

    Attributes:
        step: Counts optimizer steps from 1.
        wall_time: Seconds since the epoch at the end of the step.
        scalars: Run-level values the host knows already.
        packed: One entry per device and optimizer, and one for what was on the host.
        scaled: Whether a ``GradScaler`` called the step.
        layouts: How the parameters lie on the ranks of a distributed run, by optimizer.
        told: Issues that something beside the rules found in this step, and notes.
        players: Of several optimizers, by number, those that stepped: places of their parameters, and their steps.
        players_sites: Names of all of them by number; empty where there is only one.
    """

    step: int
    wall_time: float
    scalars: Mapping[str, float] = field(default_factory=dict)
    packed: list[Packed | Held] = field(default_factory=list)
    scaled: bool = False
    layouts: list[Layout] = field(default_factory=list)
    kind: int | None = None
    told: list[Issue | Note] = field(default_factory=list)
    players: dict[int, tuple[npt.NDArray[np.int64], int]] = field(default_factory=dict)
    players_sites: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """About how many bytes of the host the values and their copies take; other devices have their own memory."""
        copies = [part.host for part in self.packed if isinstance(part, Packed)]
        values = [item.values for part in self.packed for item in part.items]
        here = [each for each in values if not isinstance(each, Tensor) or each.device.type == "cpu"]
        return sum(getattr(each, "nbytes", 0) for each in (*copies, *here))


def pack(drained: Drained) -> list[Packed | Held]:
    """Copy what the instruments gave out towards the host, without waiting for any device.

    Args:
        drained: Values and samples, on any devices.

    Returns:
        One :class:`Held` for what is on the host already, one :class:`Packed` per device for numbers and one for each
        type of samples, and one per sample that brings its own analysis.
    """
    if False not in [isinstance(item.values, np.ndarray) for item in drained]:  # nearly every step without a device
        return [Held(tuple(drained))]
    with torch.no_grad():
        return _pack_tensors(drained)


def _pack_tensors(drained: Drained) -> list[Packed | Held]:
    # Beside numbers in float64 the samples, which are much more, would be widened to it.
    alike: dict[tuple[torch.device, torch.dtype | None], list[Pending | Sample]] = {}
    held: list[Pending | Sample] = []
    out: list[Packed | Held] = []
    for item in drained:
        values = item.values
        if isinstance(values, np.ndarray):
            held.append(item)
        elif isinstance(item, Sample) and item.analyse is not None:
            # Such a sample is large and is a copy already: among the others it would be copied and widened once more.
            out.append(_send(values.device, values.reshape(-1), [item]))
        else:
            alike.setdefault((values.device, values.dtype if isinstance(item, Sample) else None), []).append(item)
    if held:
        out.append(Held(tuple(held)))
    out.extend(_pack_device(device, items) for (device, _), items in alike.items())
    return out


def _pack_device(device: torch.device, items: list[Pending | Sample]) -> Packed:
    every = [item.values for item in items if isinstance(item.values, Tensor)]
    return _send(device, torch.cat([values.detach().reshape(-1) for values in every]), items)


def _send(device: torch.device, flat: Tensor, items: list[Pending | Sample]) -> Packed:
    if device.type != "cuda":
        return Packed(tuple(items), flat.cpu())
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(device))
    return Packed(tuple(items), host, arrived)


def spread(item: Pending, values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Place the values of a :class:`Pending` at its sites.

    Returns:
        Values and presence over all sites. Shape of both: ``[len(item.sites)]``.
    """
    out = np.zeros(len(item.sites), dtype=np.float64)
    if item.where is None and not item.nan_is_missing:
        out[:] = values
        return out, np.ones(len(item.sites), dtype=np.bool_)
    present = np.zeros(len(item.sites), dtype=np.bool_)
    where = slice(None) if item.where is None else item.where
    out[where] = values
    present[where] = ~np.isnan(values) if item.nan_is_missing else True
    return out, present
