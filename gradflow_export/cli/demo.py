"""``gradflow demo``: train small models on real data, healthy or with one fault, and report."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradflow_export.cli.programs import Program

PROGRAMS = ("mlp", "cnn", "transformer")
COMPARED = ("pre-ln", "post-ln")
FAULTS = ("none", "vanishing", "exploding", "dead", "spike", "nan", "stagnation")
TOUR = (
    *((program, "none") for program in PROGRAMS),
    ("mlp", "vanishing"),
    ("transformer", "exploding"),
    ("cnn", "dead"),
    ("transformer", "spike"),
    *((program, "none") for program in COMPARED),
)
"""What the tour trains: healthy programs, each kind of trouble once, and two architectures to compare."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="train on real data, healthy or with one fault, and report")
    parser.add_argument("--logdir", default="runs/demo", help="folder for the runs (default: %(default)s)")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="fault to inject (default: %(default)s)")
    parser.add_argument("--program", choices=(*PROGRAMS, *COMPARED, "all"), default="all", help="what is trained")
    tour = "train a healthy model, one run per fault, Pre-LN and Post-LN, and a planted mistake for the doctor"
    parser.add_argument("--tour", action="store_true", help=tour)
    parser.add_argument("--steps", type=_positive, default=200, help="optimizer steps (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and report; 0 also when the report names a fault."""
    import torch

    from gradflow_export.cli.programs import build

    threads = torch.get_num_threads()
    # Such small models gain nothing from a second thread, and wait for it for long where the cores are busy.
    torch.set_num_threads(1)
    try:
        for name, fault in _chosen(args):
            folder = _fresh(Path(args.logdir), _run_name(name, fault))
            print(f"\n{_title(name, fault)}, {args.steps} steps, into {folder}")
            _train(build(name, fault), folder, args.steps)
        if args.tour:
            _examine()
    finally:
        torch.set_num_threads(threads)
    print(f"\nTo see the runs in TensorBoard:\n  tensorboard --logdir {args.logdir}")
    print("then open http://localhost:6006/#gradflow")
    return 0


def _examine() -> None:
    """Let the doctor find a planted mistake and show the cure that it tried."""
    from gradflow_export.cli import planted
    from gradflow_export.cli.checkup import examine_script

    print("\nA script that never clears its gradients, examined by `gradflow doctor`:", flush=True)
    with contextlib.redirect_stderr(sys.stdout):
        examine_script(Path(planted.__file__), [], argparse.Namespace(tried="yes"))


def _chosen(args: argparse.Namespace) -> Sequence[tuple[str, str]]:
    if args.tour:
        return TOUR
    return [(name, args.fault) for name in (PROGRAMS if args.program == "all" else (args.program,))]


def _run_name(program: str, fault: str) -> str:
    if fault == "none":
        return program if program in COMPARED else f"{program}-healthy"
    return f"{program}-{fault}"


def _train(program: Program, folder: Path, steps: int) -> None:
    from tqdm import tqdm

    from gradflow_export import Exporter
    from gradflow_export.cli.console import show

    with Exporter(program.model, logdir=folder, verbose=0).watch(program.criterion) as exporter:
        for step in tqdm(range(1, steps + 1), unit="step", disable=not sys.stderr.isatty(), leave=False):
            program.before_step(step)
            inputs, targets = next(program.batches)
            program.optimizer.zero_grad()
            program.criterion(program.model(inputs), targets).backward()
            program.optimizer.step()
    show(exporter.report())
    print(f"held-out accuracy: {program.accuracy():.1%}")


def _title(name: str, fault: str) -> str:
    from gradflow_export.cli.programs import NAN_STEP, SICK_BLOCK, SPIKE_STEP

    data = "handwritten digits" if name in {"mlp", "cnn"} else "the sources of Python's standard library"
    sick = f"blocks.{SICK_BLOCK}"
    what = {
        "none": "no warm-up" if name in COMPARED else "healthy",
        "vanishing": "sick: every block damps the gradient",
        "exploding": "sick: every block amplifies the gradient",
        "dead": f"sick: all units of {sick} are dead",
        "spike": f"sick: the batch of step {SPIKE_STEP} is corrupt",
        "nan": f"sick: {sick} divides zero by zero from step {NAN_STEP} on",
        "stagnation": f"sick: {sick} was left out of the optimizer",
    }
    return f"{name} on {data}, {what[fault]}"


def _fresh(logdir: Path, name: str) -> Path:
    """Return a folder that does not exist yet, so that a second demo does not continue the first."""
    folder, number = logdir / name, 1
    while folder.exists():
        number += 1
        folder = logdir / f"{name}-{number}"
    return folder


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return number
