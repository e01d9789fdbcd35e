"""What rules may look back at: bounded windows of chosen metrics, filled record by record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import Facts
from gradflow_export.records.step_record import RUN_SITE, RUN_SITES, BoolArray, FloatArray, Reading, StepRecord


class RunSeries:
    """The past of one run-level metric: every recent value, a thinned view of the whole run, and its extremes.

    Non-finite values stay in the windows; ``first``, ``low`` and ``high`` concern finite ones. A missing value leaves
    no trace.
    """

    def __init__(self, window: int, thinned: int = 256) -> None:
        self._window, self._thinned = window, thinned
        self._steps = np.zeros(2 * window, dtype=np.int64)
        self._values = np.zeros(2 * window, dtype=np.float64)
        self._end = 0
        self._whole = np.zeros((thinned, 2))
        self._kept = 0
        self._stride = 1
        self.count = 0
        self.first = math.nan
        self.low = math.inf
        self.high = -math.inf

    def add(self, step: int, value: float) -> None:
        """Append one value; the oldest leaves the window when it is full."""
        if self._end == 2 * self._window:
            keep = slice(self._window + 1, None)
            self._steps[: self._window - 1] = self._steps[keep]
            self._values[: self._window - 1] = self._values[keep]
            self._end = self._window - 1
        self._steps[self._end], self._values[self._end] = step, value
        self._end += 1
        if self.count % self._stride == 0:
            self._whole[self._kept] = step, value
            self._kept += 1
            if self._kept >= self._thinned:
                half = self._whole[::2].copy()
                self._kept = len(half)
                self._whole[: self._kept] = half
                self._stride *= 2
        self.count += 1
        if math.isfinite(value):
            self.first = value if math.isnan(self.first) else self.first
            self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Recent steps, oldest first. Shape: ``[<= window]``."""
        return self._steps[max(0, self._end - self._window) : self._end]

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """Recent values, oldest first. Shape: ``[<= window]``."""
        return self._values[max(0, self._end - self._window) : self._end]

    @property
    def last(self) -> float:
        """The newest value, NaN when there is none."""
        return float(self._values[self._end - 1]) if self._end else math.nan

    def whole(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return evenly thinned steps and values of the whole run. Shape of both: ``[< thinned]``."""
        pairs = self._whole[: self._kept].copy()
        return pairs[:, 0], pairs[:, 1]

    def all(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return steps and values of the whole run, thinned but for the recent ones."""
        begin, whole = max(0, self._end - self._window), self._whole[: self._kept]
        early = whole[whole[:, 0] < self._steps[begin]]
        return (
            np.concatenate((early[:, 0].astype(np.int64), self._steps[begin : self._end])),
            np.concatenate((early[:, 1], self._values[begin : self._end])),
        )


class SiteSeries:
    """The recent past of one metric at every site it was ever read at (at most ``limit`` of them).

    Attributes:
        sites: Names of the columns, in order of first appearance.
        first: The first value that arrived at each site, NaN where none has. Shape: ``[len(sites)]``.
        left: Step of the last reading that left the window, 0 where none has.
    """

    def __init__(self, window: int, limit: int = 100_000) -> None:
        self._window, self._limit = window, limit
        self.sites: tuple[str, ...] = ()
        self._columns: dict[str, int] = {}
        self._steps = np.zeros(2 * window, dtype=np.int64)
        self._values: FloatArray = np.zeros((2 * window, 0), dtype=np.float32)
        self._present: BoolArray = np.zeros((2 * window, 0), dtype=np.bool_)
        self.first = self._high = np.zeros(0, dtype=np.float32)
        self._waiting = 0
        self._end = self.left = 0

    def add(self, step: int, reading: Reading) -> None:
        """Append one reading; sites it lacks are missing in this row, sites it adds are missing in earlier rows."""
        if reading.sites is not self.sites and reading.sites != self.sites:
            self._widen(reading.sites)
        if self._end == 2 * self._window:
            keep = slice(self._window + 1, None)
            self._high = np.fmax(self._high, np.fmax.reduce(self._values[: self._window + 1]))
            for array in (self._steps, self._values, self._present):
                array[: self._window - 1] = array[keep]
            self._end = self._window - 1
        if self._end >= self._window:
            self.left = int(self._steps[self._end - self._window])
        row, self._steps[self._end] = self._end, step
        if reading.sites == self.sites:
            self._values[row], self._present[row] = reading.values, reading.present
        else:
            columns = [self._columns[site] for site in reading.sites]
            self._values[row], self._present[row] = 0.0, False
            self._values[row, columns], self._present[row, columns] = reading.values, reading.present
        if self._waiting:
            new = self._present[row] & np.isnan(self.first)
            self.first[new] = self._values[row][new]
            self._waiting = int(np.isnan(self.first).sum())
        self._end += 1

    def _widen(self, sites: tuple[str, ...]) -> None:
        new = tuple(site for site in sites if site not in self._columns)
        if not new:
            return
        if len(self.sites) + len(new) > self._limit:
            self.sites, self._columns, self._end, new = (), {}, 0, sites
            self._values, self._present = self._values[:, :0], self._present[:, :0]
            self.first, self._high = self.first[:0], self._high[:0]
        self._columns.update({site: len(self.sites) + index for index, site in enumerate(new)})
        self.sites += new
        pad = ((0, 0), (0, len(new)))
        self._values, self._present = np.pad(self._values, pad), np.pad(self._present, pad)
        self.first = np.pad(self.first, (0, len(new)), constant_values=np.nan)
        self._high = np.pad(self._high, (0, len(new)))
        self._waiting += len(new)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps, oldest first. Shape: ``[<= window]``."""
        return self._steps[max(0, self._end - self._window) : self._end]

    @property
    def values(self) -> FloatArray:
        """Values, oldest first; 0 where missing. Shape: ``[<= window, len(sites)]``."""
        return self._values[max(0, self._end - self._window) : self._end]

    @property
    def high(self) -> FloatArray:
        """The greatest value that ever arrived at each site, 0 where none was greater. Shape: ``[len(sites)]``."""
        return np.fmax(self._high, np.fmax.reduce(self._values[: self._end], initial=0.0))

    @property
    def present(self) -> BoolArray:
        """False where nothing arrived. Shape: ``[<= window, len(sites)]``."""
        return self._present[max(0, self._end - self._window) : self._end]


def unread(steps: npt.NDArray[np.int64], step: int) -> int:
    """Return how many steps lie between a step and the last before it that was read; 0 where none is known."""
    return int((step - 1 - steps[steps < step][-1:]).sum())


def unread_at(readings: SiteSeries, site: str, step: int) -> int:
    """Return for how many steps a parameter may have rested up to one that was read, where it is not known to rest."""
    here = readings.present[readings.steps == step, [*readings.sites].index(site)]
    return unread(readings.steps, step) + int((~here).sum())  # without an optimizer, the first step is not known


@dataclass
class Kind:
    """Records in which the same was read.

    Attributes:
        rules: Places of the rules that look at them.
        last: Step of the last that was judged, 0 before the first.
        clean: Places of the rules that found nothing in one of them.
    """

    rules: tuple[int, ...]
    last: int = 0
    clean: set[int] = field(default_factory=set)


class Kinds:
    """The kinds of records there were: few, because what is read together is due together.

    Args:
        judged: The metrics and facts that each rule looks at.
        most: Kinds that are remembered; the oldest goes first.
    """

    def __init__(self, judged: Sequence[frozenset[str]], most: int = 64) -> None:
        self._judged, self._most = judged, most
        self._kinds: dict[tuple[str, ...], Kind] = {}

    def of(self, record: StepRecord) -> Kind:
        """Return what is known of records like this one."""
        names = (*record.metrics, *record.facts)
        if names not in self._kinds:
            if len(self._kinds) >= self._most:
                del self._kinds[next(iter(self._kinds))]
            each = enumerate(self._judged)
            self._kinds[names] = Kind(tuple(place for place, judged in each if not judged.isdisjoint(names)))
        return self._kinds[names]

    def last(self, wanted: frozenset[str], record: StepRecord) -> int:
        """Return the last step before a record in which the same was read of what is wanted; 0 where none is known.

        What was never read before may be there because of what was found, and tells nothing.
        """
        kinds = [(wanted.intersection(names), kind.last) for names, kind in self._kinds.items() if kind.last]
        read = wanted.intersection((*record.metrics, *record.facts)).intersection(chain(*(names for names, _ in kinds)))
        return max((last for names, last in kinds if read and read <= names), default=0)

    def usual(self, place: int) -> frozenset[str]:
        """Return what is read in records in which a rule finds nothing; the rest may be there because of a finding."""
        return frozenset(chain.from_iterable(names for names, kind in self._kinds.items() if place in kind.clean))

    def seldom(self, place: int) -> bool:
        """Return whether a rule does not look at every record."""
        return not all(place in kind.rules for kind in self._kinds.values())


class History:
    """Bounded windows of the metrics and facts that rules asked to remember; nothing grows with the number of steps.

    Args:
        metrics: Names of metrics and facts to keep; all others pass by.
        window: Evaluations kept of a run-level metric.
        site_window: Evaluations kept of a metric with many sites.

    Attributes:
        begun: Steps that were completed before the first record, where training was resumed.
        seen: Steps since then. How long a model trained before is not known, or whether it is the same one.
        ended: Whether the run is over, so that nothing is yet to come.
    """

    def __init__(self, metrics: Iterable[str], window: int = 128, site_window: int = 16) -> None:
        self._metrics = frozenset(metrics)
        self._runs: defaultdict[str, RunSeries] = defaultdict(partial(RunSeries, window))
        self._sites: defaultdict[str, SiteSeries] = defaultdict(partial(SiteSeries, site_window))
        self.begun = self.seen = 0
        self.ended = False

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        self.begun = self.begun if self.seen else record.step - 1
        self.seen = record.step - self.begun
        for metric, reading in record.metrics.items():
            if metric not in self._metrics:
                continue
            if reading.number is not None:
                self.run(metric).add(record.step, reading.number)
            elif reading.sites != RUN_SITES:
                self.at_sites(metric).add(record.step, reading)
        for name, facts in record.facts.items():
            if name in self._metrics:
                self._add_facts(name, facts, record.step)

    def _add_facts(self, name: str, facts: Facts, step: int) -> None:
        if tuple(facts) != RUN_SITES:
            self.at_sites(name).add(step, Reading.of(name, tuple(facts), list(facts.values())))
        elif (value := facts[RUN_SITE]) is not None:
            self.run(name).add(step, float(value))

    def last_read(self, names: Iterable[str], step: int) -> int:
        """Return the last step before one in which some of what is remembered was read; else the loss is asked."""
        known = self._metrics.intersection(names) or ("loss",)
        steps = [
            int(past[past < step][-1:].sum())
            for name in known
            for past in (self.run(name).all()[0], np.append(self.at_sites(name).left, self.at_sites(name).steps))
        ]
        return max(*steps, min(self.begun, step - 1))

    def run(self, metric: str) -> RunSeries:
        """Return the past of a run-level metric; empty when it never arrived."""
        return self._runs[metric]

    def at_sites(self, metric: str) -> SiteSeries:
        """Return the past of a metric with many sites; empty when it never arrived."""
        return self._sites[metric]
