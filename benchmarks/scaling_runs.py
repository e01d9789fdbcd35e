"""What a long run costs, and how long its log takes to open."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import resident
from torch import nn


@dataclass(frozen=True)
class StepsRow:
    """A look at a growing run.

    Attributes:
        steps: Steps so far.
        memory_mb: Resident size of the process.
        tensors: Live tensors that Python knows of.
        bytes_per_step: Growth of the log per step since the look before.
        step_us: CPU time of the training thread per step since the look before, training included.
        dropped: Records that the exporter could not keep up with.
    """

    steps: int
    memory_mb: float
    tensors: int
    bytes_per_step: float
    step_us: float
    dropped: int


@dataclass(frozen=True)
class Opening:
    """How long it takes to look at a log.

    Attributes:
        layers: Layers of the run, each with 8 metrics at each of 100 steps.
        log_mb: Size of the log.
        report_s: Wall time of ``gradflow report``, start of Python included.
        first_s: From the click on the panel's tab to the painted map, TensorBoard just started.
        second_s: The same, second visit.
    """

    layers: int
    log_mb: float
    report_s: float
    first_s: float
    second_s: float


def measure_steps(looks: list[int]) -> list[StepsRow]:
    """Train a tiny model under an exporter, in this process, and look at it after each number of steps."""
    from gradflow_export import Exporter

    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)), nn.Linear(16, 4))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    rows: list[StepsRow] = []
    with tempfile.TemporaryDirectory() as folder:
        exporter = Exporter(model, logdir=folder).watch(criterion)
        done = size = 0
        for look in looks:
            began = time.thread_time()
            for _ in range(look - done):
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
            took = time.thread_time() - began
            dropped = exporter.summary()["dropped"]
            grown = _bytes(Path(folder)) - size
            count, done, size = look - done, look, size + grown
            tensors = sum(1 for thing in gc.get_objects() if type(thing) in {torch.Tensor, nn.Parameter})
            row = StepsRow(look, resident() / 2**20, tensors, grown / count, took / count * 1e6, dropped)
            rows.append(row)
        exporter.close()
    return rows


def measure_opening(layers: int, steps: int = 100) -> Opening:
    """Write a log with many layers and open it as people do."""
    from browse import chromium, tensorboard, wait_for
    from panel import last_step, visit
    from panel_logs import cached_log

    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        logdir = cached_log(Path(scratch), steps, layers)
        began = time.perf_counter()
        command = [sys.executable, "-m", "gradflow_export.cli", "report", str(logdir)]
        subprocess.run(command, check=True, capture_output=True)
        report = time.perf_counter() - began
        with tensorboard(logdir) as (address, _):
            wait_for(lambda: last_step(address) == steps)
            first, second = visit(browser, address, [], []), visit(browser, address, [], [])
        return Opening(layers, _bytes(logdir) / 2**20, report, first / 1e3, second / 1e3)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
