"""How much of a run is lost when its process is killed: `python benchmarks/kill.py --times 50`.

A child trains with the default backend, tells of each step when it has made it, and at a random moment is killed, or
every other time ends itself by `os._exit`. What can be read back then is compared with what it told. A child that the
machine kept from running for a while is given that much longer: its longest pause between two steps is printed beside
the loss.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gradflow_export.errors import StorageError
from gradflow_export.storage.reader import read_run

MOST_SECONDS = 1.0
CHILD = """
import os, sys, time, torch
from torch import nn
from gradflow_export import Exporter
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
exporter = Exporter(model, logdir=sys.argv[1], budget=None).watch()
step, end = 0, float(sys.argv[3])
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    print(step, time.monotonic(), flush=True)
    end += time.monotonic() if step == 1 else 0
    if time.monotonic() > end > 0:
        os._exit(1)
    time.sleep(float(sys.argv[2]))
"""


def kill_once(logdir: Path, seconds: float, pause: float, *, itself: bool) -> tuple[int, int, float, float]:
    """Train, kill, read.

    Args:
        logdir: Where the child writes.
        seconds: How long after its first step the child is killed.
        pause: Seconds between its steps.
        itself: Whether it ends itself, by ``os._exit``.

    Returns:
        Steps made, steps read back, age in seconds of the oldest step that is lost, longest pause between two steps.
    """
    command = [sys.executable, "-c", CHILD, str(logdir), str(pause), str(seconds if itself else math.inf)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = [child.stdout.readline()]
        if not itself:
            time.sleep(seconds)
            child.kill()
        killed = time.monotonic()
        told += [line for line in child.stdout if line.endswith("\n")]
    made = {int(step): float(at) for step, at in map(str.split, told)}
    killed = max(made.values()) if itself else killed
    try:
        kept = set(read_run(logdir).records.steps)
    except StorageError:
        kept = set()
    lost = max((killed - at for step, at in made.items() if step not in kept), default=0.0)
    times = [*made.values(), killed]
    return len(made), len(kept), lost, max(after - before for before, after in itertools.pairwise(times))


def main() -> int:
    """Kill some children; 1 when one lost more than a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, help="a folder for what the children write; a temporary one by default")
    args = parser.parse_args()
    rng, worst = random.Random(args.seed), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.times):
            seconds, pause = rng.uniform(0.0, 6.0), rng.choice([0.0, 0.002, 0.02, 0.2])
            logdir = (args.logdir or Path(temporary)) / str(number)
            itself = bool(number % 2)
            made, kept, lost, stall = kill_once(logdir, seconds, pause, itself=itself)
            worst = max(worst, lost - max(stall - pause, 0.0))
            print(
                f"{'os._exit' if itself else 'killed'} after {seconds:4.1f} s, a step each {1e3 * pause:3.0f} ms: "
                f"{kept} of {made} steps read back, the oldest lost is {lost:.2f} s old; longest pause {stall:.2f} s",
                flush=True,
            )
    print(f"at most {worst:.2f} s lost")
    return int(worst > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
