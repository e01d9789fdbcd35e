"""``gradflow doctor script.py``: run a training script for a few steps and say which mistakes it makes silently."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from gradflow_export.cli.sarif import as_sarif
from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.records.causes import worst_first
from gradflow_export.records.issues import Severity, issue_to_json
from gradflow_export.writers.preflight import findings, worst

if TYPE_CHECKING:
    from gradflow_export.cli.script_runner import Outcome

FORMATS = ("text", "json", "sarif")
STEPS = 50


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that concern a script; they may stand before it and after it."""
    parser.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS, help=f"optimizer steps to run (default: {STEPS})"
    )
    parser.add_argument("--all", action="store_true", default=argparse.SUPPRESS, help="run the script to its end")
    parser.add_argument(
        "--format", choices=FORMATS, default=argparse.SUPPRESS, help="how findings are printed (default: text)"
    )
    parser.add_argument("--output", type=Path, default=argparse.SUPPRESS, help="write findings to this file")


def examine_script(script: Path, words: Sequence[str], given: argparse.Namespace) -> int:
    """Run a script and print what was found.

    Args:
        script: A file of Python code.
        words: What follows it: options of ours, and after them or after ``--`` the script's own.
        given: Options that stood before it.

    Returns:
        1 when a finding is CRITICAL, 2 when the script failed or made no step, 0 otherwise.

    Raises:
        ArgumentError: There is no such script, or fewer than one step is asked for.
        StorageError: The file for the findings cannot be written.
    """
    options, own = _split(words, given)
    steps = getattr(options, "steps", STEPS)
    kind = getattr(options, "format", "text")
    output = getattr(options, "output", None)
    if not script.is_file():
        raise ArgumentError(f"doctor expects a Python script, got {str(script)!r}, which is no file; give its path.")
    if steps < 1:
        raise ArgumentError(f"--steps expects a number of steps of at least 1, got {steps}; for example --steps 50.")
    if output is not None:
        _check_place(output)
    from gradflow_export.cli.script_runner import run_script

    # What the script prints must not get among findings that another program reads.
    quiet = contextlib.nullcontext() if kind == "text" else contextlib.redirect_stdout(sys.stderr)
    with quiet:
        outcome = run_script(script, own, steps, stop=not getattr(options, "all", False))
    told = _render(outcome, script, kind)
    if output is None:
        print(told)
    else:
        _write(output, told)
    if outcome.error:
        sys.stderr.write(
            f"{outcome.error.rstrip()}\ngradflow: doctor expects a script that runs, and {script} failed by itself "
            f"after {outcome.steps} steps with the error above; mend that first, or give the arguments with which it "
            "runs.\n"
        )
        return 2
    issues = [issue for issue, _ in outcome.issues]
    if not outcome.steps and not issues:
        sys.stderr.write(
            f"gradflow: {script} made no step of a torch.optim.Optimizer with a model that was called; nothing was "
            "learned of it. Give the arguments with which it trains.\n"
        )
        return 2
    return 1 if worst(issues) is Severity.CRITICAL else 0


def _split(words: Sequence[str], given: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Tell our options from the script's own; all that follows ``--`` is the script's."""
    ours, after = list(words), []
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
    for name in ("steps", "all", "format", "output"):
        if hasattr(given, name):
            raise ArgumentError(
                f"--{name} expects a training script, got none; write: gradflow doctor train.py --{name} ..., or leave "
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


def _render(outcome: Outcome, script: Path, kind: str) -> str:
    issues = sorted((issue for issue, _ in outcome.issues), key=worst_first)
    lines = {issue: place.line for issue, place in outcome.issues}
    if kind == "sarif":
        version = metadata.version("gradflow-export")
        failed = outcome.error.strip().rpartition("\n")[2]
        causes = [issue for issue in issues if issue.explained_by is None]
        return as_sarif([(issue, lines[issue]) for issue in causes], script, version=version, error=failed)
    if kind == "json":
        found = [{**issue_to_json(issue), "line": lines[issue] or None} for issue in issues]
        head = {"script": str(script), "steps": outcome.steps, "models": outcome.models, "error": outcome.error or None}
        return json.dumps({**head, "findings": found}, indent=2, allow_nan=False)
    models = ", ".join(outcome.models) or "no model"
    return f"{script} ({models}), {findings(issues, outcome.steps)}"
