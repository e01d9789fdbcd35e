"""Which numbers of a record go to W&B, and under which keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradflow_export.catalog import CATALOG, CUSTOM_PREFIX, MetricSpec, spec
from gradflow_export.errors import ArgumentError, nearest
from gradflow_export.records import RUN_SITE, FloatArray, Histogram, Reading, StepRecord
from gradflow_export.stats import median

PER_SITE = ("parameter.gradient_norm", "parameter.update_ratio", "block.gain", "activation.dead_share")
MOST_BINS = 32

_HEADLINES = tuple(name for name, known in CATALOG.items() if known.headline and known.kind == "run")
_LOOK, _RERANK = 5, 100
_MOST_SITES = 64
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


@final
class Ranking:
    """Keeps the worst few sites of one metric: changed at a slow pace, so that their curves have no gaps.

    Args:
        metric: A name of the catalogue.
        top: How many sites to keep.
        layers: Patterns of sites that are kept whatever they are worth.
    """

    def __init__(self, metric: str, top: int, layers: Sequence[str]) -> None:
        self._spec, self._top, self._layers = spec(metric), top, tuple(layers)
        self._sites: tuple[str, ...] | None = None
        self._fixed: list[int] = []
        self._chosen: list[int] = []
        self._ever: set[str] = set()
        self._worst: npt.NDArray[np.float64] = np.zeros(0)
        self._readings = 0

    def choose(self, reading: Reading) -> list[int]:
        """Return the numbers of the sites to send, in the order of the reading; those with NaN or Inf come at once."""
        if reading.sites is not self._sites and reading.sites != self._sites:
            self._fixed = [i for i, site in enumerate(reading.sites) if matches(site, self._layers)]
            self._worst, self._readings = np.zeros(len(reading.sites)), 0
        self._sites = reading.sites
        if len(reading.sites) <= self._top:
            return list(range(len(reading.sites)))
        if self._readings % _LOOK == 0:
            np.maximum(self._worst, badness(self._spec, reading), out=self._worst)
        if self._readings % _RERANK == 0:
            self._chosen = self._fixed + self._allow(np.argsort(-self._worst, kind="stable")[: self._top].tolist())
            self._worst = np.zeros_like(self._worst)
        self._readings += 1
        broken = np.flatnonzero(reading.present & ~np.isfinite(reading.values))[: self._top].tolist()
        return sorted({*self._chosen, *self._allow(broken)})

    def _allow(self, numbers: list[int]) -> list[int]:
        """Leave out sites never sent before once very many were: each is a chart of its own."""
        assert self._sites is not None
        allowed = []
        for number in numbers:
            site = self._sites[number]
            if site in self._ever or len(self._ever) < _MOST_SITES:
                self._ever.add(site)
                allowed.append(number)
        return allowed


@final
class Picks:
    """Turns records into rows of numbers.

    Args:
        metrics: Per-site metrics to send.
        top: How many of the worst sites of each.
        layers: Names or patterns of layers that are always sent.

    Raises:
        ArgumentError: A metric is unknown or has no sites; the message names the nearest.
    """

    def __init__(self, metrics: Sequence[str], top: int, layers: Sequence[str]) -> None:
        per_site = {name for name, known in CATALOG.items() if known.kind != "run"}
        for metric in metrics:
            if metric not in per_site:
                raise ArgumentError(
                    f"metrics expects metrics read per layer, got {metric!r}{nearest(metric, per_site)}"
                )
        self._rankings = {metric: Ranking(metric, top, layers) for metric in metrics}
        self._top, self._layers = top, tuple(layers)
        self._drawn: dict[str, set[str]] = {}

    def scalars(self, record: StepRecord) -> dict[str, float]:
        """Return ``{metric or metric/site: value}``; NaN and Inf as they are, missing values absent."""
        out: dict[str, float] = {}
        for name in (*_HEADLINES, *(r.metric for r in record.readings if r.metric.startswith(CUSTOM_PREFIX))):
            value = record.value(name)
            if value is not None:
                out[name] = value
        for metric, ranking in self._rankings.items():
            reading = record.get(metric)
            if reading is not None and reading.sites != (RUN_SITE,):
                values: FloatArray = reading.values
                for number in ranking.choose(reading):
                    if reading.present[number]:
                        out[f"{metric}/{reading.sites[number]}"] = float(values[number])
        return out

    def histograms(self, record: StepRecord, make: Any) -> dict[str, Any]:
        """Return histograms and, beside each, how many entries were NaN or Inf.

        Args:
            record: At most ``top`` sites per metric are taken, the first ones seen, and all that the user chose.
            make: ``wandb.Histogram``.
        """
        out: dict[str, Any] = {}
        for histogram in record.histograms:
            drawn = self._drawn.setdefault(histogram.metric, set())
            if histogram.site not in drawn:
                if len(drawn) >= self._top and not matches(histogram.site, self._layers):
                    continue
                drawn.add(histogram.site)
            key = f"{histogram.metric}/{histogram.site}"
            out[f"{histogram.metric}_nonfinite/{histogram.site}"] = histogram.nonfinite
            bins = few_bins(histogram)
            if bins is not None:
                out[key] = make(np_histogram=bins)
        return out


def few_bins(histogram: Histogram) -> tuple[list[int], list[float]] | None:
    """Return counts and edges of at most 32 bins, neighbours joined; ``None`` where the edges are no scale."""
    edges, counts = histogram.edges, histogram.counts
    if not len(counts) or not np.all(np.isfinite(edges)) or np.any(np.diff(edges) <= 0):
        return None
    width = math.ceil(len(counts) / MOST_BINS)
    starts = np.arange(0, len(counts), width)
    return np.add.reduceat(counts, starts).tolist(), [*edges[starts].tolist(), float(edges[-1])]
