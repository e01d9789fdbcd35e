"""What watching costs: the same training step with and without each instrument, side by side in one run.

    python benchmarks/overhead.py                      # the table
    python benchmarks/overhead.py --workload mlp --instrument gradflow --json

Two equal models take turns, one step each: a bare one and a watched one, so that both see the same machine; each row is
measured in a process of its own. The clock is the CPU time of the training thread (``thread``); other threads of the
process and its helper processes are added for ``process``. Ratios are of means, so that sampled steps count in full. An
exporter is timed after its dense start (the first 100 steps), over a whole cycle of its intervals; ``startup_ms`` is
what the dense start added per step. ``nothing`` is the A/A row: two bare models. ``x ours`` compares instruments that
read at every step: their added time as a multiple of that of ``gradflow_every_step``. Instruments that need a package
which is not installed are left out, and that is said; ``pip install -e .[benchmarks]`` brings them all.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Row, apart, measure
from workloads import workloads

from instruments import INSTRUMENTS

YARDSTICK = "gradflow_every_step"


def measure_by_name(workload: str, instrument: str, steps: int | None, *, quiet: bool) -> Row:
    """Time one instrument on one workload, in this process."""
    program = next(w for w in workloads() if w.name == workload)
    chosen = next(i for i in INSTRUMENTS if i.name == instrument)
    count = steps or (program.steps if chosen.dense_start else program.rival_steps)
    return measure(program, chosen, count, quiet=quiet)


def compare(rows: list[Row]) -> list[Row]:
    """Fill in ``times_ours``."""
    ours = {row.workload: row.added_ms for row in rows if row.instrument == YARDSTICK}
    often = {instrument.name for instrument in INSTRUMENTS if instrument.every_step}
    return [
        dataclasses.replace(row, times_ours=round(row.added_ms / ours[row.workload], 2))
        if row.instrument in often and ours.get(row.workload, 0) > 0
        else row
        for row in rows
    ]


def table(rows: list[Row]) -> str:
    """Return the rows for people."""
    titles = f"{'thread':>8}{'process':>9}{'wall':>8}{'added ms':>10}{'x ours':>8}{'B/step':>9}{'MB':>7}{'±':>8}"
    lines = [f"{'workload':<9}{'instrument':<23}{titles}"]
    for r in rows:
        times = "" if r.times_ours is None else f"{r.times_ours:.2f}"
        lines.append(
            f"{r.workload:<9}{r.instrument:<23}{r.thread_ratio:>8.3f}{r.process_ratio:>9.3f}{r.wall_ratio:>8.3f}"
            f"{r.added_ms:>10.2f}{times:>8}{r.bytes_per_step:>9}{r.memory_mb:>7.0f}{r.noise:>8.3f}"
        )
    return "\n".join(lines)


def rows_of(programs: list[str], names: list[str], steps: int | None = None) -> list[Row]:
    """Measure instruments on workloads; those whose package is missing are left out, and that is said."""
    chosen = [instrument for instrument in INSTRUMENTS if instrument.name in names]
    missing = [i for i in chosen if i.requires is not None and importlib.util.find_spec(i.requires) is None]
    for instrument in missing:
        print(f"{instrument.name} is left out: {instrument.requires} is not installed", file=sys.stderr)
    rows = []
    for workload in workloads():
        for instrument in chosen if workload.name in programs else ():
            if instrument not in missing:
                print(f"{workload.name} {instrument.name}", file=sys.stderr)
                rows.append(
                    apart(measure_by_name, workload.name, instrument.name, steps, quiet=not sys.stderr.isatty())
                )
    return compare(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs, names = [w.name for w in workloads()], [instrument.name for instrument in INSTRUMENTS]
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of the table")
    parser.add_argument("--workload", action="append", choices=programs)
    parser.add_argument("--instrument", action="append", choices=names)
    parser.add_argument("--steps", type=int, help="timed steps; by default one cycle of the exporter's intervals")
    args = parser.parse_args()
    rows = rows_of(args.workload or programs, args.instrument or names, args.steps)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores; ratios with / without, side by side in one run"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
