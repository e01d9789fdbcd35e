"""Issues that a user chose to ignore, as notes beside the numbers: no reader of issues finds them there (floor 1)."""

from __future__ import annotations

from gradflow_export.records.step_record import Issue, Note, StepRecord, issue_from_json, issue_to_json

IGNORED = "ignored"
"""Kind of these notes."""


def note_of_ignored(issue: Issue) -> Note:
    """Return an ignored issue as a note."""
    return Note(IGNORED, str(issue), issue.step, issue_to_json(issue))


def ignored_in(record: StepRecord) -> list[Issue]:
    """Return the ignored issues that would have opened or healed at a step."""
    return [issue_from_json(note.data) for note in record.notes if note.kind == IGNORED]
