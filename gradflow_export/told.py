"""Issues that something other than the rules found: they join the record of the step in which they were told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from gradflow_export.records import RUN_SITE, Issue, IssueType, StepRecord
from gradflow_export.rules.base import Rule
from gradflow_export.rules.judge import Judge

CAPACITY = 1000
"""Issues that may wait for a record, and open ones that are remembered; the oldest go first."""


class ToldJudge(Judge):
    """Asks the rules, and adds the issues it was told; what the rules say already is not said again.

    Args:
        rules: As for :class:`~gradflow_export.rules.judge.Judge`.
        strict: As there.
    """

    def __init__(self, rules: Sequence[Rule], strict: bool = False) -> None:
        super().__init__(rules, strict=strict)
        # One thread appends and another takes: a deque needs no lock for that, and a fork finds none held.
        self._waiting: deque[tuple[float, Issue]] = deque(maxlen=CAPACITY)
        self._told: dict[tuple[str, str, int], Issue] = {}

    def begin_again(self) -> None:
        """Forget all records and issues, those that wait too."""
        super().begin_again()
        self._waiting.clear()
        self._told.clear()

    @property
    def waiting(self) -> bool:
        """Whether an issue waits for a record."""
        return bool(self._waiting)

    def tell(self, issue: Issue) -> None:
        """Add an issue, or one told before that has healed, to the record of the step that is under way now."""
        self._waiting.append((time.time(), issue))

    def check(self, record: StepRecord) -> tuple[Issue, ...]:
        """Judge one record, as :meth:`Judge.check <gradflow_export.rules.judge.Judge.check>` does."""
        events = list(super().check(record))
        while self._waiting and self._waiting[0][0] <= record.wall_time:
            _, issue = self._waiting.popleft()
            if not issue.open:
                known = self._told.pop(issue.key, None)
                if known is not None:
                    events.append(replace(known, healed_step=record.step))
            elif not self._said(issue):
                while len(self._told) >= CAPACITY:
                    del self._told[next(iter(self._told))]
                self._told[issue.key] = replace(issue, step=record.step)
                events.append(self._told[issue.key])
        return tuple(events)

    def _said(self, issue: Issue) -> bool:
        for other in (*self.issues, *self._told.values()):
            if other.open and other.issue_type is issue.issue_type:
                # What is broken is one issue for the whole run, which names where it began.
                whole = RUN_SITE in (issue.layer, other.layer) or issue.issue_type is IssueType.NUMERICAL
                if whole or not set(other.layers).isdisjoint(issue.layers):
                    return True
        return False
