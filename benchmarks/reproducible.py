"""Whether the same program says the same twice, idle and beside other work, and whether a fast loop loses a record.

Run it on an idle machine; it starts and ends the other work itself::

    python benchmarks/reproducible.py                        # 20 programs, 5 runs each way
    python benchmarks/reproducible.py --programs 4 --runs 2
    python benchmarks/reproducible.py --only gan --busy 0    # nothing beside it
    python benchmarks/reproducible.py --programs 0           # the fast loop alone

Each run is a process of its own, forked from one of as many runners as there are runs, which differ in the order of
their sets. In the default mode, with ``budget=None``, the issues (type, severity, layers, step, message) of all runs of
a program must be equal; with ``synchronous=True`` every value of every record too, bit for bit, apart from clocks,
memory and the exporter's own share of the time. The exit code is 1 where anything differs or a record is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from typing_extensions import Self

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import StepRecord

CORPUS = (
    "dev/zero_grad_before_step",
    "dev/broadcast_mse",
    "dev/inputs_shuffled_alone",
    "dev/linear_regression",
    "dev/softmax_regression_from_zero",
    "heldout/layer_replaced_after_optimizer",
    "heldout/argmax_between_networks",
    "heldout/kl_of_probabilities",
    "heldout/energies_unscaled",
    "heldout/mostly_noise",
    "heldout/lora",
)
"""Programs of ``benchmarks/silent``: of a mistake the form that has it."""

CLOCKS = frozenset({"s", "steps/s", "MB"})
"""Units of what is measured with a clock, or of the process's memory."""

FAST_STEPS, BUSY_PER_CORE = 100_000, 2
LIMIT_SECONDS = 3600

Train = Callable[[], None]


def is_timed(metric: str) -> bool:
    """Whether a metric tells of clocks or of memory, and so differs from run to run."""
    return metric == "overhead" or (metric in CATALOG and CATALOG[metric].unit in CLOCKS)


def digest(records: Sequence[StepRecord]) -> dict[str, str]:
    """Return a hash of the bits of every value by step and metric, histograms and issues too, without what is timed."""
    out: dict[str, str] = {}
    for record in records:
        for r in record.readings:
            if not is_timed(r.metric):
                out[f"{record.step} {r.metric}"] = _hash(r.sites, r.values.tobytes(), r.present.tobytes())
        for h in record.histograms:
            out[f"{record.step} histogram {h.metric} {h.site}"] = _hash(repr(h))
        if record.issues:
            out[f"{record.step} issues"] = _hash(repr(record.issues))
    return out


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def differences(first: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the steps and metrics that differ between two digests."""
    return sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))


def observe(name: str, *, synchronous: bool, writers: Sequence[Any] = (), threads: int = 1) -> dict[str, Any]:
    """Train one program under a live exporter; return what it said, JSON-ready.

    Args:
        name: A key of :func:`programs`.
        synchronous: The exporter's argument.
        writers: Further writers.
        threads: How many torch computes with.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, train = programs()[name]()
    memory = MemoryWriter()
    with tempfile.TemporaryDirectory() as place:
        backends = [memory, "tensorboard", *writers]
        # What a budget leaves out is a matter of time; whether a fast loop loses anything is asked at default settings.
        settings = {} if name == "fast" else {"budget": None}
        exporter = Exporter(model, backends=backends, logdir=place, synchronous=synchronous or None, **settings)
        with exporter.watch():
            train()
        summary = exporter.summary()
    issues = sorted(
        [str(i.issue_type), i.severity.name, list(i.layers), i.step, i.healed_step, i.message] for i in exporter.issues
    )
    return {
        "issues": issues,
        "records": digest(memory.records),
        "steps": summary["steps"]["count"],
        "lost": summary["dropped"],
        "late": summary["late_requests"],
        "dense": sum(record.value("schedule.asked") is not None for record in memory.records),
        "waited": summary["waited"]["seconds"],
    }


# Programs: each returns the model and its whole training loop.


def layers(width: int = 16, depth: int = 5, out: int = 1) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(depth - 1):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, out))


def simple(model: nn.Module, loss: Callable[[int], torch.Tensor], steps: int, **settings: Any) -> Train:
    """Return a loop that minimises what ``loss(step)`` gives."""
    kind = settings.pop("optimizer", torch.optim.SGD)
    clip = settings.pop("clip", None)
    optimizer = kind(model.parameters(), **{"lr": 0.05, **settings})

    def train() -> None:
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    return train


def regression() -> tuple[nn.Module, Train]:
    model, x = layers(), torch.randn(240, 8, 16)
    return model, simple(model, lambda t: F.mse_loss(model(x[t]), x[t].sum(1, keepdim=True)), 240)


def spikes() -> tuple[nn.Module, Train]:
    """The loss of two batches is a thousand times what it should be."""
    model, x = layers(), torch.randn(320, 8, 16)

    def loss(t: int) -> torch.Tensor:
        return F.mse_loss(model(x[t]), x[t].sum(1, keepdim=True)) * (1000 if t in {150, 290} else 1)

    return model, simple(model, loss, 320, lr=1e-4)


def nan_batch() -> tuple[nn.Module, Train]:
    """One batch holds NaN, after which all is NaN."""
    model, x = layers(), torch.randn(240, 8, 16)
    x[200] = float("nan")
    return model, simple(model, lambda t: model(x[t]).square().mean(), 240)


def vanishing() -> tuple[nn.Module, Train]:
    parts = [part for _ in range(12) for part in (nn.Linear(16, 16), nn.Sigmoid())]
    model, x = nn.Sequential(*parts, nn.Linear(16, 1)), torch.randn(200, 8, 16)
    return model, simple(model, lambda t: F.mse_loss(model(x[t]), x[t].sum(1, keepdim=True)), 200)


def exploding() -> tuple[nn.Module, Train]:
    model, x = layers(), torch.randn(200, 8, 16)
    return model, simple(model, lambda t: F.mse_loss(model(x[t]), 10 * x[t].sum(1, keepdim=True)), 200, lr=0.9)


def clipped_adam() -> tuple[nn.Module, Train]:
    model, x = layers(out=3), torch.randn(200, 16, 16)

    def loss(t: int) -> torch.Tensor:
        return F.cross_entropy(model(x[t]), x[t, :, :3].argmax(1))

    return model, simple(model, loss, 200, optimizer=torch.optim.AdamW, lr=1e-2, clip=0.5)


def recurrent() -> tuple[nn.Module, Train]:
    cell, head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)
    model, x = nn.ModuleList([cell, head]), torch.randn(150, 8, 12, 8)

    def loss(t: int) -> torch.Tensor:
        return F.mse_loss(head(cell(x[t])[0][:, -1]), x[t, :, 0, :1])

    return model, simple(model, loss, 150, optimizer=torch.optim.Adam, lr=1e-2)


def transformer() -> tuple[nn.Module, Train]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20))
    data = torch.randint(0, 20, (150, 8, 10))

    def loss(t: int) -> torch.Tensor:
        return F.cross_entropy(model(data[t]).flatten(0, 1), data[t].roll(1, 1).flatten())

    return model, simple(model, loss, 150, optimizer=torch.optim.Adam, lr=1e-3)


def gan() -> tuple[nn.Module, Train]:
    """Two players with an optimizer each."""
    maker, critic = layers(8, 3, 2), layers(2, 3, 1)
    model, real, noise = nn.ModuleList([maker, critic]), torch.randn(200, 16, 2), torch.randn(200, 16, 8)
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (maker, critic)]

    def train() -> None:
        for x, z in zip(real, noise, strict=True):
            optimizers[1].zero_grad()
            (F.softplus(-critic(x)) + F.softplus(critic(maker(z).detach()))).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-critic(maker(z))).mean().backward()
            optimizers[0].step()

    return model, train


def fast() -> tuple[nn.Module, Train]:
    """One small layer and next to nothing else in the loop: some 6,000 steps a second."""
    model, x = layers(8, 1), torch.randn(4, 8)
    return model, simple(model, lambda _: model(x).square().mean(), FAST_STEPS, lr=0.01)


def corpus(path: str) -> Callable[[], tuple[nn.Module, Train]]:
    """Return a program of the corpus of silent mistakes."""
    half, name = path.split("/")

    def make() -> tuple[nn.Module, Train]:
        found = {each.name: each for kind in ("BUGS", "HEALTHY") for each in getattr(load(half), kind)}[name]
        program = found.build(False, 0) if hasattr(found, "types") else found.build(0)
        return program.model, program.train

    return make


def load(half: str) -> Any:
    return importlib.import_module(f"silent.{half}")


def programs() -> dict[str, Callable[[], tuple[nn.Module, Train]]]:
    """Return the programs that are compared, by name."""
    own = (regression, spikes, nan_batch, vanishing, exploding, clipped_adam, recurrent, transformer, gan)
    return {**{make.__name__: make for make in own}, **{path: corpus(path) for path in CORPUS}, "fast": fast}


# Processes.


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy for a while."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


class Runner:
    """A process that has loaded everything, and runs each program in a fork of itself.

    Loading takes longer than most programs. Each runner has its own order of sets and dictionaries, and its own places
    in memory, so that runs of different runners differ in all that runs of one machine differ in.

    Args:
        number: Decides the order of sets.
    """

    def __init__(self, number: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(number)}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=LIMIT_SECONDS)

    def run(self, name: str, *, synchronous: bool) -> dict[str, Any]:
        """Run one program; what it said is :func:`observe`'s, with how long it took."""
        if self._process.stdin is None or self._process.stdout is None:
            sys.exit("a runner has no pipes")
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "said.json"
            self._process.stdin.write(json.dumps([name, synchronous, str(path)]) + "\n")
            self._process.stdin.flush()
            if self._process.stdout.readline().strip() != "done":
                sys.exit(f"{name} failed; what it said stands above")
            return json.loads(path.read_text())  # type: ignore[no-any-return]


def serve() -> None:
    """Run in forks what standard input asks for, line by line."""
    for path in CORPUS:
        load(path.split("/")[0])
    for line in sys.stdin:
        name, synchronous, path = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                Path(path).write_text(json.dumps(timed(name, synchronous=synchronous)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print("done" if os.waitpid(pid, 0)[1] == 0 else "failed", flush=True)


def timed(name: str, *, synchronous: bool) -> dict[str, Any]:
    """Return what :func:`observe` does, with seconds, and of the fast loop those of a run that nobody watches."""
    seconds: dict[str, float] = {}
    if name == "fast":
        _, train = fast()
        began = time.perf_counter()
        train()
        seconds["plain_seconds"] = time.perf_counter() - began
    began = time.perf_counter()
    said = observe(name, synchronous=synchronous)
    seconds["seconds"] = time.perf_counter() - began
    if name == "fast":
        del said["records"]
    return {**said, **seconds}


def judge(mode: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return what differs between the runs of one program.

    Args:
        mode: ``"default"`` or ``"synchronous"``.
        runs: What :func:`observe` returned, of one mode.
    """
    said: list[str] = []
    for number, run in enumerate(runs[1:], start=2):
        odd = [issue for issue in run["issues"] if issue not in runs[0]["issues"]]
        odd += [issue for issue in runs[0]["issues"] if issue not in run["issues"]]
        if odd:
            said.append(f"issues of run {number} differ from the first: {odd[:3]}")
        keys = differences(runs[0]["records"], run["records"])
        if keys and mode == "synchronous":
            metrics = Counter(key.split(" ", 1)[1] for key in keys).most_common(3)
            said.append(f"{len(keys)} values of run {number} differ from the first: {metrics}")
    lost = sum(run["lost"] for run in runs)
    return [*said, *([f"{lost} records lost"] if lost else [])]


def compare(names: Sequence[str], runners: Sequence[Runner], beside: int) -> bool:
    """Run everything and print a table, row by row; return whether all is well."""
    print("| program | mode | runs | issues | dense steps asked for | late requests | equal values | lost | verdict |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    wrong: list[str] = []
    for name in tqdm(names, disable=None):
        results: dict[str, list[dict[str, Any]]] = {"default": [], "synchronous": []}
        for count in (0, beside) if beside else (0,):
            with busy(count):
                for mode, found in results.items():
                    found += [runner.run(name, synchronous=mode == "synchronous") for runner in runners]
        for mode, found in results.items():
            said = judge(mode, found)
            wrong += [f"{name}, {mode}: {line}" for line in said]
            first = found[0]["records"]
            equal = sum(all(run["records"].get(key) == value for run in found) for key, value in first.items())
            dense, late, lost = (sum(run[key] for run in found) for key in ("dense", "late", "lost"))
            print(
                f"| {name} | {mode} | {len(found)} | {len(found[0]['issues'])} | {dense} | {late} "
                f"| {equal} of {len(first)} | {lost} | {'differs' if said else 'equal'} |",
                flush=True,
            )
    for line in wrong:
        print(f"- {line}")
    return not wrong


def speed(runner: Runner, beside: int) -> bool:
    """Run the fast loop at default settings; return whether no record was lost."""
    print("| fast loop | steps/s unwatched | steps/s watched | steps | records | lost | training waited, s |")
    print("|---|---|---|---|---|---|---|")
    fine = True
    for kind, count in [("idle", 0), *([(f"{beside} busy", beside)] if beside else [])]:
        with busy(count):
            run = runner.run("fast", synchronous=False)
        fine &= run["lost"] == 0  # steps that the budget leaves out are counted, and not lost
        rates = " | ".join(f"{FAST_STEPS / run[key]:.0f}" for key in ("plain_seconds", "seconds"))
        print(f"| {kind} | {rates} | {FAST_STEPS} | {run['steps']} | {run['lost']} | {run['waited']:.2f} |")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--programs", type=int, default=20, help="how many of the programs")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--runs", type=int, default=5, help="runs of each program and mode, idle and again busy")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--busy", type=int, default=BUSY_PER_CORE * cores, help="busy processes beside, 0 for none")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    tqdm.monitor_interval = 0
    names = [name for name in programs() if arguments.only in name and name != "fast"][: arguments.programs]
    with contextlib.ExitStack() as stack:
        runners = [stack.enter_context(Runner(number)) for number in range(1, arguments.runs + 1)]
        began = time.perf_counter()
        equal = compare(names, runners, arguments.busy)
        print()
        fine = speed(runners[0], arguments.busy)
        print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes; {'all equal' if equal and fine else 'FAILED'}")
    return 0 if equal and fine else 1


if __name__ == "__main__":
    sys.exit(main())
