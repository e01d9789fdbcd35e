"""The diagnostic report as people read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradflow_export.diagnostics.series import GRADIENTS, LOSS, TIMING, UPDATES, Series, SeriesBook
from gradflow_export.diagnostics.stability import StabilityCounts

_CONSOLE_LOSS = ("total_loss", "confidence_max_confidence", "confidence_target_confidence")
_NAME = 30


def report_lines(book: SeriesBook, counts: StabilityCounts) -> list[str]:
    """Return the lines of the report.

    Args:
        book: What was measured. A series without a value says ``no data``.
        counts: What happened.
    """
    backward = book[TIMING["total_backward_pass"]].seen
    passes = book["runtime.backward_passes"].seen
    # Without the loss passes cannot be told apart: then there was one, at least, for each set of gradients.
    total = max(round(passes.mean * passes.count), book["gradient.total_norm"].seen.count)
    return [
        "🔍 BACKWARD PASS DIAGNOSTIC REPORT",
        "=" * 80,
        *_section("📊 GRADIENT STATISTICS", _each(book, GRADIENTS, _ranged)),
        *_section("📉 LOSS ANALYSIS", [_loss(name, book[LOSS[name]]) for name in _CONSOLE_LOSS]),
        *_section("🔧 PARAMETER UPDATES", _each(book, UPDATES, _spread)),
        *_section("⏱️  TIMING ANALYSIS", _each(book, TIMING, _milliseconds)),
        *_section(
            "🚨 STABILITY ALERTS",
            [
                f"Gradient explosions: {counts.explosions}",
                f"Parameter stagnations: {counts.stagnations}",
                f"Unstable updates: {counts.unstable}",
                f"Total backward passes: {total}",
                f"Avg backward pass time: {1e3 * backward.mean:.2f}ms",
            ],
        ),
    ]


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, "-" * 40, *lines]


def _each(book: SeriesBook, names: Mapping[str, str], form: Callable[[Series], str]) -> list[str]:
    return [_line(name, form(book[metric]) if book[metric].seen.count else "no data") for name, metric in names.items()]


def _line(name: str, text: str) -> str:
    return f"{name:<{_NAME}}: {text}"


def _ranged(series: Series) -> str:
    s = series.seen
    return f"{s.mean:.6f} ± {s.std:.6f} (range: {s.low:.6f} - {s.high:.6f})"


def _spread(series: Series) -> str:
    return f"{series.seen.mean:.6f} ± {series.seen.std:.6f}"


def _milliseconds(series: Series) -> str:
    return f"{1e3 * series.seen.mean:.2f}ms ± {1e3 * series.seen.std:.2f}ms"


def _loss(name: str, series: Series) -> str:
    digits = 4 if name == "total_loss" else 3
    seen = series.seen
    return _line(name, f"{seen.last:.{digits}f} (avg: {seen.mean:.{digits}f})" if seen.count else "no data")
