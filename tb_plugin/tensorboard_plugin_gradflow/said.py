"""The verdict on a run in the words of ``gradflow report``, read from its chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gradflow_export.records.causes import Group, groups
from gradflow_export.records.lost import LostSteps
from gradflow_export.records.step_record import Issue, Reading, Severity, issue_from_json
from gradflow_export.records.verdict import Course, Verdict, own_losses, problem, verdict
from gradflow_export.storage.event_chunks import unmask_values
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.source import Source

_PLAYERS = "optimizer.loss"
_EMPTY = MappingProxyType({
    "running": Verdict("none", "no step recorded yet", "the run is open, and nothing has been written yet"),
    "closed": Verdict("none", "no step recorded", "the run was closed before its first step"),
    "silent": Verdict("none", "no step recorded", "the run was not closed, and nothing has been written for long"),
})  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """What the verdict on a run is made of; none of it changes while the run's version stays.

    Attributes:
        course: How far it came, and how its loss went.
        groups: The issues of the latest session, by cause.
        earlier: Those that earlier sessions left open.
        lost: What its sessions lost, by their records.
        error: The exception that ended the latest session, with its step; empty if there was none.
    """

    course: Course
    groups: tuple[Group, ...]
    earlier: tuple[Group, ...]
    lost: LostSteps
    error: str = ""

    def said(self, state: str) -> dict[str, str]:
        """Return tone, headline and detail.

        Args:
            state: Of the run, as ``RunIndex.state`` returns it.
        """
        after = self.course.last if state == "silent" and self.course.steps else None
        lost = replace(self.lost, after=after, error=self.error).phrase
        if not self.course.steps:
            empty = _EMPTY[state]
            return asdict(replace(empty, detail="; ".join(filter(None, (empty.detail, lost)))))
        now = list(_open(self.groups))
        made = verdict(
            self.course,
            [_named(issue) for issue in now],
            worst=max((issue.severity for issue in now), default=Severity.INFO),
            earlier=[_named(issue) for issue in _open(self.earlier)],
            healed=sum(not group.head.open for group in self.groups),
            lost=lost,
        )
        return asdict(made)


def findings(
    source: Source, index: RunIndex, issues: Iterable[Mapping[str, Any]], course: Course, lost: LostSteps
) -> Findings:
    """Return what the verdict on a run is made of.

    Args:
        source: Where to read.
        index: The run.
        issues: All of its issues.
        course: With the losses of the run, and whether anything was judged.
        lost: What its sessions lost, by their records.
    """
    parts: dict[bool, list[Issue]] = {True: [], False: []}
    for issue in issues:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # of a type that this version does not know
            parts[issue["state"] == "ended"].append(issue_from_json({**issue, "explained_by": None}))
    course.steps, course.last, course.stepped = recorded_steps(source, index), index.last_step, True
    for session, chunk in player_chunks(index):
        course.players |= _players(source, index, session, chunk)
    ends = [end for session in index.sessions[-1:] for _, end in source.read_json(index.run, session.of_kind("end"))]
    error = str(ends[-1].get("error", "")) if ends else ""
    return Findings(course, groups(parts[False]), groups(parts[True]), lost, error)


def recorded_steps(source: Source, index: RunIndex) -> int:
    """Return how many steps were recorded and still count.

    Args:
        source: Where to read.
        index: The run.
    """
    total = 0
    for session in index.sessions:
        clocks = [c for c in session.of_kind("clock") if c.parts.name == "steps" and c.key.endswith("-0")]
        total += sum(int(chunk.content["rows"]) for chunk in clocks if int(chunk.content["last"]) < session.cut)
        late = [chunk for chunk in clocks if int(chunk.content["last"]) >= session.cut]
        for _, stored in source.read(index.run, late):
            total += int((stored < session.cut).sum()) if isinstance(stored, np.ndarray) else 0
    return total


def player_chunks(index: RunIndex) -> Iterator[tuple[Session, Chunk]]:
    """Yield the first and the last chunk of the losses of the optimizers, by session; there are none without several.

    Args:
        index: The run.
    """
    for session in index.sessions:
        chunks: Sequence[Chunk] = session.of_metric(_PLAYERS)
        yield from ((session, chunk) for chunk in (*chunks[:1], *chunks[1:][-1:]))


def tables_of(session: Session, chunk: Chunk) -> list[Chunk]:
    """Return the tables of site names that a chunk of values needs.

    Args:
        session: The session that it belongs to.
        chunk: The chunk.
    """
    return [part for part in session.of_kind("sites") if int(part.parts.part) == chunk.content["sites"]]


def _players(source: Source, index: RunIndex, session: Session, chunk: Chunk) -> set[str]:
    names: Sequence[str] = next((n for _, n in source.read_json(index.run, tables_of(session, chunk))), [])
    found: set[str] = set()
    for _, stored in source.read(index.run, [chunk]):
        if isinstance(stored, np.ndarray) and stored.ndim == 2 and stored.shape[1] == len(names):
            values, present = unmask_values(stored)
            for row, there in zip(values, present, strict=True):
                found |= own_losses(Reading(_PLAYERS, tuple(names), row, there))
    return found


def _open(found: Sequence[Group]) -> Iterator[Issue]:
    return (group.head for group in found if group.head.open and group.head.severity > Severity.INFO)


def _named(issue: Issue) -> str:
    return problem(issue.issue_type, issue.layer, issue.step)
