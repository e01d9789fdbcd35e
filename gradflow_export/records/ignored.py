"""What a user says is meant: types and layers that are no issues, but notes beside the numbers (floor 1)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.records.causes import layers_explained_by
from gradflow_export.records.step_record import Issue, IssueType, Note, StepRecord, issue_from_json, issue_to_json

IGNORED = "ignored"
"""Kind of these notes."""


def note_of_ignored(issue: Issue) -> Note:
    """Return an ignored issue as a note."""
    return Note(IGNORED, str(issue), issue.step, issue_to_json(issue))


def ignored_in(record: StepRecord) -> list[Issue]:
    """Return the ignored issues that would have opened or healed at a step."""
    return [issue_from_json(note.data) for note in record.notes if note.kind == IGNORED]


_WANTED = "issue types, or pairs of issue type and layer"
EXAMPLE = "for example ignore=['DEAD', ('NOT_TRAINING', 'pooler')]"


@dataclass(frozen=True)
class Ignored:
    """Pairs of an issue type and a pattern of layers.

    Attributes:
        pairs: A layer matches a pattern that is its name, a module it is part of, or a shell pattern (``"*.bias"``).
    """

    pairs: tuple[tuple[IssueType, str], ...] = ()

    def joined(self, other: Ignored) -> Ignored:
        """Return what covers all that either does."""
        return Ignored(tuple(dict.fromkeys((*self.pairs, *other.pairs))))

    def covers(self, kind: IssueType, layer: str) -> bool:
        """Whether issues of a type are ignored in a layer; what they explain there is ignored with them.

        >>> meant = ignored([("NOT_TRAINING", "pooler")])
        >>> meant.covers(IssueType.NOT_TRAINING, "pooler.weight"), meant.covers(IssueType.DEAD, "pooler")
        (True, False)
        """
        return any(
            (kind is named or kind in layers_explained_by(named))
            and (layer == where or layer.startswith(f"{where}.") or fnmatch.fnmatchcase(layer, where))
            for named, where in self.pairs
        )


def ignored(given: object) -> Ignored:
    """Return what the argument or setting ``ignore`` stands for.

    Args:
        given: Pairs of an issue type and a pattern of layers, or ``None``. A type alone stands for all layers.

    Raises:
        ArgumentError: A type is unknown; the message names the nearest.
        ArgumentTypeError: It is no list of pairs of strings.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        if given is None:
            return Ignored()
        raise ArgumentTypeError(f"ignore must be a list of {_WANTED}, got {given!r}; {EXAMPLE}.")
    pairs: list[tuple[IssueType, str]] = []
    for item in given:
        pair = (item, "*") if isinstance(item, str) else item
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise ArgumentTypeError(f"ignore must hold {_WANTED}, got {item!r}; {EXAMPLE}.")
        kind, where = pair
        if kind not in IssueType.__members__:
            raise ArgumentError(f"ignore names the issue type {kind!r}{nearest(kind.upper(), IssueType.__members__)}")
        pairs.append((IssueType[kind], where))
    return Ignored(tuple(pairs))
