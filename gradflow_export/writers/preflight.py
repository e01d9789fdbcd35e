"""A writer that says after the first steps what it found in them, and then nothing more."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO, final

from gradflow_export.errors import ArgumentError
from gradflow_export.records.causes import Group, groups
from gradflow_export.records.step_record import Issue, RunInfo, Severity, StepRecord


@final
class PreflightWriter:
    """Prints one summary of the issues found in the first steps, worst first.

    Args:
        steps: After which step it is printed; earlier when the run ends before.
        stream: Where to print; ``None`` is whatever ``sys.stderr`` is at that moment.

    Raises:
        ArgumentError: ``steps`` is below 1.
    """

    name = "preflight"

    def __init__(self, steps: int = 50, stream: TextIO | None = None) -> None:
        if steps < 1:
            raise ArgumentError(f"steps expects a whole number of steps of at least 1, got {steps}; for example 50.")
        self._steps, self._stream = steps, stream
        self._issues: dict[tuple[str, str, int], Issue] = {}
        self._last = 0
        self._told = False

    def in_child(self) -> PreflightWriter:
        """Return the writer of a forked child: one that has reported nothing yet."""
        return PreflightWriter(self._steps, self._stream)

    def open(self, run: RunInfo) -> None:
        """Print nothing: nothing is known yet."""

    def write(self, record: StepRecord) -> None:
        """Take in the record's issues, and print when the last of the first steps has come."""
        if self._told:
            return
        self._issues.update({issue.key: issue for issue in record.issues})
        self._last = record.step
        if record.step >= self._steps:
            self._tell()

    def flush(self) -> None:
        """Flush the stream."""
        self._target.flush()

    def close(self) -> None:
        """Print what is known, if that has not been done."""
        if not self._told and self._last:
            self._tell()

    @property
    def _target(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _tell(self) -> None:
        self._told = True
        self._target.write(f"gradflow: preflight, {findings(self._issues.values(), self._last)}\n")


def findings(issues: Iterable[Issue], steps: int, *, stopped: bool = False) -> str:
    """Return issues as text, worst first: a line that counts causes, and three or four lines for each.

    What comes back is one, with the steps at which it did.

    Args:
        issues: What was found.
        steps: In how many steps.
        stopped: Whether the run was stopped after them, and would have gone on.
    """
    ran = ("first " if stopped else "") + ("1 step" if steps == 1 else f"{steps} steps")
    shown: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups(issues):
        shown.setdefault((group.head.issue_type, group.head.layer, group.head.cause), []).append(group)
    if not shown:
        return f"{ran}: nothing found."
    count = "1 finding" if len(shown) == 1 else f"{len(shown)} findings"
    lines = [f"{ran}: {count}."]
    for group, *others in shown.values():
        issue, again = group.head, ", ".join(str(step) for step in sorted(each.head.step for each in others))
        more = f" (+{len(issue.layers) - 1} more)" if len(issue.layers) > 1 else ""
        gone = "" if issue.open else f", healed at step {issue.healed_step}"
        where = f"{issue.layer or 'the whole model'}{more}"
        gone += f"; also at step {again}" if again else ""
        lines.append(f"  [{issue.severity.name}] {issue.issue_type} in {where} since step {issue.step}{gone}")
        lines.append(f"    evidence {issue.message}")
        lines += [f"    also     {group.also}"] if group.also else []
        code = issue.advice.replace("\n", f"\n{' ' * 13}")
        lines.append(f"    fix      {code}")
    return "\n".join(lines)


def worst(issues: list[Issue]) -> Severity | None:
    """Return the greatest severity among the issues that are open, ``None`` without any."""
    return max((issue.severity for issue in issues if issue.open), default=None)
