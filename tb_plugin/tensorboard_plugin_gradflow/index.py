"""What a run holds, known from the descriptions of its tensors alone: no tensor is opened here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gradflow_export.chunks import Tag, parse_tag
from tensorboard_plugin_gradflow.metadata import FORMAT, decode_content

_NO_CUT = 2**62
_REMEMBERED = 2**15
_BESIDE = re.compile(r"(.*) \[\d+-[0-9a-f-]+\]", re.DOTALL)


@dataclass(frozen=True)
class Chunk:
    """One tensor of a run.

    Attributes:
        tag: Its full tag.
        parts: The tag taken apart.
        content: The description stored beside it.
    """

    tag: str
    parts: Tag
    content: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The name by which other chunks of the same session refer to this one."""
        return f"{self.parts.name}/{self.parts.part}"

    @cached_property
    def order(self) -> tuple[int, int, str]:
        """Sorts the chunks of a session in the order in which they were written."""
        return self.parts.chunk, len(self.parts.part), self.parts.part


@dataclass(frozen=True)
class Session:
    """One process start of a run.

    Attributes:
        name: Start time in milliseconds, a random word and the rank.
        chunks: By the name that other chunks use.
        cut: First step that a later session wrote again; steps from here on do not count any more.
    """

    name: str
    chunks: Mapping[str, Chunk]
    cut: int

    def of_kind(self, kind: str) -> Iterator[Chunk]:
        """Yield the chunks of one kind in the order in which they were written."""
        yield from self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> Mapping[str, Sequence[Chunk]]:
        found: dict[str, list[Chunk]] = {}
        for chunk in sorted(self.chunks.values(), key=lambda chunk: chunk.order):
            found.setdefault(str(chunk.content.get("kind")), []).append(chunk)
        return found

    def phase_of(self, chunk: Chunk) -> str:
        """Return the phase in which a chunk of values was read, ``""`` when its clock is not there."""
        clock = self.chunks.get(str(chunk.content["clock"]))
        return "" if clock is None else str(clock.content["phase"])


@dataclass(frozen=True)
class RunIndex:
    """The sessions of one run, oldest first, each begun after the one before it had ended.

    Attributes:
        run: TensorBoard's name of the run; with that of a session behind it where several were written at a time.
        sessions: Sessions of the lowest rank present.
        updated: Wall time of the newest tensor, in seconds since the epoch.
        too_new: How many tensors a newer version of the writer wrote; they are left out.
    """

    run: str
    sessions: tuple[Session, ...]
    updated: float
    too_new: int

    @property
    def tensors(self) -> int:
        """How many tensors the run holds."""
        return sum(len(session.chunks) for session in self.sessions)

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step, ``None`` before the first chunk."""
        clocks = [chunk.content for session in self.sessions for chunk in session.of_kind("clock")]
        if not clocks:
            return None
        return min(int(clock["first"]) for clock in clocks), self.last_step

    @property
    def last_step(self) -> int:
        """The last step that counts, 0 before the first chunk."""
        return max(
            (
                min(int(chunk.content["last"]), session.cut - 1)
                for session in self.sessions
                for chunk in session.of_kind("clock")
            ),
            default=0,
        )

    @property
    def phases(self) -> tuple[str, ...]:
        """Every phase word, "train" first."""
        words = {str(chunk.content["phase"]) for session in self.sessions for chunk in session.of_kind("clock")}
        return tuple(sorted(words, key=lambda word: (word != "train", word)))

    @property
    def version(self) -> str:
        """Changes whenever the run has something new."""
        return f"{self.tensors}.{self.last_step}.{self.sessions[-1].name if self.sessions else ''}"


def build_indexes(run: str, listing: Mapping[str, Any]) -> list[RunIndex]:
    """Sort the tensors of one folder into sessions.

    Several sessions of one run are one history: where a later session begins at a step that an earlier one had passed
    already (a resumed checkpoint), the later one counts. Sessions that were written at the same time are runs of their
    own.

    Args:
        run: TensorBoard's name of the folder.
        listing: Tag to time series, as ``list_tensors`` returns it.

    Returns:
        The run that began first, then the others; never empty, and without sessions when no tag is ours.
    """
    found: dict[str, dict[str, Chunk]] = {}
    times: dict[str, list[float]] = {}
    updated: dict[str, float] = {}
    too_new = 0
    for tag, series in listing.items():
        chunk = _described(tag, series.plugin_content)
        if chunk is None:
            continue
        if chunk.content["v"] > FORMAT:
            too_new += 1
            continue
        name, wall = chunk.parts.session, float(series.max_wall_time)
        found.setdefault(name, {})[chunk.key] = chunk
        updated[name] = max(updated.get(name, 0.0), wall)
        if chunk.content.get("kind") == "clock":
            times.setdefault(name, []).append(wall)
    lowest = min((_order(name)[1] for name in found), default=0)
    names = sorted((name for name in found if _order(name)[1] == lowest), key=_order)
    out: list[RunIndex] = []
    for history in _histories(names, times) or [[]]:
        sessions, cut = [], _NO_CUT
        for name in reversed(history):
            session = Session(name, found[name], cut)
            sessions.append(session)
            cut = min([cut, *_first_steps(session.of_kind("clock"))])
        shown = f"{run} [{history[0]}]" if out else run
        newest = max((updated[name] for name in history), default=0.0)
        out.append(RunIndex(shown, tuple(reversed(sessions)), newest, 0 if out else too_new))
    return out


def _histories(names: Sequence[str], times: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Tell sessions that follow each other from those whose steps were recorded at the same time."""
    histories: list[list[str]] = []
    ends: list[float] = []
    for name in names:
        began, ended = min(times.get(name, [math.inf])), max(times.get(name, [0.0]))
        over = [place for place, end in enumerate(ends) if end <= max(_order(name)[0] / 1000, began)]
        if over:
            place = max(over, key=ends.__getitem__)
            histories[place].append(name)
            ends[place] = max(ends[place], ended)
        else:
            histories.append([name])
            ends.append(ended)
    return histories


def folder_of(run: str) -> str:
    """Return TensorBoard's name of the folder that a run lies in."""
    found = _BESIDE.fullmatch(run)
    return run if found is None else found.group(1)


def started(session: str) -> float | None:
    """Return when a session began, in seconds since the epoch, from its name."""
    return _order(session)[0] / 1000 or None


@lru_cache(_REMEMBERED)
def _described(tag: str, content: bytes) -> Chunk | None:
    """Return what a tag and its description say: that never changes, and every request reads all of them."""
    parts, decoded = parse_tag(tag), decode_content(content)
    return None if parts is None or decoded is None else Chunk(tag, parts, decoded)


def _first_steps(clocks: Iterable[Chunk]) -> list[int]:
    return [int(clock.content["first"]) for clock in clocks]


def _order(session: str) -> tuple[int, int, str]:
    head, tail = session.partition("-")[0], session.rpartition("-")[2]
    return (int(head) if head.isdecimal() else 0, int(tail) if tail.isdecimal() else 0, session)
