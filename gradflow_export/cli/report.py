"""``gradflow report LOGDIR``: what happened in the runs below a folder. Reads files only; never imports torch."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gradflow_export.cli.console import show
from gradflow_export.cli.folders import runs_below, runs_in
from gradflow_export.errors import ArgumentError
from gradflow_export.records.issues import Severity
from gradflow_export.records.lost import DROPPED, LostSteps
from gradflow_export.records.verdict import JUDGED
from gradflow_export.report.summary import RunSummary
from gradflow_export.storage.reader import Run
from gradflow_export.writers.console import first_clause

_TONES = ("bad", "warn", "none", "good")
_WIDEST = 60
"""Letters of a run's name up to which the verdicts of several runs stand below each other."""

VERDICT = frozenset((*JUDGED, "optimizer.loss", DROPPED))
"""Metrics that a verdict is made of."""

_Found = tuple[Path, Run, RunSummary]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="print a report of the runs in a folder")
    parser.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    whole = "print every run in full; by default, several runs are listed with one line each"
    parser.add_argument("--details", action="store_true", help=whole)
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with NaN and Inf as strings")
    failing = (
        "exit with status 1 if an open issue has at least this severity; by default issues do not change the status"
    )
    choices = [each.name for each in Severity if each]
    parser.add_argument("--fail-on", type=str.upper, choices=choices, help=failing)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 where a run has an open issue as severe as ``--fail-on`` says, else 0.

    Raises:
        ArgumentError: ``--fail-on`` was given, and a run has no step that could have shown an issue, or damaged files.
    """
    stored = [(path, each) for path in runs_below(args.logdir).values() for each in runs_in(path)]
    alone = len({path for path, _ in stored}) == 1
    whole = stored if args.details or args.json else stored[-1:] if alone else []
    found = [(path, each, summarise(each, whole=(path, each) in whole)) for path, each in stored]
    if args.json:
        runs = [{"path": str(path), **_kept(each), **summary.as_dict()} for path, each, summary in found]
        print(json.dumps({"runs": runs}, indent=2, allow_nan=False))
    else:
        show("\n\n".join(_pages(args.logdir, found, details=args.details)))
    if args.fail_on is None:
        return 0
    still = [issue.severity for *_, summary in found for issue in summary.issues if issue.open]
    if max(still, default=Severity.INFO) >= Severity[args.fail_on]:
        return 1
    empty = [str(path) for path, _, summary in found if not summary.course.stepped]
    if empty:
        raise ArgumentError(f"--fail-on found no optimizer step in {', '.join(empty)}; nothing can be said of it.")
    damaged = [str(path) for path, each, _ in found if each.skipped]
    if damaged:
        raise ArgumentError(f"--fail-on found no such issue, but damaged files in {', '.join(damaged)}.")
    return 0


def _pages(logdir: Path, found: Sequence[_Found], *, details: bool) -> Iterator[str]:
    """Yield the newest run of a single folder in full, and a line for each other one; all in full with ``details``."""
    alone = len({path for path, *_ in found}) == 1
    whole = found if details else found[-1:] if alone else ()
    paths = Counter(path for path, *_ in found)
    for path, each, summary in whole:
        yield "\n".join([summary.as_text(f"{path}{_own(each) if paths[path] > 1 else ''}"), *_notes(each)])
    rest = found[: len(found) - len(whole)]
    if rest:
        sick = sum(summary.judged.tone in {"bad", "warn"} for *_, summary in rest)
        several = f"{len(rest)} {'other ' * alone}run{'s' * (len(rest) > 1)} in {logdir}, {sick} to look at"
        one = "" if alone else f"gradflow report {shlex.quote(str(logdir / 'NAME'))}; all of them: "
        command = f"{'In full' if alone else 'One in full'}: {one}gradflow report {shlex.quote(str(logdir))} --details"
        yield "\n".join([f"{several}. {command}", *_brief(logdir, rest)])


def _brief(logdir: Path, found: Sequence[_Found]) -> Iterator[str]:
    """Yield a line for each run, the worst first: its name, its verdict, and the first thing to do."""
    paths = Counter(path for path, *_ in found)
    lines = []
    for path, each, summary in found:
        name = path.relative_to(logdir).as_posix()
        name += _own(each) if paths[path] > 1 else ""
        open_ones = [group.head for group in summary.groups if group.head.open]
        worst = max((issue.severity for issue in open_ones), default=Severity.INFO)
        fix = first_clause(open_ones[0].advice) if open_ones else ""
        said = f"{f'[{worst.name}] ' if open_ones else ''}{summary.verdict}{f'. Fix: {fix}' if fix else ''}"
        lines.append(((-worst, _TONES.index(summary.judged.tone)), name, said))
    width = min(max(len(name) for _, name, _ in lines), _WIDEST)
    yield from (f"  {name:<{width}}  {said}" for _, name, said in sorted(lines, key=itemgetter(0)))


def _own(stored: Run) -> str:
    """Return what tells a run from others in its folder: when it began, and the name to read it by."""
    began = time.strftime(" began %Y-%m-%d %H:%M:%S", time.localtime(stored.info.started)) if stored.info else ""
    return f" [{stored.sessions[0]}{began}]" if stored.sessions else ""


def summarise(stored: Run, *, whole: bool = True) -> RunSummary:
    """Sum a run up, record by record, and what its files say is missing.

    Args:
        stored: The run.
        whole: Whether more than its verdict and issues is asked for.
    """
    summary = RunSummary(stored.info)
    summary.resumed = stored.records.resumed
    for record in stored.records if whole else stored.records.only(VERDICT):
        summary.add(record)
    after = None if stored.closed else summary.last
    dropped = summary.lost_steps.dropped
    summary.lost_steps = LostSteps(dropped, {"": 0}, after, stored.error, stored.skipped).joined(stored.gaps)
    return summary


def _kept(stored: Run) -> dict[str, Any]:
    return {
        "sessions": list(stored.sessions),
        "beside": list(stored.beside),
        "replaced": list(stored.replaced),
        "closed": stored.closed,
        "error": stored.error,
        "damaged": stored.skipped,
        "missing": [{"first": g.first, "last": g.last, "steps": g.steps, "reason": g.reason} for g in stored.gaps],
    }


def _notes(stored: Run) -> Iterator[str]:
    if stored.records.resumed:
        places = ", ".join(map(str, stored.records.resumed))
        yield f"  note   {len(stored.records.resumed) + 1} sessions: training was resumed at step {places}"
    if stored.beside:
        several = f"{len(stored.beside) + 1} runs wrote to this folder at the same time"
        yield f"  note   {several}; this is session {stored.sessions[-1]}. Give each its own logdir."
    if not stored.closed:
        yield "  note   not closed: the run goes on, or its process was killed, which costs at most its last second, or"
        yield "         its disk was full to the end."
    if stored.replaced:
        again = f"the folder was written to again from step {stored.records.steps[0] if len(stored.records) else 1} on"
        yield f"  note   {again}: this is session {stored.sessions[-1]}; those before it have a report each."
    for gap in stored.gaps:
        yield f"  note   not in the files: {gap}"
