"""An index of one log file: which sessions and pages it has, and how to load one page (floor 1, part of the store).

A page is a chunk of an event file, or some hundred lines of a JSON-lines file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import (
    Gap,
    Issue,
    RunInfo,
    StepRecord,
    gap_from_json,
    info_from_json,
    issue_from_json,
)
from gradflow_export.storage.event_chunks import FORMAT, Blob, Tag, Unpacker, parse_tag
from gradflow_export.storage.event_codec import FrameReader, event_blobs
from gradflow_export.storage.jsonl import End, LineDecoder

_LINES_PER_PAGE = 256


@dataclass(eq=False)
class Page:
    """Some records of one session.

    Attributes:
        clock: Wall time of each step.
        load: Reads the records from disk, with readings of the metrics that are named at least; ``None`` is all.
    """

    clock: dict[int, float]
    load: Callable[[Collection[str] | None], list[StepRecord]]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the page, rising."""
        return tuple(self.clock)

    def bare(self, step: int) -> StepRecord:
        """Return what is known of a step whose readings cannot be loaded."""
        return StepRecord(step, self.clock[step])

    def keep(self) -> None:
        """Load the records now, and hold them: what they are read from is about to go."""
        records: list[StepRecord] = []
        with contextlib.suppress(OSError):
            records = self.load(None)
        self.load = lambda _wanted: records


@dataclass(eq=False)
class Session:
    """What one file holds of one session.

    Attributes:
        name: The session's name.
        info: Its description, ``None`` when that was lost.
        pages: In step order.
        gaps: Steps that the file says could not be written.
        issues: Those that opened or healed, each with the step at which it was written.
        closed: Whether it says that the session was closed.
        error: The exception that ended it, as far as it says.
    """

    name: str
    info: RunInfo | None = None
    pages: list[Page] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    issues: list[tuple[int, Issue]] = field(default_factory=list)
    closed: bool = False
    error: str = ""

    @property
    def started(self) -> float:
        """Seconds since the epoch, for the order of sessions."""
        if self.info is not None:
            return self.info.started
        head = self.name.partition("-")[0]
        return int(head) / 1000.0 if head.isdigit() else 0.0

    @property
    def rank(self) -> int:
        """Rank of the process that wrote it."""
        if self.info is not None:
            return self.info.rank
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0


@dataclass(eq=False)
class LineSession(Session):
    """A session in a JSON-lines file.

    Attributes:
        places: Offsets of the lines of the last page.
    """

    places: list[int] = field(default_factory=list)

    def index(self, record: StepRecord, offset: int, load: Callable[[list[int]], list[StepRecord]]) -> None:
        """Take note of one record."""
        if len(self.places) % _LINES_PER_PAGE == 0:
            places = self.places = []
            self.pages.append(Page({}, lambda _wanted: load(places)))
        self.places.append(offset)
        self.issues += ((record.step, issue) for issue in record.issues)
        self.pages[-1].clock[record.step] = record.wall_time


@dataclass(eq=False)
class EventSession(Session):
    """A session in an event file.

    Attributes:
        path: The file.
        sites: Site tables by number.
        places: Offsets of the frames of each chunk.
    """

    path: Path = field(default_factory=Path)
    sites: dict[int, tuple[str, ...]] = field(default_factory=dict)
    places: dict[int, list[int]] = field(default_factory=dict)
    clocks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def index(self, tag: Tag, blob: Blob, offset: int) -> None:
        """Take note of one blob.

        Raises:
            ValueError: It does not hold what its tag promises.
        """
        if tag.name == "meta":
            self.info = info_from_json(json.loads(_text(blob)))
        elif tag.name == "sites":
            self.sites[int(tag.part)] = tuple(json.loads(_text(blob)))
        elif tag.name == "gap":
            self.gaps.append(gap_from_json(json.loads(_text(blob))))
        elif tag.name == "end":
            self.closed, self.error = True, str(json.loads(_text(blob)).get("error", ""))
        else:
            self.places.setdefault(tag.chunk, []).append(offset)
            if tag.name == "issues":
                self.issues += _issues(_text(blob))
            if tag.name in {"steps", "wall"} and tag.part.endswith("-0"):
                if isinstance(blob.data, str) or blob.data.ndim != 1:
                    raise ValueError(f"{blob.tag} expects one number per row")
                self.clocks.setdefault(tag.chunk, {})[tag.name] = blob.data.tolist()

    def finish(self) -> None:
        """Turn the chunks whose clock is whole into pages."""
        for chunk, clock in sorted(self.clocks.items()):
            if len(clock.get("steps", ())) == len(clock.get("wall", ())) > 0:
                pairs = dict(zip(clock["steps"], clock["wall"], strict=True))
                self.pages.append(Page(pairs, partial(self._load, chunk)))
        self.clocks = {}

    def _load(self, chunk: int, wanted: Collection[str] | None) -> list[StepRecord]:
        unpacker = Unpacker(wanted, sites=self.sites)
        try:
            with self.path.open("rb") as stream:
                reader = FrameReader(stream)
                for offset in self.places[chunk]:
                    for tag, blob in _own_blobs(reader.payload_at(offset)):
                        if tag.session == self.name and tag.name not in {"meta", "sites"} and tag.chunk == chunk:
                            unpacker.add(tag, blob.data, blob.content)
            return unpacker.records()
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            # Checksums were right, so this is a foreign or half-compatible writer: the steps stand, without readings.
            return []


def read_events(path: Path) -> tuple[list[EventSession], int]:
    """Index an event file.

    Args:
        path: The file; records of other writers in it are passed over.

    Returns:
        The sessions in it, and how many damaged or cut-off frames were skipped.

    Raises:
        StorageError: It was written by a newer version of this package, or cannot be opened.
    """
    sessions: dict[str, EventSession] = {}
    skipped = 0
    with _opened(path) as stream:
        reader = FrameReader(stream)
        for offset, payload in reader:
            skipped += not _index_frame(payload, offset, path, sessions)
    for session in sessions.values():
        session.finish()
    return list(sessions.values()), skipped + reader.skipped


def read_draft(path: Path) -> tuple[list[EventSession], int]:
    """Read a file of drafts, which is emptied or removed as soon as the file proper has what it holds.

    Args:
        path: The file, which may be gone.

    Returns:
        The sessions in it, whose pages are loaded, and how many damaged or cut-off frames were skipped.

    Raises:
        StorageError: It was written by a newer version of this package, or cannot be opened though it is there.
    """
    try:
        sessions, skipped = read_events(path)
    except StorageError:
        if path.exists():
            raise
        return [], 0
    for session in sessions:
        for page in session.pages:
            page.keep()
    return sessions, skipped


def read_lines(path: Path) -> tuple[list[LineSession], int]:
    """Index a JSON-lines file.

    Args:
        path: The file; lines of other writers in it are passed over.

    Returns:
        The sessions in it, and how many damaged or cut-off lines were skipped.

    Raises:
        StorageError: It was written by a newer version of this package, or cannot be opened.
    """
    sessions: dict[str, LineSession] = {}
    decoder = LineDecoder(session=path.stem.removeprefix("gradflow-"))
    skipped = offset = 0
    with _opened(path) as stream:
        for line in stream:
            start, offset = offset, offset + len(line)
            try:
                found = decoder.decode(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                skipped += bool(line.strip())
                continue
            if found is None:
                continue
            session = sessions.setdefault(decoder.session, LineSession(decoder.session))
            if isinstance(found, RunInfo):
                session.info = found
            elif isinstance(found, Gap):
                session.gaps.append(found)
            elif isinstance(found, End):
                session.closed, session.error = True, found.error
            else:
                session.index(found, start, partial(_load_lines, path, decoder.sites, session.name))
    return list(sessions.values()), skipped


def _load_lines(
    path: Path, sites: dict[str, dict[int, tuple[str, ...]]], session: str, places: list[int]
) -> list[StepRecord]:
    """Read some lines; tables that come later on their page are known by then."""
    records = []
    with path.open("rb") as stream:
        for place in places:
            stream.seek(place)
            try:
                found = LineDecoder(sites, session).decode(stream.readline())
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(found, StepRecord):
                records.append(found)
    return records


def _index_frame(payload: bytes, offset: int, path: Path, sessions: dict[str, EventSession]) -> bool:
    try:
        for tag, blob in _own_blobs(payload):
            _check_version(blob.content, blob.tag)
            session = sessions.setdefault(tag.session, EventSession(tag.session, path=path))
            session.index(tag, blob, offset)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _own_blobs(payload: bytes) -> list[tuple[Tag, Blob]]:
    pairs = ((parse_tag(blob.tag), blob) for blob in event_blobs(payload))
    return [(tag, blob) for tag, blob in pairs if tag is not None]


def _check_version(content: Mapping[str, Any], tag: str) -> None:
    if int(content.get("v", 0)) > FORMAT:
        raise StorageError(
            f"{tag} has format {content['v']}, this version reads up to {FORMAT}; update gradflow-export."
        )


def _issues(text: str) -> Iterator[tuple[int, Issue]]:
    """Yield issues with the steps of their records, as far as this version understands them."""
    with contextlib.suppress(ValueError, TypeError):
        for step, each in json.loads(text):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                yield int(step), issue_from_json(each)


def _text(blob: Blob) -> str:
    if not isinstance(blob.data, str):
        raise ValueError(f"{blob.tag} expects JSON, got an array")  # noqa: TRY004 - one kind for damage
    return blob.data


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise StorageError(f"expected a readable file, got {os.fspath(path)!r}: {error.strerror or error}") from error
