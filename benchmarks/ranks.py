"""What joining many ranks costs: CPU time of rank 0's worker and of the busiest other rank, for each recorded step.

Every rank is played in turn by this one process, over a real ``TCPStore`` on the loopback interface. Each holds a shard
of every tensor, as under ``fully_shard``. A plain step carries one gradient norm a tensor and the loss, a sampled one
eight values a tensor. ``python benchmarks/ranks.py --ranks 8 64 256 1024 4096 --tensors 150 1000``
"""

import argparse
import statistics
import sys
import time

import numpy as np
import torch.distributed as dist

from gradflow_export.distributed.rank_reduce import Joiner
from gradflow_export.distributed.rank_shares import encode
from gradflow_export.distributed.rank_transport import Exchange, height_of
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.records.column import Column

PLAIN = ("parameter.gradient_norm",)
SAMPLED = (
    "parameter.gradient_norm", "parameter.gradient_l1", "parameter.gradient_linf", "parameter.gradient_mean",
    "parameter.weight_norm", "parameter.update_norm", "parameter.adam_rms", "parameter.nonfinite",
)  # fmt: skip
AIM_MS = 20.0


def column(sites, value):
    """Return a column with one value at every site."""
    made = Column(sites)
    made.values[:], made.present[:] = value, True
    return made


def layout(sites, ranks):
    """Return that of a model of which every rank holds a shard of each tensor."""
    count = len(sites)
    whole = np.ones(count, dtype=np.int64)
    return Layout(sites, np.arange(count), np.ones(count, dtype=np.bool_), whole * ranks, whole * 1000, ranks)


def measure(ranks, tensors, metrics, rounds):
    """Return milliseconds of CPU a step of rank 0 and of the busiest other, bytes of a message, and rank 0's norm."""
    sites = tuple(f"model.layers.{place // 12}.block.{place % 12}.weight" for place in range(tensors))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    ends = [Exchange(store, rank, ranks) for rank in range(ranks)]
    lies = [layout(sites, ranks)]
    for end in ends:
        end.open()
    order = sorted(range(ranks), key=lambda rank: (height_of(rank, ranks), rank))
    spent = [[] for _ in range(ranks)]
    for step in range(1, rounds + 2):
        for rank in order:
            columns = {metric: column(sites, 3.0) for metric in metrics}
            columns["loss"] = column(("",), float(rank))
            began = time.thread_time()
            ends[rank].join(step, columns, lies)
            if step > 1:  # names travel in the first
                spent[rank].append(1e3 * (time.thread_time() - began))
    norm = float(columns["parameter.gradient_norm"].values[0])
    assert columns["loss"].values[0] == (ranks - 1) / 2, "a rank was not heard"
    assert abs(norm - 3.0 * ranks**0.5) < 1e-9 * norm, "a shard was not heard"
    middle = [statistics.median(times) for times in spent]
    message = encode(Joiner(1, ranks).share({metric: column(sites, 3.0) for metric in metrics}, lies), schema=False)
    for end in ends:
        end.close()
    return middle[0], max(middle[1:]), len(message)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--tensors", type=int, nargs="+", default=[150, 1000])
    parser.add_argument("--rounds", type=int, default=5, help="steps that are measured; the median counts")
    options = parser.parse_args()
    print("| ranks | levels | tensors | step | rank 0 (ms) | busiest other (ms) | message (kB) |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for ranks in options.ranks:
        for tensors in options.tensors:
            for name, metrics in (("plain", PLAIN), ("sampled", SAMPLED)):
                first, other, size = measure(ranks, tensors, metrics, options.rounds)
                worst = max(worst, first, other)
                row = (ranks, height_of(0, ranks), tensors, name, f"{first:.1f}", f"{other:.1f}", f"{size / 1e3:.0f}")
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(f"\nGreatest: {worst:.1f} ms of CPU a recorded step (aim: {AIM_MS:.0f} ms).")
    return int(worst > AIM_MS)


if __name__ == "__main__":
    sys.exit(main())
