"""The parts of a diagnostic summary, each from the series that were read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradflow_export.diagnostics.series import GRADIENTS, LOSS, TIMING, UPDATES, Series, SeriesBook
from gradflow_export.diagnostics.stability import WINDOW, converged, improvement, pflug, slope_of_log
from gradflow_export.records.statistics import spread_of
from gradflow_export.records.step_record import number_to_json

_MUCH_RATE, _MUCH_DAMPING = 1.0, 0.5

Numbers = dict[str, Any]


def described(series: Series) -> Numbers | None:
    """Return statistics of one series, JSON-ready: over the whole run, and how it moved over the last steps.

    Returns:
        ``mean``, ``std``, ``min``, ``max``, ``last``, ``count``, ``nonfinite``, and over the last 20 values
        ``variance``, ``cv``, ``change_rate`` and ``trend`` (of the logarithm, per step); ``None`` without a value.
    """
    seen = series.seen
    if not seen.count and not seen.nonfinite:
        return None
    recent = spread_of(*series.last(WINDOW))
    numbers = {
        "mean": seen.mean if seen.count else math.nan, "std": seen.std, "min": seen.low, "max": seen.high,
        "last": seen.last, "variance": recent.variance, "cv": recent.cv, "change_rate": recent.change_rate,
        "trend": recent.trend,
    }  # fmt: skip
    return {**_json(numbers), "count": seen.count, "nonfinite": seen.nonfinite}


def gradient_statistics(book: SeriesBook) -> Numbers:
    """Return the gradients of phase, magnitude and predictions, and the norms over all parameters."""
    norms = ("total_norm", "mean_norm", "std_norm", "max_norm", "min_norm")
    return _each(book, GRADIENTS) | _each(book, {name: f"gradient.{name}" for name in norms})


def loss_analysis(book: SeriesBook) -> Numbers:
    """Return loss, logits, confidence, alignment and components, and how fast the greatest logit grows."""
    names = {
        "logit_min_logit": "logits.min", "logit_mean_logit": "logits.mean", "logit_std_logit": "logits.std",
        "logit_margin": "logits.margin", "log_z": "logits.log_z", "prediction_entropy": "confidence.entropy",
        "accuracy": "alignment.accuracy", "target_margin": "alignment.margin",
    }  # fmt: skip
    steps, high = book["logits.max"].last(WINDOW)
    _, low = book["logits.min"].last(WINDOW)
    drift = slope_of_log(steps, np.maximum(np.abs(high), np.abs(low))) if len(high) == len(low) else math.nan
    return {
        **_each(book, LOSS),
        **_each(book, names),
        "logit_drift": number_to_json(drift),
        "components": _components(book),
    }


def _components(book: SeriesBook) -> Numbers:
    parts = dict(book.components())
    total = sum(abs(series.seen.mean) for series in parts.values())
    return {
        name: {**(described(series) or {}), "share": abs(series.seen.mean) / total if total else None}
        for name, series in parts.items()
    }


def parameter_updates(book: SeriesBook) -> Numbers:
    """Return changes of phase and magnitude, update norms, and whether the run has come to rest."""
    steps, sizes = book["update.total_norm"].last(WINDOW)
    _, losses = book["loss"].last(WINDOW)
    _, norms = book["gradient.total_norm"].last(WINDOW)
    _, cosines = book["gradient.cosine"].last(WINDOW)
    common = min(len(norms), len(cosines))
    turning = pflug(norms[-common:], cosines[-common:]) if common else math.nan
    rest = {
        "update_trend": slope_of_log(steps, sizes),
        "loss_improvement": improvement(losses),
        "pflug_statistic": turning,
    }
    return {
        **_each(book, UPDATES),
        **_each(book, {"total_norm": "update.total_norm", "update_ratio": "update.ratio"}),
        "convergence": {
            **_json(rest),
            "stationary": turning < 0,
            "converged": converged(losses, book["loss"].seen.low),
        },
    }


def performance(book: SeriesBook) -> Numbers:
    """Return times in seconds, passes per second, memory in MB, and how many passes added to gradients."""
    passes, hits = book["runtime.backward_passes"].seen, book["runtime.accumulated_share"].seen
    speed = book["runtime.throughput"].seen
    names = {
        "memory_mb": "runtime.rss", "cuda_memory_mb": "runtime.cuda_allocated",
        "steps_per_second": "runtime.throughput", "overhead": "overhead",
    }  # fmt: skip
    return {
        **_each(book, TIMING),
        **_each(book, names),
        "backward_passes_per_second": speed.last * passes.mean if speed.count and passes.count else None,
        "accumulation_hit_rate": hits.mean if hits.count else None,
    }


def over_time(book: SeriesBook) -> Numbers:
    """Return how the gradients of phase and magnitude go together: across nodes, and from step to step."""
    _, phase = book["phase.gradient"].last(WINDOW)
    _, magnitude = book["magnitude.gradient"].last(WINDOW)
    together = math.nan
    if len(phase) == len(magnitude) >= 8 and (phase > 0).all() and (magnitude > 0).all():
        logs = np.log(phase), np.log(magnitude)
        if all(float(values.std()) > 0 for values in logs):
            together = float(np.corrcoef(*logs)[0, 1])
    pearson, spearman = book["phase.correlation"].seen, book["phase.rank_correlation"].seen
    return {
        "across_nodes": pearson.mean if pearson.count else None,
        "rank_across_nodes": spearman.mean if spearman.count else None,
        "over_time": None if math.isnan(together) else together,
    }


def notes(book: SeriesBook, damped: float | None) -> list[str]:
    """Return rules of thumb that apply; the rules proper are behind the alerts.

    Args:
        book: What was measured.
        damped: Share of the gains of the last sample that are below 1/2, ``None`` without gains.
    """
    out = []
    if damped is not None and damped > _MUCH_DAMPING:
        out.append(
            f"{100 * damped:.0f} % of the transitions between blocks have a gain below 0.5: gradients shrink on their "
            "way back. Compare with gain.depth before you change anything."
        )
    rate, loss = book["learning_rate"].seen.last, book["loss"].seen
    if rate > _MUCH_RATE and loss.nonfinite:
        out.append(f"the loss became NaN or Inf and the learning rate is {rate:g}: too high; try a tenth of it.")
    if book["runtime.accumulated_share"].seen.last == 1.0 and book["runtime.accumulated_share"].seen.count > 1:
        out.append("gradients accumulate over all backward passes: check that optimizer.zero_grad() is called.")
    return out


def _each(book: SeriesBook, names: Mapping[str, str]) -> Numbers:
    return {name: described(book[metric]) for name, metric in names.items()}


def _json(numbers: Mapping[str, float]) -> Numbers:
    return {name: number_to_json(value) for name, value in _finite(numbers.items())}


def _finite(items: Iterable[tuple[str, float]]) -> Iterable[tuple[str, float | None]]:
    """Replace NaN, which here says that there was too little to tell, by ``None``."""
    return ((name, None if math.isnan(value) else value) for name, value in items)
