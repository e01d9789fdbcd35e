"""Counts of steps that a fixed threshold calls unstable, and signs that a run has come to rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import theil_sen
from gradflow_export.records.step_record import StepRecord
from gradflow_export.rules.sampled import margin

Floats = npt.NDArray[np.float64]

WINDOW = 20
_LARGE_UPDATE, _TURN = 10.0, -0.5


class StabilityCounts:
    """Counts steps, literally as the fixed thresholds say; issues are the rules' business.

    Args:
        thresholds: ``gradient_explosion_threshold``, ``parameter_stagnation_threshold`` and ``loss_spike_threshold``.

    Attributes:
        explosions: Steps whose greatest gradient norm of a parameter is above the threshold, or NaN or Inf.
        stagnations: Measured updates of all parameters together whose norm is below the threshold: what changed from
            one forward pass to the next where that was read, on declared grids, else what the optimizer changed.
        unstable: Measured updates ten times the median of the last twenty, or steps at which the gradient turns round
            (cosine below -0.5) while it grows.
        loss_anomalies: Steps whose loss is NaN or Inf or above the threshold times the loss before.
    """

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._thresholds = thresholds
        self.explosions = self.stagnations = self.unstable = self.loss_anomalies = 0
        self._updates: deque[float] = deque(maxlen=WINDOW)
        self._norm = self._loss = math.nan

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        greatest = record.value("gradient.max_norm")
        if greatest is not None:
            self.explosions += not greatest <= self._thresholds["gradient_explosion_threshold"]
        update = record.value("update.total_norm")
        # Of what is estimated only what its error cannot change is counted.
        off = margin(record, "update.total_norm")
        large = update is not None and self._is_large(update - off)
        passed = record.value("update.change_norm")
        change = (None if update is None else update + off) if passed is None else passed
        if change is not None:
            self.stagnations += change < self._thresholds["parameter_stagnation_threshold"]
        if update is not None:
            self._updates.append(update)
        norm, cosine = record.value("gradient.total_norm"), record.value("gradient.cosine")
        turns = cosine is not None and cosine + margin(record, "gradient.cosine") < _TURN
        turned = norm is not None and turns and norm > self._norm
        self.unstable += large or turned
        self._norm = math.nan if norm is None else norm
        loss = record.value("loss")
        if loss is not None:
            spiked = self._loss > 0 and loss > self._thresholds["loss_spike_threshold"] * self._loss
            self.loss_anomalies += spiked or not math.isfinite(loss)
            self._loss = loss

    def _is_large(self, update: float) -> bool:
        usual = median(self._updates) if len(self._updates) >= 3 else math.inf
        return not math.isfinite(update) or (usual > 0 and update > _LARGE_UPDATE * usual)

    def as_dict(self) -> dict[str, int]:
        """Return the three counts of the JSON export."""
        return {
            "gradient_explosion_count": self.explosions,
            "parameter_stagnation_count": self.stagnations,
            "unstable_updates_count": self.unstable,
        }


def slope_of_log(steps: npt.NDArray[np.int64], values: Floats) -> float:
    """Return the Theil-Sen slope of ``ln |x|`` per step over finite values that are not 0; NaN below two of them.

    Args:
        steps: Shape: ``[n]``.
        values: Shape: ``[n]``. With the greatest logits of a step this is logit drift.
    """
    usable = np.isfinite(values) & (values != 0)
    return theil_sen(steps[usable].astype(np.float64), np.log(np.abs(values[usable])))


def pflug(norms: Floats, cosines: Floats) -> float:
    """Return ``sum_t <g_t, g_{t-1}>`` over a window; below 0 the iterates move about one place.

    Args:
        norms: Gradient norms. Shape: ``[n]``.
        cosines: Cosine with the gradient of the step before. Shape: ``[n]``; the first one is not used.

    Returns:
        NaN for fewer than two steps.

    Source: Pflug 1990; Chee and Toulis 2018, AISTATS, arXiv:1710.06382.
    """
    return float((norms[1:] * norms[:-1] * cosines[1:]).sum()) if len(norms) > 1 else math.nan


def improvement(losses: Floats) -> float:
    """Return by which share of its size the loss fell between the halves of a window; NaN below two losses."""
    half = len(losses) // 2
    if not half or not np.isfinite(losses).all():
        return math.nan
    before, after = float(np.median(losses[:half])), float(np.median(losses[half:]))
    return (before - after) / abs(before) if before else 0.0


def converged(losses: Floats, least: float) -> bool:
    """Return whether the loss lies within 1 % of its least value and falls by less than 0.1 % over the window.

    Args:
        losses: The last losses. Shape: ``[n]``.
        least: Least loss of the whole run.
    """
    gain = improvement(losses)
    return len(losses) >= WINDOW and abs(gain) < 1e-3 and float(np.median(losses)) <= least + 0.01 * abs(least)
