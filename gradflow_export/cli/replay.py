"""``gradflow replay LOGDIR --to wandb``: send finished runs to Weights & Biases. Reads files; never imports torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from gradflow_export.cli.folders import read_newest, runs_below
from gradflow_export.records.step_record import RunInfo
from gradflow_export.storage.reader import Run
from gradflow_export.storage.table import StepTables

FINISH_SECONDS = 600.0
"""How long a run may take to be sent to the end."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("replay", help="send finished runs to Weights & Biases")
    parser.add_argument(
        "logdir", type=Path, help="a run's folder, a folder of runs, or the Parquet files of a W&B run (its artifact)"
    )
    parser.add_argument("--to", choices=["wandb"], required=True, help="where to send them")
    parser.add_argument("--project", default="gradflow", help="W&B project (default: %(default)s)")
    parser.add_argument("--entity", help="W&B entity; your own by default")
    parser.add_argument("--offline", action="store_true", help="write to disk, for a later `wandb sync`")
    parser.add_argument("--alerts", action="store_true", help="also send the alerts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send every run below the folder."""
    tables = StepTables.below(args.logdir)
    if tables:
        send(tables, args.logdir.resolve().stem, args)
        return 0
    runs = runs_below(args.logdir)
    for name, path in runs.items():
        send(read_newest(path), path.resolve().name if name == "." else name, args)
    return 0


def send(stored: Run | StepTables, name: str, args: argparse.Namespace) -> None:
    """Send one run into a W&B run of its own.

    Args:
        stored: The run as it was read back.
        name: Name of the W&B run.
        args: ``project``, ``entity``, ``offline`` and ``alerts``.
    """
    from gradflow_export.writers import WandbWriter

    init = {"project": args.project, "entity": args.entity, "mode": "offline" if args.offline else None}
    writer = WandbWriter(
        rows="own",
        most_alerts=50 if args.alerts else 0,
        name=name,
        settings={"finish_timeout": FINISH_SECONDS},
        **{key: value for key, value in init.items() if value is not None},
    )
    writer.open(stored.info or RunInfo(session="0-0", started=0.0))
    for record in tqdm(stored.records, name, disable=not sys.stderr.isatty(), unit="step"):
        writer.write(record)
    writer.close()
    print(f"{name}: {len(stored.records)} steps sent to {'an offline run' if args.offline else 'W&B'}")
