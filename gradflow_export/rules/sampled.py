"""How far an estimated value may be from the true one, so that a rule says only what that cannot change."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from gradflow_export.records.catalog import spec
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.rules.evidence import Floats, reading_of
from gradflow_export.rules.history import History

SURE = 3.0
"""Standard errors within which the true value is taken to lie."""


def margin(record: StepRecord, metric: str, site: str = "") -> float:
    """Return how far a value of a record may be off: 0 where it is exact.

    Args:
        record: Holds the value.
        metric: Its name.
        site: Its site.
    """
    error = record.value(spec(metric).error, site)
    return 0.0 if error is None else float(_margin(metric, error, record.value(metric, site) or 0.0))


def likely(record: StepRecord, metric: str, site: str = "") -> tuple[float, float, float]:
    """Return the least that a value of a record may be, the value, and the greatest; NaN where it is missing."""
    value, far = record.value(metric, site), margin(record, metric, site)
    return (math.nan, math.nan, math.nan) if value is None else (value - far, value, value + far)


def off(record: StepRecord, reading: Reading) -> Floats:
    """Return how far each value of a reading may be off: 0 where it is exact. Shape: ``[sites]``."""
    told = reading_of(record, spec(reading.metric).error).as_dict()
    return _margin(reading.metric, [told.get(site) or 0.0 for site in reading.sites], reading.values)


def margins(history: History, metric: str) -> Floats:
    """Return how far each value in the window of a metric may be off: 0 where it is exact.

    The rule must remember the metric that holds the error.

    Args:
        history: What rules look back at.
        metric: One value per step. Use :func:`site_margins` for many sites.

    Returns:
        Shape: that of ``history.run(metric).values``.
    """
    past, errors = history.run(metric), history.run(spec(metric).error)
    known = dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True))
    return _margin(metric, [known.get(step, 0.0) for step in past.steps.tolist()], past.values)


def agreement(history: History) -> float:
    """Return the mean cosine between gradients of a long window; of consecutive ones where the path is not known.

    It is not 0 where nothing that the weights did has changed what is asked of them. The rule must remember
    ``gradient.coherence``, ``gradient.cosine`` and their errors.

    Returns:
        0 for fewer than 20 gradients.
    """
    cosines = (history.run("gradient.cosine").values - margins(history, "gradient.cosine"))[-30:]
    long = (history.run("gradient.coherence").values - margins(history, "gradient.coherence"))[-1:]
    return 0.0 if len(cosines) < 20 else float(long[0]) if len(long) else median(cosines)


def site_margins(history: History, metric: str) -> Floats:
    """Return :func:`margins` of a metric with many sites. Shape: that of ``history.at_sites(metric).values``."""
    past, errors = history.at_sites(metric), history.at_sites(spec(metric).error)
    rows = {step: row for row, step in enumerate(errors.steps.tolist())}
    columns = {site: column for column, site in enumerate(errors.sites)}
    mine = [(row, rows[step]) for row, step in enumerate(past.steps.tolist()) if step in rows]
    where = [(column, columns[site]) for column, site in enumerate(past.sites) if site in columns]
    told = np.zeros(past.values.shape)
    if mine and where:
        (to, at), (column, place) = np.array(mine).T, np.array(where).T
        told[np.ix_(to, column)] = np.where(errors.present, errors.values, 0.0)[np.ix_(at, place)]
    return _margin(metric, told, past.values)


def most_at_first(history: History, metric: str) -> Floats:
    """Return the greatest that the first value of each site may have been. Shape: ``[sites]``."""
    past, errors = history.at_sites(metric), history.at_sites(spec(metric).error)
    told = dict(zip(errors.sites, errors.first.tolist(), strict=True))
    return past.first + _margin(metric, [told.get(site, 0.0) for site in past.sites], past.first)


def _margin(metric: str, errors: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
    """Return how far values may be off whose standard errors are known, 0 where one is not. Shape: that of both."""
    error = spec(metric).error
    out = SURE * _sizes(errors)
    return out * _sizes(values) if error and spec(error).unit == "share" else out


def _sizes(values: npt.ArrayLike) -> Floats:
    """Return magnitudes, 0 for what is not finite."""
    return np.asarray(np.abs(np.where(np.isfinite(values), values, 0.0)), dtype=np.float64)


def usual(history: History, gain: float) -> npt.NDArray[np.intp]:
    """Return the places of layers that began with weights of a usual size among those whose steps were read."""
    ratios, gains = history.at_sites("parameter.update_ratio"), history.at_sites("parameter.initial_gain")
    return _places(ratios.sites, gains.sites, gains.first.tobytes(), gain)


@functools.lru_cache(maxsize=8)
def _places(sites: tuple[str, ...], begun: tuple[str, ...], gains: bytes, gain: float) -> npt.NDArray[np.intp]:
    """Return which sites began with a gain of at least so much: rules ask at each record, and it does not change."""
    firsts = np.frombuffer(gains, dtype=np.float32).tolist()
    usual = {site for site, first in zip(begun, firsts, strict=True) if first >= gain}
    found = np.array([index for index, site in enumerate(sites) if site in usual], dtype=np.intp)
    found.setflags(write=False)
    return found


def first_step(history: History, gain: float) -> float:
    """Return the median over these layers of the first update to weight ratio that was read; 0 without any."""
    first = history.at_sites("parameter.update_ratio").first[usual(history, gain)].astype(np.float64)
    first = first[np.isfinite(first)]
    return median(first) if first.size else 0.0


def steps_of_layers(history: History, gain: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the median update to weight ratio over the layers that began with weights of a usual size.

    What begins with zeros or next to them grows by itself, whatever the learning rate. Of ratios that are estimated the
    least that is likely counts.

    Returns:
        Steps and ratios, 0 where nothing was read. Shape of both: ``[readings]``.
    """
    ratios, columns = history.at_sites("parameter.update_ratio"), usual(history, gain)
    values = (ratios.values - site_margins(history, "parameter.update_ratio"))[:, columns].astype(np.float64)
    told = ratios.present[:, columns] & np.isfinite(values)
    counts = told.sum(axis=1)
    # All medians at once: this is asked at each record. What was not read is sorted to the end.
    ordered, row = np.sort(np.where(told, values, np.inf), axis=1), np.arange(len(values))
    if not ordered.size:
        return ratios.steps, np.zeros(len(values))
    low, high = (ordered[row, np.maximum((counts - 1 + odd) // 2, 0)] for odd in (0, 1))
    return ratios.steps, np.where(counts > 0, np.where(counts % 2, low, 0.5 * (low + high)), 0.0)
