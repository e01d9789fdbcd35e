"""What the debugging API and the asynchronous logger take from a training loop; side by side in one run.

    python benchmarks/debug_service.py            # both tables
    python benchmarks/debug_service.py api --blocks 12
    python benchmarks/debug_service.py stall

``api``: blocks of training steps, with a training debugger and a server in a thread of the same process, take turns:
in one the server is left in peace (``quiet``), in the next it is asked 200 times in parallel by another process
(``asked``), in the third it is left in peace again (``again``: the noise of the machine). ``thread`` is CPU time of the
training thread and ``wall`` time of the clock, both as a ratio of sums to the quiet blocks; ``ms per burst`` is the
wall time that 200 requests took from the training, by medians; ``server ms`` is the CPU time that the server's thread
used in a block, which is the most that it can have held the GIL, and does not depend on what else the machine does.
What a burst costs in per cent depends on how often one comes.

``stall``: how long an event loop stands still for one check of all gradients: the call itself, which is all that runs
on the loop's thread, and the longest delay of a task that wants to run each millisecond while the answer is awaited.
The same for a check within the loop as it is often written (``isnan`` and ``isinf`` of each gradient), and for copying
all gradients, which is the least that a snapshot without reading would take.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workloads import workloads

from gradflow_export import AsyncTrainingLogger, TrainingDebugger
from gradflow_export.debugging.service.api import create_app, serving
from instruments import Trainer

REQUESTS = 200
KINDS = ("quiet", "asked", "again")


def ask(address: str) -> None:
    """Ask 200 times in parallel for each line of standard input, and say how many answers were good."""

    def one(number: int) -> bool:
        path = ("/training-logs/debug/summary", "/training-logs/debug/training/summary", "/metrics")[number % 3]
        with urllib.request.urlopen(address + path, timeout=60) as answer:
            return answer.status == 200 and bool(answer.read())

    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in sys.stdin:
            print(sum(pool.map(one, range(REQUESTS))), flush=True)


def api(name: str, blocks: int, steps: int) -> None:
    """Print the first table."""
    trainer = Trainer(next(each for each in workloads() if each.name == name))
    debugger = TrainingDebugger()
    trainer.before = lambda step, model: debugger.monitor_training_step(model, 1.0, step) and None
    thread: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
    served: dict[str, list[float]] = {kind: [] for kind in KINDS}
    good = 0
    with serving(create_app(debugger, token="not-used-by-this-script"), port=0) as address:
        command = [sys.executable, __file__, "ask", "--address", address]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None
        assert client.stdout is not None
        server = next(each for each in threading.enumerate() if each.name == "gradflow-api")
        assert server.ident is not None
        clock = time.pthread_getcpuclockid(server.ident)
        trainer.step()
        for number in range(blocks * len(KINDS)):
            # The order turns, so that no kind always comes first after another.
            kind = KINDS[(number + number // len(KINDS)) % len(KINDS)]
            trainer.forget()
            if kind == "asked":
                client.stdin.write("go\n")
                client.stdin.flush()
            began, spent = time.perf_counter(), time.clock_gettime(clock)
            for _ in range(steps):
                trainer.step()
            wall[kind].append(time.perf_counter() - began)
            thread[kind].append(sum(trainer.thread))
            if kind == "asked":
                good += int(client.stdout.readline())
            served[kind].append((time.clock_gettime(clock) - spent) * 1e3)
        client.stdin.close()
        client.wait()
    print(f"\n{blocks} bursts of {REQUESTS} requests, {good} answered; {steps} steps of a block")
    print(f"{'blocks':<8}{'thread':>9}{'wall':>9}{'s a block':>12}{'ms per burst':>14}{'server ms':>11}")
    for kind in KINDS:
        added = (statistics.median(wall[kind]) - statistics.median(wall["quiet"])) * 1e3
        ratios = (sum(times[kind]) / sum(times["quiet"]) for times in (thread, wall))
        print(
            f"{kind:<8}" + "".join(f"{r:>9.4f}" for r in ratios) + f"{statistics.mean(wall[kind]):>12.3f}{added:>14.1f}"
            f"{statistics.median(served[kind]):>11.1f}"
        )


def stall(rounds: int) -> None:
    """Print the second table."""
    print(f"\n{'model':<6}{'check':<24}{'call ms':>9}{'greatest':>10}{'lag ms':>9}{'greatest':>10}")
    for workload in workloads():
        trainer = Trainer(workload)
        trainer.step()
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        with AsyncTrainingLogger(user_id=0, model_name=workload.name) as logger:
            checks: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
                ("nothing", lambda: asyncio.sleep(0.01)),
                ("check_gradient_anomalies", lambda: logger.check_gradient_anomalies_async(trainer.model)),  # noqa: B023
                ("within the loop", lambda: _within(gradients)),  # noqa: B023 - called before the next model
                ("a copy of each", lambda: _copied(gradients)),  # noqa: B023
            )
            for name, check in checks:
                calls, lags = asyncio.run(_watch(check, rounds))
                numbers = (statistics.median(calls), max(calls), statistics.median(lags), max(lags))
                print(
                    f"{workload.name:<6}{name:<24}{numbers[0]:>9.2f}{numbers[1]:>10.2f}{numbers[2]:>9.2f}{numbers[3]:>10.2f}"
                )


def _within(gradients: list[torch.Tensor]) -> Awaitable[object]:
    broken = [g for g in gradients if bool(torch.isnan(g).any()) or bool(torch.isinf(g).any())]
    return asyncio.sleep(0, broken)


def _copied(gradients: list[torch.Tensor]) -> Awaitable[object]:
    return asyncio.sleep(0, [g.clone() for g in gradients])


async def _watch(check: Callable[[], Awaitable[object]], rounds: int) -> tuple[list[float], list[float]]:
    """Return, for each round, the time of the call and the longest delay of another task, in ms."""
    calls, lags = [], []
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            wanted = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - wanted)

    ticking = asyncio.create_task(tick())
    for _ in range(rounds):
        await asyncio.sleep(0.005)
        longest = 0.0
        began = time.perf_counter()
        waiting = check()
        calls.append((time.perf_counter() - began) * 1e3)
        await waiting
        await asyncio.sleep(0.003)
        lags.append(longest * 1e3)
    ticking.cancel()
    return calls, lags


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["api", "stall", "ask"])
    parser.add_argument("--workload", choices=["mlp", "cnn", "gpt"], default="gpt", help="what is trained")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=30, help="checks of each kind")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "ask":
        ask(args.address)
        return
    if args.what in {None, "api"}:
        api(args.workload, args.blocks, args.steps)
    if args.what in {None, "stall"}:
        stall(args.rounds)


if __name__ == "__main__":
    main()
