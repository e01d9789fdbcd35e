"""Measure the detector on generated programs: healthy ones, and the same with one mistake each.

    python benchmarks/mutation.py --programs 40 --out runs/mutation.jsonl    # stop it and run it again: it goes on
    python benchmarks/mutation.py --half unseen --out runs/unseen.jsonl
    python benchmarks/mutation.py --operators rate_100 --programs 20 --misses

Programs come from ``benchmarks/generated/grammar.py`` and mistakes from ``operators.py``; with ``--half unseen`` both
come from ``benchmarks/generated/unseen``, on which no rule was developed. A program counts as *healthy*
when, unwatched, it learns in every seed: its skill on held-out data (1 perfect, 0 the best constant prediction) reaches
0.4. A mutant counts as *harmful* when it loses at least 0.05 of skill, with p < 0.05 (Welch, one-sided) and Cohen's d
of at least 0.5; held-out data are those from before the mistake. Then one more run is watched by
``Exporter(model).watch()`` with nothing but the model.

*Identified*: an issue of MEDIUM or worse. *Right*: one of a type that names the cause. *Located*: of such an issue the
first site, or half of its sites, is at fault. Intervals are Wilson's, 95 %; mutants share programs, so they are too
narrow.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import multiprocessing
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from detection import wilson
from silent.common import located
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.causes import groups
from gradflow_export.records.issues import Issue, Severity

SEEDS, LEARNS, LOST = 5, 0.4, 0.05


@dataclass(frozen=True)
class Half:
    """One half of the generator.

    Attributes:
        draw: Returns the recipe of a number.
        programs: The module with the parts of a program and its loop.
        operators: The mistakes by name.
        held_out: Returns held-out samples, as they are before a mistake.
    """

    draw: Callable[[int], Any]
    programs: ModuleType
    operators: dict[str, Any]
    held_out: Callable[[Any], Any]


@functools.cache
def half(name: str) -> Half:
    """Return a half of the generator; the other one is not even imported."""
    if name == "unseen":
        import generated.unseen.grammar
        import generated.unseen.programs

        programs = generated.unseen.programs
        operators = generated.unseen.OPERATORS
        return Half(generated.unseen.grammar.draw, programs, {o.name: o for o in operators}, programs.held_out)
    import generated.grammar
    import generated.operators
    import generated.programs
    from generated.tasks import TEST

    def held_out(p: Any) -> Any:
        return p.data.inputs[-TEST:].clone(), p.data.targets[-TEST:].clone()

    operators = generated.operators.OPERATORS
    return Half(generated.grammar.draw, generated.programs, {o.name: o for o in operators}, held_out)


@dataclass(frozen=True)
class Result:
    """What is known of a program, or of one with a mistake.

    Attributes:
        number: Which program.
        mistake: Name of the operator, ``""`` for none.
        scores: Skill of the unwatched run of each seed.
        proven: Whether it learns in every seed; with a mistake, whether that harms.
        issues: Type, severity and sites of each issue of the watched run.
        seconds: CPU time of the watched run.
        causes: Its issues of MEDIUM or worse that no other one explains.
        where: Sites at fault, where they differ from program to program.
    """

    number: int
    mistake: str
    scores: tuple[float, ...]
    proven: bool
    issues: tuple[tuple[str, int, tuple[str, ...]], ...]
    seconds: float
    causes: int = 0
    where: tuple[str, ...] = ()


Outcome = tuple[float, tuple[Issue, ...], tuple[str, ...]]


def made(of: str, number: int, mistake: str, seed: int) -> tuple[Any, Any]:
    """Return a program that is ready to be trained and its held-out samples, ``None`` where no mistake can be made."""
    chosen = half(of)
    p = chosen.programs.parts(chosen.draw(number), seed, number)
    held_out = chosen.held_out(p)
    if mistake and not chosen.operators[mistake].make(p):
        return None, held_out
    chosen.programs.assemble(p)
    return p, held_out


def run(of: str, number: int, mistake: str, seed: int, watched: bool) -> Outcome | None:
    """Train one program; return its skill, issues and faulty sites, ``None`` where the mistake cannot be made in it."""
    p, held_out = made(of, number, mistake, seed)
    if p is None:
        return None
    programs = half(of).programs
    where = tuple(getattr(p, "where", ()))
    if not watched:
        programs.train(p)
        return programs.score(p, held_out), (), where
    with Exporter(p.model, backends=[MemoryWriter()], verbose=0) as exporter:
        exporter.watch()
        programs.train(p)
    return programs.score(p, held_out), tuple(exporter.issues), where


def harmful(healthy: Sequence[float], mutant: Sequence[float]) -> bool:
    """Whether skill was lost: DeepCrime's rule (p < 0.05, d >= 0.5) with Welch's test, one-sided, and at least 0.05."""
    lost = statistics.mean(healthy) - statistics.mean(mutant)
    spreads = [max(statistics.stdev(values), 0.01) for values in (healthy, mutant)]
    parts_ = [spread**2 / len(healthy) for spread in spreads]
    error = math.sqrt(sum(parts_))
    degrees = sum(parts_) ** 2 / sum(part**2 / (len(healthy) - 1) for part in parts_)
    within = math.sqrt(sum(spread**2 for spread in spreads) / 2)
    return lost >= LOST and lost / within >= 0.5 and lost / error > _critical(degrees)


def _critical(degrees: float) -> float:
    """Return Student's t for one-sided 5 % (Hill's expansion; within 0.5 % from 4 degrees on)."""
    z = 1.6449
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


Task = tuple[int, str, tuple[float, ...]]


def measure(of: str, task: Task) -> Result | None:
    """Prove and watch one program, or one mutant whose healthy scores are known."""
    number, mistake, healthy = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.CRITICAL)
    scores = []
    for seed in range(SEEDS):
        try:
            done = run(of, number, mistake, seed, watched=False)
        except (
            RuntimeError,
            ValueError,
            IndexError,
        ):  # shapes or types that a mistake broke: its author would have seen that
            return None
        if done is None:
            return None
        scores.append(done[0])
        if not mistake and done[0] < LEARNS:
            return Result(number, mistake, tuple(scores), False, (), 0.0)
        if mistake and len(scores) == 3 and statistics.mean(scores) >= statistics.mean(healthy):
            return Result(number, mistake, tuple(scores), False, (), 0.0)  # three seeds show no trace of harm
    proven = harmful(healthy, scores) if mistake else True
    if not proven:
        return Result(number, mistake, tuple(scores), False, (), 0.0)
    began = time.process_time()
    watched = run(of, number, mistake, number % SEEDS, watched=True)
    seconds, (issues, where) = time.process_time() - began, watched[1:] if watched else ((), ())
    told = tuple((str(i.issue_type), int(i.severity), i.layers) for i in issues)
    causes = sum(group.head.severity >= Severity.MEDIUM for group in groups(issues))
    return Result(number, mistake, tuple(scores), proven, told, seconds, causes, where)


def stored(path: Path) -> dict[tuple[int, str], Result]:
    """Return the results of earlier runs by program and mistake."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    for line in lines:
        line["issues"] = tuple((kind, severity, tuple(sites)) for kind, severity, sites in line["issues"])
        line["where"] = tuple(line.get("where", ()))
    return {(line["number"], line["mistake"]): Result(**line) for line in lines}


def measure_all(arguments: argparse.Namespace) -> dict[tuple[int, str], Result]:
    """Measure what is not stored yet: healthy programs first, then mutants of those that learn."""
    known = stored(arguments.out)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(arguments.first, arguments.first + arguments.programs)
    one, operators = functools.partial(measure, arguments.half), half(arguments.half).operators
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=40) as pool:

        def work(tasks: list[Task], title: str) -> None:
            todo = [task for task in tasks if task[:2] not in known]
            with arguments.out.open("a") as out:
                for task, done in zip(todo, tqdm(pool.imap(one, todo), title, len(todo)), strict=True):
                    result = done or Result(task[0], task[1], (), False, (), -1.0)
                    known[task[:2]] = result
                    out.write(json.dumps(asdict(result)) + "\n")
                    out.flush()

        work([(n, "", ()) for n in numbers], "programs")
        learn = [n for n in numbers if known[n, ""].proven]
        chosen = [name for name in operators if not arguments.operators or name in arguments.operators]
        mutants = []
        for n in learn:  # every program has its own few mistakes
            some = random.Random(f"mistakes {n}").sample(chosen, min(arguments.mistakes, len(chosen)))
            mutants += [(n, name, known[n, ""].scores) for name in some]
        work(mutants, "mutants")
    wanted = {(n, "") for n in numbers} | {(n, name) for n, name, _ in mutants}
    return {key: known[key] for key in known if key in wanted}


def serious(result: Result) -> list[tuple[str, tuple[str, ...]]]:
    """Type and sites of the issues that a user is meant to act upon."""
    return [(kind, sites) for kind, severity, sites in result.issues if severity >= Severity.MEDIUM]


def verdict(operator: Any, result: Result) -> tuple[bool, bool, bool]:
    """Whether a mutant was identified, with a right type, and located."""
    found, where = serious(result), result.where or operator.where
    right = [sites for kind, sites in found if kind in operator.types]
    return bool(found), bool(right), any(located(sites or ("",), where) for sites in right)


def share(hits: int, of: int) -> str:
    """Return a share with its interval, as the table prints it."""
    low, high = wilson(hits, of)
    return f"{hits} of {of} ({hits / max(of, 1):.0%}, {low:.0%} to {high:.0%})"


def averaged(verdicts: list[list[bool]]) -> str:
    """Return the mean over operators of the share of verdicts, with an interval as of that many mutants."""
    if not verdicts:
        return "none"
    mean, of = statistics.mean(sum(v) / len(v) for v in verdicts), sum(map(len, verdicts))
    low, high = wilson(mean * of, of)
    return f"{mean:.0%} of {len(verdicts)} operators ({low:.0%} to {high:.0%})"


def by_type(operators: dict[str, Any], by_operator: dict[str, list[tuple[bool, bool, bool]]]) -> Iterator[str]:
    """Return the shares by the first type of each operator, averaged over operators."""
    yield "| type | harmful | identified | right | located |"
    yield "|---|---|---|---|---|"
    for kind in dict.fromkeys(o.types[0] for o in operators.values()):
        some = [by_operator[name] for name, o in operators.items() if o.types[0] == kind and by_operator.get(name)]
        if some:
            columns = " | ".join(averaged([[v[index] for v in each] for each in some]) for index in range(3))
            yield f"| {kind} | {sum(map(len, some))} | {columns} |"


def table(operators: dict[str, Any], results: dict[tuple[int, str], Result], misses: bool) -> Iterator[str]:
    """Return the table, line by line."""
    healthy = [r for r in results.values() if not r.mistake and r.proven]
    drawn = sum(not r.mistake for r in results.values())
    alarmed = [r for r in healthy if serious(r)]
    harm = [r for r in results.values() if r.mistake and r.proven]
    tried = sum(bool(r.mistake) and r.seconds >= 0 for r in results.values())
    verdicts = {(r.number, r.mistake): verdict(operators[r.mistake], r) for r in harm}
    by_operator = defaultdict(list)
    for r in harm:
        by_operator[r.mistake].append(verdicts[r.number, r.mistake])
    yield "| | |"
    yield "|---|---|"
    yield f"| programs that learn | {share(len(healthy), drawn)} |"
    yield f"| healthy, alarmed | {share(len(alarmed), len(healthy))} |"
    yield f"| mutants, harm proven | {share(len(harm), tried)} |"
    for index, name in enumerate(("identified", "right type", "and located")):
        yield f"| harmful: {name} | {share(sum(v[index] for v in verdicts.values()), len(harm))} |"
        yield f"| averaged over operators | {averaged([[v[index] for v in some] for some in by_operator.values()])} |"
    for degree, name in ((False, "structure"), (True, "degree")):
        some = [verdicts[r.number, r.mistake] for r in harm if operators[r.mistake].degree is degree]
        yield f"| mistakes of {name}: right type | {share(sum(v[1] for v in some), len(some))} |"
    causes = [r.causes for r in harm if serious(r)]
    yield f"| causes reported of a program that is identified | {statistics.mean(causes):.2f} |" if causes else ""
    yield ""
    yield "| operator | harmful of tried | identified | right | located |"
    yield "|---|---|---|---|---|"
    for operator in operators.values():
        some = by_operator[operator.name]
        of = sum(r.mistake == operator.name and r.seconds >= 0 for r in results.values())
        if not of:
            continue
        counts = " | ".join(str(sum(v[index] for v in some)) for index in range(3))
        yield f"| {operator.name} | {len(some)} of {of} | {counts} |"
    yield ""
    yield from by_type(operators, by_operator)
    if misses:
        yield ""
        for r in [*alarmed, *(r for r in harm if not all(verdicts[r.number, r.mistake]))]:
            said = ", ".join(f"{kind} {severity} at {sites[:2]}" for kind, severity, sites in r.issues) or "nothing"
            yield f"- {r.number} {r.mistake or 'healthy'}: {said}"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("development", "unseen"), default="development", help="of the generator")
    parser.add_argument("--programs", type=int, default=40, help="programs to draw")
    parser.add_argument("--first", type=int, default=0, help="number of the first one; other numbers, other programs")
    parser.add_argument("--mistakes", type=int, default=5, help="mistakes tried in each program")
    parser.add_argument("--operators", nargs="*", help="these operators alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/mutation.jsonl"), help="results, added to as they come")
    parser.add_argument("--misses", action="store_true", help="say of each miss and alarm what was said instead")
    arguments = parser.parse_args()
    print(*table(half(arguments.half).operators, measure_all(arguments), arguments.misses), sep="\n")


if __name__ == "__main__":
    main()
