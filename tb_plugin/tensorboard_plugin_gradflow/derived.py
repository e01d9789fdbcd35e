"""Metrics that are not stored because others say it all: computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gradflow_export.records.catalog import MetricSpec
from gradflow_export.storage.event_chunks import ABSENT_BITS, MISSING_BITS

Stored = npt.NDArray[np.float32]

_LOGARITHM = "block.log_gain"
_NOTHING = -50.0
"""Logs of earlier versions hold some -60 nats, of the logarithm of 1e-30, where a block passed on a gradient of 0."""


@dataclass(frozen=True)
class Derived:
    """A metric made of a stored one, step by step.

    Attributes:
        spec: What it is.
        source: The stored metric.
        compute: From the stored form of that one to the stored form of this. Shape of both: ``[rows, sites]``.
    """

    spec: MetricSpec
    source: str
    compute: Callable[[Stored], Stored]


def gain_from_loss(log_gains: Stored) -> Stored:
    """Return the sum of the logarithmic gains from the loss down to each block.

    Args:
        log_gains: Of the blocks in depth order, in stored form. Shape: ``[rows, blocks]``.

    Returns:
        In nats, in stored form; *missing* where no gain arrived, behind which the sum begins anew. Shape: as the input.
    """
    bits = np.ascontiguousarray(log_gains).view(np.uint32)
    gone = (bits == MISSING_BITS) | (bits == ABSENT_BITS)
    out = np.array(log_gains, dtype=np.float32)
    total = np.zeros(len(out))
    with np.errstate(invalid="ignore"):  # an infinite gain behind one that is minus infinity
        for block in reversed(range(out.shape[1])):
            total = np.where(gone[:, block], 0.0, total + out[:, block])
            out[:, block] = total
    out.view(np.uint32)[gone] = MISSING_BITS
    return out


_ALL = (
    Derived(
        MetricSpec(
            "block.gain_from_loss", "gain from the loss to here", "nats", "block",
            "sum of block.log_gain over this block and all behind it", "definition", "c",
        ),
        "block.log_gain",
        gain_from_loss,
    ),
)  # fmt: skip
DERIVED = MappingProxyType({item.spec.name: item for item in _ALL})


def stored_name(metric: str) -> str:
    """Return the metric that must be read for another one; itself where it is stored."""
    return DERIVED[metric].source if metric in DERIVED else metric


def compute(metric: str, stored: Stored) -> Stored:
    """Return the values of a metric from those of its source. Shape of both: ``[rows, sites]``."""
    if stored_name(metric) == _LOGARITHM:
        stored = _without_floor(stored)
    return DERIVED[metric].compute(stored) if metric in DERIVED else stored


def _without_floor(log_gains: Stored) -> Stored:
    """Return logarithmic gains with *missing* where a block passed on nothing. Shape: as the input."""
    nothing = np.isfinite(log_gains) & (log_gains < _NOTHING)
    if not nothing.any():
        return log_gains
    out = np.array(log_gains, dtype=np.float32)
    out.view(np.uint32)[nothing] = MISSING_BITS
    return out
