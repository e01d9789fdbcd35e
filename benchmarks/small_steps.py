"""What watching costs where steps are short: microseconds a step and ratios, beside a bare twin in the same run.

    python benchmarks/small_steps.py              # the table
    python benchmarks/small_steps.py --steps 20000

Two equal models take turns, 250 steps each, so that both see the same machine; each row is measured in a process of its
own. ``thread`` is the CPU time of the training thread with and without, after the dense start (the first 100 steps) and
2 000 steps in which the budget settles; ``process`` adds the worker thread. ``skipped step`` is what a step costs that
is only counted: the difference of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

from gradflow_export import Exporter

CHUNK = 250
SETTLE = 2_000
WIDTHS = {"0.15 ms": 32, "1 ms": 640}
SETTINGS = {"nothing": None, "default": {}, "budget=0.01": {"budget": 0.01}, "no budget": {"budget": None}}


def program(width):
    """Return a model of five layers, its optimizer, and what makes a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, step


def measure(workload, setting, steps):
    """Time one setting in this process."""
    torch.set_num_threads(1)
    (_, bare), (model, watched) = program(WIDTHS[workload]), program(WIDTHS[workload])
    chosen = SETTINGS[setting]
    exporter = None if chosen is None else Exporter(model, backends=["memory"], **chosen).watch()
    began = time.thread_time()
    for _ in range(100):
        watched()
    dense = time.thread_time() - began
    for _ in range(SETTLE):
        watched()
    times = {bare: [], watched: []}
    began = time.process_time()
    for _ in range(steps // CHUNK):
        for step in (bare, watched):
            for _ in range(CHUNK):
                before = time.thread_time()
                step()
                times[step].append(time.thread_time() - before)
    spent = time.process_time() - began
    alone, with_ours = sum(times[bare]), sum(times[watched])
    skipped = None
    if exporter is not None:
        exporter.close()
        skipped = exporter.summary()["skipped"].get("budget", 0)
    return {
        "workload": workload,
        "setting": setting,
        "bare_us": 1e6 * alone / len(times[bare]),
        "thread": with_ours / alone,
        "process": (spent - alone) / alone,
        "added_us": 1e6 * (with_ours - alone) / len(times[bare]),
        "skipped_step_us": 1e6 * (statistics.median(times[watched]) - statistics.median(times[bare])),
        "dense_us": 1e6 * dense / 100,
        "left_out": skipped,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.steps)))
        return
    titles = ("step", "setting", "bare us", "thread", "process", "added us", "skipped step us", "dense step us")
    print("| " + " | ".join(titles) + " | steps left out |")
    print("|---" * (len(titles) + 1) + "|")
    for workload in WIDTHS:
        for setting in SETTINGS:
            command = [sys.executable, __file__, "--one", workload, setting, "--steps", str(options.steps)]
            row = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            )
            cells = (
                workload, setting, f"{row['bare_us']:.0f}", f"{row['thread']:.3f}", f"{row['process']:.3f}",
                f"{row['added_us']:.1f}", f"{row['skipped_step_us']:.1f}", f"{row['dense_us']:.0f}", row["left_out"],
            )  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
