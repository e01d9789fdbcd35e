"""Memory that watching adds to a large model, told apart from noise.

    python benchmarks/added_memory.py                          # 500 M parameters in float32: 5 GB, some minutes
    python benchmarks/added_memory.py --parameters 20_000_000
    python benchmarks/added_memory.py --parameters 100_000_000 --batch 64 --allocator plain

Each arm is a process of its own: it trains, notes its resident size, and trains on with or without an exporter at its
defaults. ``peak`` is how far the resident size ever rose above what was noted (the kernel's high-water mark, begun
anew), temporary copies included; ``rest`` how far it stands above it after the last step, free memory given back, and
``private`` the part of that which is no file: code that is used for the first time is read from the files of torch and
numpy, and the system may drop it again. Added is watched less bare; the two bare arms, A and A', tell the noise, and
``libraries`` what an exporter takes that is made and told to watch nothing.

The defaults are one sample per step, and blocks of a megabyte and more kept off the heap, so that nothing is told but
what is held. With ``--allocator plain`` glibc does as it likes: a heap that training and watching share, and one of the
worker's, keep what they once needed, and bare runs differ by megabytes.

With ``--held`` a second pair of arms counts instead of measuring: the bytes that Python's allocator and numpy hold
(``tracemalloc``), and those of tensors that live and are neither the model's nor its gradients, watched less bare.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import math
import sys
import tempfile
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from scaling import NARROW, Chain
from timing import apart, resident

MEGABYTE = 2**20
DEPTH, WARM_UP = 8, 3
ARMS = ("A", "A'", "libraries", "watched")
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # malloc.h of glibc


@dataclass(frozen=True)
class Growth:
    """What one process needed beyond what it had before it was watched.

    Attributes:
        peak_mb: Highest resident size, less that before.
        rest_mb: Resident size in the end, less that before.
        private_mb: That of it which is no file.
        python_mb: Bytes that Python and numpy hold more than before; 0 where they are not counted.
        tensors_mb: Bytes of live tensors that are neither parameters nor gradients; 0 where they are not counted.
        largest: Where Python holds most, as file, line and bytes.
    """

    peak_mb: float
    rest_mb: float
    private_mb: float
    python_mb: float = 0.0
    tensors_mb: float = 0.0
    largest: tuple[str, ...] = ()


def measure(arm: str, parameters: int, steps: int, batch: int, *, plain: bool, count: bool) -> Growth:
    """Train in this process, and say what it needed.

    Args:
        arm: ``watched``, ``libraries`` (loaded, but nothing is watched), or any other word for neither.
        parameters: Size of the model.
        steps: Steps after it is watched, all of full size.
        batch: Samples of a step.
        plain: Whether to leave the allocator as it comes.
        count: Whether to count what is held, which takes time and memory itself.
    """
    for option, value in () if plain else ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, MEGABYTE)):
        ctypes.CDLL(None).mallopt(option, value)
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = max(math.isqrt(parameters // DEPTH), NARROW)
    model = Chain(DEPTH, width, bias=False)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(batch, width), torch.randint(0, 10, (batch,))

    def train(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        train(WARM_UP)
        if count:
            from gradflow_export import Exporter  # what modules hold is counted by the other arms

            tracemalloc.start(4)
        held, before, private = _tensors(model), resident(), _status("RssAnon")
        _forget_peak()
        exporter = None
        if arm in {"libraries", "watched"}:
            from gradflow_export import Exporter

            exporter = Exporter(model, logdir=folder, enabled=arm == "watched").watch(criterion)
        train(steps)
        peak = _status("VmHWM") - before
        if exporter is not None:
            exporter.summary()  # the worker has nothing to do any more
        rest, private = resident() - before, _status("RssAnon") - private
        python, largest = _python() if count else (0, ())
        tensors = _tensors(model) - held
        if exporter is not None:
            exporter.close()
    measured = (number / MEGABYTE for number in (peak, rest, private, python, tensors))
    return Growth(*measured, largest=largest)


def _python() -> tuple[int, tuple[str, ...]]:
    shot = tracemalloc.take_snapshot()
    largest = shot.statistics("lineno")[:12]
    told = tuple(f"{s.traceback[0].filename}:{s.traceback[0].lineno} {s.size / 1024:.0f} kB" for s in largest)
    return tracemalloc.get_traced_memory()[0], told


def _tensors(model: nn.Module) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own |= {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    there = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in there}
    return sum(size for place, size in sizes.items() if place not in own)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=500_000_000)
    parser.add_argument("--steps", type=int, default=12, help="the first ten read everything")
    parser.add_argument("--batch", type=int, default=1, help="samples of a step")
    parser.add_argument("--allocator", choices=("held", "plain"), default="held", help="plain: glibc as it comes")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--held", action="store_true", help="count what is held too")
    parser.add_argument("--json", action="store_true", help="print one object instead of the tables")
    args = parser.parse_args()

    def run(arm: str, *, count: bool) -> Growth:
        plain = args.allocator == "plain"
        return apart(measure, arm, args.parameters, args.steps, args.batch, plain=plain, count=count)

    found = {arm: run(arm, count=False) for arm in args.arms}
    counted = {arm: run(arm, count=True) for arm in ("A", "watched")} if args.held else {}
    if args.json:
        print(json.dumps([{arm: asdict(g) for arm, g in part.items()} for part in (found, counted)], indent=2))
        return 0
    print(f"torch {torch.__version__}, {args.parameters:,} parameters, {args.steps} steps of {args.batch} samples\n")
    print("| arm | peak, MB | rest, MB | private, MB |\n|---|---|---|---|")
    for arm, g in found.items():
        print(f"| {arm} | {g.peak_mb:.2f} | {g.rest_mb:.2f} | {g.private_mb:.2f} |")
    if counted:
        bare, g = counted["A"], counted["watched"]
        python, tensors = g.python_mb - bare.python_mb, g.tensors_mb - bare.tensors_mb
        print(f"\nheld: {python:.2f} MB by Python and numpy, {tensors:.2f} MB by tensors; most of it at")
        print("\n".join(f"  {line}" for line in g.largest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
