"""Logs of a known size for the panel's benchmark, written by the real writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2

from gradflow_export.records.step_record import Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.event_codec import frame, version_event
from gradflow_export.writers.tensorboard import TensorBoardWriter

LAYERS = 200
PER_LAYER = (
    "block.gain",
    "block.gradient_norm",
    "block.output_rms",
    "parameter.gradient_norm",
    "parameter.weight_norm",
    "parameter.update_ratio",
    "activation.dead_share",
    "activation.zero_share",
)
_STARTED = 1_732_143_600.0
_SICK = 137


def records(steps: range, layers: int = LAYERS) -> Iterator[StepRecord]:
    """Yield steps of a run in which one layer starts to amplify the gradient half way: 8 metrics at every layer."""
    rng = np.random.default_rng(steps.start)
    blocks = tuple(f"layers.{number}" for number in range(layers))
    sites = {"parameter": tuple(f"{name}.weight" for name in blocks), "activation": tuple(f"{n}.act" for n in blocks)}
    present = np.ones(layers, dtype=np.bool_)
    sick, middle = min(_SICK, layers - 1), (steps.start + steps.stop) // 2
    for step in steps:
        noise = rng.standard_normal((len(PER_LAYER), layers)).astype(np.float32)
        values = np.exp(0.1 * noise)
        values[-2:] = np.clip(0.2 + 0.05 * noise[-2:], 0.0, 1.0)
        if step > middle:
            values[0, sick] *= 8.0
        wide = (
            Reading(name, sites.get(name.partition(".")[0], blocks), row, present)
            for name, row in zip(PER_LAYER, values, strict=True)
        )
        loss = 0.5 + 4.0 / (1.0 + step / 1000) + 0.02 * float(noise[0, 0])
        run = (Reading.run("loss", loss), Reading.run("gradient.total_norm", float(values[1].sum())))
        issues = (_issue(blocks[sick], step),) if step == middle + 1 else ()
        yield StepRecord(step, _STARTED + 0.1 * step, (*run, *wide), (), issues)


def cached_log(cache: Path, steps: int, layers: int = LAYERS) -> Path:
    """Return a log directory with one run of ``steps`` steps, written on the first call."""
    folder = cache / f"{layers}-layers-{steps}-steps"
    done = folder / "complete"
    if not done.exists():
        writer = TensorBoardWriter(folder / "run", flush_seconds=1e9)
        writer.open(RunInfo(_session(_STARTED), _STARTED, model="Benchmark", parameters=124_439_808))
        for record in records(range(1, steps + 1), layers):
            writer.write(record)
        writer.close()
        done.touch()
    return folder


def many_runs(cache: Path, runs: int, steps: int = 200, layers: int = 12) -> Path:
    """Return a log directory with many short runs, written on the first call; half of them have an issue."""
    folder = cache / f"{runs}-runs"
    done = folder / "complete"
    if not done.exists():
        for number in range(runs):
            writer = TensorBoardWriter(folder / f"sweep-{number}", flush_seconds=1e9)
            started = _STARTED + 1000 * number
            writer.open(RunInfo(_session(started), started, model="Sweep", parameters=1_000_000))
            for record in records(range(1, steps + 1), layers):
                writer.write(record if number % 2 else replace(record, issues=()))
            writer.close()
        done.touch()
    return folder


def scalar_log(folder: Path, runs: int = 5, tags: int = 200, first: int = 0, steps: int = 1000) -> None:
    """Write plain scalars, none of ours, as any other program does."""
    for run in range(runs):
        path = folder / f"run-{run}"
        path.mkdir(parents=True, exist_ok=True)
        frames = [version_event(_STARTED)]
        for step in range(first, first + steps):
            values = [
                summary_pb2.Summary.Value(tag=f"group{tag // 10}/metric{tag}", simple_value=step / (1 + tag))
                for tag in range(tags)
            ]
            event = event_pb2.Event(wall_time=_STARTED + step, step=step, summary=summary_pb2.Summary(value=values))
            frames.append(event.SerializeToString())
        with (path / "events.out.tfevents.1732143600.benchmark").open("ab") as file:
            file.write(b"".join(map(frame, frames if first == 0 else frames[1:])))


class LiveRun:
    """A run that grows in the background as a training would, with a chunk every two seconds.

    Args:
        folder: The run's folder.
        per_second: Steps written per second.
        layers: How many layers are read.

    Attributes:
        written: When each step that ends a chunk reached the disk, in seconds since the epoch.
    """

    EARLIER = 2_000
    FLUSH = 2.0

    def __init__(self, folder: Path, per_second: float = 10.0, layers: int = 60) -> None:
        self.written: dict[int, float] = {}
        self._pause = 1.0 / per_second
        self._records = records(range(1, 1_000_000), layers)
        self._writer = TensorBoardWriter(folder, flush_seconds=1e9)
        self._writer.open(RunInfo(_session(time.time()), time.time(), model="Live", parameters=1_000_000))
        for _ in range(self.EARLIER):
            self._writer.write(next(self._records))
        self._writer.flush()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="live run")
        self._thread.start()

    def close(self) -> None:
        """Stop writing."""
        self._stop.set()
        self._thread.join()
        self._writer.close()

    def _write(self) -> None:
        due = flushed = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += self._pause
            record = next(self._records)
            self._writer.write(record)
            if time.monotonic() - flushed >= self.FLUSH:
                self._writer.flush()
                flushed = time.monotonic()
                self.written[record.step] = time.time()


def _session(started: float) -> str:
    return f"{int(started * 1000)}-0"


def _issue(layer: str, step: int) -> Issue:
    message = "gain 8.0 is above 2.0: the block multiplies the gradient that passes through it."
    return Issue(IssueType.EXPLODING, Severity.HIGH, layer, step, 8.0, 2.0, message, "Clip the gradient norm to 1.0.")
