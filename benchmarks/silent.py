"""Which silent training mistakes ``Exporter(model).watch()`` names and finds, and when it cries wolf.

Run it on a half of the corpus in ``benchmarks/silent/``::

    python benchmarks/silent.py --half dev --seeds 3
    python benchmarks/silent.py --half heldout --write       # the table in docs/silent-mistakes.md
    python benchmarks/silent.py --half second                # the later set, in neither half and not in "all"
    python benchmarks/silent.py --half third                 # one later still, likewise
    python benchmarks/silent.py --half all --prove           # no exporter: that mended programs learn

Each mistake was made in public and is made again in a small program. The exporter is attached before training, with
nothing but the model, and the program trains as its author wrote it.

- *Identified*: any issue of severity MEDIUM or worse was raised.
- *Right type*: one of these issues has a type that the corpus calls true of the program.
- *Located*: of an issue of the right type the first site is at fault, or at least half of its sites are.
- *Alarm* on a mended or healthy program: any issue of severity MEDIUM or worse, or any at all of the types for silent
  mistakes.

A program counts as identified, named or located when it is so in every seed, and as alarmed when it is so in any.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import math
import multiprocessing
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from silent.common import TYPES, located
from tqdm import tqdm

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.records.causes import groups
from gradflow_export.records.issues import Severity

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "silent-mistakes.md"
BEGIN, END = "<!-- silent: begin -->", "<!-- silent: end -->"
SICK, MENDED, HEALTHY = "sick", "mended", "healthy"


@dataclass(frozen=True)
class Run:
    """What was seen in one run of one program.

    Attributes:
        half: Which half of the corpus it is from.
        name: The program.
        form: Sick, mended, or healthy.
        seed: The seed.
        issues: Type, severity and sites of each issue.
        score: How well the model did after training.
        learned: Whether that reaches the program's goal.
        seconds: CPU time of the run, exporter and score included.
        causes: How many of the issues a user is meant to act upon no other one explains; 0 in older files.
    """

    half: str
    name: str
    form: str
    seed: int
    issues: tuple[tuple[str, int, tuple[str, ...]], ...]
    score: float
    learned: bool
    seconds: float
    causes: int = 0


@dataclass(frozen=True)
class Task:
    """One run to be done: half, index in it, form, seed, whether an exporter watches, and its severity floor."""

    half: str
    index: int
    form: str
    seed: int
    watched: bool


def _as_in_a_fresh_process() -> None:
    """Give freed memory back to the system, or a leak of this program would fit into it unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def work(task: Task) -> Run:
    """Train one program, watched or not."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    _as_in_a_fresh_process()
    began = time.process_time()
    half = importlib.import_module(f"silent.{task.half}")
    if task.form == HEALTHY:
        case = half.HEALTHY[task.index]
        program = case.build(task.seed)
    else:
        case = half.BUGS[task.index]
        program = case.build(task.form == MENDED, task.seed)
    issues: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    causes = 0
    if task.watched:
        with Exporter(program.model, backends=[MemoryWriter()], verbose=0) as exporter:
            exporter.watch()
            program.train()
        issues = tuple((str(issue.issue_type), int(issue.severity), issue.layers) for issue in exporter.issues)
        causes = sum(group.head.severity >= Severity.MEDIUM for group in groups(exporter.issues))
    else:
        program.train()
    score = program.score()
    seconds = time.process_time() - began
    return Run(task.half, case.name, task.form, task.seed, issues, score, score >= program.goal, seconds, causes)


def serious(run: Run) -> list[tuple[str, tuple[str, ...]]]:
    """Type and sites of the issues that a user is meant to act upon."""
    return [(kind, sites) for kind, severity, sites in run.issues if severity >= Severity.MEDIUM]


def alarms(run: Run) -> tuple[str, ...]:
    """Return the types that were wrongly raised on a program without a mistake."""
    return tuple(sorted({kind for kind, severity, _ in run.issues if severity >= Severity.MEDIUM or kind in TYPES}))


def judge(bug: Any, runs: list[Run]) -> dict[str, Any]:
    """Return what the runs of one mistake and of its mended twin say, JSON-ready."""
    sick = [r for r in runs if r.form == SICK]
    mended = [r for r in runs if r.form == MENDED]
    found = [serious(r) for r in sick]
    right = [[sites for kind, sites in issues if kind in bug.types] for issues in found]
    raised = {kind for issues in found for kind, _ in issues}
    return {
        "name": bug.name,
        "half": sick[0].half,
        "type": bug.types[0],
        "source": bug.source,
        "seeds": len(sick),
        "identified": sum(bool(issues) for issues in found),
        "right_type": sum(bool(hits) for hits in right),
        "located": sum(any(located(sites, bug.where) for sites in hits) for hits in right),
        "twin_alarmed": sum(bool(alarms(r)) for r in mended),
        "twin_types": sorted({kind for r in mended for kind in alarms(r)}),
        "twin_learned": sum(r.learned for r in mended),
        "sick_learned": sum(r.learned for r in sick),
        "causes": sum(r.causes for r in sick),
        "issues": sum(map(len, found)),
        "extra": sorted(raised - set(bug.types) - set(bug.also)),
        "raised": sorted(raised),
        "sites": sorted(
            {f"{kind} at {site or 'model'}" for issues in found for kind, sites in issues for site in sites[:1]}
        ),
    }


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, JASA 22); (0, 1) of nothing."""
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, z * z / trials
    half = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return max((share + square / 2 - half) / (1 + square), 0.0), min((share + square / 2 + half) / (1 + square), 1.0)


def counted(what: str, aim: str, hits: int, trials: int, runs: int, of_runs: int) -> str:
    """Return a row of the table of totals."""
    low, high = wilson(hits, trials)
    share = hits / trials if trials else 0.0
    return f"| {what} | {aim} | {hits} of {trials} | {share:.0%} | {low:.0%} to {high:.0%} | {runs} of {of_runs} |"


def summary(rows: list[dict[str, Any]], healthy: dict[str, list[Run]]) -> dict[str, Any]:
    """Return the totals: programs, counted strictly, and runs."""
    seeds = sum(row["seeds"] for row in rows)
    totals: dict[str, Any] = {"programs": len(rows), "runs": seeds}
    for key in ("identified", "right_type", "located"):
        totals[key] = {"programs": sum(row[key] == row["seeds"] for row in rows), "runs": sum(row[key] for row in rows)}
    totals["twin_alarmed"] = {
        "programs": sum(row["twin_alarmed"] > 0 for row in rows),
        "runs": sum(row["twin_alarmed"] for row in rows),
    }
    alarmed = totals["identified"]["runs"] or 1
    totals["causes_each"] = sum(row["causes"] for row in rows) / alarmed
    totals["issues_each"] = sum(row["issues"] for row in rows) / alarmed
    totals["healthy"] = {"programs": len(healthy), "runs": sum(map(len, healthy.values()))}
    totals["healthy_alarmed"] = {
        "programs": sum(any(alarms(r) for r in runs) for runs in healthy.values()),
        "runs": sum(bool(alarms(r)) for runs in healthy.values() for r in runs),
    }
    return totals


def table(rows: list[dict[str, Any]], healthy: dict[str, list[Run]], totals: dict[str, Any]) -> str:
    """Return totals, a row for each mistake and every false alarm, as Markdown."""
    lines = [
        "| | target | programs | rate | 95 % interval | runs |",
        "|---|---|---|---|---|---|",
    ]
    for key, what, aim in (
        ("identified", "mistakes identified", "≥ 90 %"),
        ("right_type", "with the right type", "≥ 80 %"),
        ("located", "and located", "≥ 75 %"),
        ("twin_alarmed", "fixed versions alarmed", "≤ 5 %"),
    ):
        lines.append(counted(what, aim, totals[key]["programs"], len(rows), totals[key]["runs"], totals["runs"]))
    lines += [
        counted(
            "healthy programs alarmed", "≤ 5 %", totals["healthy_alarmed"]["programs"], totals["healthy"]["programs"],
            totals["healthy_alarmed"]["runs"], totals["healthy"]["runs"],
        ),
        "",
        f"Issues of each mistake identified: {totals['issues_each']:.2f}"
        + (f"; of these no other explains {totals['causes_each']:.2f}." if totals["causes_each"] else "."),
        "",
        "| mistake | half | identified | right type | located | fixed version | also reported |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    kind = ""
    for row in sorted(rows, key=lambda row: TYPES.index(row["type"])):
        if row["type"] != kind:
            kind = row["type"]
            lines.append(f"| **{kind}** | | | | | | |")
        of = row["seeds"]
        twin = ", ".join(row["twin_types"]) or "no issue"
        lines.append(
            f"| [{row['name']}]({row['source']}) | {row['half']} | {row['identified']}/{of} | "
            f"{row['right_type']}/{of} | {row['located']}/{of} | {twin} | {', '.join(row['extra'])} |"
        )
    cries = [
        f"- {name} (seeds {', '.join(str(r.seed) for r in runs if alarms(r))}): "
        f"{', '.join(sorted({kind for r in runs for kind in alarms(r)}))}"
        for name, runs in healthy.items()
        if any(alarms(r) for r in runs)
    ]
    return "\n".join([*lines, "", "Healthy programs alarmed:" if cries else "No healthy program was alarmed.", *cries])


def proofs(runs: list[Run]) -> str:
    """Return the score of every program, and whether those that should have learned."""
    lines, wrong = [], []
    for run in sorted(runs, key=lambda r: (r.half, r.name, r.form)):
        lines.append(
            f"{run.half} {run.name} {run.form} #{run.seed}: {run.score:.3f} "
            f"{'learned' if run.learned else 'did not learn'} {run.seconds:.2f} s"
        )
        if run.form != SICK and not run.learned:
            wrong.append(f"{run.name} #{run.seed}")
    return "\n".join([*lines, f"{len(runs)} runs; mended or healthy and not learning: {', '.join(wrong) or 'none'}"])


def commit() -> str:
    """Return the short name of the commit that is measured."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def write(text: str, note: str) -> None:
    """Put the table between the markers of the page."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{note}\n\n{text}\n{END}{tail}", encoding="utf-8")


def load(paths: list[Path]) -> tuple[list[Run], str]:
    """Return the runs in files that ``--json`` wrote, and what is to be said of them."""
    runs, notes = [], []
    for path in paths:
        saved = json.loads(path.read_text(encoding="utf-8"))
        notes.append(saved["note"])
        runs += [
            Run(**{**run, "issues": tuple((kind, level, tuple(sites)) for kind, level, sites in run["issues"])})
            for run in saved["runs"]
        ]
    return runs, " ".join(notes)


def tasks(halves: list[str], seeds: int, only: str, watched: bool) -> list[Task]:
    """Return every run that is asked for."""
    found = []
    for name in halves:
        half = importlib.import_module(f"silent.{name}")
        for seed in range(seeds):
            for index, bug in enumerate(half.BUGS):
                if only in bug.name or only in bug.types:
                    found += [Task(name, index, form, seed, watched) for form in (SICK, MENDED)]
            for index, case in enumerate(half.HEALTHY):
                if only in case.name:
                    found.append(Task(name, index, HEALTHY, seed, watched))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--half", choices=("dev", "heldout", "second", "third", "all"), default="dev")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1 of every program")
    parser.add_argument(
        "--only", default="", help="run only programs whose name contains this, or mistakes of this type"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--prove", action="store_true", help="watch nothing; print what each program learned")
    parser.add_argument("--write", action="store_true", help="put the table into docs/silent-mistakes.md")
    parser.add_argument("--load", type=Path, nargs="+", help="judge the runs in files that --json wrote")
    arguments = parser.parse_args()
    if arguments.load:
        runs, note = load(arguments.load)
    else:
        halves = ["dev", "heldout"] if arguments.half == "all" else [arguments.half]
        wanted = tasks(halves, arguments.seeds, arguments.only, watched=not arguments.prove)
        note = f"`python benchmarks/silent.py --half {arguments.half}`, {time.strftime('%Y-%m-%d')}, commit {commit()}."
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            runs = list(tqdm(pool.imap(work, wanted, chunksize=4), total=len(wanted), disable=arguments.json))
    if arguments.prove:
        sys.exit(print(proofs(runs)))
    by_name, healthy = defaultdict(list), defaultdict(list)
    for run in runs:
        (healthy if run.form == HEALTHY else by_name)[run.name].append(run)
    known = [
        bug for half in sorted({run.half for run in runs}) for bug in importlib.import_module(f"silent.{half}").BUGS
    ]
    rows = [judge(bug, by_name[bug.name]) for bug in known if bug.name in by_name]
    totals = summary(rows, healthy)
    if arguments.json:
        print(
            json.dumps({"note": note, "totals": totals, "mistakes": rows, "runs": [asdict(r) for r in runs]}, indent=1)
        )
        return
    text = table(rows, healthy, totals)
    print(text)
    if arguments.write:
        write(text, note)


if __name__ == "__main__":
    main()
