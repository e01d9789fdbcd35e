"""Held-out programs, sick and healthy; run this file to verify every label.

``python benchmarks/heldout/programs.py [--replicates 3] [part of a name]``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import attention
import convolution
import games
import mlp
import policy
import sequence
import training

CASES = [case for part in (mlp, training, convolution, sequence, attention, policy, games) for case in part.CASES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=1)
    parser.add_argument("part", nargs="?", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wrong, slow = [], 0.0
    chosen = [case for case in CASES if arguments.part in case.name or arguments.part == case.label]
    for case in chosen:
        for replicate in range(arguments.replicates):
            began = time.process_time()
            losses = case.build(replicate).train()
            seconds = time.process_time() - began
            slow = max(slow, seconds)
            good, figures = case.verify(replicate)
            wrong += [] if good else [f"{case.name} #{replicate}"]
            shown = f"{losses[0]:.3g} -> {losses[-1]:.3g}  {figures}"
            print(
                f"{'true ' if good else 'FALSE'} {case.name} #{replicate} {case.label} {seconds:.2f} s  {shown[:260]}"
            )
    print(dict(Counter(case.label for case in chosen)))
    print(f"{len(chosen)} programs, slowest {slow:.1f} s, labels not proven: {wrong or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
