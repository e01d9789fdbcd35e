"""The card that a notebook shows of a run: verdict, issues, loss. Plain HTML, no script, nothing from the network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

from gradflow_export.records.step_record import Issue, Severity
from gradflow_export.report.summary import RunSummary
from gradflow_export.report.trace import Trace

WIDTH, HEIGHT = 240, 48
SHOWN = 5
"""Issues on the card at most."""
_FINE, _GRAVE, _MILD = "#188038", "#c5221f", "#b06000"


def card(summary: RunSummary, place: str, command: str) -> str:
    """Return a run as HTML.

    Args:
        summary: What happened so far.
        place: Where its files are; empty when there are none.
        command: What to run to see more.
    """
    said = summary.judged
    colour = {"bad": _GRAVE, "warn": _MILD}.get(said.tone, _FINE)
    model = "" if summary.info is None else f"{summary.info.model}, {summary.info.size}"
    about = " · ".join(filter(None, [model, f"step {summary.last}" if summary.last else "", place]))
    rest = f"<li>{len(summary.issues) - SHOWN} more</li>" if len(summary.issues) > SHOWN else ""
    listed = "".join(_item(issue) for issue in summary.issues[:SHOWN])
    issues = f'<ul style="margin:6px 0 0;padding-left:18px">{listed}{rest}</ul>' if listed else ""
    return (
        f'<div style="border:1px solid #8884;border-left:4px solid {colour};border-radius:4px;padding:8px 12px;'
        'max-width:860px;font:13px/1.5 system-ui,sans-serif">'
        '<div style="display:flex;justify-content:space-between;gap:16px">'
        f"<div><b>GradFlow: {escape(str(said))}</b>"
        f'<div style="opacity:.7">{escape(about)}</div></div>{sparkline(summary.trace, summary.loss)}</div>{issues}'
        f'<div style="margin-top:6px;opacity:.7">{escape(command)}</div></div>'
    )


def sparkline(trace: Trace, ends: tuple[float, float] | None = None) -> str:
    """Return the loss as a small picture in SVG; empty below two finite points. What is not finite leaves a gap.

    Args:
        trace: The loss over all steps.
        ends: The first and the last loss, as the verdict states them; ``None`` where there are too few to state them.
    """
    finite = [value for value in trace.values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high, last = min(finite), max(finite), max(trace.steps[-1] - trace.steps[0], 1)
    scale = (HEIGHT - 4) / (high - low) if high > low and math.isfinite(high - low) else 0.0
    lines = "".join(
        f'<polyline points="{points}" fill="none" stroke="#1a73e8" stroke-width="1.5"/>'
        for points in _runs(trace, low, scale, WIDTH / last)
    )
    label = "loss" if ends is None else f"loss from {ends[0]:.4g} to {ends[1]:.4g}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" style="flex:none" aria-label="{label}">'
        f"<title>{label}</title>{lines}</svg>"
    )


def _runs(trace: Trace, low: float, scale: float, across: float) -> Iterator[str]:
    points: list[str] = []
    for step, value in [*zip(trace.steps, trace.values, strict=True), (0, math.nan)]:
        if math.isfinite(value):
            points.append(f"{(step - trace.steps[0]) * across:.1f},{HEIGHT - 2 - (value - low) * scale:.1f}")
        elif points:
            yield " ".join(_joined(points))
            points = []


def _joined(points: list[str]) -> Iterable[str]:
    return points if len(points) > 1 else points * 2  # one alone is a dot


def _item(issue: Issue) -> str:
    where, until = issue.layer or "the whole model", "" if issue.open else f", healed at step {issue.healed_step}"
    return (
        f'<li><b style="color:{_colour(issue.severity)}">{issue.issue_type}</b> in <code>{escape(where)}</code> '
        f"{issue.since}{until}: {escape(issue.message)} "
        f'<span style="opacity:.7">{escape(issue.advice)}</span></li>'
    )


def _colour(severity: Severity) -> str:
    return _GRAVE if severity >= Severity.HIGH else _MILD
