"""Gradient norms before clipping: what every rule judges, because under clipping the used ones read the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gradflow_export.records.step_record import FloatArray, Reading, StepRecord

_TOTAL, _BEFORE, _LEFT = "gradient.total_norm", "gradient.norm_before_clip", "gradient.clip_scale"
_OF_PARAMETERS = "parameter.gradient_norm"
_ALL = frozenset(["gradient.mean_norm", "gradient.std_norm", "gradient.max_norm", "gradient.min_norm"])
_ROUNDING = 1e-5


def before_clipping(record: StepRecord) -> StepRecord:
    """Return a record with the gradient norms that were there before clipping.

    Args:
        record: As it was written: its norms are those that the optimizer used.

    Returns:
        The same record where nothing was clipped, or where it is not known what was. Otherwise the norm over all
        parameters is ``gradient.norm_before_clip``, and those of parameters are divided by what clipping left of each.
    """
    whole, left = record.value(_BEFORE), record.value(_LEFT)
    if whole is None or left is None or abs(left - 1.0) < _ROUNDING:
        return record
    own = record.get("parameter.clip_scale")
    known = math.isfinite(left) and left > 0
    readings = []
    for reading in record.readings:
        if reading.metric == _TOTAL:
            changed = Reading.run(_TOTAL, whole)
        elif known and reading.metric == _OF_PARAMETERS:
            changed = _divided(reading, _left_of(reading, own, left))
        elif known and own is None and reading.metric in _ALL:
            changed = _divided(reading, np.full(1, left, dtype=np.float32))
        else:
            changed = reading
        readings.append(changed)
    return replace(record, readings=tuple(_summed_up(readings) if known and own is not None else readings))


def _left_of(reading: Reading, own: Reading | None, left: float) -> FloatArray:
    """Return what clipping left of each parameter. Shape: ``[sites]``."""
    if own is None or own.sites != reading.sites:
        return np.full(len(reading.sites), left, dtype=np.float32)
    return np.where(own.present & (own.values > 0), own.values, np.float32(1.0)).astype(np.float32)


def _divided(reading: Reading, by: FloatArray) -> Reading:
    with np.errstate(over="ignore"):
        return Reading(reading.metric, reading.sites, (reading.values / by).astype(np.float32), reading.present)


def _summed_up(readings: list[Reading]) -> list[Reading]:
    """Take mean, spread, greatest and least norm anew from those of the parameters."""
    norms = next((reading for reading in readings if reading.metric == _OF_PARAMETERS), None)
    values = np.zeros(0) if norms is None else norms.values[norms.present].astype(np.float64)
    if not values.size:
        return readings
    with np.errstate(invalid="ignore"):
        numbers = dict(zip(sorted(_ALL), (values.max(), values.mean(), values.min(), values.std()), strict=True))
    return [Reading.run(r.metric, float(numbers[r.metric])) if r.metric in _ALL else r for r in readings]
