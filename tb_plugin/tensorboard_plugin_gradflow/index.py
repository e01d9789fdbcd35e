"""What a run holds, known from the descriptions of its tensors alone: no tensor is opened here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from gradflow_export.storage.continued import Identity, chains, identity_of
from gradflow_export.storage.event_chunks import Tag, parse_tag
from tensorboard_plugin_gradflow.metadata import FORMAT, decode_content

_NO_CUT = 2**62
_PATIENCE, _PAUSES = 120.0, 3
"""Seconds, and longest pauses so far, until a run that writes nothing is called silent: chunks take up to 60 s."""
_REMEMBERED = 2**15
_REMEMBERED_CONTENTS = 2**14
_WHOLE = re.compile(r"[0-9]{1,15}")
_MOST_STEP = 2**53
_SPAN = (("first", int), ("last", int))
_PROMISED = MappingProxyType(
    {
        "clock": (*_SPAN, ("rows", int), ("phase", str)),
        "values": (*_SPAN, ("rows", int), ("metric", str), ("sites", int), ("clock", str)),
        "issues": _SPAN,
        "histograms": _SPAN,
        "notes": _SPAN,
        "gap": _SPAN,
    }
)
_IF_THERE = MappingProxyType({"meta": (("model", str), ("entries", int))})
"""What older writers left out."""
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

    def of_metric(self, metric: str) -> Sequence[Chunk]:
        """Return the chunks of values of one metric, or of the table ``"run"``, in the order they were written in."""
        return self._by_metric.get(metric, ())

    @cached_property
    def _by_metric(self) -> Mapping[str, Sequence[Chunk]]:
        found: dict[str, list[Chunk]] = {}
        for chunk in self.of_kind("values"):
            found.setdefault(str(chunk.content["metric"]), []).append(chunk)
        return found

    @cached_property
    def _by_kind(self) -> Mapping[str, Sequence[Chunk]]:
        found: dict[str, list[Chunk]] = {}
        for chunk in sorted(self.chunks.values(), key=lambda chunk: chunk.order):
            found.setdefault(str(chunk.content.get("kind")), []).append(chunk)
        return found

    def clock_of(self, chunk: Chunk) -> Chunk | None:
        """Return the steps that the rows of a chunk of values were read at, ``None`` when they are not there."""
        clock = self.chunks.get(chunk.content["clock"])
        return clock if clock is not None and clock.parts.name == "steps" else None

    def phase_of(self, chunk: Chunk) -> str:
        """Return the phase in which a chunk of values was read, ``""`` when its clock is not there."""
        clock = self.clock_of(chunk)
        return "" if clock is None else str(clock.content["phase"])


@dataclass(frozen=True)
class RunIndex:
    """The sessions of one run, oldest first, each begun after the one before it had ended.

    Attributes:
        run: TensorBoard's name of the run; with that of a session behind it where several were written at a time.
        sessions: Sessions of the lowest rank present.
        updated: Wall time of the newest tensor, in seconds since the epoch.
        too_new: How many tensors a newer version of the writer wrote; they are left out.
        damaged: How many have a description that nobody can have meant; they are left out too.
        written: When the last session wrote a chunk of steps, rising, in seconds since the epoch.
    """

    run: str
    sessions: tuple[Session, ...]
    updated: float
    too_new: int
    damaged: int = 0
    written: tuple[float, ...] = ()

    @cached_property
    def tensors(self) -> int:
        """How many tensors the run holds."""
        return sum(len(session.chunks) for session in self.sessions)

    @cached_property
    def steps(self) -> tuple[int, int] | None:
        """First and last step, ``None`` before the first chunk."""
        clocks = [chunk.content for session in self.sessions for chunk in session.of_kind("clock")]
        if not clocks:
            return None
        return min(int(clock["first"]) for clock in clocks), self.last_step

    @cached_property
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

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Every phase word, "train" first."""
        words = {str(chunk.content["phase"]) for session in self.sessions for chunk in session.of_kind("clock")}
        return tuple(sorted(words, key=lambda word: (word != "train", word)))

    @property
    def closed(self) -> bool:
        """Whether the last session was closed, so that nothing is missing behind it."""
        return any(True for session in self.sessions[-1:] for _ in session.of_kind("end"))

    def state(self, now: float) -> str:
        """Return ``"closed"``, ``"running"``, or ``"silent"``: not closed, and nothing written for longer than usual.

        Args:
            now: Seconds since the epoch.
        """
        if self.closed:
            return "closed"
        pauses = (after - before for before, after in pairwise(self.written))
        return "running" if now - self.updated <= max(_PATIENCE, _PAUSES * max(pauses, default=0.0)) else "silent"

    @cached_property
    def version(self) -> str:
        """Changes whenever the run has something new."""
        return f"{self.tensors}.{self.last_step}.{self.sessions[-1].name if self.sessions else ''}"


def build_indexes(run: str, listing: Mapping[str, Any]) -> list[RunIndex]:
    """Sort the tensors of one folder into sessions.

    Several sessions of one run are one history: where a later session begins at a step that an earlier one had passed
    already (a resumed checkpoint), the later one counts. Sessions that were written at the same time are runs of their
    own, and so is one that did not continue what came before it: see
    :func:`gradflow_export.storage.continued.chains`.

    Args:
        run: TensorBoard's name of the folder.
        listing: Tag to time series, as ``list_tensors`` returns it.

    Returns:
        The folder's own run, then the others; never empty, and without sessions when no tag is ours. Of runs of which
        each followed the one before, the last is the folder's own.
    """
    found: dict[str, dict[str, Chunk]] = {}
    times: dict[str, list[float]] = {}
    updated: dict[str, float] = {}
    too_new = damaged = 0
    for tag, series in listing.items():
        chunk = _described(tag, series.plugin_content)
        if chunk is None:
            damaged += 1
            continue
        if chunk.content["v"] > FORMAT:
            too_new += 1
            continue
        name, wall = chunk.parts.session, float(series.max_wall_time)
        wall = wall if math.isfinite(wall) else 0.0
        found.setdefault(name, {})[chunk.key] = chunk
        updated[name] = max(updated.get(name, 0.0), wall)
        if chunk.content.get("kind") == "clock":
            times.setdefault(name, []).append(wall)
    damaged += sum(map(_drop_contradictions, found.values()))
    lowest = min((_order(name)[1] for name in found), default=0)
    names = sorted((name for name in found if _order(name)[1] == lowest), key=_order)
    out: list[RunIndex] = []
    for history in _histories(names, times) or [[]]:
        places = chains([_start(found[name]) for name in history])
        # The one that goes on has the name: a page that is open on it follows when a cell is run again.
        for part in reversed([history[place.start : place.stop] for place in places]):
            sessions, cut = [], _NO_CUT
            for name in reversed(part):
                session = Session(name, found[name], cut)
                sessions.append(session)
                cut = min([cut, *_first_steps(session.of_kind("clock"))])
            shown = f"{run} [{part[0]}]" if out else run
            newest = max((updated[name] for name in part), default=0.0)
            # What cannot be understood cannot be distinguished by session either: it counts for the folder's own run.
            counts = (0, 0) if out else (too_new, damaged)
            written = tuple(sorted(times.get(part[-1], ()))) if part else ()
            out.append(RunIndex(shown, tuple(reversed(sessions)), newest, *counts, written))
    return out


def _drop_contradictions(chunks: dict[str, Chunk]) -> int:
    """Drop the chunks of a session that contradict what goes with them, and return how many these are.

    What a clock says stands in two descriptions, and with the values once more: a step that only one of them knows
    would hide what other sessions wrote.
    """
    wrong = []
    for key, chunk in chunks.items():
        kind = chunk.content.get("kind")
        other = chunks.get(key.replace("steps/", "wall/", 1)) if kind == "clock" else None
        if kind == "values":
            other = chunks.get(chunk.content["clock"])
        if other is not None and any(
            chunk.content[name] != other.content.get(name) for name in ("first", "last", "rows")
        ):
            wrong.append(key)
    for key in wrong:
        del chunks[key]
    return len(wrong)


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


def _start(chunks: Mapping[str, Chunk]) -> tuple[int | None, Identity | None]:
    """Return the first step of a session and which model it trains, as far as known."""
    kinds = [(chunk.content.get("kind"), chunk.content) for chunk in chunks.values()]
    steps = (int(content["first"]) for kind, content in kinds if kind == "clock")
    models = (identity_of(content.get("model"), content.get("entries")) for kind, content in kinds if kind == "meta")
    return min(steps, default=None), next(filter(None, models), None)


def folder_of(run: str) -> str:
    """Return TensorBoard's name of the folder that a run lies in."""
    found = _BESIDE.fullmatch(run)
    return run if found is None else found.group(1)


def started(session: str) -> float | None:
    """Return when a session began, in seconds since the epoch, from its name."""
    return _order(session)[0] / 1000 or None


@lru_cache(_REMEMBERED)
def _described(tag: str, content: bytes) -> Chunk | None:
    """Return what a tag and its description say: that never changes, and every request reads all of them.

    Returns:
        ``None`` where they cannot be understood. What is returned has all that its kind promises, in the right types.
    """
    parts, decoded = parse_tag(tag), _sound_content(content)
    if parts is None or decoded is None:
        return None
    if decoded["v"] <= FORMAT and decoded.get("kind") == "sites" and not parts.part.isdigit():
        return None
    return Chunk(tag, parts, decoded)


@lru_cache(_REMEMBERED_CONTENTS)
def _sound_content(content: bytes) -> Mapping[str, Any] | None:
    """Return a description with all that its kind promises; the runs of a sweep have the same ones."""
    decoded = decode_content(content)
    if decoded is not None and decoded["v"] <= FORMAT:
        promised = _PROMISED.get(str(decoded.get("kind")), ())
        if not all(_holds(decoded.get(name), kind) for name, kind in promised):
            return None
        known = _IF_THERE.get(str(decoded.get("kind")), ())
        if not all(_holds(decoded[name], kind) for name, kind in known if name in decoded):
            return None
        if promised and decoded["first"] > decoded["last"]:
            return None
    return decoded


def _holds(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_STEP
    return isinstance(value, kind)


def _first_steps(clocks: Iterable[Chunk]) -> list[int]:
    return [int(clock.content["first"]) for clock in clocks]


def _order(session: str) -> tuple[int, int, str]:
    head, tail = session.partition("-")[0], session.rpartition("-")[2]
    return (int(head) if _WHOLE.fullmatch(head) else 0, int(tail) if _WHOLE.fullmatch(tail) else 0, session)
