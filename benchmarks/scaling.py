"""How the cost of watching grows: with parameters, with tensors, and with the length of the run.

    python benchmarks/scaling.py                       # everything, in about an hour on a quiet machine
    python benchmarks/scaling.py --axis tensors --most 1000 --json

- **parameters**: 1 M to 500 M of them in 9 tensors, SGD. What is read at every step, and everything read at every step.
- **blocks**: 250 to 10 000 residual blocks whose activations are calls of functions, and the exponent as below.
- **tensors**: 100 to 10 000 at a constant 2 M parameters. The last line of each table is the exponent of a power law
  fitted to the added time, and that between the two largest sizes, where what is paid once weighs least: 1 is linear.
- **steps**: one run of a tiny model, looked at after 100, 1000, 10 000 and 100 000 steps: memory, bytes, added time.
- **opening**: how long ``gradflow report`` and the panel take to open a log of 10 000 layers.

Added time is CPU time of the training thread, a bare and a watched model taking turns (``benchmarks/overhead.py``);
``nothing`` is the A/A row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from scaling_runs import Opening, StepsRow, measure_opening, measure_steps
from timing import Row, apart, keep_memory, measure
from workloads import Workload

from instruments import INSTRUMENTS

PARAMETERS = (1_000_000, 5_000_000, 20_000_000, 100_000_000, 500_000_000)
TENSORS = (100, 300, 1_000, 3_000, 10_000)
BLOCKS = (250, 1_000, 4_000, 10_000)
STEPS = (100, 1_000, 10_000, 100_000)
LAYERS = (100, 1_000, 10_000)
CONSTANT = 2_000_000
WATCHED = ("nothing", "gradflow_norms", "gradflow_every_step")
AXES = ("parameters", "tensors", "blocks", "steps", "opening")
NARROW, WIDTH = 4, 12


class Chain(nn.Module):
    """A residual chain of square layers, and a narrow layer beside it.

    A narrow input goes through the narrow layer alone: the steps that wind an exporter's schedule forward are cheap at
    any size.
    """

    def __init__(self, depth: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))
        self.activations = nn.ModuleList(nn.ReLU() for _ in range(depth))
        self.narrow = nn.Linear(NARROW, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(x[:, :NARROW])
        if x.shape[1] == NARROW:
            return out
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = x + activation(layer(x)) / len(self.layers)  # in any depth of the same size
        return out + x[:, :10]


class Block(nn.Module):
    """A residual layer whose activation is a call of a function."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layer, self.depth = nn.Linear(width, width), depth

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(x)) / self.depth


class Blocks(nn.Module):
    """Such blocks in a row, and the narrow layer of :class:`Chain`."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(depth, width) for _ in range(depth))
        self.narrow = nn.Linear(NARROW, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(x[:, :NARROW])
        if x.shape[1] == NARROW:
            return out
        for block in self.blocks:
            x = block(x)
        return out + x[:, :10]


@dataclass(frozen=True)
class Point:
    """One size and what watching cost there.

    Attributes:
        axis: ``parameters``, ``tensors`` or ``blocks``.
        size: How many of them.
        row: The measurement.
    """

    axis: str
    size: int
    row: Row


def chain(name: str, make: Callable[[], nn.Module], width: int, *, rows: int, steps: int) -> Workload:
    """Return a training program around a :class:`Chain` or :class:`Blocks`."""
    return Workload(
        name,
        make,
        lambda n: (torch.randn(n, NARROW if n == 2 else width), torch.randint(0, 10, (n,))),
        rows,
        steps,
        steps,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    )


def workload_of(axis: str, size: int) -> Workload:
    """Return the training program of a point; the number of timed steps falls with its size."""
    if axis == "parameters":
        steps = min(40, max(6, 400_000_000 // size))
        width = max(math.isqrt(size // 8), 16)
        return chain(f"{size:.0e}", lambda: Chain(8, width, bias=False), width, rows=1, steps=steps)
    if axis == "blocks":
        steps = min(40, max(6, 10_000 // size))
        return chain(f"{size}", lambda: Blocks(size, WIDTH), WIDTH, rows=4, steps=steps)
    depth = size // 2
    steps = min(40, max(6, 20_000 // size))
    width = max(math.isqrt(CONSTANT // depth), 10)
    return chain(f"{size}", lambda: Chain(depth, width, bias=True), width, rows=4, steps=steps)


def measure_point(axis: str, size: int, instrument: str) -> Row:
    """Time one instrument at one size, in this process."""
    keep_memory()
    workload = workload_of(axis, size)
    return measure(workload, next(i for i in INSTRUMENTS if i.name == instrument), workload.steps, quiet=True)


def exponent(points: list[Point], axis: str, instrument: str) -> tuple[float, float] | None:
    """Return the slope of log added time over log size, of all points and of the two largest; needs three points."""
    known = [p for p in points if p.axis == axis and p.row.instrument == instrument and p.row.added_ms > 0]
    if len(known) < 3:
        return None
    x, y = np.log([p.size for p in known]), np.log([p.row.added_ms for p in known])
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


@dataclass(frozen=True)
class Scaling:
    """All that was measured."""

    points: list[Point]
    steps: list[StepsRow]
    openings: list[Opening]


def collect(axes: Sequence[str], most: int | None, rounds: int) -> Scaling:
    """Measure along some axes.

    Args:
        axes: Of ``AXES``.
        most: Leave out sizes above this one.
        rounds: Repeat each point of parameters, tensors and blocks so often, and take the median.
    """

    def sizes(every: tuple[int, ...]) -> list[int]:
        return [size for size in every if most is None or size <= most]

    points = []
    for axis, every in (("parameters", PARAMETERS), ("tensors", TENSORS), ("blocks", BLOCKS)):
        for size in sizes(every) if axis in axes else ():
            for name in WATCHED:
                print(f"{axis} {size:,} {name}", file=sys.stderr)
                repeats = [apart(measure_point, axis, size, name) for _ in range(rounds)]
                repeats.sort(key=lambda row: row.added_ms)
                points.append(Point(axis, size, repeats[rounds // 2]))
    steps = apart(measure_steps, sizes(STEPS)) if "steps" in axes else []
    openings = [apart(measure_opening, layers) for layers in sizes(LAYERS)] if "opening" in axes else []
    return Scaling(points, steps, openings)


def table_of_points(points: list[Point], axis: str) -> str:
    """Return the points of one axis as Markdown."""
    lines = [f"| {axis} | bare step, ms | A/A, ms | norms, ms | everything, ms | everything, MB |", "|---" * 6 + "|"]
    for size in sorted({p.size for p in points if p.axis == axis}):
        nothing, norms, everything = (
            next(p.row for p in points if (p.axis, p.size, p.row.instrument) == (axis, size, name)) for name in WATCHED
        )
        added = " | ".join(f"{row.added_ms:.2f} ({row.added_ms / row.bare_ms:+.1%})" for row in (nothing, norms))
        lines.append(
            f"| {size:,} | {nothing.bare_ms:.1f} | {added} | {everything.added_ms:.2f} "
            f"({everything.added_ms / everything.bare_ms:+.0%}) | {everything.memory_mb:.0f} |"
        )
    fits = [exponent(points, axis, name) for name in WATCHED[1:]]
    said = " | ".join("" if fit is None else f"{fit[0]:.2f}; {fit[1]:.2f}" for fit in fits)
    lines.append(f"| exponent over all; between the last two | | | {said} | |")
    return "\n".join(lines) + "\n"


def table_of_steps(rows: list[StepsRow]) -> str:
    """Return the looks at a long run as Markdown."""
    lines = ["| steps | memory, MB | live tensors | bytes per step | µs per step | dropped |", "|---" * 6 + "|"]
    lines += [
        f"| {r.steps:,} | {r.memory_mb:.1f} | {r.tensors} | {r.bytes_per_step:.0f} | {r.step_us:.0f} | {r.dropped} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def table_of_openings(rows: list[Opening]) -> str:
    """Return opening times as Markdown."""
    lines = [
        "| layers | log, MB | `gradflow report`, s | panel's tab clicked to map painted, s | second visit, s |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {r.layers:,} | {r.log_mb:.1f} | {r.report_s:.2f} | {r.first_s:.2f} | {r.second_s:.2f} |" for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=AXES)
    parser.add_argument("--most", type=int, help="leave out sizes above this one")
    parser.add_argument("--rounds", type=int, default=1, help="repeat all but steps and opening, and take the median")
    parser.add_argument("--json", action="store_true", help="print one object instead of the tables")
    args = parser.parse_args()
    found = collect(args.axis or AXES, args.most, args.rounds)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
        return
    print(f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores\n")
    for axis in ("parameters", "tensors", "blocks"):
        if any(point.axis == axis for point in found.points):
            print(table_of_points(found.points, axis))
    if found.steps:
        print(table_of_steps(found.steps))
    if found.openings:
        print(table_of_openings(found.openings))


if __name__ == "__main__":
    main()
