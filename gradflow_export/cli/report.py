"""``gradflow report LOGDIR``: what happened in the runs below a folder. Reads files only; never imports torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradflow_export.catalog import CATALOG
from gradflow_export.records import Issue, RunInfo, StepRecord, info_to_json, issue_to_json, number_to_json
from gradflow_export.stats import Welford
from gradflow_export.store import find_runs, read_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="what happened in the runs below a folder")
    parser.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--json", action="store_true", help="everything as JSON; NaN and Inf as strings")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class RunReport:
    """One run, summed up.

    Attributes:
        path: The run's folder.
        info: What was known at its start, ``None`` where the file does not say.
        steps: How many steps were recorded.
        first: The first recorded step, 0 when there is none.
        last: The last recorded step, 0 when there is none.
        headline: Statistics of each headline metric that was recorded.
        issues: Each issue once, as it stood at the end; worst first, then by step.
    """

    path: Path
    info: RunInfo | None
    steps: int
    first: int
    last: int
    headline: dict[str, Welford]
    issues: tuple[Issue, ...]


def run(args: argparse.Namespace) -> int:
    """Print the report; 2 when there is no run to report on."""
    reports = [summarise(path) for path in find_runs(args.logdir).values()] if args.logdir.is_dir() else []
    if not reports:
        why = "holds no gradflow run" if args.logdir.is_dir() else "is not a folder"
        sys.stderr.write(f"gradflow: {args.logdir} {why}; give the logdir of an Exporter, such as runs/\n")
        return 2
    if args.json:
        print(json.dumps({"runs": [as_json(report) for report in reports]}, indent=2, allow_nan=False))
    else:
        print("\n\n".join(as_text(report) for report in reports))
    return 0


def summarise(path: Path) -> RunReport:
    """Read one run and sum it up.

    Args:
        path: The run's folder.
    """
    stored = read_run(path)
    records: Sequence[StepRecord] = stored.records
    headline: dict[str, Welford] = {}
    issues: dict[tuple[str, str, int], Issue] = {}
    for record in records:
        for reading in record.readings:
            value = record.value(reading.metric)
            if value is not None and reading.metric in CATALOG and CATALOG[reading.metric].headline:
                headline.setdefault(reading.metric, Welford()).add(value)
        issues.update((issue.key, issue) for issue in record.issues)
    ordered = sorted(issues.values(), key=lambda issue: (-issue.severity, issue.step))
    first, last = (records[0].step, records[-1].step) if records else (0, 0)
    return RunReport(path, stored.info, len(records), first, last, headline, tuple(ordered))


def as_json(report: RunReport) -> dict[str, Any]:
    """Return the report ready for ``json.dumps(..., allow_nan=False)``; NaN and the infinities are strings."""
    return {
        "path": str(report.path),
        "info": None if report.info is None else info_to_json(report.info),
        "steps": {"count": report.steps, "first": report.first, "last": report.last},
        "headline": {
            name: {key: number_to_json(value) for key, value in _statistics(seen).items()}
            | {"nonfinite": seen.nonfinite}
            for name, seen in sorted(report.headline.items())
        },
        "issues": [issue_to_json(issue) for issue in report.issues],
    }


def as_text(report: RunReport) -> str:
    """Return the report as lines for a terminal."""
    info = report.info
    model = f"  {info.model}, {info.parameters:,} parameters" if info and info.model else ""
    span = f"steps {report.first} to {report.last}, {report.steps} recorded" if report.steps else "no step recorded"
    lines = [f"{report.path}{model}", f"  {span}"]
    if report.headline:
        lines.append(f"  {'metric':<22}{'last':>12}{'mean':>12}{'min':>12}{'max':>12}  unit")
    for name, seen in sorted(report.headline.items()):
        numbers = "".join(f"{value:>12.4g}" for value in _statistics(seen).values())
        extra = f"  ({seen.nonfinite} NaN or Inf)" if seen.nonfinite else ""
        lines.append(f"  {name:<22}{numbers}  {CATALOG[name].unit}{extra}")
    lines.append(f"  {len(report.issues) or 'no'} issue{'' if len(report.issues) == 1 else 's'}")
    for issue in report.issues:
        where, until = issue.layer or "the whole model", "" if issue.open else f", gone at step {issue.healed_step}"
        lines += [
            f"  [{issue.severity.name}] {issue.issue_type} in {where} since step {issue.step}{until}",
            f"    seen   {issue.message}",
            f"    value  {issue.value:.4g}, threshold {issue.threshold:.4g}",
            f"    do     {issue.advice}",
        ]
        if len(issue.layers) > 1:
            lines.insert(-1, f"    layers {', '.join(issue.layers)}")
    return "\n".join(lines)


def _statistics(seen: Welford) -> dict[str, float]:
    """Return last, mean, least and greatest; NaN where no finite number was seen."""
    if not seen.count:
        return {"last": seen.last, "mean": math.nan, "min": math.nan, "max": math.nan}
    return {"last": seen.last, "mean": seen.mean, "min": seen.low, "max": seen.high}
