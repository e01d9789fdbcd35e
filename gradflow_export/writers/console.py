"""A writer that speaks: what is watched, each issue as it opens and heals, and how the run ended."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TextIO, final

from gradflow_export.errors import ArgumentError
from gradflow_export.records.causes import with_causes
from gradflow_export.records.step_record import Issue, RunInfo, Severity, StepRecord, passes_alone
from gradflow_export.writers.terminal import say

_HEADLINES = (
    ("loss", "loss"),
    ("alignment.accuracy", "accuracy"),
    ("gradient.total_norm", "gradient norm"),
    ("gain.depth", "depth gain"),
    ("update.ratio", "update ratio"),
    ("learning_rate", "lr"),
    ("runtime.throughput", "steps/s"),
    ("overhead", "overhead"),
)

BURST, REFILL_SECONDS = 10, 6.0
"""Issue lines that may come at once, and the seconds of the run after which one more may."""
_NAMED = 4
"""Blocks that are named when watching begins."""
_AT_END = 3
"""Lines about issues of severity MEDIUM before the last one."""


@final
class ConsoleWriter:
    """Prints what is watched, issues as they open and heal, and at the end the verdict and the next command.

    Args:
        stream: Where to print. ``None``: to ``logging`` where the program has set it up, else to whatever
            ``sys.stderr`` is at that moment, above progress bars.
        every: Seconds of the records' own clock between lines of headline numbers; 0 prints one per record.
        verbose: 1: issues of severity HIGH and CRITICAL, at most ten at once and one every six seconds after that,
            though the first of each type always; those of severity MEDIUM that are open at the end. 2: every issue,
            with all of its advice, and headline numbers.

    Attributes:
        unseen: Why no step was recorded, if none was, and what to do.

    Raises:
        ArgumentError: ``every`` is negative or NaN, or ``verbose`` is neither 1 nor 2.
    """

    name = "console"

    def __init__(self, stream: TextIO | None = None, every: float = 10.0, *, verbose: int = 2) -> None:
        if not every >= 0:
            raise ArgumentError(f"every expects seconds >= 0, got {every}; pass 0 for a line per record")
        if verbose not in {1, 2}:
            raise ArgumentError(f"verbose expects 1 or 2, got {verbose!r}; leave the writer out to print nothing")
        self._stream = stream
        self._every, self._verbose = float(every), int(verbose)
        self._where = ""
        self._next: Callable[[], str] = str
        self._verdict: Callable[[], str] | None = None
        self._printed: float | None = None
        self._last_step = 0
        self._open: dict[tuple[str, str, int], Issue] = {}
        self._types: set[str] = set()
        self._found = self._left_out = 0
        self._tokens, self._counted = float(BURST), 0.0
        self._passes = self._closed = False
        self.unseen = _NO_STEP

    def about(self, where: str, following: Callable[[], str], verdict: Callable[[], str]) -> None:
        """Complete what the first and the last line tell; an exporter does so.

        Args:
            where: Where records go, and what to open.
            following: Asked for the next command at the end.
            verdict: Asked for at the end.
        """
        self._where, self._next, self._verdict = where, following, verdict

    def in_child(self) -> ConsoleWriter:
        """Return the writer of a forked child: this one, for the stream is shared."""
        return self

    def open(self, run: RunInfo) -> None:
        """Print which model is watched, its blocks, and where records go."""
        world = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        blocks = f", {_listed(run.blocks)}" if run.blocks else ""
        self._print(f"watching {run.model or 'a model'}, {run.size}{blocks}{world}{self._where}")

    def write(self, record: StepRecord) -> None:
        """Print the record's issues, and its headline numbers when they are due."""
        if self._closed:
            return
        if passes_alone(record):
            self._passes = True
        else:
            self._last_step = record.step
        for issue in record.issues:
            self._tell(issue, record.wall_time)
        due = self._printed is None or not 0 <= record.wall_time - self._printed < self._every
        if due and self._verbose > 1:
            self._printed = record.wall_time
            self._print(_headline(record))

    def flush(self) -> None:
        """Flush the stream."""
        target = sys.stderr if self._stream is None else self._stream
        if not self._closed and target is not None:
            target.flush()

    def close(self) -> None:
        """Print the verdict and the next command; the stream stays open, for it is the user's."""
        if self._closed:
            return
        self._closed = True
        self._say_left_out()
        for issue in self._untold()[:_AT_END]:
            self._print(_opened(issue, stepped=self._last_step > 0), _level(issue.severity))
        if self._verdict is None:
            found = f"issues: {self._found}, still open: {len(self._open)}" if self._found else "no issues"
            self._print(f"closed after step {self._last_step}; {found}")
            return
        worst = max((issue.severity for issue in self._open.values()), default=Severity.INFO)
        when = f"after step {self._last_step}" if self._last_step else "no optimizer step was seen"
        seen = self._last_step or self._passes
        ended = f"{when}: {self._verdict()}{self._next()}" if seen else f"no step was recorded{self.unseen}"
        self._print(ended, _level(worst))

    def _untold(self) -> list[Issue]:
        """Return the first of each type that is open, that was not printed yet, and that nothing else explains."""
        first: dict[str, Issue] = {}
        for issue in with_causes(self._open.values()):
            if issue.severity >= Severity.MEDIUM and issue.explained_by is None:
                first.setdefault(issue.issue_type.value, issue)
        return [issue for kind, issue in first.items() if kind not in self._types] if self._verbose == 1 else []

    def _tell(self, issue: Issue, now: float) -> None:
        known = self._open.get(issue.key)
        if not issue.open:
            self._open.pop(issue.key, None)
        else:
            self._found += known is None
            self._open[issue.key] = issue
        grave = issue.severity >= Severity.HIGH and (not issue.open or known is None or issue.severity > known.severity)
        if not (grave or self._verbose > 1):
            return
        cause = self._cause_of(issue)
        if cause is not None:
            if self._verbose == 1 and cause.issue_type.value not in self._types:  # it was not grave by itself
                self._tell_shortly(replace(cause, severity=max(cause.severity, issue.severity)), now)
            also = f"also seen: {issue.issue_type} in {_place(issue)} since step {issue.step}, "
            also += f"which {cause.issue_type} explains"
            self._print(also, _level(issue.severity))
        elif self._verbose > 1:
            self._print(_issue_line(issue), _level(issue.severity) if issue.open else logging.INFO)
        else:
            self._tell_shortly(issue, now)

    def _cause_of(self, issue: Issue) -> Issue | None:
        """Return the open issue that explains another one."""
        known = with_causes(self._open.values()) if issue.open else ()
        why = next((found.explained_by for found in known if found.key == issue.key), None)
        return None if why is None else self._open[why]

    def _tell_shortly(self, issue: Issue, now: float) -> None:
        self._tokens = min(self._tokens + max(now - self._counted, 0.0) / REFILL_SECONDS, float(BURST))
        self._counted = now
        first = issue.open and issue.issue_type.value not in self._types
        if self._tokens < 1 and not first:
            self._left_out += 1
            return
        self._tokens = max(self._tokens - 1, 0.0)
        self._say_left_out()
        if issue.open:
            self._types.add(issue.issue_type.value)
            self._print(_opened(issue, stepped=self._last_step > 0), _level(issue.severity))
        else:
            what = f"{issue.issue_type} in {_place(issue)} since step {issue.step}"
            self._print(f"healed at step {issue.healed_step}: {what}")

    def _say_left_out(self) -> None:
        if self._left_out:
            self._print(f"{self._left_out} more lines about issues that opened and healed were omitted")
            self._left_out = 0

    def _print(self, line: str, level: int = logging.INFO) -> None:
        # Names of modules may hold anything, a line break too.
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
        if self._stream is None:
            say(f"gradflow: {line}", level)
        else:
            self._stream.write(f"gradflow: {line}\n")


_NO_STEP = (
    ": no optimizer has stepped with this model's parameters in this process (none of those given to watch(), if any), "
    "nor was exporter.step() called. "
    "Next: gradflow doctor SCRIPT.py"
)


def _listed(blocks: Sequence[str]) -> str:
    if len(blocks) <= _NAMED:
        return f"{len(blocks)} block{'s' * (len(blocks) > 1)} ({', '.join(blocks)})"
    return f"{len(blocks)} blocks ({blocks[0]}, {blocks[1]}, ... {blocks[-1]})"


def _place(issue: Issue) -> str:
    more = f" (+{len(issue.layers) - 1} more)" if len(issue.layers) > 1 else ""
    return f"{issue.layer or 'the whole model'}{more}"


def _opened(issue: Issue, *, stepped: bool) -> str:
    """Return what is wrong and the first thing to do, on one line; all of the advice is in the report."""
    fix = first_clause(issue.advice)
    what = " ".join(issue.message.split())
    since = f" {issue.since}" if stepped else ""
    said = f"[{issue.severity.name}] {issue.issue_type} in {_place(issue)}{since}: {what}"
    return f"{said} Fix: {fix}." if fix else said


def first_clause(advice: str) -> str:
    """Return the first clause of an advice, up to a full stop or semicolon that stands in no brackets or quotes.

    >>> first_clause("call step({'a': 1}); or do not. Then look.")
    "call step({'a': 1})"
    """
    text = " ".join(advice.split())
    depth, at = 0, 0
    while at < len(text):
        quoted = _QUOTED.match(text, at)
        if quoted:
            at = quoted.end()
            continue
        depth = max(depth + (text[at] in "([{") - (text[at] in ")]}"), 0)
        if not depth and _END.match(text, at):
            return text[:at]
        at += 1
    return text.rstrip(".;")


_QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)")
_END = re.compile(r"[;.](?:\s|$)")


def _level(severity: Severity) -> int:
    if severity < Severity.HIGH:
        return logging.INFO
    return logging.ERROR if severity is Severity.CRITICAL else logging.WARNING


def _issue_line(issue: Issue) -> str:
    line = " ".join(str(issue).split())
    return line if issue.open else f"healed {line}"


def _headline(record: StepRecord) -> str:
    phase = "" if record.phase == "train" else f" ({record.phase})"
    known = ((label, record.value(metric)) for metric, label in _HEADLINES)
    parts = [f"{label} {value:.4g}" for label, value in known if value is not None]
    return "  ".join([f"step {record.step}{phase}", *parts])
