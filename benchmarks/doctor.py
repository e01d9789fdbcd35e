"""What ``gradflow doctor`` finds by experiment: right causes, wrong ones, prescriptions for healthy programs, cost.

    python benchmarks/doctor.py --part dev                       # benchmarks/silent, its part for development
    python benchmarks/doctor.py --part heldout --only RATE
    python benchmarks/doctor.py --part path/to/corpus.py         # any module with CASES, see doctor_case.py
    python benchmarks/doctor.py --part third --symptoms          # with the first stage: rules judge one run as well
    python benchmarks/doctor.py --part unseen --programs 400 --symptoms    # generated, and healthy where they learn
    python benchmarks/doctor.py --part third --json runs/doctor.jsonl      # stores as it goes; run again, it goes on
    python benchmarks/doctor.py --json runs/doctor.jsonl --write           # what is stored, into docs/doctor.md

Each program is run as a script. A *right cause* is a cure, tried and confirmed, whose treatment is the fix of an issue
type that the corpus calls true of the program, or (with ``--symptoms``) an issue of such a type that the experiments
leave at MEDIUM or above; *cure confirmed* counts the former alone, *by a stand-in* those whose right values only the
author has (see docs/doctor.md). A *wrong cause* is a cure of no such type. A *false prescription* is any cure for a
mended or healthy program.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import doctor_case
import mutation
import torch
from detection import wilson

from gradflow_export.cli.checkup import STEPS
from gradflow_export.cli.script_runner import run_script
from gradflow_export.errors import GradflowError
from gradflow_export.experiments.account import weighed
from gradflow_export.experiments.battery import Battery
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.runs import STEPS as TRAINED
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.treatments import find
from gradflow_export.experiments.watched import needed, unexplained
from gradflow_export.records.causes import with_causes
from gradflow_export.records.issues import Issue, Severity

CASE = Path(doctor_case.__file__)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "doctor.md"
BEGIN, END = "<!-- begin: measured -->", "<!-- end: measured -->"
COLUMNS = (
    "programs", "faulty", "right cause", "cure confirmed", "stand-in", "wrong cause", "sound", "prescribed",
    "not compared", "runs",
)  # fmt: skip
SICK, MENDED, HEALTHY = "sick", "mended", "healthy"
UNPROVEN = "unproven"
"""A generated program that is as drawn and does not learn: nothing is known of its health."""


@dataclass(frozen=True)
class Seen:
    """What came of one program.

    Attributes:
        part: Where it is from.
        name: Its name.
        form: Sick, mended, healthy or unproven.
        types: Issue types that name what is wrong with it.
        ill: Why it is ill; empty where it is not.
        refused: Why nothing was judged.
        cures: Treatments that rescue it.
        cured: Issue types that they fix.
        runs: How many runs there were.
        relative: Their processor time as a multiple of one run's.
        seconds: Time in all.
        issues: Types of the issues of the first stage that the experiments leave at MEDIUM or above.
        also: Issue types that are true of it as well, and count neither as right nor as wrong.
    """

    part: str
    name: str
    form: str
    types: tuple[str, ...]
    ill: str = ""
    refused: str = ""
    cures: tuple[str, ...] = ()
    cured: tuple[str, ...] = ()
    runs: int = 0
    relative: float = 0.0
    seconds: float = 0.0
    issues: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether a cure fits nothing that is true of the program."""
        return bool(self.cures) and not set(self.cured) & {*self.types, *self.also}

    @property
    def named(self) -> bool:
        """Whether a cure or an issue fits."""
        return self.right or bool(set(self.issues) & set(self.types))

    @property
    def right(self) -> bool:
        """Whether a cure fits."""
        return bool(set(self.cured) & set(self.types))

    @property
    def stands_in(self) -> bool:
        """Whether the cure that fits confirms a cause and is no fix."""
        return self.right and any(find(name).stands_in for each in self.cures for name in each.split(" + "))


def examine(
    part: str, name: str, form: str, types: tuple[str, ...], also: tuple[str, ...], jobs: int | None, *, symptoms: bool
) -> Seen:
    """Examine one program."""
    began = time.monotonic()
    target = Target(CASE, words=(part, name, form))
    issues: list[Issue] = []
    try:
        with Laboratory(target, jobs=jobs) as laboratory:
            if part in doctor_case.GENERATED and form == HEALTHY:
                sound = laboratory.apart(functools.partial(learns, part, int(name)), sys.stdout, sys.stderr)
                if not sound:
                    return Seen(part, name, UNPROVEN, types)
            if symptoms:
                watched = laboratory.apart(
                    functools.partial(run_script, target, STEPS, longer=True), sys.stdout, sys.stderr
                )
                issues = [issue for issue, _ in watched.issues]
            found = with_causes(issues)
            steps = needed(found, TRAINED)
            survey = laboratory.look(steps=steps)
            if not survey.trainings:
                why = survey.error.strip()[-200:] or "nothing steps a torch.optim.Optimizer"
                serious = tuple(sorted({str(each.issue_type) for each in issues if each.severity >= Severity.MEDIUM}))
                return Seen(part, name, form, types, refused=f"no steps: {why}", issues=serious, also=also)
            suspects = [issue.issue_type for issue in unexplained(found)]
            verdict = Battery(laboratory, survey.trainings[-1], steps=steps, suspects=suspects).run()
    except GradflowError as error:
        return Seen(part, name, form, types, refused=str(error), also=also)
    cures = tuple(" + ".join(trial.names) for trial in verdict.cures)
    cured = {str(kind) for trial in verdict.cures for each in trial.names for kind in find(each).fixes}
    one = verdict.cpu / max(verdict.runs, 1)
    left = {str(issue.issue_type) for issue in weighed(issues, verdict) if issue.severity >= Severity.MEDIUM}
    return Seen(
        part, name, form, types, verdict.baseline.complaint if verdict.baseline else "", verdict.refused, cures,
        tuple(sorted(cured)), verdict.runs, verdict.cpu / one if one else 0.0, time.monotonic() - began,
        tuple(sorted(left)), also,
    )  # fmt: skip


def programs(part: str, only: str) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Return name, form, right issue types and other true ones of each program."""
    if part.endswith(".py"):
        cases = doctor_case.loaded(part).CASES
        return [
            (case.name, HEALTHY if case.label == "HEALTHY" else SICK, (case.label,), tuple(case.also))
            for case in cases
            if only in case.name
        ]
    half = importlib.import_module(f"silent.{part}")
    found = []
    for bug in half.BUGS:
        if only in bug.name or only in bug.types:
            found += [(bug.name, form, tuple(bug.types), tuple(bug.also)) for form in (SICK, MENDED)]
    return found + [(case.name, HEALTHY, (), ()) for case in half.HEALTHY if only in case.name]


def generated(
    half: str, numbers: range, proofs: Path | None
) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Return the same of generated programs: those with a mistake of proven harm, and those without."""
    operators, known = mutation.half(half).operators, mutation.stored(proofs) if proofs else {}
    harmful = [each for each in known.values() if each.mistake and each.proven and each.number in numbers]
    return [
        *((f"{r.number}:{r.mistake}", SICK, tuple(map(str, operators[r.mistake].types)), ()) for r in harmful),
        *((str(number), HEALTHY, (), ()) for number in numbers),
    ]


def learns(half: str, number: int) -> bool:
    """Return whether a generated program learns, trained to its end."""
    torch.set_num_threads(1)
    done = mutation.run(half, number, "", doctor_case.SEED, watched=False)
    return done is not None and done[0] >= mutation.LEARNS


def summary(seen: list[Seen]) -> str:
    """Return the totals as a table in Markdown."""
    sick = [each for each in seen if each.form == SICK]
    sound = [each for each in seen if each.form in {MENDED, HEALTHY}]
    runs = [each.runs for each in seen if each.runs]
    rows = [
        ("right cause named", sum(each.named for each in sick), len(sick)),
        ("cure confirmed, right cause", sum(each.right and not each.stands_in for each in sick), len(sick)),
        ("right cause confirmed by a stand-in", sum(each.stands_in for each in sick), len(sick)),
        ("cure confirmed, wrong cause", sum(each.wrong for each in sick), len(sick)),
        ("ill, no cure found", sum(bool(each.ill and not each.cures and not each.refused) for each in sick), len(sick)),
        ("faulty, no yardstick", sum(bool(each.refused) for each in sick), len(sick)),
        ("prescriptions for mended and healthy programs", sum(bool(each.cures) for each in sound), len(sound)),
        ("mended and healthy, no yardstick", sum(bool(each.refused) for each in sound), len(sound)),
    ]
    lines = ["| | programs | share |", "|---|---|---|"]
    lines += [f"| {what} | {count} of {of} | {count / of if of else 0:.0%} |" for what, count, of in rows]
    cost = f"Median cost: {statistics.median(runs):.0f} runs." if runs else "Nothing was run."
    return "\n".join([*lines, "", cost])


def measured(seen: Sequence[Seen]) -> str:
    """Return a row for each part, and one for all of them, as a table in Markdown."""
    parts = {part: [each for each in seen if each.part == part] for part in dict.fromkeys(each.part for each in seen)}
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, some in [*parts.items(), ("all", list(seen))]:
        sick = [each for each in some if each.form == SICK]
        sound = [each for each in some if each.form in {MENDED, HEALTHY}]
        counts = [
            share(sum(each.named for each in sick), len(sick)),
            share(sum(each.right and not each.stands_in for each in sick), len(sick)),
            share(sum(each.stands_in for each in sick), len(sick)),
            share(sum(each.wrong for each in sick), len(sick)),
            str(len(sound)),
            share(sum(bool(each.cures) for each in sound), len(sound)),
            share(sum(bool(each.refused) for each in [*sick, *sound]), len(sick) + len(sound)),
            f"{statistics.median([each.runs for each in [*sick, *sound] if each.runs] or [0]):.0f}",
        ]
        lines.append(f"| {Path(name).stem} | {len(sick)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def share(count: int, of: int) -> str:
    """Return a share with its 95 % interval after Wilson."""
    low, high = wilson(count, of)
    return f"{count} ({low:.0%} to {high:.0%})" if of else "-"


def write(text: str) -> None:
    """Put a table into its page."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN, 1)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


def stored(path: Path | None) -> dict[tuple[str, str, str], Seen]:
    """Return what earlier runs have seen, by part, name and form; a line that was cut off is left out."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    whole = [Seen(**{k: tuple(v) if isinstance(v, list) else v for k, v in line.items()}) for line in lines]
    drawn = {SICK: SICK, MENDED: MENDED, HEALTHY: HEALTHY, UNPROVEN: HEALTHY}
    return {(each.part, each.name, drawn[each.form]): each for each in whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--part", default="dev", help="dev, heldout, second, third, development, unseen, or a path")
    parser.add_argument("--only", default="", help="programs whose name contains this, or mistakes of this type")
    parser.add_argument("--form", choices=(SICK, MENDED, HEALTHY), help="these alone")
    parser.add_argument("--every", type=int, default=1, help="every n-th program")
    parser.add_argument("--programs", type=int, default=40, help="of a half of the generator")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--proofs", type=Path, help="what mutation.py stored: mutants of proven harm are sick")
    parser.add_argument("--symptoms", action="store_true", help="the first stage as well")
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--json", type=Path, help="what was seen of each program, a line each; these are not run again")
    parser.add_argument("--write", action="store_true", help="put what is stored into docs/doctor.md, and run nothing")
    arguments = parser.parse_args()
    seen = []
    known = stored(arguments.json)
    if arguments.write:
        write(measured(list(known.values())))
        return
    wanted = (
        generated(arguments.part, range(arguments.first, arguments.first + arguments.programs), arguments.proofs)
        if arguments.part in doctor_case.GENERATED
        else programs(arguments.part, arguments.only)
    )
    wanted = [each for each in wanted if arguments.form in {None, each[1]}]
    for name, form, types, also in wanted[:: arguments.every]:
        each = known.get((arguments.part, name, form)) or examine(
            arguments.part, name, form, types, also, arguments.jobs, symptoms=arguments.symptoms
        )
        seen.append(each)
        mark = "right" if each.right else "WRONG" if each.wrong else "named" if each.named else "-"
        if form != SICK:
            mark = "FALSE" if each.cures else "-"
        print(
            f"{mark:5} {each.form:8} {name} {each.types}: {', '.join(each.cures) or 'no cure'}; "
            f"{' '.join(each.issues)}; {each.refused or each.ill or 'learns'}; {each.runs} runs, {each.seconds:.0f} s",
            flush=True,
        )
        if arguments.json and (arguments.part, name, form) not in known:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(each)) + "\n")
    print(summary(seen))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
