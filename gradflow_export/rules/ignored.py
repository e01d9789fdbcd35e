"""What a user says is meant: issue types and layers that are not reported as issues."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.records.causes import layers_explained_by
from gradflow_export.records.step_record import IssueType
from gradflow_export.rules.base import Finding

MEANT = "\0ignored"
"""End of the cause of a finding that is ignored, so that it shares no issue with one that is not."""

EXAMPLE = "for example ignore=[('NOT_TRAINING', 'pooler')]"


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

    def split(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """Return the findings, those of which some layers are ignored in two parts; see :data:`MEANT`."""
        out: list[Finding] = []
        for finding in findings if self.pairs else ():
            meant = tuple(layer for layer in finding.layers if self.covers(finding.issue_type, layer))
            others = tuple(layer for layer in finding.layers if layer not in meant)
            out += [replace(finding, layers=others)] if others else []
            out += [replace(finding, layers=meant, cause=finding.cause + MEANT)] if meant else []
        return tuple(out) if self.pairs else findings


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
        raise ArgumentTypeError(f"ignore must be a list of pairs of issue type and layer, got {given!r}; {EXAMPLE}.")
    pairs: list[tuple[IssueType, str]] = []
    for item in given:
        pair = (item, "*") if isinstance(item, str) else item
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise ArgumentTypeError(f"ignore must hold pairs of issue type and layer, got {item!r}; {EXAMPLE}.")
        kind, where = pair
        if kind not in IssueType.__members__:
            raise ArgumentError(f"ignore names the issue type {kind!r}{nearest(kind, IssueType.__members__)}")
        pairs.append((IssueType[kind], where))
    return Ignored(tuple(pairs))
