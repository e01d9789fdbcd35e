"""What watching costs: the same training step with and without each instrument, side by side in one run.

    python benchmarks/overhead.py                      # the table
    python benchmarks/overhead.py --workload mlp --instrument gradflow --json

Two equal models take turns, one step each: a bare one and a watched one, so that both see the same machine. The clock
is the CPU time of the training thread (``thread_ratio``); other threads of the process are added for
``process_ratio``. Ratios are of means, so that sampled steps count in full. The exporter is timed after its dense start
(the first 100 steps), over a whole cycle of its intervals; ``startup_ms`` is what the dense start added per step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from gradflow_export import Exporter
from gradflow_export.schedule import INTERVALS, SETTLING_STEPS

sys.path.insert(0, str(Path(__file__).parent))
from workloads import Workload, workloads

After = Callable[[int, nn.Module], None]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        workload: Name of the training program.
        instrument: What watched it.
        thread_ratio: CPU time of the training thread, with / without.
        process_ratio: CPU time of the whole process, with / without (a helper process of wandb is not in it).
        wall_ratio: Median wall time of a step, with / without.
        added_ms: Training-thread CPU added to a mean step.
        bytes_per_step: Growth of the log directory.
        noise: thread_ratio of the two halves of the timed steps, as a half difference.
        startup_ms: Training-thread CPU added per step of the dense start; 0 for rivals.
        steps: Timed steps.
    """

    workload: str
    instrument: str
    thread_ratio: float
    process_ratio: float
    wall_ratio: float
    added_ms: float
    bytes_per_step: float
    noise: float
    startup_ms: float
    steps: int


class Trainer:
    """One model with its optimizer, stepped and timed."""

    def __init__(self, workload: Workload, after: After | None = None) -> None:
        torch.manual_seed(0)
        self.model = workload.model()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch, self.small = workload.batch(workload.size), workload.batch(2)
        self.after = after
        self.steps = 0
        self.thread: list[float] = []
        self.wall: list[float] = []

    def step(self, *, small: bool = False) -> None:
        """Take one step; ``small`` ones are for winding schedules forward."""
        inputs, targets = self.small if small else self.batch
        wall, thread = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        if self.after is not None:
            self.after(self.steps, self.model)
        self.thread.append(time.thread_time() - thread)
        self.wall.append(time.perf_counter() - wall)
        self.steps += 1

    def forget(self) -> None:
        """Drop the times so far."""
        self.thread.clear()
        self.wall.clear()


@contextlib.contextmanager
def gradflow(trainer: Trainer, logdir: Path, **settings: Any) -> Iterator[None]:
    """Watch with the exporter."""
    with Exporter(trainer.model, logdir=logdir, **settings).watch(trainer.criterion):
        yield


def every_step(trainer: Trainer, logdir: Path) -> contextlib.AbstractContextManager[None]:
    """Watch with everything read at every step, histograms and ranks apart."""
    often = {name: 1 for name in INTERVALS if name not in {"ranks", "histograms"}}
    return gradflow(trainer, logdir, intervals=often)


@contextlib.contextmanager
def wandb_log(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Only log the loss into an offline W&B run at every step, as the user of ``gradflow_wandb`` does."""
    import wandb

    os.environ.update(WANDB_SILENT="true")
    settings = wandb.Settings(x_disable_stats=True, console="off")
    run = wandb.init(mode="offline", dir=str(logdir), settings=settings, project="overhead")
    trainer.after = lambda step, _model: run.log({"loss": float(step)})
    yield
    run.finish()


@contextlib.contextmanager
def gradflow_wandb(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch with the exporter, to TensorBoard and to an offline W&B run that the user logs into at every step."""
    with wandb_log(trainer, logdir), gradflow(trainer, logdir, backends=["tensorboard", "wandb"]):
        yield


@contextlib.contextmanager
def wandb_watch(trainer: Trainer, logdir: Path, log: str) -> Iterator[None]:
    """Watch with ``wandb.watch(log_freq=1)`` and one ``wandb.log`` per step, offline."""
    import wandb

    os.environ.update(WANDB_SILENT="true")
    settings = wandb.Settings(x_disable_stats=True, console="off")
    run = wandb.init(mode="offline", dir=str(logdir), settings=settings, project="overhead")
    run.watch(trainer.model, log=log, log_freq=1)
    trainer.after = lambda step, _model: run.log({"loss": float(step)})
    yield
    run.unwatch(trainer.model)
    run.finish()


@contextlib.contextmanager
def tensorboard_naive(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch with the usual loop: norm and histogram of every parameter's gradient."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(logdir))

    def after(step: int, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                writer.add_scalar(f"norm/{name}", p.grad.norm().item(), step)
                writer.add_histogram(f"grad/{name}", p.grad, step)

    trainer.after = after
    yield
    writer.close()


INSTRUMENTS: tuple[tuple[str, Callable[[Trainer, Path], contextlib.AbstractContextManager[None]]], ...] = (
    ("nothing", lambda _trainer, _logdir: contextlib.nullcontext()),
    ("gradflow", gradflow),
    ("gradflow_every_step", every_step),
    ("gradflow_wandb", gradflow_wandb),
    ("wandb_log", wandb_log),
    ("wandb_watch_gradients", lambda trainer, logdir: wandb_watch(trainer, logdir, "gradients")),
    ("wandb_watch_all", lambda trainer, logdir: wandb_watch(trainer, logdir, "all")),
    ("tensorboard_naive", tensorboard_naive),
)


def measure(workload: Workload, name: str, steps: int | None, *, quiet: bool) -> Row:
    """Time one instrument on one workload."""
    instrument = dict(INSTRUMENTS)[name]
    ours = name.startswith("gradflow")
    count = steps or (workload.steps if ours else workload.rival_steps)
    bare, watched = Trainer(workload), Trainer(workload)
    with tempfile.TemporaryDirectory() as folder, instrument(watched, Path(folder)):
        startup = 0.0
        if ours:
            for _ in tqdm(range(SETTLING_STEPS), f"{workload.name} {name} start", disable=quiet, leave=False):
                bare.step(small=True)
                watched.step(small=True)
            startup = statistics.mean(watched.thread) - statistics.mean(bare.thread)
        for _ in range(3):
            bare.step()
            watched.step()
        bare.forget()
        watched.forget()
        gc.collect()
        gc.disable()
        size, process, thread = _bytes(Path(folder)), time.process_time(), time.thread_time()
        for _ in tqdm(range(count), f"{workload.name} {name}", disable=quiet, leave=False):
            bare.step()
            watched.step()
        others = (time.process_time() - process) - (time.thread_time() - thread)
        gc.enable()
        grown = _bytes(Path(folder)) - size
    half = count // 2
    without, added = statistics.mean(bare.thread), statistics.mean(watched.thread) - statistics.mean(bare.thread)
    first, second = (
        statistics.mean(watched.thread[part]) / statistics.mean(bare.thread[part])
        for part in (slice(None, half), slice(half, None))
    )
    return Row(
        workload=workload.name,
        instrument=name,
        thread_ratio=round(1 + added / without, 4),
        process_ratio=round(1 + (added + others / count) / without, 4),
        wall_ratio=round(statistics.median(watched.wall) / statistics.median(bare.wall), 4),
        added_ms=round(added * 1e3, 3),
        bytes_per_step=round(grown / count),
        noise=round(abs(first - second) / 2, 4),
        startup_ms=round(startup * 1e3, 3),
        steps=count,
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of the table")
    parser.add_argument("--workload", action="append", choices=[w.name for w in workloads()])
    parser.add_argument("--instrument", action="append", choices=[name for name, _ in INSTRUMENTS])
    parser.add_argument("--steps", type=int, help="timed steps; by default one cycle of the exporter's intervals")
    args = parser.parse_args()
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = [
        measure(workload, name, args.steps, quiet=not sys.stderr.isatty())
        for workload in workloads()
        if not args.workload or workload.name in args.workload
        for name, _ in INSTRUMENTS
        if not args.instrument or name in args.instrument
    ]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores; ratios with / without, side by side in one run"
    )
    print(
        f"{'workload':<9}{'instrument':<23}{'thread':>8}{'process':>9}{'wall':>8}{'added ms':>10}{'B/step':>9}{'±':>8}"
    )
    for r in rows:
        print(
            f"{r.workload:<9}{r.instrument:<23}{r.thread_ratio:>8.3f}{r.process_ratio:>9.3f}{r.wall_ratio:>8.3f}"
            f"{r.added_ms:>10.2f}{r.bytes_per_step:>9}{r.noise:>8.3f}"
        )


if __name__ == "__main__":
    main()
