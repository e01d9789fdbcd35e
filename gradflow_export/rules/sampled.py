"""How far an estimated value may be from the true one, so that a rule says only what that cannot change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradflow_export.records.catalog import spec
from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.rules.history import History

SURE = 3.0
"""Standard errors within which the true value is taken to lie."""

Floats = npt.NDArray[np.float64]


def margin(record: StepRecord, metric: str, site: str = "") -> float:
    """Return how far a value of a record may be off: 0 where it is exact.

    Args:
        record: Holds the value.
        metric: Its name.
        site: Its site.
    """
    kind = spec(metric)
    error = record.value(kind.error, site) if kind.error else None
    if not error or not np.isfinite(error):
        return 0.0
    value = record.value(metric, site) or 0.0
    return SURE * error * (float(_sizes(np.array(value))) if spec(kind.error).unit == "share" else 1.0)


def off(record: StepRecord, reading: Reading) -> Floats:
    """Return how far each value of a reading may be off: 0 where it is exact. Shape: ``[sites]``."""
    kind = spec(reading.metric)
    errors = record.get(kind.error) if kind.error else None
    if errors is None:
        return np.zeros(len(reading.sites))
    told = errors.as_dict()
    out = SURE * _sizes(np.array([told.get(site) or 0.0 for site in reading.sites]))
    return out * _sizes(reading.values) if spec(kind.error).unit == "share" else out


def margins(history: History, metric: str) -> Floats:
    """Return how far each value in the window of a metric may be off: 0 where it is exact.

    The rule must remember the metric that holds the error.

    Args:
        history: What rules look back at.
        metric: One value per step. Use :func:`site_margins` for many sites.

    Returns:
        Shape: that of ``history.run(metric).values``.
    """
    kind, past = spec(metric), history.run(metric)
    out = np.zeros(len(past.values))
    if kind.error:
        errors = history.run(kind.error)
        known = dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True))
        out = SURE * _sizes(np.array([known.get(step, 0.0) for step in past.steps.tolist()], dtype=np.float64))
        if spec(kind.error).unit == "share":
            out = out * _sizes(past.values)
    return out


def site_margins(history: History, metric: str) -> Floats:
    """Return :func:`margins` of a metric with many sites. Shape: that of ``history.at_sites(metric).values``."""
    kind, past = spec(metric), history.at_sites(metric)
    out = np.zeros(past.values.shape)
    errors = history.at_sites(kind.error) if kind.error else None
    if errors is None or not len(errors.steps):
        return out
    rows = {step: row for row, step in enumerate(errors.steps.tolist())}
    columns = {site: column for column, site in enumerate(errors.sites)}
    mine = [(row, rows[step]) for row, step in enumerate(past.steps.tolist()) if step in rows]
    where = [(column, columns[site]) for column, site in enumerate(past.sites) if site in columns]
    if mine and where:
        (to, at), (column, place) = np.array(mine).T, np.array(where).T
        told = np.where(errors.present, errors.values, 0.0)[np.ix_(at, place)]
        out[np.ix_(to, column)] = SURE * _sizes(told)
    return out * _sizes(past.values) if spec(kind.error).unit == "share" else out


def _sizes(values: npt.NDArray[np.floating]) -> Floats:
    """Return magnitudes, 0 for what is not finite."""
    return np.asarray(np.abs(np.where(np.isfinite(values), values, 0.0)), dtype=np.float64)
