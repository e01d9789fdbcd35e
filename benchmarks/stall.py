"""How long a training step waits for the W&B writer, whatever the server does; side by side in one run.

    python benchmarks/stall.py                      # the table, in less than three minutes
    python benchmarks/stall.py --server hanging --rounds 10

Steps of about 5 ms, each with a ``run.log`` of the user's, take turns in blocks: of a bare model, of one with an
exporter that writes TensorBoard files, and of one whose exporter writes to the same online run as well, with alerts and
with tables every 2 s. The server is a process of its own on the loopback: up, answering 503, gone (connections
refused), hanging (it accepts and never answers), or slow (10 s for each request) from the first timed step on.
``blocked`` is the part of a step in which the training thread neither ran nor waited for a core: it waited for the GIL,
a lock or a disk. ``gc`` is the longest full garbage collection within a step, on whichever thread it ran; ``over``
counts steps of more than 50 ms, and ``noGC`` those of them without a full collection. ``calls`` is the median number of
calls of Python and C functions of the training thread in a step, and ``most`` the greatest, in further steps that are
not timed: they do not depend on what else the machine does. Each server has a process of its own; ``close``,
``finish`` and ``exit`` are the seconds that the exporter, the user's run and the end of the process take.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradflow_export import Exporter
from gradflow_export.schedule import SETTLING_STEPS
from gradflow_export.writers import WandbWriter

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "wandb_core")]
from workloads import Mlp  # noqa: E402 - lies beside this script

LIMIT = 50.0
COUNTED = 30
_CALLS = ("call", "c_call")
SERVERS = ("up", "503", "gone", "hanging", "slow")


def serve() -> None:
    """Answer as W&B does until standard input ends, and as the lines read from it say."""
    from server import LoopbackServer

    with LoopbackServer() as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            what = line.strip()
            server.down, server.hanging = 503 if what == "503" else None, what == "hanging"
            server.slow = 10.0 if what == "slow" else 0.0
    os._exit(0)


@contextlib.contextmanager
def server() -> Iterator[tuple[str, Any]]:
    """Start a server; yields its address and a function that changes what it does."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def become(what: str) -> None:
        if what == "gone":
            process.kill()
            process.wait()
        else:
            process.stdin.write(f"{what}\n")  # type: ignore[union-attr] # checked above
            process.stdin.flush()  # type: ignore[union-attr] # checked above

    try:
        yield process.stdout.readline().strip(), become
    finally:
        process.kill()
        process.wait()


class Collections:
    """Adds up the time of full garbage collections."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            self._began = time.perf_counter()
        elif info["generation"] == 2:
            self.seconds += time.perf_counter() - self._began


class Steps:
    """A model whose steps are timed."""

    def __init__(self, depth: int, collections: Collections) -> None:
        self.collections = collections
        torch.manual_seed(0)
        self.model = Mlp(depth)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.randn(64, 64), torch.randint(0, 10, (64,))
        self.wall: list[float] = []
        self.blocked: list[float] = []
        self.collected: list[float] = []
        self.calls: list[int] = []
        self.done = 0

    def step(self, run: Any) -> None:
        """Take one step, and log it as a user would; every 400th explodes, so that alerts are raised."""
        wall, ran, collected = time.perf_counter(), scheduled(), self.collections.seconds
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(self.inputs), self.targets)
        odd = self.done % 400 == 399
        self.optimizer.param_groups[0]["lr"] = 1e-12 if odd else 1e-3
        (loss * (1e6 if odd else 1)).backward()
        self.optimizer.step()
        run.log({"loss": loss.item()})
        self.wall.append(time.perf_counter() - wall)
        self.blocked.append(max(0.0, self.wall[-1] - (scheduled() - ran)))
        self.collected.append(self.collections.seconds - collected)
        self.done += 1

    def forget(self) -> None:
        """Drop the times so far."""
        self.wall.clear()
        self.blocked.clear()
        self.collected.clear()

    def block(self, run: Any, seconds: float) -> None:
        """Take steps for some time."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.step(run)

    def count(self, run: Any, steps: int) -> None:
        """Take steps, and count the calls of this thread in each."""
        timed = len(self.wall)
        for _ in range(steps):
            calls = itertools.count()
            sys.setprofile(lambda _frame, event, _arg, calls=calls: next(calls) if event in _CALLS else None)
            self.step(run)
            sys.setprofile(None)
            self.calls.append(next(calls))
        del self.wall[timed:], self.blocked[timed:], self.collected[timed:]


def scheduled() -> float:
    """Return the seconds that this thread ran or waited for a core."""
    return time.thread_time() + int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9


def measure(collections: Collections, what: str, folder: Path, depth: int, seconds: float, rounds: int) -> str:
    """Time both models beside a server; returns the lines of the table."""
    import wandb

    with server() as (url, become):
        settings = wandb.Settings(
            base_url=url, api_key="0" * 40, x_disable_stats=True, console="off", finish_timeout=3.0, init_timeout=20.0
        )  # fmt: skip
        run = wandb.init(project="stall", dir=str(folder), settings=settings)
        models = {name: Steps(depth, collections) for name in ("nothing", "files", "wandb")}
        models["nothing"].count(run, COUNTED)  # before any exporter is there, which looks at each backward pass
        writers = {
            "files": ["tensorboard"],
            "wandb": ["tensorboard", WandbWriter(table_seconds=2.0, alert_cooldown=0.0)],
        }
        exporters = {
            name: Exporter(models[name].model, backends=backends, logdir=folder / name).watch(models[name].criterion)
            for name, backends in writers.items()
        }
        for _ in range(SETTLING_STEPS):
            for steps in models.values():
                steps.step(run)
        for name, steps in models.items():
            if name in exporters:
                exporters[name].summary()
            steps.forget()
        become(what)
        for _ in range(rounds):
            for name, steps in models.items():
                steps.block(run, seconds)
                if name in exporters:
                    exporters[name].summary()  # nothing of it is left for the next block
        for name in exporters:
            models[name].count(run, COUNTED)
        exporters["files"].close()
        began = time.perf_counter()
        exporters["wandb"].close()
        closed = time.perf_counter() - began
        run.finish()
        finished = time.perf_counter() - began - closed
    return "\n".join(line(what, *named) for named in models.items()) + f"{closed:>8.2f}{finished:>8.2f}"


def line(what: str, name: str, steps: Steps) -> str:
    """Return a line of the table."""
    wall, blocked, collected = (np.array(times) * 1e3 for times in (steps.wall, steps.blocked, steps.collected))
    numbers = (*np.percentile(wall, (50, 99)), wall.max(), np.percentile(blocked, 99), blocked.max(), collected.max())
    over = wall > LIMIT
    counts = f"{over.sum():>6}{(over & (collected == 0)).sum():>6}"
    calls = f"{int(np.median(steps.calls)):>7}{max(steps.calls):>7}"
    return f"{what:<9}{name:<9}{len(wall):>6}" + "".join(f"{value:>8.1f}" for value in numbers) + counts + calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--server", action="append", choices=SERVERS)
    parser.add_argument("--depth", type=int, default=30, help="layers of the model")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a block")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each model")
    parser.add_argument("--alone", choices=SERVERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    if args.alone:
        logging.getLogger("gradflow_export").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        folder = Path.cwd()
        print(measure(Collections(), args.alone, folder, args.depth, args.seconds, args.rounds), flush=True)
        print(time.time(), flush=True)
        return
    print(f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores; ms, and s to close exporter, run and process")
    columns = ("p50", "p99", "max", "block99", "blkmax", "gc")
    titles = "".join(f"{title:>8}" for title in columns)
    ends = "".join(f"{title:>8}" for title in ("close", "finish", "exit"))
    print(f"{'server':<9}{'watched':<9}{'steps':>6}{titles}{'over':>6}{'noGC':>6}{'calls':>7}{'most':>7}{ends}")
    options = ["--depth", str(args.depth), "--seconds", str(args.seconds), "--rounds", str(args.rounds)]
    for what in args.server or SERVERS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(Path(__file__).resolve()), "--alone", what, *options]
            own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
            own |= {f"WANDB_{name}_DIR": str(Path(folder) / name) for name in ("DATA", "CACHE", "CONFIG")}
            own |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "NO_PROXY": "127.0.0.1"}
            own |= {"GRADFLOW_VERBOSE": "0"}
            played = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=own, check=False)
            ended = time.time()
        if played.returncode != 0:
            sys.exit(f"the process beside the server {what!r} ended with {played.returncode}")
        *lines, done = played.stdout.splitlines()
        print("\n".join(lines) + f"{ended - float(done):>8.2f}", flush=True)


if __name__ == "__main__":
    main()
