"""The issues of a run as they stand, for a file that has lost records."""

from __future__ import annotations

from dataclasses import replace

from gradflow_export.records.step_record import Gap, Issue, StepRecord


class OpenIssues:
    """Follows issues record by record, and adds those that were written before to the next one after a loss.

    A disk that was full or a file that was removed takes issues along that stay open and are not reported again.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[str, str, int], Issue] = {}
        self._lost = 0

    def completed(self, record: StepRecord, lost: Gap | None) -> StepRecord:
        """Return a record, with the issues of before if records were lost since the last one.

        Args:
            record: The next one.
            lost: What was lost so far.
        """
        before = {key: issue for key, issue in self._states.items() if issue.open}
        count = 0 if lost is None else lost.steps
        if count != self._lost:
            before = dict(self._states)  # that one healed may be lost too
        self._states = {**before, **{issue.key: issue for issue in record.issues}}
        if count == self._lost:
            return record
        self._lost = count
        return replace(record, issues=tuple(self._states.values()))
