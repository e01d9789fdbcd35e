"""``gradflow export LOGDIR --format csv``: every value of a run as a table. Reads files; never imports torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradflow_export.cli.folders import newest_first, read_newest, runs_below
from gradflow_export.errors import StorageError
from gradflow_export.storage.table import FORMATS, write_table


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("export", help="write every value of a run as CSV, Parquet or JSON")
    parser.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--format", choices=list(FORMATS), required=True, help="output format")
    parser.add_argument(
        "--output", type=Path, help="a file, or a folder with one file per run; without it, csv and json are printed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the runs; 2 when there are several where one is wanted.

    Of a folder that was written to more than once, a folder is given every run, and a file or the terminal the newest.
    """
    runs = runs_below(args.logdir)
    if args.output is None:
        return _to_terminal(next(iter(runs.values())), args.format, len(runs))
    one_file = args.output.suffix == f".{args.format}" and not args.output.is_dir()
    if one_file and len(runs) > 1:
        sys.stderr.write(f"gradflow: {args.logdir} holds {len(runs)} runs; give a folder with --output, or one run\n")
        return 2
    if not one_file:
        _make(args.output)
    for name, path in runs.items():
        stem = path.resolve().name if name == "." else name.replace("/", "__")
        stored = [read_newest(path)] if one_file else newest_first(path)
        for place, each in enumerate(stored):
            session = f" (session {each.sessions[-1]})" if len(stored) > 1 else ""
            own = f"{stem}.{each.sessions[-1]}" if place else stem
            target = args.output if one_file else args.output / f"{own}.{args.format}"
            write_table(target, each.records, each.info)
            print(f"{target}: {len(each.records)} steps{session}")
    return 0


def _to_terminal(path: Path, form: str, runs: int) -> int:
    if runs > 1:
        sys.stderr.write(f"gradflow: expected one run, got {runs}; give a folder with --output, or one of them\n")
        return 2
    if form == "parquet":
        sys.stderr.write("gradflow: Parquet cannot be printed; give a file with --output\n")
        return 2
    stored = read_newest(path)
    FORMATS[form](sys.stdout, stored.records, stored.info)
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"--output expects a folder, or a file whose name ends as --format says, got {str(folder)!r}: "
            f"{error.strerror or error}; choose another."
        ) from error
