"""Memory while watching a long run: resident size, live tensors and Python objects every 2000 steps.

Run ``python benchmarks/memory.py`` (about a minute). Nothing may grow with the number of steps: the last column is the
growth of the resident size since a fifth of the run, when buffers, windows and allocator pools have filled.
"""

import argparse
import gc
import sys
import tempfile

import psutil
import torch
from torch import nn

from gradflow_export import Exporter

MEGABYTE = 2**20


def live_tensors() -> int:
    """Return how many tensors Python knows of."""
    return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor or type(thing) is nn.Parameter)


def main() -> int:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--report-every", type=int, default=2_000)
    parser.add_argument("--every-step", action="store_true", help="read every instrument at every step")
    parser.add_argument("--unwatched", action="store_true", help="the same loop without an exporter, for comparison")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)), nn.Linear(16, 4))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01)
    names = ("blocks", "logits", "activations", "updates", "statistics", "ranks", "histograms")
    intervals = dict.fromkeys(names, 1) if given.every_step else None
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as logdir:
        exporter = Exporter(
            model, backends=["tensorboard", "jsonl"], logdir=logdir, intervals=intervals, enabled=not given.unwatched
        ).watch(criterion)
        base = None
        print(f"{'step':>8}{'RSS MB':>10}{'tensors':>10}{'objects':>10}{'dropped':>10}{'growth MB':>12}", flush=True)
        for step in range(1, given.steps + 1):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            if step % given.report_every == 0:
                dropped = exporter.summary()["dropped"]
                gc.collect()
                rss = process.memory_info().rss / MEGABYTE
                base = rss if base is None and step >= given.steps / 5 else base
                growth = "" if base is None else f"{rss - base:.2f}"
                print(
                    f"{step:>8}{rss:>10.1f}{live_tensors():>10}{len(gc.get_objects()):>10}{dropped:>10}{growth:>12}",
                    flush=True,
                )
        exporter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
