"""``gradflow doctor script.py``: run a training script, report its silent mistakes, and try what mends them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from gradflow_export.cli.console import agreed, show
from gradflow_export.cli.sarif import as_sarif
from gradflow_export.errors import ArgumentError, GradflowError, StorageError
from gradflow_export.experiments.runs import Outcome
from gradflow_export.experiments.target import NOTEBOOK, Target, cells, module_target
from gradflow_export.records.causes import with_causes, worst_first
from gradflow_export.records.issues import Issue, Severity, issue_to_json
from gradflow_export.writers.preflight import findings, worst

if TYPE_CHECKING:
    from gradflow_export.experiments.laboratory import Laboratory
    from gradflow_export.experiments.questions import Answer
    from gradflow_export.experiments.verdict import Verdict

FORMATS = ("text", "json", "sarif")
STEPS = 50
PATIENCE = 120.0
"""Seconds that experiments may take without being asked for."""
ELSEWHERE = 1.0
"""Seconds of processor time from which on processes of a script may be where it trains."""
STOPPED = 128
"""What is added to the number of the signal that ended it."""

OPTIONS = (
    "steps", "all", "format", "output", "tried", "cpu_budget", "measure", "html", "jobs", "network", "in_place",
    "fresh",
)  # fmt: skip
"""What concerns a script and means nothing without one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that concern a script; they may stand before it and after it."""
    add = parser.add_argument
    unset = argparse.SUPPRESS
    add(
        "--steps",
        type=int,
        default=unset,
        help=f"optimizer steps to watch (default: {STEPS}, more if they are fast)",
    )
    add("--all", action="store_true", default=unset, help="watch the script to its end")
    add("--format", choices=FORMATS, default=unset, help="output format (default: text)")
    add("--output", type=Path, default=unset, help="write the report to this file")
    add(
        "--try",
        dest="tried",
        nargs="?",
        const="yes",
        choices=("yes", "all"),
        default=unset,
        help="run the script again with one change at a time to find what makes it learn; --try=all tries every "
        f"change (default: if that takes less than {PATIENCE:.0f} s)",
    )
    add("--no-try", dest="tried", action="store_const", const="no", default=unset, help="watch only")
    add("--cpu-budget", default=unset, help="CPU time for the experiments: seconds, or 40x for the time of 40 runs")
    add(
        "--measure",
        default=unset,
        help="value to compare instead of the loss: [higher:|lower:] and an expression in the script, or stdout: "
        "and a pattern",
    )
    add("--html", type=Path, default=unset, help="write an HTML report with charts to this file")
    add("--jobs", type=int, default=unset, help="number of parallel runs (default: one per CPU, at most 4)")
    add("--network", action="store_true", default=unset, help="allow network access for the script")
    add("--fresh", action="store_true", default=unset, help="start each run as a new process instead of forking")
    add("--in-place", action="store_true", default=unset, help="allow the script to write to its own folder")


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with ``--try`` spelled so that it does not take the next word for its value."""
    before = words.index("--") if "--" in words else len(words)
    return ["--try=yes" if word == "--try" and at < before else word for at, word in enumerate(words)]


@dataclass
class Report:
    """Everything that is known of a script; it grows as the doctor works.

    Attributes:
        target: The script.
        outcome: What watching it showed.
        verdicts: What the experiments showed, one for each model that it trains.
        answers: What was asked beyond one cause.
        notes: Why something was not done.
    """

    target: Target
    outcome: Outcome
    verdicts: list[Verdict] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def issues(self) -> list[Issue]:
        """What was found, as the experiments leave it, worst first."""
        found = [issue for issue, _ in self.outcome.issues]
        if self.verdicts:
            from gradflow_export.experiments.account import weighed

            for verdict in self.verdicts:
                found = weighed(found, verdict)
        return sorted(found, key=worst_first)

    def line(self, issue: Issue) -> int:
        """Return the line of the script that an issue belongs to, 0 where it is not known."""
        return next((place.line for each, place in self.outcome.issues if each.key == issue.key), 0)

    @property
    def code(self) -> int:
        """The exit status: 1 for a HIGH or CRITICAL finding, or a confirmed cure."""
        cured = any(verdict.cures for verdict in self.verdicts)
        return 1 if cured or (worst(self.issues) or Severity.INFO) >= Severity.HIGH else 0


def examine_script(script: Path | None, words: Sequence[str], given: argparse.Namespace) -> int:
    """Run a script, try what mends it, and print what was found.

    Args:
        script: A file of Python code or a notebook; ``None`` where ``words`` begin with the name of a module.
        words: What follows it: options of ours, and after them or after ``--`` the script's own.
        given: Options that stood before it.

    Returns:
        1 when a finding is HIGH or CRITICAL or a cure was confirmed, 2 when the script failed or made no step, 128
        and the number of the signal when one ended it, 130 for Ctrl-C, 0 otherwise.

    Raises:
        ArgumentError: There is no such script, it is a notebook without cells, or fewer than one step is asked for.
        StorageError: The file for the findings cannot be written.
    """
    module, words = ("", list(words)) if script is not None else (words[0], list(words[1:]))
    options, own = _split(words, given)
    steps = getattr(options, "steps", STEPS)
    kind = getattr(options, "format", "text")
    output = getattr(options, "output", None)
    if script is not None and not script.is_file():
        raise ArgumentError(f"doctor expects a Python script, got {str(script)!r}, which is no file; give its path.")
    if script is not None and script.suffix == NOTEBOOK:
        cells(script)
    _budget(getattr(options, "cpu_budget", ""), 1.0)
    if steps < 1:
        raise ArgumentError(f"--steps expects a number of steps of at least 1, got {steps}; for example --steps 50.")
    for place in (output, getattr(options, "html", None)):
        if place is not None:
            _check_place(place)
    target = module_target(module, tuple(own)) if script is None else Target(script, words=tuple(own))
    report = Report(target, Outcome())
    stopped = 0
    # What the script prints must not get among findings that another program reads.
    quiet = contextlib.nullcontext() if kind == "text" else contextlib.redirect_stdout(sys.stderr)
    with quiet:
        try:
            _consult(report, options, steps)
        except KeyboardInterrupt as ended:
            stopped = STOPPED + next(iter(ended.args), signal.SIGINT)
            known = "these are the results so far" if report.outcome.steps else "there are no results yet"
            report.notes.append(f"interrupted: {known}.")
    told = _render(report, kind)
    if output is None:
        # A terminal that was closed takes nothing any more.
        with contextlib.suppress(OSError) if stopped else contextlib.nullcontext():
            show(told)
    else:
        _write(output, told)
    if getattr(options, "html", None) is not None and report.outcome.steps:
        from gradflow_export.experiments.page import as_html

        _write(options.html, as_html(target.name, report.issues, report.verdicts, report.answers, report.outcome))
    return stopped or _status(report)


def _status(report: Report) -> int:
    """Return the exit status, and say why the script could not be examined where that is so."""
    outcome, name = report.outcome, report.target.name
    if outcome.error:
        sys.stderr.write(
            f"{outcome.error.rstrip()}\ngradflow: doctor expects a script that runs, and {name} failed by itself "
            f"after {outcome.steps} steps with the error above; mend that first, or give the arguments with which it "
            "runs.\n"
        )
        return 2
    if not outcome.steps and not report.issues:
        sys.stderr.write(
            f"gradflow: {name} made no step of a torch.optim.Optimizer, and none by hand, with a model that is called; "
            f"nothing to report. {_trains_elsewhere(outcome.elsewhere) or 'Give the arguments with which it trains.'}\n"
        )
        return 2
    return report.code


def _trains_elsewhere(seconds: float) -> str:
    """Return what to do about a script whose processes of its own do the work; empty where they do little."""
    if seconds < ELSEWHERE:
        return ""
    return (
        f"The processes that it started ran for {seconds:.0f} s; training in child processes is not watched. Call "
        "the training function in the script itself: main(0) instead of torch.multiprocessing.spawn(main)."
    )


def _consult(report: Report, options: argparse.Namespace, steps: int) -> None:
    """Watch the script, and then try what mends it."""
    from gradflow_export.cli.script_runner import run_script
    from gradflow_export.experiments.laboratory import Laboratory
    from gradflow_export.experiments.measure import parse

    stop, tried = not getattr(options, "all", False), getattr(options, "tried", "")
    with Laboratory(
        report.target,
        jobs=getattr(options, "jobs", None),
        network=getattr(options, "network", False),
        in_place=getattr(options, "in_place", False),
        fresh=getattr(options, "fresh", False),
        measure=parse(options.measure) if hasattr(options, "measure") else None,
    ) as laboratory:
        longer = not hasattr(options, "steps")
        watching = functools.partial(run_script, report.target, steps, stop=stop, longer=longer)
        report.outcome = laboratory.apart(watching, sys.stdout, sys.stderr)
        if tried != "no" and not report.outcome.error and report.outcome.models:
            try:
                _experiment(report, laboratory, options)
            except GradflowError as error:
                tried = any(verdict.trials for verdict in report.verdicts)
                report.notes.append(f"{'not everything' if tried else 'nothing'} was tried: {error}")


def _experiment(report: Report, laboratory: Laboratory, options: argparse.Namespace) -> None:
    """Run the experiments on each model that the script trains."""
    from tqdm import tqdm

    from gradflow_export.experiments.battery import RUNS, Battery
    from gradflow_export.experiments.questions import answers
    from gradflow_export.experiments.runs import STEPS as TRAINED
    from gradflow_export.experiments.watched import needed, unexplained

    tried, found = getattr(options, "tried", ""), with_causes(issue for issue, _ in report.outcome.issues)
    steps = needed(found, TRAINED)
    survey = laboratory.look(steps=steps)
    if report.outcome.steps and not survey.trainings:
        report.notes.append(
            "nothing was tried: the script updates its weights by hand, with gradients that are sparse. Let a "
            "torch.optim.Optimizer make the steps, such as torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    seconds = RUNS * survey.run_seconds(steps) * len(survey.trainings) / laboratory.plan.jobs
    seconds += (RUNS if laboratory.whole else 3) * survey.setup
    if not tried and seconds > PATIENCE and not agreed(f"testing fixes takes about {seconds:.0f} s. Run?"):
        report.notes.append(f"nothing was tried: it would take about {seconds:.0f} s; pass --try to run it.")
        return
    if not survey.ended:
        report.notes.append("the script was stopped before its end; models that it trains later were not examined.")
    budget = _budget(getattr(options, "cpu_budget", ""), survey.run_seconds(steps))
    suspects = [issue.issue_type for issue in unexplained(found)]
    print(f"gradflow: {laboratory.reach}", file=sys.stderr)
    # Processes are forked from this one, which must have no thread beside it.
    tqdm.monitor_interval = 0
    with tqdm(total=RUNS * len(survey.trainings), unit="run", disable=None, leave=False, file=sys.stderr) as bar:

        def tell(line: str) -> None:
            bar.write(f"gradflow: {line}", file=sys.stderr)
            bar.update(laboratory.runs - bar.n)

        for training in survey.trainings:
            battery = Battery(
                laboratory,
                training,
                steps=steps,
                budget=budget,
                everything=tried == "all",
                suspects=suspects,
                tell=tell,
            )
            report.verdicts.append(battery.verdict)
            battery.run()
            if tried == "all" or hasattr(options, "html"):
                tell("the additional questions")
                report.answers += answers(laboratory, battery.verdict, survey.trainings)


def _budget(text: str, run: float) -> float:
    """Return seconds of processor time.

    Raises:
        ArgumentError: The text is neither seconds nor a multiple of a run.
    """
    if not text:
        return math.inf
    try:
        budget = float(text[:-1]) * run if text.endswith("x") else float(text)
    except ValueError:
        budget = math.nan
    if not budget > 0:
        raise ArgumentError(
            f"--cpu-budget expects seconds or a multiple of a run, got {text!r}; for example 60 or 40x."
        )
    return budget


def _split(words: Sequence[str], given: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Tell our options from the script's own; all that follows ``--`` is the script's."""
    ours, after = own_words(words), []
    if "--" in ours:
        ours, after = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="gradflow doctor SCRIPT", add_help=False, allow_abbrev=False)
    add_options(parser)
    options, own = parser.parse_known_args(ours, argparse.Namespace(**vars(given)))
    return options, [*own, *after]


def refuse_without_script(given: argparse.Namespace) -> None:
    """Raise where an option that concerns a script came without one.

    Raises:
        ArgumentError: The message names the option.
    """
    for name in OPTIONS:
        if hasattr(given, name):
            option = (
                ("--no-try" if given.tried == "no" else "--try") if name == "tried" else f"--{name.replace('_', '-')}"
            )
            raise ArgumentError(
                f"{option} expects a training script, got none; write: gradflow doctor train.py {option} ..., or leave "
                "it out to check the installation."
            )


def _check_place(output: Path) -> None:
    """Raise before the script runs where its findings could not be written after it."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        what = "a folder" if output.is_dir() else "in a folder that does not exist"
        raise StorageError(f"--output expects a file to write to, got {str(output)!r}, which is {what}; give another.")


def _write(output: Path, told: str) -> None:
    try:
        output.write_text(told + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--output expects a file to write to, got {str(output)!r}: {error.strerror or error}; give another."
        ) from error


def _render(report: Report, kind: str) -> str:
    # An interrupt before anything was known may have come while torch was imported, which cannot be done again.
    if report.verdicts:
        from gradflow_export.experiments.account import as_json, lines

    issues, outcome = report.issues, report.outcome
    if kind == "sarif":
        version = metadata.version("gradflow-export")
        failed = outcome.error.strip().rpartition("\n")[2]
        causes = [issue for issue in issues if issue.explained_by is None]
        return as_sarif(
            [(issue, report.line(issue)) for issue in causes], report.target.path, version=version, error=failed
        )
    if kind == "json":
        found = [{**issue_to_json(issue), "line": report.line(issue) or None} for issue in issues]
        told = {
            "script": report.target.name,
            "steps": outcome.steps,
            "stopped": outcome.stopped,
            "models": outcome.models,
            "error": outcome.error or None,
            "findings": found,
            "experiments": [as_json(verdict) for verdict in report.verdicts],
            "answers": [{"question": each.title, "answer": each.text, "wrong": each.wrong} for each in report.answers],
            "notes": report.notes,
        }
        return json.dumps(told, indent=2, allow_nan=False)
    models = ", ".join(outcome.models) or "no model"
    summary = findings(issues, outcome.steps, stopped=outcome.stopped)
    comparable = [each.baseline for each in report.verdicts if each.baseline is not None and not each.refused]
    if not issues and any(baseline.ill for baseline in comparable):
        summary = summary.replace("nothing found.", "no rule found anything, but the script does not learn.")
    shown = [f"{report.target.name} ({models}), {summary}"] if outcome.steps or issues else []
    for number, verdict in enumerate(report.verdicts, start=1):
        if len(report.verdicts) > 1:
            first = verdict.training.skipped + 1
            shown.append(f"model {number} of {len(report.verdicts)}, trained by the optimizer steps from {first} on:")
        shown += lines(verdict, issues)
    return "\n".join([*shown, *(f"  {each.title}: {each.text}" for each in report.answers), *report.notes])
