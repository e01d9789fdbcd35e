"""What the live exporter finds in a corpus of sick and healthy training programs, and where it is wrong.

Run it on a corpus file::

    python benchmarks/detection.py --corpus benchmarks/heldout/programs.py --replicates 3
    python benchmarks/detection.py --corpus corpus.py --profile seed --json

A corpus is a Python file with ``CASES``. A case has ``name``, ``label`` (an issue type, or ``HEALTHY``), ``where``
(prefixes of the layers at fault, ``""`` for the whole model), ``also`` (labels that are true of it too) and
``build(replicate) -> Program``; a program has ``model``, ``steps``, ``step(t, tap)`` and may have ``blocks``,
``players``, ``losses`` and ``policy``. The exporter sees what a user's loop would show it: the model, the optimizers'
steps, the loss on which ``backward`` is called, and blocks, players' losses and policy where given.

A fault counts as found when its label is raised at or below one of ``where``; labels in ``also`` count neither way, and
neither do those in ``REASONS``.
Location precision is the share, among the layers named in issues of the right label, that lies at or below ``where``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import logging
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter

HEALTHY = "HEALTHY"
REASONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "STAGNATION": frozenset({"NOT_TRAINING", "BAD_INIT"}),
        "VANISHING": frozenset({"BAD_INIT"}),
        "EXPLODING": frozenset({"BAD_INIT", "LEARNING_RATE"}),
    }
)
"""Types that tell why a fault of some label is there, which the corpora were labelled too early to know."""


@dataclass(frozen=True)
class Outcome:
    """What was found in one replicate of one program.

    Attributes:
        name: The program.
        replicate: Which seed.
        label: What is wrong with it.
        found: Label and layer of every issue raised, a row per layer named.
        ok: Found where it is, or silent when healthy.
        extra: Labels raised that are not true of it.
        inside: Layers named in issues of the right label that lie at or below ``where``.
        named: Layers named in issues of the right label.
        seconds: Time of the run.
    """

    name: str
    replicate: int
    label: str
    found: tuple[tuple[str, str], ...]
    ok: bool
    extra: tuple[str, ...]
    inside: int
    named: int
    seconds: float


def load(path: Path) -> ModuleType:
    """Import a corpus from its file."""
    spec = importlib.util.spec_from_file_location("gradflow_detection_corpus", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"--corpus must name a Python file with CASES, got {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def observing_backward(exporter: Exporter) -> Iterator[None]:
    """Hand every scalar on which ``backward`` is called to the exporter, as ``observe(loss=loss)`` before it would."""
    backward = torch.Tensor.backward

    def observed(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.numel() == 1:
            exporter.observe(loss=self)
        backward(self, *args, **kwargs)

    torch.Tensor.backward = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def run(program: Any, profile: str) -> list[tuple[str, str]]:
    """Train one program under a live exporter; return label and layer of all issues."""
    with Exporter(program.model, backends=[MemoryWriter()], profile=profile, verbose=0) as exporter:
        exporter.watch(blocks=program.blocks)
        if program.losses is not None:
            players = program.losses

            def losses(model: Any) -> Any:
                values = players(model)
                exporter.observe(loss=values[0])
                return values

            program.losses = losses

        def tap(phase: str, _program: Any) -> None:
            if phase == "backward" and program.policy is not None:
                exporter.observe(policy=program.policy(program.model))

        with observing_backward(exporter):
            for t in range(program.steps):
                program.step(t, tap)
        return [(str(issue.issue_type), layer) for issue in exporter.issues for layer in issue.layers]


def below(layer: str, where: list[str]) -> bool:
    """Whether a layer lies at or below one of the prefixes."""
    return any(not prefix or layer == prefix or layer.startswith(prefix + ".") for prefix in where)


def _as_in_a_fresh_process() -> None:
    """Give memory that earlier programs freed back to the system, or what a program keeps would fit in there unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def judge(case: Any, replicate: int, profile: str) -> Outcome:
    """Run one replicate of a case and compare with its label."""
    began = time.perf_counter()
    _as_in_a_fresh_process()
    found = run(case.build(replicate), profile)
    raised = {label for label, _ in found}
    right = [layer for label, layer in found if label == case.label]
    inside = sum(below(layer, case.where) for layer in right)
    return Outcome(
        name=case.name,
        replicate=replicate,
        label=case.label,
        found=tuple(found),
        ok=not raised - set(case.also) if case.label == HEALTHY else inside > 0,
        extra=tuple(sorted(raised - set(case.also) - {case.label} - REASONS.get(case.label, frozenset()))),
        inside=inside,
        named=len(right),
        seconds=time.perf_counter() - began,
    )


def share(part: float, whole: float) -> float:
    """Part of a whole; 0 of nothing."""
    return part / whole if whole else 0.0


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, JASA 22); (0, 1) of nothing."""
    if not trials:
        return 0.0, 1.0
    share_, square = hits / trials, z * z / trials
    half = z * math.sqrt(share_ * (1 - share_) / trials + square / (4 * trials))
    return max((share_ + square / 2 - half) / (1 + square), 0.0), min((share_ + square / 2 + half) / (1 + square), 1.0)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return all figures of a run, JSON-ready."""
    faults = [o for o in outcomes if o.label != HEALTHY]
    healthy = [o for o in outcomes if o.label == HEALTHY]
    by_class = defaultdict(list)
    for outcome in faults:
        by_class[outcome.label].append(outcome)
    per_class = {
        label: {
            "programs": len(group),
            "found": sum(o.ok for o in group),
            "recall": share(sum(o.ok for o in group), len(group)),
            "location_precision": share(sum(o.inside for o in group), sum(o.named for o in group)),
            "wrong_extra": sum(bool(o.extra) for o in group),
        }
        for label, group in sorted(by_class.items())
    }
    alarms = sum(not o.ok for o in healthy)
    per_class[HEALTHY] = {"programs": len(healthy), "alarmed": alarms}
    return {
        "macro_recall": share(sum(row["recall"] for k, row in per_class.items() if k != HEALTHY), len(by_class)),
        "recall": share(sum(o.ok for o in faults), len(faults)),
        "healthy_false_alarm": share(alarms, len(healthy)),
        "healthy_programs": len({o.name for o in healthy}),
        "healthy_programs_alarmed": len({o.name for o in healthy if not o.ok}),
        "faulty_programs": len({o.name for o in faults}),
        "faulty_programs_always_found": len({o.name for o in faults} - {o.name for o in faults if not o.ok}),
        "healthy_with_a_true_label": len({o.name for o in healthy if o.ok and o.found}),
        "wrong_extra": share(sum(bool(o.extra) for o in faults), len(faults)),
        "location_precision": share(sum(o.inside for o in faults), sum(o.named for o in faults)),
        "seconds": sum(o.seconds for o in outcomes),
        "per_class": per_class,
        "cases": [{key: value for key, value in asdict(o).items() if key not in {"inside", "named"}} for o in outcomes],
    }


def interval(what: str, hits: int, trials: int) -> str:
    """Return a count with its share and interval."""
    low, high = wilson(hits, trials)
    return f"{what}: {hits} of {trials}, {share(hits, trials):.1%} (95 % interval {low:.1%} to {high:.1%})"


def table(result: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Return the figures as Markdown, and every program that went wrong."""
    lines = [
        "| label | runs | found | recall | location precision | with wrong extra labels |",
        "|---|---|---|---|---|---|",
    ]
    for label, row in result["per_class"].items():
        if label != HEALTHY:
            lines.append(
                f"| {label} | {row['programs']} | {row['found']} | {row['recall']:.0%} | "
                f"{row['location_precision']:.0%} | {row['wrong_extra']} |"
            )
    healthy = result["per_class"][HEALTHY]
    lines += [
        "",
        f"- macro recall {result['macro_recall']:.1%}, recall {result['recall']:.1%}; "
        + interval("programs found in every run", result["faulty_programs_always_found"], result["faulty_programs"]),
        "- " + interval("healthy runs with an alarm", healthy["alarmed"], healthy["programs"]),
        "- "
        + interval(
            "healthy programs with an alarm in any run", result["healthy_programs_alarmed"], result["healthy_programs"]
        )
        + f"; with a label that is true of them, and nothing else: {result['healthy_with_a_true_label']}",
        f"- faults with wrong extra labels {result['wrong_extra']:.1%}",
        f"- location precision {result['location_precision']:.1%}",
        f"- {result['seconds']:.0f} s",
    ]
    wrong = [o for o in outcomes if not o.ok or o.extra]
    if wrong:
        lines += ["", "Not as labelled:"]
        for o in wrong:
            raised = Counter(label for label, _ in o.found)
            said = ", ".join(f"{label} in {layers} layers" if layers > 1 else label for label, layers in raised.items())
            lines.append(f"- {o.name} #{o.replicate} ({o.label}): {said or 'nothing'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, required=True, help="Python file with CASES")
    parser.add_argument("--profile", choices=("robust", "seed"), default="robust")
    parser.add_argument("--replicates", type=int, default=1, help="seeds 0 .. N-1 of every program")
    parser.add_argument("--first", type=int, default=0, help="first seed, for held-out ones")
    parser.add_argument("--only", default="", help="run only cases whose name or label contains this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    cases = [c for c in load(arguments.corpus).CASES if arguments.only in c.name or arguments.only in c.label]
    replicates = range(arguments.first, arguments.first + arguments.replicates)
    runs = [(case, replicate) for case in cases for replicate in replicates]
    outcomes = [judge(*each, arguments.profile) for each in tqdm(runs, disable=arguments.json)]
    result = summary(outcomes)
    print(json.dumps(result, indent=1) if arguments.json else table(result, outcomes))


if __name__ == "__main__":
    main()
