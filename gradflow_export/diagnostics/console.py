"""The diagnostic report as people read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradflow_export.diagnostics.series import GRADIENTS, LOSS, TIMING, UPDATES, Series, SeriesBook
from gradflow_export.diagnostics.stability import StabilityCounts

_CONSOLE_LOSS = ("total_loss", "confidence_max_confidence", "confidence_target_confidence")
_NAME = 30
_NAMED = 8


def report_lines(book: SeriesBook, counts: StabilityCounts, updates: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report.

    Args:
        book: What was measured. A series without a value says ``no data``.
        counts: What happened.
        updates: The summary of the discrete updates; nodes and parameters that stand out are named.
    """
    backward = book[TIMING["total_backward_pass"]].seen
    passes = book["runtime.backward_passes"].seen
    # Without the loss passes cannot be distinguished: then there was one, at least, for each set of gradients.
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
        *_nodes(updates),
    ]


def _nodes(updates: Mapping[str, Any]) -> list[str]:
    """Return a section about nodes and parameters that stand out, nothing where none does."""
    small = [f"{found['node']} ({100 * found['share']:.0f} % of readings)" for found in updates["small_nodes"]]
    often = updates["nodes"].get("update_frequency", {})
    still = [node for node, share in often.items() if share == 0]
    resting = [f"{site} ({count})" for site, count in updates["stagnant"].items()]
    lines = [
        f"{title}: {some(names)}"
        for title, names in (
            ("Nodes with unusually small gradients", small),
            ("Nodes without a change between forward passes", still),
            ("Parameters that should have changed and did not (measured steps)", resting),
        )
        if names
    ]
    return _section("🔎 NODES", lines) if lines else []


def some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


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
