"""Issues that something other than the rules found: they join the record of the step in which they were reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, StepRecord
from gradflow_export.rules.base import Rule
from gradflow_export.rules.judge import Judge

if TYPE_CHECKING:
    from gradflow_export.storage.earlier import Earlier

CAPACITY = 1000
"""Open issues that are remembered; the oldest go first."""

MENDED = 100
"""Least number of records without it after which what an earlier session left open is over."""


@dataclass(frozen=True, eq=False)
class Amendment(Issue):
    """What is known of an issue since it was reported: its message is added to that of the issue with the same key."""


@dataclass(frozen=True, eq=False)
class Reported(Issue):
    """An issue as it was handed over, with the step then under way, which may make no record.

    Attributes:
        at: That step.
    """

    at: int = 0


def reported(issue: Issue, at: int) -> Reported:
    """Return an issue with the step during which it is handed over."""
    return Reported(**{each.name: getattr(issue, each.name) for each in fields(Issue)}, at=at)


class ToldJudge(Judge):
    """Asks the rules, and adds the issues it received; what the rules say already is not said again.

    Args:
        rules: As for :class:`~gradflow_export.rules.judge.Judge`.
        strict: As there.
    """

    def __init__(self, rules: Sequence[Rule], strict: bool = False) -> None:
        super().__init__(rules, strict=strict)
        self._told: dict[tuple[str, str, int], Issue] = {}
        self._left: list[tuple[Issue, int]] = []
        self._judged = 0

    def recall(self, before: Earlier, *rules: Rule) -> None:
        """Go on from what earlier sessions of the run left; before the first record.

        Rules on the loss see what it was. An issue that was left open is over when this session has not reported it
        after twice as many records as it took to be reported, and after ``MENDED`` of them.

        Args:
            before: What they left.
            rules: Rules about what may have changed in between.
        """
        if self._rules:
            ignored = self.ignored
            Judge.__init__(self, (*self._rules, *rules), self._strict, self._keep)
            self.ignored = ignored
            self._left = list(before.issues)
            for step, loss in before.losses:
                self._history.run("loss").add(step, loss)

    def begin_again(self) -> None:
        """Forget all records and issues."""
        super().begin_again()
        self._told.clear()
        self._left.clear()

    def check(self, record: StepRecord, told: Sequence[Issue] = ()) -> tuple[Issue, ...]:
        """Judge one record, as :meth:`Judge.check <gradflow_export.rules.judge.Judge.check>` does.

        Args:
            record: The next record.
            told: Issues that were reported during its step or since the record before, and such of earlier ones as have
                healed.
        """
        events = list(super().check(record))
        for issue in told:
            into = self._noted if self._is_ignored(issue) else events
            if isinstance(issue, Amendment):
                into += self._amended(issue)
                continue
            at = min(issue.at, record.step) if isinstance(issue, Reported) else record.step
            if not issue.open:
                known = self._told.pop(issue.key, None)
                if known is not None:
                    into.append(replace(known, healed_step=at))
            elif not self._said(issue):
                while len(self._told) >= CAPACITY:
                    del self._told[next(iter(self._told))]
                self._told[issue.key] = replace(issue, step=at)
                into.append(self._told[issue.key])
        self._judged += 1
        return (*events, *self._mended(record.step))

    def _mended(self, step: int) -> list[Issue]:
        """Return what earlier sessions left open and is over now."""
        if not self._left:
            return []
        known = {issue.key[:2] for issue in (*self.issues, *self._told.values())}
        left = [(issue, after) for issue, after in self._left if issue.key[:2] not in known]
        over = [issue for issue, after in left if self._judged >= max(MENDED, 2 * after)]
        self._left = [(issue, after) for issue, after in left if issue not in over]
        return [replace(issue, healed_step=step) for issue in over]

    def _amended(self, amendment: Amendment) -> list[Issue]:
        """Add to the message of an issue, and return it where it is known."""
        found: list[Issue] = []
        for known in (self._issues, self._told):
            for number, issue in known.items():
                if issue.key == amendment.key:
                    found.append(replace(issue, message=f"{issue.message} {amendment.message}"))
                    known[number] = found[-1]  # type: ignore[index]  # each with keys of its own kind
        return found[:1]

    def _is_ignored(self, issue: Issue) -> bool:
        return all(self.ignored.covers(issue.issue_type, layer) for layer in issue.layers)

    def _said(self, issue: Issue) -> bool:
        for other in (*self.issues, *self._told.values()):
            if other.open and other.issue_type is issue.issue_type:
                # What is broken is one issue for the whole run, which names where it began.
                whole = RUN_SITE in (issue.layer, other.layer) or issue.issue_type is IssueType.NUMERICAL
                if whole or not set(other.layers).isdisjoint(issue.layers):
                    return True
        return False
