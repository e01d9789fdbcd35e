"""Which numbers of a record go to W&B, and under which keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records.catalog import CATALOG, CUSTOM_PREFIX, MetricSpec, spec
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, Histogram, Reading, StepRecord

RUN_KEYS = (
    "loss", "gradient.total_norm", "gradient.norm_before_clip", "update.ratio", "learning_rate", "gain.depth",
    "policy.entropy",
)  # fmt: skip
"""Numbers of the whole model that are sent by default."""

CHAIN, NO_CHAIN = "block.gain", "parameter.gradient_norm"
"""What is sent per layer by default: of a chain of blocks, and where there is none."""

PER_SITE = ("block.gain", "parameter.gradient_norm", "parameter.update_ratio", "activation.dead_share")
"""Metrics in which a flagged layer is shown: the first that knows it."""

NONFINITE = "gradient.nonfinite"
FLAGGED, MOST_FLAGGED = "flagged", 6
LAYERS = 5
MOST_KEYS, BESIDE = 20, 8
"""Keys of a run by default, and those of them that are always there: ``step``, ``open_issues``, ``read_at``,
``gain_report`` and what ``since_last`` says."""

HISTOGRAM_KEYS = ("histogram/first", "histogram/last")
MOST_BINS = 32

_MOST_CHOICES = 4
_WORST = 1e6


def matches(site: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern names this site or a layer that it belongs to."""
    return any(fnmatchcase(site, pattern) or fnmatchcase(site, f"{pattern}.*") for pattern in patterns)


def badness(known: MetricSpec, reading: Reading) -> npt.NDArray[np.float64]:
    """Say how far each site is from what is good.

    Args:
        known: Description of the metric.
        reading: Its values. Shape: ``[sites]``.

    Returns:
        Shape ``[sites]``: distance in logarithms from the middle of the metric's marks, or from the median where it has
        none; the size of the value on linear scales; -1 where the value is missing and the greatest for NaN and Inf.
    """
    values = np.abs(reading.values.astype(np.float64))
    good = reading.present & np.isfinite(values)
    out = np.full(values.shape, _WORST)
    if known.scale == "log":
        logs = np.log(np.maximum(values, 1e-300), where=good, out=np.zeros_like(values))
        centre = float(np.mean(np.log(known.marks))) if known.marks else median(logs[good]) if any(good) else 0
        out[good] = np.abs(logs[good] - centre)
    else:
        out[good] = values[good]
    out[~reading.present] = -1.0
    return out


def worst(record: StepRecord) -> tuple[float, str] | None:
    """Return how bad the worst layer of a record is, and its name; of gains where there are any, else of norms."""
    for metric in (CHAIN, NO_CHAIN):
        reading = record.get(metric)
        if reading is not None and reading.present.any():
            bad = badness(spec(metric), reading)
            number = int(bad.argmax())
            return float(bad[number]), reading.sites[number]
    return None


@final
class Chosen:
    """The layers of one metric that have curves: evenly spread over depth, and the same in every run of a model.

    Args:
        count: How many: the first, the last, and in between at equal distances.
        layers: Patterns of layers that are chosen besides.
        skip: How many at the beginning are not among them.
    """

    def __init__(self, count: int, layers: Sequence[str], skip: int = 0) -> None:
        self._count, self._layers, self._skip = count, tuple(layers), skip
        self._sites: tuple[str, ...] | None = None
        self._names: frozenset[str] = frozenset()
        self._numbers: list[int] = []
        self._choices = 0

    def numbers(self, sites: tuple[str, ...]) -> list[int]:
        """Return the numbers of the chosen; where none of them is there any more, the choice is made anew."""
        if sites is not self._sites and sites != self._sites:
            self._sites = sites
            if self._names.isdisjoint(sites) and self._choices < _MOST_CHOICES:
                self._choices += 1
                deep = sites[self._skip :] or sites
                evenly = np.linspace(0, len(deep) - 1, min(self._count, len(deep))) if deep else ()
                self._names = frozenset(deep[round(float(number))] for number in evenly)
            wanted = self._names
            self._numbers = [
                number for number, site in enumerate(sites) if site in wanted or matches(site, self._layers)
            ]
        return self._numbers


@final
class Flagged:
    """Layers that a rule or NaN pointed at, at most six, each from then on in one metric that knows it."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, str]] = {}
        self._wanted: list[str] = []

    def values(self, record: StepRecord, shown: Collection[str]) -> dict[str, float]:
        """Return the values of the flagged layers.

        Args:
            record: Its new issues, and NaN or Inf in its readings, flag layers.
            shown: Keys that the record's row has anyway.
        """
        for issue in record.issues:
            if issue.open and issue.layer and issue.layer not in self._wanted:
                self._wanted.append(issue.layer)
        self._wanted = [layer for layer in self._wanted if not self._find(layer, record, shown)]
        for metric in PER_SITE:
            reading = record.get(metric)
            if reading is not None and self.free:
                for number in np.flatnonzero(reading.present & ~np.isfinite(reading.values))[:MOST_FLAGGED].tolist():
                    self._add(metric, reading.sites[number], shown)
        count = record.value(NONFINITE)
        if count:
            self.take(NONFINITE, "")
        values = ((key, record.value(metric, site)) for key, (metric, site) in self._keys.items())
        return {key: value for key, value in values if value is not None}

    @property
    def free(self) -> bool:
        """Whether there is room for another."""
        return len(self._keys) < MOST_FLAGGED

    def has(self, metric: str, site: str) -> bool:
        """Return whether a metric at a site has a key."""
        return (metric, site) in self._keys.values()

    def take(self, metric: str, site: str) -> str | None:
        """Return the key of a metric at a site; ``None`` where it has none and there is no room."""
        key = f"{FLAGGED}/{metric}:{site}" if site else f"{FLAGGED}/{metric}"
        if key not in self._keys and not self.free:
            return None
        self._keys[key] = metric, site
        return key

    def _find(self, layer: str, record: StepRecord, shown: Collection[str]) -> bool:
        """Flag a layer under a metric that knows it, or the first parameter in it; return whether one does."""
        if not self.free:
            return True
        for metric in PER_SITE:
            reading = record.get(metric)
            sites = () if reading is None else reading.sites
            site = layer if layer in sites else next((name for name in sites if name.startswith(f"{layer}.")), None)
            if site is not None:
                self._add(metric, site, shown)
                return True
        return False

    def _add(self, metric: str, site: str, shown: Collection[str]) -> None:
        if f"{metric}/{site}" not in shown:
            self.take(metric, site)


@final
class Picks:
    """Turns records into rows of numbers: by default few enough to be read, and the same in every run of a model.

    Numbers go first: histograms get what they leave of ``MOST_KEYS``.

    Attributes:
        drawn: The histograms that are sent, by metric and site, and their keys.

    Args:
        metrics: Metrics to send in place of the default ones: of the whole model, or per layer.
        top: How many layers of each metric that is read per layer.
        layers: Names or patterns of layers that are always sent.

    Raises:
        ArgumentError: A metric is unknown; the message names the nearest.
    """

    def __init__(self, metrics: Sequence[str] | None = None, top: int = LAYERS, layers: Sequence[str] = ()) -> None:
        for metric in metrics or ():
            if metric not in CATALOG:
                raise ArgumentError(f"metrics expects names of metrics, got {metric!r}{nearest(metric, CATALOG)}")
        self._default, self._top, self._layers = metrics is None, top, tuple(layers)
        self._run = tuple(name for name in metrics or RUN_KEYS if CATALOG[name].kind == "run")
        named = (name for name in metrics or () if CATALOG[name].kind != "run")
        self._chosen = {metric: self._choose(metric) for metric in named}
        # What the user asked for by name is sent, however much it is.
        self._limited = self._default and top <= LAYERS and not layers
        self._numbers: set[str] = set()
        self.drawn: dict[tuple[str, str], str] = {}
        self._settled = False
        self._flagged = Flagged()

    def begin(self, blocks: Sequence[str]) -> None:
        """Settle which metric is sent per layer by default; without blocks the first record settles it.

        Args:
            blocks: Names of the blocks of the run; empty where none are known yet.
        """
        if self._default and blocks:
            self._chosen = {CHAIN: self._choose(CHAIN)}

    def _choose(self, metric: str) -> Chosen:
        # The first block of a chain has no gain: that is from one block to the next.
        return Chosen(self._top, self._layers, skip=int(metric == CHAIN))

    def scalars(self, record: StepRecord) -> dict[str, float]:
        """Return ``{metric or metric/site: value}``; NaN and Inf as they are, missing values absent."""
        out: dict[str, float] = {}
        for name in (*self._run, *(r.metric for r in record.readings if r.metric.startswith(CUSTOM_PREFIX))):
            value = record.value(name)
            if value is not None:
                out[name] = value
        if self._default and not self._chosen:
            metric = NO_CHAIN if record.get(CHAIN) is None else CHAIN
            self._chosen = {metric: self._choose(metric)}
        shown = set(out)
        for metric, chosen in self._chosen.items():
            reading = record.get(metric)
            if reading is not None and reading.sites != (RUN_SITE,):
                for number in chosen.numbers(reading.sites):
                    key = f"{metric}/{reading.sites[number]}"
                    shown.add(key)
                    if reading.present[number]:
                        out[key] = float(reading.values[number])
        self._numbers.update(key for key in shown if not key.startswith(CUSTOM_PREFIX))
        out.update(self._flagged.values(record, shown))
        return out

    def histograms(self, record: StepRecord, make: Any) -> dict[str, Any]:
        """Return histograms: the first and the last of one metric, and those of layers that the user chose.

        Args:
            record: Where a drawn histogram leaves NaN or Inf out, their number has a key from then on.
            make: ``wandb.Histogram``.

        Returns:
            Histograms and numbers by key; ``None`` for one whose edges are no scale, or that has made room for numbers.
        """
        room = MOST_KEYS - BESIDE - len(self._numbers) if self._limited else len(HISTOGRAM_KEYS)
        out: dict[str, Any] = {}
        if not self._settled and record.histograms:
            self._settled = True
            first = record.histograms[0]
            last = [histogram for histogram in record.histograms if histogram.metric == first.metric][-1]
            for histogram, key in zip((first, last), HISTOGRAM_KEYS, strict=True):
                self.drawn.setdefault((histogram.metric, histogram.site), key)
        while len(self.drawn) > max(room, 0):
            out[self.drawn.popitem()[1]] = None
        for histogram in record.histograms:
            if (histogram.metric, histogram.site) in self.drawn:
                key = self.drawn[histogram.metric, histogram.site]
            elif matches(histogram.site, self._layers):
                key = f"{histogram.metric}/{histogram.site}"
            else:
                continue
            broken = f"{histogram.metric}_nonfinite"
            wanted = histogram.nonfinite or self._flagged.has(broken, histogram.site)
            if wanted and (flag := self._flagged.take(broken, histogram.site)) is not None:
                out[flag] = histogram.nonfinite
            bins = few_bins(histogram)
            out[key] = None if bins is None else make(np_histogram=bins)
        return out


def few_bins(histogram: Histogram) -> tuple[list[int], list[float]] | None:
    """Return counts and edges of at most 32 bins, neighbours joined; ``None`` where the edges are no scale."""
    edges, counts = histogram.edges, histogram.counts
    if not len(counts) or not np.all(np.isfinite(edges)) or np.any(np.diff(edges) <= 0):
        return None
    width = math.ceil(len(counts) / MOST_BINS)
    starts = np.arange(0, len(counts), width)
    return np.add.reduceat(counts, starts).tolist(), [*edges[starts].tolist(), float(edges[-1])]
