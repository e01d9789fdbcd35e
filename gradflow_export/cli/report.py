"""``gradflow report LOGDIR``: what happened in the runs below a folder. Reads files only; never imports torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gradflow_export.cli.folders import runs_below
from gradflow_export.store import read_run
from gradflow_export.summary import RunSummary


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="what happened in the runs below a folder")
    parser.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--json", action="store_true", help="everything as JSON; NaN and Inf as strings")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    paths = runs_below(args.logdir).values()
    if args.json:
        runs = [{"path": str(path), **summarise(path).as_dict()} for path in paths]
        print(json.dumps({"runs": runs}, indent=2, allow_nan=False))
    else:
        print("\n\n".join(summarise(path).as_text(str(path)) for path in paths))
    return 0


def summarise(path: Path) -> RunSummary:
    """Read one run, record by record, and sum it up.

    Args:
        path: The run's folder.

    Raises:
        StorageError: It holds no run, or a newer version wrote it.
    """
    stored = read_run(path)
    summary = RunSummary(stored.info)
    for record in stored.records:
        summary.add(record)
    return summary
