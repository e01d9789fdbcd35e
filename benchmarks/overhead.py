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
import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from instruments import INSTRUMENTS, Instrument, Trainer
from workloads import Workload, workloads

YARDSTICK = "gradflow_every_step"
WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        workload: Name of the training program.
        instrument: What watched it.
        thread_ratio: CPU time of the training thread, with / without.
        process_ratio: CPU time of all threads and of helper processes, with / without.
        wall_ratio: Median wall time of a step, with / without.
        added_ms: Training-thread CPU added to a mean step.
        bytes_per_step: Growth of the log directory.
        memory_mb: Resident size of the process and its helpers after the timed steps, less before the instrument and
            its libraries were loaded.
        noise: thread_ratio of the two halves of the timed steps, as a half difference.
        startup_ms: Training-thread CPU added per step of the dense start; 0 for rivals.
        steps: Timed steps.
        times_ours: ``added_ms`` as a multiple of that of ``gradflow_every_step``, of instruments that read at every
            step too; ``None`` otherwise.
    """

    workload: str
    instrument: str
    thread_ratio: float
    process_ratio: float
    wall_ratio: float
    added_ms: float
    bytes_per_step: float
    memory_mb: float
    noise: float
    startup_ms: float
    steps: int
    times_ours: float | None = None


def measure(workload: Workload, instrument: Instrument, count: int, *, quiet: bool) -> Row:
    """Time one instrument on one workload."""
    bare, watched = Trainer(workload), Trainer(workload)
    _take_turns(bare, watched, WARM_UP)
    before = _resident()
    title = f"{workload.name} {instrument.name}"
    with tempfile.TemporaryDirectory() as folder, instrument.watch(watched, Path(folder)):
        startup = 0.0
        if instrument.dense_start:
            from gradflow_export.schedule import SETTLING_STEPS

            bare.forget()
            watched.forget()
            _take_turns(bare, watched, SETTLING_STEPS, f"{title} start", small=True, quiet=quiet)
            startup = statistics.mean(watched.thread) - statistics.mean(bare.thread)
        _take_turns(bare, watched, WARM_UP)
        bare.forget()
        watched.forget()
        gc.collect()
        gc.disable()
        size, process, thread = _bytes(Path(folder)), _all_cpu(), time.thread_time()
        _take_turns(bare, watched, count, title, quiet=quiet)
        others = (_all_cpu() - process) - (time.thread_time() - thread)
        gc.enable()
        grown, memory = _bytes(Path(folder)) - size, _resident() - before
    half = count // 2
    without, added = statistics.mean(bare.thread), statistics.mean(watched.thread) - statistics.mean(bare.thread)
    first, second = (
        statistics.mean(watched.thread[part]) / statistics.mean(bare.thread[part])
        for part in (slice(None, half), slice(half, None))
    )
    return Row(
        workload=workload.name,
        instrument=instrument.name,
        thread_ratio=round(1 + added / without, 4),
        process_ratio=round(1 + (added + others / count) / without, 4),
        wall_ratio=round(statistics.median(watched.wall) / statistics.median(bare.wall), 4),
        added_ms=round(added * 1e3, 3),
        bytes_per_step=round(grown / count),
        memory_mb=round(memory / 2**20, 1),
        noise=round(abs(first - second) / 2, 4),
        startup_ms=round(startup * 1e3, 3),
        steps=count,
    )


def _take_turns(
    bare: Trainer, watched: Trainer, count: int, title: str = "", *, small: bool = False, quiet: bool = True
) -> None:
    for _ in tqdm(range(count), title, disable=quiet, leave=False):
        bare.step(small=small)
        watched.step(small=small)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _all_cpu() -> float:
    helpers = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return time.process_time() + sum(times.user + times.system for times in helpers)


def _resident() -> int:
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library: freed memory stays in the figure
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def measure_by_name(workload: str, instrument: str, steps: int | None, *, quiet: bool) -> Row:
    """Time one instrument on one workload, in this process."""
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    program = next(w for w in workloads() if w.name == workload)
    chosen = next(i for i in INSTRUMENTS if i.name == instrument)
    count = steps or (program.steps if chosen.dense_start else program.rival_steps)
    return measure(program, chosen, count, quiet=quiet)


def measure_apart(workload: str, instrument: str, steps: int | None, *, quiet: bool) -> Row:
    """Time one instrument on one workload in a new process, whose memory holds nothing of other instruments."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_by_name, workload, instrument, steps, quiet=quiet).result()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of the table")
    parser.add_argument("--workload", action="append", choices=[w.name for w in workloads()])
    parser.add_argument("--instrument", action="append", choices=[instrument.name for instrument in INSTRUMENTS])
    parser.add_argument("--steps", type=int, help="timed steps; by default one cycle of the exporter's intervals")
    args = parser.parse_args()
    chosen = [i for i in INSTRUMENTS if not args.instrument or i.name in args.instrument]
    missing = [i for i in chosen if i.requires is not None and importlib.util.find_spec(i.requires) is None]
    for instrument in missing:
        print(f"{instrument.name} is left out: {instrument.requires} is not installed", file=sys.stderr)
    rows = compare(
        [
            measure_apart(workload.name, instrument.name, args.steps, quiet=not sys.stderr.isatty())
            for workload in workloads()
            if not args.workload or workload.name in args.workload
            for instrument in chosen
            if instrument not in missing
        ]
    )
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores; ratios with / without, side by side in one run"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
