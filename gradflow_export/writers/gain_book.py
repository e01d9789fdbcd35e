"""What a run's gains were, by depth and step, in bounded memory: the numbers behind gain report and gain chart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from gradflow_export.records.step_record import Reading, StepRecord

GAIN, NORM = "block.gain", "block.gradient_norm"
PARAMETER_NORM = "parameter.gradient_norm"
MOST_COLUMNS = 96
MOST_SITES = 4096
"""Blocks beyond this are not followed: 96 columns of them are 3 MB."""

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def extremeness(values: Floats, present: Flags) -> Floats:
    """Say how far from 1 each gain is, so that the greatest is the one to keep.

    Args:
        values: Gains. Shape: any.
        present: False where nothing arrived. Shape: as ``values``.

    Returns:
        ``|ln value|``; for 0 and Inf above every finite one, for NaN above these, -1 where nothing arrived.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.abs(np.log(np.abs(values)))
    out = np.where(np.isnan(values), np.inf, np.minimum(out, 1e6))
    return np.where(present, out, -1.0)


@dataclass(frozen=True, eq=False)
class Profile:
    """One value per layer, in depth order.

    Attributes:
        metric: What was read.
        step: When.
        sites: Names of the layers.
        values: Shape ``[sites]``.
        present: False where nothing arrived. Shape: ``[sites]``.
    """

    metric: str
    step: int
    sites: tuple[str, ...]
    values: Floats
    present: Flags


@dataclass(frozen=True, eq=False)
class GainMap:
    """Gains by time and depth.

    Attributes:
        sites: Names of the blocks in depth order.
        spans: First and last step of each column.
        values: Of the readings of a column the one farthest from 1. Shape: ``[columns, sites]``.
        present: False where nothing arrived. Shape: ``[columns, sites]``.
        readings: How many readings a column joins, but for the last, which may have fewer.
        newest: The newest reading alone.
    """

    sites: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    values: Floats
    present: Flags
    readings: int
    newest: Profile | None = None


@final
class GainBook:
    """Remembers gains: a fixed number of columns, each the extremes of equally many readings; neighbours are joined.

    Args:
        columns: Greatest number of columns; even, at least 2.
    """

    def __init__(self, columns: int = MOST_COLUMNS) -> None:
        self._most = columns
        self._sites: tuple[str, ...] = ()
        self._values: Floats = np.zeros((columns, 0))
        self._present: Flags = np.zeros((columns, 0), dtype=np.bool_)
        self._spans: list[tuple[int, int]] = []
        self._width, self._filled = 1, 0
        self._norms: Profile | None = None
        self._newest: Profile | None = None

    def add(self, record: StepRecord) -> None:
        """Take in one record; a change of the blocks begins the map anew."""
        gains = record.get(GAIN)
        if gains is not None:
            self._add_gains(gains, record.step)
            self._newest = _profile(gains, record.step)
        known = self._norms
        norms = record.get(NORM)
        if norms is None and (known is None or known.metric == PARAMETER_NORM):
            norms = record.get(PARAMETER_NORM)
        if norms is not None:
            self._norms = _profile(norms, record.step)

    @property
    def map(self) -> GainMap | None:
        """The gains so far; ``None`` before the first."""
        count = len(self._spans)
        if not count:
            return None
        return GainMap(
            self._sites,
            tuple(self._spans),
            self._values[:count].copy(),
            self._present[:count].copy(),
            self._width,
            self._newest,
        )

    @property
    def norms(self) -> Profile | None:
        """The newest gradient norms: of the blocks' outputs, or of layers where no blocks are watched."""
        norms = self._norms
        return _by_layer(norms) if norms is not None and norms.metric == PARAMETER_NORM else norms

    def _add_gains(self, reading: Reading, step: int) -> None:
        sites = reading.sites[:MOST_SITES]
        if sites != self._sites:
            self._sites, self._spans, self._width, self._filled = sites, [], 1, 0
            self._values = np.zeros((self._most, len(sites)))
            self._present = np.zeros((self._most, len(sites)), dtype=np.bool_)
        values, present = reading.values[:MOST_SITES].astype(np.float64), reading.present[:MOST_SITES]
        if self._spans and self._filled < self._width:
            last = len(self._spans) - 1
            self._spans[last] = self._spans[last][0], step
            self._keep(last, values, present)
            self._filled += 1
            return
        if len(self._spans) == self._most:
            self._join()
        self._spans.append((step, step))
        self._values[len(self._spans) - 1], self._present[len(self._spans) - 1] = values, present
        self._filled = 1

    def _keep(self, column: int, values: Floats, present: Flags) -> None:
        worse = extremeness(values, present) > extremeness(self._values[column], self._present[column])
        self._values[column][worse] = values[worse]
        self._present[column] |= present

    def _join(self) -> None:
        for column in range(0, self._most, 2):
            into = column // 2
            self._values[into], self._present[into] = self._values[column], self._present[column]
            self._keep(into, self._values[column + 1], self._present[column + 1])
            self._spans[into] = self._spans[column][0], self._spans[column + 1][1]
        del self._spans[self._most // 2 :]
        self._width *= 2


def _profile(reading: Reading, step: int) -> Profile:
    return Profile(reading.metric, step, reading.sites, reading.values.astype(np.float64), np.array(reading.present))


def _by_layer(profile: Profile) -> Profile:
    """Join the norms of a layer's parameters."""
    layers: dict[str, list[float]] = {}
    for site, value, here in zip(profile.sites, profile.values.tolist(), profile.present.tolist(), strict=True):
        norms = layers.setdefault(site.rpartition(".")[0] or site, [])
        if here:
            norms.append(value)
    values = np.array([_joined(norms) for norms in layers.values()])
    present = np.array([bool(norms) for norms in layers.values()])
    return Profile(profile.metric, profile.step, tuple(layers), values, present)


def _joined(norms: list[float]) -> float:
    # math.hypot gives Inf where one is Inf and another NaN; a NaN is what one wants to see.
    return math.nan if any(math.isnan(norm) for norm in norms) else math.hypot(*norms)
