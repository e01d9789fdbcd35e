"""Print the tables of docs/detection.md: how soon a late fault is reported, and how often issues are right.

    python benchmarks/tables.py latency --programs 12 --write
    python benchmarks/tables.py reliability --results runs/mutation.jsonl --write    # of benchmarks/mutation.py
    python benchmarks/tables.py reliability --programs 60 --results runs/quick.jsonl
    python benchmarks/tables.py reliability --results silent-dev.json silent-third.json    # of silent.py --json

*Latency*: programs of ``benchmarks/generated`` train for 205 to 244 steps as they are; then one fault begins, and they
train on for 110 steps. Counted are the steps from the first one with the fault to the record in which an issue of
MEDIUM or worse opens. A program in which anything is told before is left out. ``synchronous=True`` takes the
budget away: steps of these programs take less than a millisecond, and to keep within 5 % of that many are left out.

*Reliability*: of each program the worst issue counts, with its severity. It is right when its type names the mistake;
wrong when it does not, or the program is healthy. The share that is right depends on how many programs have a mistake,
and is given for two such shares. With ``--programs`` each program and one mutant of each are run once, watched: a quick
look, in which a program counts as healthy at a skill of 0.4, and a mutant as harmful where a tenth is lost.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detection import wilson
from generated.grammar import draw
from generated.operators import OPERATORS
from generated.programs import Parts, assemble, parts, score, train
from generated.tasks import TEST
from mutation import LEARNS, Result, half, run, stored
from torch import Tensor, nn
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.issues import Severity

PAGE = Path(__file__).resolve().parent.parent / "docs" / "detection.md"
AFTER = 110
"""Steps that a program trains on with its fault."""


# Latency


@dataclass(frozen=True)
class Late:
    """A fault that begins in the middle of training.

    Attributes:
        name: What happens.
        make: Enters it into the parts of a program, given a function that says whether it has begun; False where it
            does not apply.
        types: Issue types that name it, or what it does.
        always: Whether what shows it is read at every step: the loss and the norms of gradients.
    """

    name: str
    make: Callable[[Parts, Callable[[], bool]], bool]
    types: str
    always: bool


def _rate(factor: float) -> Callable[[Parts, Callable[[], bool]], bool]:
    def make(p: Parts, begun: Callable[[], bool]) -> bool:
        p.factor = lambda _t: factor if begun() else 1.0
        return True

    return make


def _sign(p: Parts, begun: Callable[[], bool]) -> bool:
    loss = p.loss
    p.loss = lambda out, y: -loss(out, y) if begun() else loss(out, y)
    return True


def _inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Parts, Callable[[], bool]], bool]:
    def make(p: Parts, begun: Callable[[], bool]) -> bool:
        p.batch = lambda x, y: (change(x), y) if begun() else (x, y)
        return not p.data.tokens

    return make


def _one_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = float("nan")
    return x


def _not_cleared(p: Parts, begun: Callable[[], bool]) -> bool:
    p.clears = lambda _t: not begun()
    return p.recipe.loop != "closure"


def _cleared_late(p: Parts, begun: Callable[[], bool]) -> bool:
    rows = p.rows

    def noted(t: int) -> Tensor:
        p.clears_late = begun()
        return rows(t)

    p.rows = noted
    return True


def _cut(p: Parts, begun: Callable[[], bool]) -> bool:
    p.model.before_head = lambda h: h.detach() if begun() else h
    return True


def _once(change: Callable[[nn.Module], None]) -> Callable[[Parts, Callable[[], bool]], bool]:
    def make(p: Parts, begun: Callable[[], bool]) -> bool:
        layers = [b.layer for b in p.model.blocks if isinstance(getattr(b, "layer", None), (nn.Linear, nn.Conv2d))]
        layers = [layer for layer in layers if layer.bias is not None]
        if not layers or p.recipe.norm or p.recipe.activation not in {"relu", "tanh"}:
            return False
        rows, done = p.rows, [False]

        def changed(t: int) -> Tensor:
            if begun() and not done[0]:
                done[0] = True
                with torch.no_grad():
                    change(layers[len(layers) // 2])
            return rows(t)

        p.rows = changed
        return True

    return make


def _kill(layer: nn.Module) -> None:
    layer.weight.zero_()  # type: ignore[union-attr,operator]
    layer.bias.fill_(-5.0)  # type: ignore[union-attr,operator]


_STEPS = "LEARNING_RATE UNSTABLE EXPLODING DIVERGING LOSS_SPIKE NUMERICAL"
_REST = "NOT_TRAINING STAGNATION LEARNING_RATE"
LATE = (
    Late("the learning rate rises 100-fold", _rate(100.0), _STEPS, always=True),
    Late("the loss changes its sign", _sign, f"{_STEPS} WRONG_LOSS NOT_LEARNING", always=True),
    Late("inputs become 1,000 times as large", _inputs(lambda x: 1000 * x), f"{_STEPS} DATA_SCALE", always=True),
    Late("one input is NaN", _inputs(_one_nan), "NUMERICAL", always=True),
    Late("gradients are no longer cleared", _not_cleared, f"STALE_GRAD {_STEPS}", always=True),
    Late("gradients are cleared before the step", _cleared_late, _REST, always=True),
    Late("the learning rate falls to 0", _rate(0.0), _REST, always=False),
    Late("the graph is cut before the head", _cut, _REST, always=False),
    Late("a layer is killed, or saturated", _once(_kill),
         "DEAD SATURATION STAGNATION VANISHING BOTTLENECK NOT_TRAINING", always=False),
)  # fmt: skip


def _told(number: int, late: Late) -> tuple[int | None, int | None] | None:
    """Return the steps until anything and until a right type is told; ``None`` where the fault cannot be made."""
    recipe = draw(number)
    begin = 205 + 7 * number % 40
    p = parts(replace(recipe, schedule="", steps=begin + AFTER, batch=min(recipe.batch, 64)), 0, number)
    rows, now = p.rows, [0]

    def noted(t: int) -> Tensor:
        now[0] = t
        return rows(t)

    p.rows = noted
    if not late.make(p, lambda: now[0] >= begin):
        return None
    assemble(p)
    memory = MemoryWriter()
    with Exporter(p.model, backends=[memory], verbose=0, synchronous=True) as exporter:
        exporter.watch()
        train(p)
    opened = [(r.step, i) for r in memory.records for i in r.issues if i.open and i.severity >= Severity.MEDIUM]
    if any(step <= begin for step, _ in opened):
        return None
    steps = [
        [s - begin for s, i in opened if right in (None, str(i.issue_type) in late.types)] for right in (None, True)
    ]
    return min(steps[0], default=None), min(steps[1], default=None)


def latency(numbers: list[int]) -> Iterator[str]:
    """Return the table of latency."""
    found: dict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
    for number in tqdm(numbers):
        for late in LATE:
            told = _told(number, late)
            if told is not None:
                found[late.name].append(told)
    yield "| what begins | read at every step | programs | told | median | 90th percentile | of a right type |"
    yield "|---|---|---|---|---|---|---|"
    for late in LATE:
        yield _row(late.name, "yes" if late.always else "no", found[late.name])
    for always, name in ((True, "**all that is read at every step**"), (False, "**the rest**")):
        yield _row(name, "", [each for late in LATE if late.always is always for each in found[late.name]])


def _row(name: str, always: str, told: list[tuple[int | None, int | None]]) -> str:
    steps = np.array([np.inf if first is None else first for first, _ in told])
    if not len(steps):
        return f"| {name} | {always} | 0 | | | | |"
    middle, most = (_steps(float(np.quantile(steps, q, method="higher"))) for q in (0.5, 0.9))
    right = sum(second is not None for _, second in told)
    return f"| {name} | {always} | {len(told)} | {int(np.isfinite(steps).sum())} | {middle} | {most} | {right} |"


def _steps(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) else f"not within {AFTER}"


# Reliability


def reliability(paths: list[Path], of: str) -> Iterator[str]:
    """Return the table of reliability from what was stored of runs."""
    told, healthy = [], []
    for path in paths:
        more = _of_silent(path) if path.suffix == ".json" else _of_mutants(path, half(of).operators)
        told += more[0]
        healthy += more[1]
    yield f"{len(healthy)} runs of programs without a mistake, {len(told)} with one."
    yield ""
    yield "| worst issue | mistakes: right type | another type | no mistake | right at 50 % | right at 10 % |"
    yield "|---|---|---|---|---|---|"
    for severity in (Severity.CRITICAL, Severity.HIGH, Severity.MEDIUM, Severity.LOW):
        some = [types & wanted for level, types, wanted in told if level == severity]
        right, alarmed = sum(map(bool, some)), healthy.count(severity)
        shares = [_precision(right, len(some) - right, len(told), alarmed, len(healthy), at) for at in (0.5, 0.1)]
        low, high = wilson(right, len(some))
        said = f"{right} of {len(some)} ({low:.0%} to {high:.0%})" if some else "none"
        yield f"| {severity.name} | {said} | {len(some) - right} | {alarmed} | {shares[0]} | {shares[1]} |"
    missed = sum(level < Severity.MEDIUM for level, _, _ in told)
    yield ""
    yield f"Nothing of MEDIUM or worse was said of {missed} of the {len(told)}."


Told = tuple[int, set[str], set[str]]
"""Severity of the worst issue, types that were told with it, and types that are right."""


def _of_mutants(path: Path, operators: dict[str, Any]) -> tuple[list[Told], list[int]]:
    """Return what was told of harmful mutants, and the worst severity of each healthy program."""
    proven = [r for r in stored(path).values() if r.proven]
    told = [(*_worst(r.issues), set(operators[r.mistake].types)) for r in proven if r.mistake]
    return told, [_worst(r.issues)[0] for r in proven if not r.mistake]


def _of_silent(path: Path) -> tuple[list[Told], list[int]]:
    """Return the same of what ``benchmarks/silent.py --json`` printed; mended twins have no mistake."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    halves = {run["half"] for run in runs}
    types = {bug.name: set(bug.types) for name in halves for bug in import_module(f"silent.{name}").BUGS}
    told = [(*_worst(run["issues"]), types[run["name"]]) for run in runs if run["form"] == "sick"]
    return told, [_worst(run["issues"])[0] for run in runs if run["form"] != "sick"]


def _worst(issues: Sequence[tuple[str, int, tuple[str, ...]]]) -> tuple[int, set[str]]:
    worst = max((severity for _, severity, _ in issues), default=-1)
    return worst, {kind for kind, severity, _ in issues if severity == worst}


def quick(path: Path, programs: int, first: int) -> None:
    """Run programs, and one mutant of each that learns, once; results are added to a file, and nothing is run again."""
    known, operators = stored(path), OPERATORS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:

        def done(number: int, mistake: str, lost_of: float | None) -> None:
            if (number, mistake) in known:
                return
            try:
                seen = run("development", number, mistake, 0, watched=True)
            except (RuntimeError, ValueError, IndexError):  # shapes that a mistake broke
                seen = None
            if seen is None:
                result = Result(number, mistake, (), False, (), -1.0)
            else:
                skill, issues, where = seen
                proven = skill >= LEARNS if lost_of is None else lost_of - skill >= 0.1
                told = tuple((str(i.issue_type), int(i.severity), i.layers) for i in issues)
                result = Result(number, mistake, (skill,), proven, told, 0.0, where=where)
            known[number, mistake] = result
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()

        for number in tqdm(range(first, first + programs)):
            done(number, "", None)
        for number in tqdm([n for n in range(first, first + programs) if known[n, ""].proven]):
            done(number, operators[number % len(operators)].name, known[number, ""].scores[0])


def _precision(right: int, wrong: int, harm: int, alarmed: int, healthy: int, prevalence: float) -> str:
    """Return the share of right ones among all such issues at a prevalence of mistakes."""
    hits, other = (prevalence * count / max(harm, 1) for count in (right, wrong))
    all_of_them = hits + other + (1 - prevalence) * alarmed / max(healthy, 1)
    return f"{hits / all_of_them:.0%}" if all_of_them else ""


def learning(count: int, first: int) -> list[int]:
    """Return the first programs that learn without an exporter in one seed."""
    found: list[int] = []
    number = first
    while len(found) < count:
        p = parts(draw(number), 0, number)
        held_out = p.data.inputs[-TEST:].clone(), p.data.targets[-TEST:].clone()
        assemble(p)
        train(p)
        if score(p, held_out) >= LEARNS:
            found.append(number)
        number += 1
    return found


def write(kind: str, text: str) -> None:
    """Put a table between its markers in the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    head, rest = page.split(begin, 1)
    PAGE.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("latency", "reliability"))
    parser.add_argument("--programs", type=int, default=0, help="how many; for reliability 0 takes what is stored")
    parser.add_argument("--first", type=int, default=0, help="number of the first one to try")
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=[Path("runs/mutation.jsonl")],
        help="for reliability: what benchmarks/mutation.py stored, or benchmarks/silent.py --json printed",
    )
    parser.add_argument("--half", choices=("development", "unseen"), default="development", help="of these results")
    parser.add_argument("--write", action="store_true", help="put the table into docs/detection.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.CRITICAL)
    if arguments.table == "reliability":
        if arguments.programs:
            quick(arguments.results[0], arguments.programs, arguments.first)
        lines, size = (
            reliability(arguments.results, arguments.half),
            "of " + ", ".join(f"`{p.name}`" for p in arguments.results),
        )
        size = f"{arguments.programs} programs, one seed" if arguments.programs else size
    else:
        lines = latency(learning(arguments.programs or 12, arguments.first))
        size = f"{arguments.programs or 12} programs from number {arguments.first} on"
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    note = f"`python benchmarks/tables.py {arguments.table}`, {size}, {time.strftime('%Y-%m-%d')}, commit "
    text = "\n".join([f"{note}{told.stdout.strip() or 'unknown'}.", "", *lines])
    print(text)
    if arguments.write:
        write(arguments.table, text)


if __name__ == "__main__":
    main()
