"""A run's summary as text for a terminal: the verdict, what is wrong, then the numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.statistics import Welford
from gradflow_export.records.step_record import Issue, RunInfo

if TYPE_CHECKING:
    from gradflow_export.report.summary import RunSummary

SHORT = 1000
"""Steps up to which the dense start has much to do with the share of the time that watching took."""


def as_lines(summary: RunSummary, title: str) -> list[str]:
    """Return a summary as lines for a terminal, problems before metrics.

    Args:
        summary: What happened in a run.
        title: First words of the first line, such as the log directory.
    """
    info = summary.info
    model = f"  {info.model}, {info.size}{_now_trained(summary, info)}" if info and info.model else ""
    span = (
        f"steps {summary.first} to {summary.last}, {summary.steps} record{'s' * (summary.steps > 1)}"
        if summary.steps
        else "no step recorded"
    )
    if summary.steps and not summary.course.stepped:
        span = "no optimizer step was seen"
    if summary.spacing > 1:
        span += f"; to keep to the budget, at times one of {summary.spacing:.0f}"
    if summary.overhead is not None:
        span += f"; overhead {summary.overhead:.1%} of the time of all steps"
        span += " (the first 100 are recorded densely)" if summary.last <= SHORT else ""
    lines = [f"{title}{model}", f"  {summary.verdict}", f"  {span}"]
    for group in summary.groups:
        lines += issue_lines(group.head, group.also)
    if summary.left_out:
        lines.append(f"  {summary.left_out} older healed issues are not listed")
    for issue in summary.ignored:
        until = "" if issue.open else f", healed at step {issue.healed_step}"
        where = f"{issue.layer or 'the whole model'}{f' and {n} more' if (n := len(issue.layers) - 1) else ''}"
        lines.append(f"  ignored  {issue.issue_type} in {where} since step {issue.step}{until}")
    pattern = summary.flow_pattern
    if pattern is not None:
        lines.append(f"  gradient flow: {pattern}")
    width = max(22, *(len(name) + 1 for name in summary.headline)) if summary.headline else 0
    if summary.headline:
        lines.append(f"  {'metric':<{width}}{'last':>12}{'mean':>12}{'min':>12}{'max':>12}  unit")
    for name, seen in sorted(summary.headline.items()):
        numbers = "".join(f"{value:>12.4g}" for value in statistics(seen).values())
        extra = f"  ({seen.nonfinite} NaN or Inf)" if seen.nonfinite else ""
        extra += _seldom(summary, name, seen)
        lines.append(f"  {name:<{width}}{numbers}  {CATALOG[name].unit}{extra}")
    return lines


def statistics(seen: Welford) -> dict[str, float]:
    """Return last, mean, least and greatest of the finite numbers; NaN where there was none."""
    if not seen.count:
        return {"last": seen.last, "mean": math.nan, "min": math.nan, "max": math.nan}
    return {"last": seen.last, "mean": seen.mean, "min": seen.low, "max": seen.high}


def _now_trained(summary: RunSummary, info: RunInfo) -> str:
    """Say how many parameters train now, where it is another number than when watching began."""
    trained, entries = summary.trained or (info.parameters, info.entries)
    return f"; at the end {trained:,} train" if entries == info.entries and trained != info.parameters else ""


def _seldom(summary: RunSummary, name: str, seen: Welford) -> str:
    """Say of which steps a row is, where that is less than half of them or not up to the last."""
    count, last = seen.count + seen.nonfinite, summary.read[name]
    taken = summary.course.steps
    said = [f"read at {count} of {taken} steps"] if 2 * count < taken else []
    said += [f"last read at step {last}"] if last < max(summary.read.values()) else []
    return f"  ({', '.join(said)})" if said else ""


def issue_lines(issue: Issue, also: str = "") -> list[str]:
    """Return an issue as lines for a terminal: what, where, since when, the numbers, its consequences, what to do.

    Args:
        issue: What is wrong.
        also: What it explains, in words.
    """
    where, until = issue.layer or "the whole model", "" if issue.open else f", healed at step {issue.healed_step}"
    lines = [
        f"  [{issue.severity.name}] {issue.issue_type} in {where} {issue.since}{until}",
        f"    evidence {issue.message}",
        f"    value    {issue.value:.4g}, threshold {issue.threshold:.4g}",
    ]
    if len(issue.layers) > 1:
        lines.append(f"    layers   {', '.join(issue.layers)}")
    if also:
        lines.append(f"    also     {also}")
    return [*lines, f"    fix      {issue.advice}"]
