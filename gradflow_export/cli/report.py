"""``gradflow report LOGDIR``: what happened in the runs below a folder. Reads files only; never imports torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradflow_export.cli.console import show
from gradflow_export.cli.folders import runs_below, runs_in
from gradflow_export.records.issues import Severity
from gradflow_export.records.lost import LostSteps
from gradflow_export.report.summary import RunSummary
from gradflow_export.storage.reader import Run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="print a report of the runs in a folder")
    parser.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with NaN and Inf as strings")
    failing = (
        "exit with status 1 if an open issue has at least this severity; by default issues do not change the status"
    )
    choices = [each.name for each in Severity if each]
    parser.add_argument("--fail-on", type=str.upper, choices=choices, help=failing)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 where a run has an open issue as severe as ``--fail-on`` says, else 0."""
    stored = [(path, each) for path in runs_below(args.logdir).values() for each in runs_in(path)]
    found = [(path, each, summarise(each)) for path, each in stored]
    if args.json:
        runs = [{"path": str(path), **_kept(each), **summary.as_dict()} for path, each, summary in found]
        print(json.dumps({"runs": runs}, indent=2, allow_nan=False))
    else:
        show("\n\n".join("\n".join([summary.as_text(str(path)), *_notes(each)]) for path, each, summary in found))
    if args.fail_on is None:
        return 0
    still = [issue.severity for *_, summary in found for issue in summary.issues if issue.open]
    return int(max(still, default=Severity.INFO) >= Severity[args.fail_on])


def summarise(stored: Run) -> RunSummary:
    """Sum a run up, record by record, and what its files say is missing."""
    summary = RunSummary(stored.info)
    for record in stored.records:
        summary.add(record)
    unwritten = {"": sum(gap.steps for gap in stored.gaps)}
    summary.lost_steps = LostSteps(summary.lost_steps.dropped, unwritten, None if stored.closed else summary.last)
    return summary


def _kept(stored: Run) -> dict[str, Any]:
    return {
        "sessions": list(stored.sessions),
        "beside": list(stored.beside),
        "replaced": list(stored.replaced),
        "closed": stored.closed,
        "missing": [{"first": g.first, "last": g.last, "steps": g.steps, "reason": g.reason} for g in stored.gaps],
    }


def _notes(stored: Run) -> Iterator[str]:
    if stored.beside:
        several = f"{len(stored.beside) + 1} runs wrote to this folder at the same time"
        yield f"  note   {several}; this is session {stored.sessions[-1]}. Give each its own logdir."
    if not stored.closed:
        yield "  note   not closed: the run goes on, or its process was killed, which costs at most its last second, or"
        yield "         its disk was full to the end."
    if stored.replaced:
        again = f"the folder was written to again from step {stored.records.steps[0] if len(stored.records) else 1} on"
        yield f"  note   {again}: this is session {stored.sessions[-1]}; those before it have a report each."
    for gap in stored.gaps:
        yield f"  note   could not be written: {gap}"
