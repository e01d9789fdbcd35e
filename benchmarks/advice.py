"""Print how often it helps to do what an issue advises: the table of docs/detection.md.

    python benchmarks/advice.py --programs 60 --first 1000 --out runs/advice.jsonl --write
    python benchmarks/advice.py --programs 0 --out runs/advice.jsonl --write      # what is stored; nothing is run

One mistake is made in a generated program that learns without it (``benchmarks/generated``, the half for development),
and the program is watched. Of each type of MEDIUM or worse that is open at the end, and that no other issue explains,
the advice is followed word by word: ``advice_patches.py`` reads nothing but the issue. Alternatives of an advice are
tried in its order, and one that says "lower" or "raise" up to four times; then with another seed. It *helps* where with
both seeds no issue of the type is open any more, and the skill on held-out data rises by 0.05 or more.

Only mistakes count that cost 0.1 of skill. Of what a mistake leaves as good as it was, no advice can be told to help.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from advice_patches import Program, follow, patches
from detection import wilson
from generated.grammar import draw
from generated.operators import OPERATORS
from generated.programs import assemble, parts, score, train
from generated.tasks import TEST
from mutation import LEARNS
from tables import write
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.patient import Patient
from gradflow_export.records.causes import with_causes
from gradflow_export.records.issues import Issue, Severity, issue_to_json

RISES, LOST, SEEDS, ATTEMPTS, NEVER, STEPS = 0.05, 0.1, (0, 1), 4, 10**9, 200
SLOW = frozenset(("transformer", "convolution", "image", "image_residual", "recurrent"))
"""Networks that are left out, for they take ten times as long as the others."""
FORK = multiprocessing.get_context("fork")
OPERATOR = {o.name: o for o in OPERATORS}
Followed = tuple[tuple[Issue, int], ...]
"""Issues, and which alternative of the advice of each is done."""


def run(
    number: int, mistake: str, seed: int, followed: Followed = (), watched: bool = True
) -> tuple[float, list[Issue]] | None:
    """Train a program with a mistake and advice; return its skill and open issues, ``None`` where it cannot be made.

    The skill of what is worse than a constant prediction is 0, so that to be less bad is no help.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.CRITICAL)
    changes: list[Intervention] = []
    if followed:  # before the program takes functions of torch by name
        Patient(lambda: (changes, NEVER), lambda _patient: None).attach()
    recipe = draw(number)
    p = parts(replace(recipe, steps=min(recipe.steps, STEPS)), seed, number)
    if mistake and not OPERATOR[mistake].make(p):
        return None
    program = Program(p, changes)
    if not all(follow(program, issue, alternative) for issue, alternative in followed):
        return None
    assemble(p)
    try:
        with Exporter(p.model, backends=[MemoryWriter()], verbose=0) as exporter:
            if watched:
                exporter.watch()
            train(p)
    except (RuntimeError, ValueError, IndexError):  # shapes that a mistake or advice broke
        return None
    found = [i for i in with_causes(exporter.issues) if i.severity >= Severity.MEDIUM and i.open]
    return max(score(p, (p.data.inputs[-TEST:], p.data.targets[-TEST:])), 0.0), found


def apart(*arguments: Any) -> Any:
    """Run in a process of its own: what the doctor does to torch there ends with it."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: there.send(run(*arguments)))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:  # it ended with an error
        return None
    finally:
        process.join()


def followed(number: int, mistake: str, first: tuple[float, list[Issue]], issue: Issue) -> dict[str, Any]:
    """Follow the advice of an issue until it helps, then with another seed; return what is stored of it."""
    kind, skill, tried, way = issue.issue_type, first[0], [], ((issue, 0),)
    while len(tried) < ATTEMPTS and way[-1][1] < len(patches(way[-1][0])):
        seen = apart(number, mistake, SEEDS[0], way)
        left = [] if seen is None else [i for i in seen[1] if i.issue_type == kind]
        tried.append([[k for _, k in way], None if seen is None else seen[0], bool(left)])
        if seen is not None and not left and seen[0] >= skill + RISES:
            break
        at, until = way[-1][1], issue if "until the loss falls" in issue.advice else None
        again = next((i for i in left if patches(i)), until)
        more = again is not None and "the learning rate" in patches(issue)[at][1][0] and at < len(patches(again))
        way = (*way, (again, at)) if more and again else ((issue, at + 1),)
    helped = bool(tried) and not tried[-1][2] and tried[-1][1] is not None and tried[-1][1] >= skill + RISES
    told = {"kind": str(kind), "issue": issue_to_json(issue), "skill": skill, "tried": tried, "other": None}
    if helped:
        before, after = (apart(number, mistake, SEEDS[1], done, bool(done)) for done in ((), way))
        if before and after:
            told["other"] = [before[0], after[0], any(i.issue_type == kind for i in after[1])]
    return told


def measure(number: int, mistake: str, sound: float) -> Iterator[dict[str, Any]]:
    """Yield what is stored of a program with a mistake: one line for each type, or one that says why there is none."""
    alone = apart(number, mistake, SEEDS[0], (), False)
    harm = alone is not None and sound - alone[0] >= LOST
    first = apart(number, mistake, SEEDS[0]) if harm else None
    kinds: dict[str, Issue] = {}
    for issue in first[1] if first else []:
        if issue.explained_by is None:
            kinds.setdefault(str(issue.issue_type), issue)
    if not kinds or first is None:
        yield {"kind": "" if harm else "harmless"}
    for issue in kinds.values():
        yield followed(number, mistake, first, issue)  # type: ignore[arg-type]


def all_of(task: tuple[int, str, float]) -> list[dict[str, Any]]:
    """Return what is stored of a program, or of one of its mistakes."""
    number, mistake, sound = task
    if mistake:
        return [{"number": number, "mistake": mistake, **line} for line in measure(number, mistake, sound)]
    alone = apart(number, "", SEEDS[0], (), False)
    return [{"number": number, "mistake": "", "kind": "", "skill": alone[0] if alone else 0.0}]


def helps(line: dict[str, Any], sound: float) -> tuple[bool, bool, bool]:
    """Whether the issue closes, skill rises, and both with another seed as well; of the best that was tried.

    With the other seed the mistake may cost nothing; then nothing may be lost against the program without it.
    """
    tried = [(not left, skill >= line["skill"] + RISES) for _, skill, left in line["tried"] if skill is not None]
    closes, rises = max(tried, default=(False, False), key=sum)
    before, after, left = line["other"] or (0.0, 0.0, True)
    return closes, rises, closes and rises and not left and after >= min(before + RISES, sound - RISES)


def table(lines: list[dict[str, Any]], named: bool) -> Iterator[str]:
    """Return the table of the issues that name the mistake, or of the others."""
    found: dict[str, list[tuple[bool, bool, bool]]] = defaultdict(list)
    silent: dict[str, int] = defaultdict(int)
    sound = {line["number"]: line["skill"] for line in lines if not line["mistake"]}
    for line in lines:
        if "tried" in line and (line["kind"] in OPERATOR[line["mistake"]].types) is named:
            if any(skill is not None for _, skill, _ in line["tried"]):
                found[line["kind"]].append(helps(line, sound[line["number"]]))
            else:
                silent[line["kind"]] += 1
    yield "| type | mistakes | issue closes | skill rises | both, with two seeds | no change that a script can make |"
    yield "|---|---|---|---|---|---|"
    for kind in sorted({*found, *silent}, key=lambda k: -len(found[k])):
        counts = " | ".join(str(sum(each[index] for each in found[kind])) for index in range(3))
        yield f"| {kind} | {len(found[kind])} | {counts} | {silent[kind]} |"
    every = [each[2] for some in found.values() for each in some]
    low, high = wilson(sum(every), len(every))
    yield f"| **all** | {len(every)} | | | **{sum(every)}** ({low:.0%} to {high:.0%}) | {sum(silent.values())} |"


def main() -> None:
    """Measure what is not stored yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=0, help="how many to draw; 0 prints what is stored")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--mistakes", type=int, default=5, help="tried in each program")
    parser.add_argument("--operators", nargs="*", help="these mistakes alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/advice.jsonl"), help="results, added to as they come")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/detection.md")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    text = arguments.out.read_text(encoding="utf-8") if arguments.out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    numbers = [n for n in range(arguments.first, arguments.first + arguments.programs) if draw(n).body not in SLOW]
    with (
        ProcessPoolExecutor(arguments.processes, FORK) as pool,
        arguments.out.open("a", encoding="utf-8") as out,
    ):

        def work(tasks: list[tuple[int, str, float]]) -> None:
            known = {(line["number"], line["mistake"]) for line in lines}
            todo = [task for task in tasks if task[:2] not in known]
            for found in tqdm(pool.map(all_of, todo), total=len(todo)):
                done = [{"commit": commit.strip(), **line} for line in found]
                lines.extend(done)
                out.write("".join(json.dumps(line) + "\n" for line in done))
                out.flush()

        work([(n, "", 0.0) for n in numbers])
        learn = {line["number"]: line["skill"] for line in lines if not line["mistake"] and line["skill"] >= LEARNS}
        names = arguments.operators or list(OPERATOR)
        chosen = {n: random.Random(f"advice {n}").sample(names, len(names)) for n in numbers if n in learn}
        work([(n, chosen[n][at], learn[n]) for at in range(min(arguments.mistakes, len(names))) for n in chosen])
    drawn, of = sum(not line["mistake"] for line in lines), sorted({line["commit"] for line in lines})
    text = "\n".join((
        f"`python benchmarks/advice.py`, {drawn} programs, {time.strftime('%Y-%m-%d')}, commit {', '.join(of)}.",
        "", "Issues that name the mistake:", "", *table(lines, named=True),
        "", "Other issues of these programs:", "", *table(lines, named=False),
    ))  # fmt: skip
    print(text)
    if arguments.write:
        write("advice", text)


if __name__ == "__main__":
    main()
