"""What the panel's server costs by itself: how soon it is ready, how long an answer takes, how much memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from browse import get
from panel_logs import cached_log, many_runs

Row = tuple[str, float | None, list[float], str]
RUNS, WIDE, WIDE_STEPS = 1000, 10_000, 2_000
TURNS = 3
READY = {20_000: 1.0, 100_000: 3.0}
MOST_MB, MOST_SECONDS = 300, 2.0
# What asks for as much as may be asked for.
_GREEDY = (
    "series?run=run&metric=block.gain&columns=8192&reduce=extreme,min,max,mean",
    "series?run=run&metric=block.gradient_norm&columns=8192&reduce=mean",
    "series?run=run&metric=parameter.update_ratio&columns=8192&rows=4096",
    "series?run=run&metric=block.output_rms&columns=1&rows=1&reduce=mean",
    "moment?run=run&" + "&".join(f"metric={name}" for name in ("block.gain", "parameter.gradient_norm", "loss")),
    "around?run=run&metric=block.gain&step=1001&count=100",
    "tree?run=run&metric=parameter.gradient_norm",
    "annotations?run=run",
)


def measure_server(cache: Path, steps: Sequence[int], layers: int, wide: int = WIDE, runs: int = RUNS) -> list[Row]:
    """Return rows: what, limit, values, unit."""
    rows = measure_ready(cache, steps, layers)
    with view(many_runs(cache, runs)) as (address, process, _):
        before, work = process.memory_info().rss, process.cpu_times()
        first, again = (_seconds(f"{address}overview") for _ in range(2))
        done = process.cpu_times()
        rows += [
            (f"overview of {runs} runs", 1.0, [first], "s"),
            (
                f"overview of {runs} runs, twice: CPU time",
                None,
                [done.user + done.system - work.user - work.system],
                "s",
            ),
            (f"overview of {runs} runs, again", 1.0, [again], "s"),
            (f"overview of {runs} runs: memory", MOST_MB, [(process.memory_info().rss - before) / 1e6], "MB"),
        ]
    with view(cached_log(cache, WIDE_STEPS, wide)) as (address, process, _):
        before = most = process.memory_info().rss
        name = f"{wide} layers x {WIDE_STEPS} steps"
        rows.append(
            (f"{name}: 400 rows of a map", 2.0, [_seconds(f"{address}series?run=run&metric=block.gain&rows=400")], "s")
        )
        for query in _GREEDY:
            rows.append((f"{name}: {query[:60]}", MOST_SECONDS, [_seconds(f"{address}{query}")], "s"))
            most = max(most, process.memory_info().rss)
        rows.append((f"{name}: memory after the greedy requests", MOST_MB, [(most - before) / 1e6], "MB"))
    return rows


def measure_ready(cache: Path, steps: Sequence[int], layers: int) -> list[Row]:
    """Return how soon ``gradflow view`` serves logs of these lengths: what, limit, values, unit."""
    rows: list[Row] = []
    for length in steps:
        log = cached_log(cache, length, layers)
        ready, work = [], []
        for _ in range(TURNS):
            with view(log) as (_, process, seconds):
                ready.append(seconds)
                times = process.cpu_times()
                work.append(times.user + times.system)
        name = f"gradflow view, {layers} layers x {length} steps"
        rows += [(f"{name}: ready", READY.get(length), ready, "s"), (f"{name}: CPU time until then", None, work, "s")]
    return rows


@contextmanager
def view(logdir: Path) -> Iterator[tuple[str, psutil.Process, float]]:
    """Serve a log by ``gradflow view``; yields its address, its process, and the seconds until it said so."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "gradflow_export.cli", "view", str(logdir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            seconds = time.perf_counter() - begun
            if "http://" not in said:
                raise RuntimeError(f"expected gradflow view to say where it serves, got {said!r}")
            yield f"http://{said.split('http://')[1].split()[0]}", psutil.Process(process.pid), seconds
        finally:
            process.terminate()


def _seconds(address: str) -> float:
    begun = time.perf_counter()
    get(address)
    return time.perf_counter() - begun
