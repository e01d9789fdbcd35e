"""What the verdict reads: the first and the last loss, and how many steps were lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from gradflow_export.records.lost import DISABLED, UNSEEN, LostSteps
from gradflow_export.records.statistics import ENDS
from gradflow_export.records.step_record import Gap, gap_from_json
from gradflow_export.records.verdict import Course
from gradflow_export.storage.continued import RECENT, between
from gradflow_export.storage.event_chunks import ABSENT_BITS, MISSING_BITS
from tensorboard_plugin_gradflow.index import Chunk, RunIndex, Session
from tensorboard_plugin_gradflow.sound import is_note
from tensorboard_plugin_gradflow.source import Source

Steps = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Known = Mapping[str, tuple[Steps, Floats]]
READ: Known = MappingProxyType({})
"""Nothing was read yet."""
_RECENT_CHUNKS = RECENT + 1  # one row each at least


def loss_course(source: Source, index: RunIndex, pairs: list[tuple[Session, Chunk]], known: Known = READ) -> Course:
    """Return how the loss went, as ``gradflow report`` tells it; as many chunks are read from either end as it takes.

    Args:
        source: Where to read.
        index: The run.
        pairs: The chunks that hold the loss, oldest first.
        known: What was read of some of them already, by tag.

    Returns:
        The first and the last loss, and the last reading; nothing else is set.
    """
    course = Course()

    def losses(session: Session, chunk: Chunk) -> list[tuple[float, int]]:
        steps, values = known.get(chunk.tag) or readings(source, index, session, chunk, "loss")
        if len(steps) and steps[-1] >= course.loss_read:
            course.loss_read, course.last_loss = int(steps[-1]), float(values[-1])
        finite = np.isfinite(values)
        return list(zip(values[finite].tolist(), steps[finite].tolist(), strict=True))

    enough = 2 * ENDS
    found: list[tuple[float, int]] = []
    rest = deque(pairs)
    while rest and len(found) < enough:
        found += losses(*rest.popleft())
    tail: list[tuple[float, int]] = []
    while rest and len(tail) < enough:
        tail = losses(*rest.pop()) + tail
    found += tail
    # Those between the ends do not count.
    for loss in found if len(found) <= 2 * enough else found[:enough] + found[-enough:]:
        course.ends.add(*loss)
    course.judged = bool(course.loss_read)
    return course


def both_ends(course: Course) -> dict[str, float] | None:
    """Return the first and the last loss by name.

    Args:
        course: How the loss went.
    """
    return None if course.loss is None else dict(zip(("first", "last"), course.loss, strict=True))


def lost_steps(source: Source, index: RunIndex, pairs: list[tuple[Session, Chunk]]) -> LostSteps:
    """Add up what was lost in each session: steps without a record, records that could not be written, what failed.

    Args:
        source: Where to read.
        index: The run.
        pairs: The chunks that hold ``runtime.dropped``, which begins at 0 in each session.
    """
    newest = {session.name: (session, chunk) for session, chunk in pairs}
    ends = (readings(source, index, *pair, "runtime.dropped")[1] for pair in newest.values())
    dropped = sum(float(values.max()) for values in ends if len(values) and np.isfinite(values).all())
    gaps = gaps_between(source, index)
    for session in index.sessions:
        own = source.read_json(index.run, session.of_kind("gap"))
        gaps += [gap_from_json(gap) for _, gap in own if gap["first"] < session.cut]
    disabled: dict[str, int] = {}
    unseen = ""
    for session in index.sessions:
        for step, note in source.read_items(index.run, session.of_kind("notes"), is_note):
            if note["kind"] == DISABLED and step < session.cut:
                disabled.setdefault(note["text"], step)
            unseen = note["text"] if note["kind"] == UNSEEN and session is index.sessions[-1] else unseen
    return LostSteps({"": int(dropped)}, {"": 0}, disabled=disabled, unseen=unseen).joined(gaps)


def gaps_between(source: Source, index: RunIndex) -> list[Gap]:
    """Return the steps that lie between two sessions and are in neither, as ``gradflow report`` counts them.

    Args:
        source: Where to read.
        index: The run.
    """
    found = []
    for earlier, later in pairwise([session for session in index.sessions if any(session.of_kind("clock"))]):
        own, next_own = (
            [gap for _, gap in source.read_json(index.run, session.of_kind("gap"))] for session in (earlier, later)
        )
        first = earlier.cut
        until = min([first, *(int(gap["first"]) for gap in next_own)])
        clocks = [c for c in earlier.of_kind("clock") if c.parts.name == "steps" and c.key.endswith("-0")]
        recent = [stored for _, stored in source.read(index.run, clocks[-_RECENT_CHUNKS:])]
        steps = {
            int(step) for stored in recent if isinstance(stored, np.ndarray) for step in stored.astype(np.int64).flat
        }
        known = {*steps, *(min(int(gap["last"]), first - 1) for gap in own if gap["first"] < first)}
        settings = next(
            (meta.get("settings") for _, meta in source.read_json(index.run, earlier.of_kind("meta"))), None
        )
        closed = any(True for _ in earlier.of_kind("end"))
        lost = between(sorted(known), until, settings, closed=closed) if known else None
        found += [] if lost is None else [lost]
    return found


def every_step(clock: Chunk) -> bool:
    """Return whether a clock counts every step from its first to its last, which need not be read then."""
    return int(clock.content["rows"]) == int(clock.content["last"]) - int(clock.content["first"]) + 1


def readings(source: Source, index: RunIndex, session: Session, chunk: Chunk, metric: str) -> tuple[Steps, Floats]:
    """Return the readings of a run-level metric in one chunk that still count, and their steps.

    Args:
        source: Where to read.
        index: The run.
        session: The session that the chunk belongs to.
        chunk: Holds the metric among others.
        metric: Its name.
    """
    clock = session.clock_of(chunk)
    tables = [part for part in session.of_kind("sites") if int(part.parts.part) == chunk.content["sites"]]
    names: list[str] = next((names for _, names in source.read_json(index.run, tables)), [])
    if clock is None:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    regular = every_step(clock)
    wanted = [chunk] if regular else [clock, chunk]
    arrays = {part.tag: stored for part, stored in source.read(index.run, wanted)}
    first, last = int(clock.content["first"]), int(clock.content["last"])
    steps = np.arange(first, last + 1) if regular else arrays.get(clock.tag)
    stored = arrays.get(chunk.tag)
    if not isinstance(steps, np.ndarray) or not isinstance(stored, np.ndarray) or metric not in names:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    if stored.ndim != 2 or stored.shape != (len(steps), len(names)):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    column = np.ascontiguousarray(np.asarray(stored, dtype=np.float32)[:, names.index(metric)])
    bits = column.view(np.uint32)
    there = (bits != ABSENT_BITS) & (bits != MISSING_BITS) & (steps < session.cut)
    return steps[there].astype(np.int64), column[there]
