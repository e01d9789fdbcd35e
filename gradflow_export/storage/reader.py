"""Read a run back, from event files and JSON lines, bit for bit (floor 1; never imports torch).

Nothing is held in memory but an index and the pages being looked at, so a run may be larger than memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import overload

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import Gap, RunInfo, StepRecord
from gradflow_export.storage.continued import before, between, chains, identity
from gradflow_export.storage.event_chunks import DRAFTS, Blob
from gradflow_export.storage.event_codec import FrameReader, event_blobs
from gradflow_export.storage.log_index import Page, Session, read_draft, read_events, read_lines

_KEPT_PAGES = 4
_PEEKED_FRAMES = 4
QUICK = 2**25
"""Bytes that are read in about a second, which is what a run that is resumed waits for at most."""


class Start:
    """All that the files of a run hold of one session: of each step what is found first.

    Args:
        parts: What each file holds, those that are complete first.
    """

    def __init__(self, parts: Sequence[Session]) -> None:
        self.parts, self.name = parts, parts[0].name
        infos = [part.info for part in parts if part.info is not None]
        self.info = infos[-1] if infos else None
        self.started, self.rank = max(part.started for part in parts), max(part.rank for part in parts)
        self.closed = any(part.closed for part in parts)
        self.error = next((part.error for part in parts if part.error), "")
        self.issues = sorted((pair for part in parts for pair in part.issues), key=itemgetter(0))
        self.owner: dict[int, Page] = {}
        for part in parts:
            for page in part.pages:
                for step in page.clock:
                    self.owner.setdefault(step, page)
        walls = [page.clock[step] for step, page in self.owner.items()]
        self.began, self.ended = min(walls, default=self.started), max(walls, default=self.started)

    @property
    def gaps(self) -> Sequence[Gap]:
        """The gaps, less the steps that another file of the session holds, such as its draft; what all lack, once."""
        found: dict[tuple[int, int], Gap] = {}
        for part in self.parts:
            own = {step for page in part.pages for step in page.clock}
            for gap in part.gaps:
                elsewhere = sum(gap.first <= step <= gap.last and step not in own for step in self.owner)
                first = next((step for step in range(gap.first, gap.last) if step not in self.owner), gap.last)
                last = next((step for step in range(gap.last, first, -1) if step not in self.owner), first)
                if elsewhere < gap.steps:
                    found[first, last] = replace(gap, first=first, last=last, steps=gap.steps - elsewhere)
        return tuple(found.values())


class Records(Sequence[StepRecord]):
    """The records of a run in step order, read from disk when they are asked for.

    A later session takes over from its first step on, as when training is resumed from a checkpoint: what an earlier
    session holds from there is left out.

    Attributes:
        resumed: First steps of the sessions after the first, rising.
    """

    def __init__(self, starts: Sequence[Start]) -> None:
        self._owner: dict[int, Page] = {}
        self.resumed = tuple(sorted(min(start.owner) for start in starts[1:] if start.owner))
        for start in starts:
            first = min(start.owner, default=math.inf)
            self._owner = {step: page for step, page in self._owner.items() if step < first}
            self._owner.update(start.owner)
        self._steps = sorted(self._owner)
        self._loaded: dict[Page, dict[int, StepRecord]] = {}
        self._wanted: Collection[str] | None = None

    def only(self, metrics: Collection[str]) -> Records:
        """Return the same records with readings of at least these metrics, which takes a fraction of the time."""
        some = Records(())
        some._owner, some._steps, some.resumed, some._wanted = self._owner, self._steps, self.resumed, metrics
        return some

    @property
    def steps(self) -> tuple[int, ...]:
        """Every step, rising."""
        return tuple(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        """Return one record, or a list of them."""
        if isinstance(index, slice):
            return [self._record(step) for step in self._steps[index]]
        return self._record(self._steps[index])

    def __iter__(self) -> Iterator[StepRecord]:
        return map(self._record, self._steps)

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit with any sequence of records."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _record(self, step: int) -> StepRecord:
        page = self._owner[step]
        if page not in self._loaded:
            while len(self._loaded) >= _KEPT_PAGES:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[page] = {record.step: record for record in page.load(self._wanted)}
        return self._loaded[page].get(step) or page.bare(step)


@dataclass(frozen=True)
class Run:
    """A recorded run: the sessions of one directory that continue each other, merged.

    Attributes:
        path: The directory or file that was read.
        info: The description in the latest session that has one; ``None`` when none has.
        sessions: Names of the merged sessions, earliest first.
        records: Every record in strictly rising step order; a lazy sequence.
        skipped: Number of damaged or truncated frames and lines that were skipped, in all runs of the directory.
        gaps: Recorded steps that could not be written, according to the files, and steps between two sessions that
            are in neither.
        beside: The latest session of each other run that was written to the same directory at the same time.
        replaced: The last session of each earlier run that no later session continued, earliest first: the later one
            started again at or before its first step, as when a notebook cell is run twice, or trained another model.
        closed: Whether the latest session was closed. If not, it is in progress, its process was killed, or it could
            not write.
        error: The exception that ended the latest session, with its step; empty if there was none.
    """

    path: Path
    info: RunInfo | None
    sessions: tuple[str, ...]
    records: Records
    skipped: int
    gaps: tuple[Gap, ...] = ()
    beside: tuple[str, ...] = ()
    closed: bool = True
    replaced: tuple[str, ...] = ()
    error: str = ""


def read_run(logdir: str | os.PathLike[str], *, rank: int | None = None, session: str | None = None) -> Run:
    """Read the run in a directory, or in a single file.

    Args:
        logdir: The log directory of a run, or one of its files. Subdirectories are other runs.
        rank: Rank of the process in a distributed run; ``None`` is the lowest one that wrote here.
        session: Name of a session, to select one of several runs written at the same time; ``None`` is the run
            that began first. For a session that a later one replaced, the run up to that point is returned.

    Returns:
        The run. Damaged data are counted in ``skipped``, and the rest is read.

    Raises:
        StorageError: There is no run, or it was written by a newer version of this package.
    """
    path = Path(logdir)
    if not path.exists():
        raise StorageError(
            f"expected a log directory or a file in it, got {str(path)!r}, which does not exist; check it"
        )
    files = [file for file in _files(path) if path.is_file() or _is_ours(file)]
    sessions, skipped = _all_sessions(files)
    if not sessions and not any(_named_as_ours(file) for file in files):
        raise StorageError(_nothing_there(path))
    starts = _starts(sessions)
    ranks = {start.rank for start in starts}
    chosen = min(ranks, default=0) if rank is None else rank
    if ranks and chosen not in ranks:
        raise StorageError(f"expected a rank that wrote to {str(path)!r}, got {rank}; ranks there: {sorted(ranks)}")
    histories = _histories([start for start in starts if start.rank == chosen])
    found_in = [history for history in histories if session is None or any(s.name == session for s in history)]
    if session is not None and not found_in:
        known = ", ".join(start.name for start in starts)
        raise StorageError(f"expected a session that wrote to {str(path)!r}, got {session!r}; sessions there: {known}")
    history, whole = (found_in[0], found_in[0]) if found_in else ([], [])
    own: Sequence[Start] = _runs(history)[-1] if history else ()
    for run in _runs(whole)[:-1]:
        if session in {start.name for start in run}:  # a later one took the place of this run
            own = [start for start in run if start.owner or start.name == session]
            history = whole[: whole.index(own[-1]) + 1]
    return Run(
        path,
        next((start.info for start in reversed(own) if start.info is not None), None),
        tuple(start.name for start in own),
        Records(own),
        skipped,
        tuple(sorted(missing(own), key=lambda gap: gap.first)),
        tuple(other[-1].name for other in histories if other is not whole),
        bool(own) and own[-1].closed,
        _replaced(history),
        own[-1].error if own else "",
    )


def continued(logdir: str | os.PathLike[str], info: RunInfo, before: int) -> Sequence[Start]:
    """Return the sessions that a new one continues, earliest first; none if their files are too long to read at once.

    Args:
        logdir: The log directory of the run.
        info: The session that continues them.
        before: Its first step.

    Raises:
        StorageError: A file was written by a newer version of this package, or cannot be read.
    """
    files = [file for file in _files(Path(logdir)) if _is_ours(file)]
    sessions = _all_sessions(files)[0] if sum(file.stat().st_size for file in files) <= QUICK else []
    starts = [each for each in _starts(sessions) if each.rank == info.rank and each.name != info.session and each.owner]
    if not starts:
        return ()
    run = _runs(max(_histories(starts), key=lambda history: history[-1].ended))[-1]
    known = {identity(start.info) for start in run} | {identity(info)}
    return () if min(run[0].owner) >= before or len(known - {None}) > 1 else run


def _all_sessions(files: Sequence[Path]) -> tuple[list[Session], int]:
    """Index files; return the sessions in them, and how many damaged frames and lines were skipped."""
    sessions: list[Session] = []
    skipped = 0
    for file in reversed(files):  # drafts first: what goes from them into the file proper meanwhile is read there
        read = read_lines if file.suffix == ".jsonl" else read_draft if file.suffix == DRAFTS else read_events
        found, damaged = read(file)
        sessions = [*found, *sessions]
        skipped += damaged
    return sessions, skipped


def missing(starts: Sequence[Start], until: int | None = None) -> Iterator[Gap]:
    """Yield what the sessions of a run say is missing, and what lies between two of them, the latest session first.

    What one says of a step from which a later one recorded does not count. At ``until`` begins one more that goes on.
    """
    cut: float = math.inf if until is None else until
    later: Sequence[Gap] | None = None if until is None else ()
    for start in reversed(starts):
        own = [part for gap in start.gaps for part in before(gap, cut)]
        yield from own
        if start.owner:
            if later is not None:
                began = int(min([cut, *(gap.first for gap in later)]))
                known = {*start.owner, *(gap.last for gap in own)}
                lost = between(sorted(known), began, start.info and start.info.settings, closed=start.closed)
                yield from () if lost is None else (lost,)
            cut, later = min(cut, *start.owner), start.gaps


def _runs(history: Sequence[Start]) -> list[Sequence[Start]]:
    """Divide sessions that follow each other into runs, the last of which is the one that goes on."""
    found = chains([(min(start.owner, default=None), identity(start.info)) for start in history])
    return [[history[place] for place in places] for places in found]


def _replaced(history: Sequence[Start]) -> tuple[str, ...]:
    """Return the last session with a step of each run but the last."""
    return tuple([start.name for start in run if start.owner][-1] for run in _runs(history)[:-1])


def _starts(parts: Sequence[Session]) -> list[Start]:
    """Bring together what several files hold of one session; earliest first."""
    by_name: dict[str, list[Session]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    return sorted(map(Start, by_name.values()), key=lambda start: (start.started, start.name))


def _histories(starts: Sequence[Start]) -> list[list[Start]]:
    """Tell sessions that follow each other from those that ran at the same time; those that began first come first."""
    histories: list[list[Start]] = []
    for start in starts:
        # A session that replaces another in one process may be made before the other one's last step.
        over = [h for h in histories if h[-1].ended <= max(start.started, start.began) or not start.owner]
        if over:
            max(over, key=lambda history: history[-1].ended).append(start)
        else:
            histories.append([start])
    return histories


def drafts_in(folder: Path, before: float) -> Iterator[tuple[Blob, float]]:
    """Yield what sessions that were not closed had recorded beside their last chunk.

    Args:
        folder: The run's folder.
        before: Seconds since the epoch; a draft that was written to later is left out.

    Returns:
        Each blob, numbered as in :meth:`~gradflow_export.storage.event_packing.Packer.draft`, and when its file was
        last written to.
    """
    for file in _files(folder):
        if file.suffix == DRAFTS:
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or damaged
                yield from _settled(file, before)


def _settled(file: Path, before: float) -> Iterator[tuple[Blob, float]]:
    written = file.stat().st_mtime
    if written < before:
        with file.open("rb") as stream:
            for _, payload in FrameReader(stream):
                yield from ((blob, written) for blob in event_blobs(payload))


def find_runs(logdir: str | os.PathLike[str]) -> dict[str, Path]:
    """Find every run at or below a directory.

    Args:
        logdir: Directory to search.

    Returns:
        Directories by run name, sorted. Names are those of TensorBoard: the path relative to ``logdir`` with ``/``
        between parts, ``"."`` for ``logdir`` itself. Empty if there is no run.

    Raises:
        StorageError: ``logdir`` is not a directory.
    """
    top = Path(logdir)
    if not top.is_dir():
        got = "is a file" if top.exists() else "does not exist"
        raise StorageError(
            f"expected a log directory, got {str(top)!r}, which {got}; pass the directory above the runs"
        )
    ours = (folder for folder in _folders(top) if any(map(_is_ours, _files(folder))))
    return dict(sorted((folder.relative_to(top).as_posix(), folder) for folder in ours))


def _folders(top: Path) -> Iterator[Path]:
    """Walk through links too, as TensorBoard does, but into no folder from within itself."""
    for name, below, _ in os.walk(top, followlinks=True):
        here = os.path.realpath(name)
        below[:] = [child for child in below if not f"{here}/".startswith(f"{os.path.realpath(Path(name, child))}/")]
        yield Path(name)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - names are filtered before a Path is made of each
    except OSError:
        return []
    # What was drafted comes last: the file proper knows better.
    found = [path / name for name in names if "tfevents" in name or name.endswith((".jsonl", DRAFTS))]
    return sorted(found, key=lambda file: file.suffix == DRAFTS)


def _named_as_ours(file: Path) -> bool:
    ours, suffix = ("tfevents", ".gradflow") if "tfevents" in file.name else ("gradflow-", (".jsonl", DRAFTS))
    return ours in file.name and file.name.endswith(suffix)


def _is_ours(file: Path) -> bool:
    """Look at the name, else at the first few frames or lines: somebody else's file may be huge."""
    if _named_as_ours(file):
        return True
    try:
        with file.open("rb") as stream:
            if file.suffix == ".jsonl":
                return stream.readline(1 << 20).startswith(b'{"kind":"run","v":')
            return any(event_blobs(payload) for _, payload in islice(FrameReader(stream), _PEEKED_FRAMES))
    except (OSError, ValueError):
        return False


def _nothing_there(path: Path) -> str:
    if path.is_file():
        return (
            f"expected an event file or a .jsonl file written by gradflow, got {str(path)!r}, which holds nothing of "
            "ours; pass the directory that the exporter was given as logdir."
        )
    below = [name for name in islice(find_runs(path), 4) if name != "."]
    hint = f"there are runs below it: {', '.join(below)}" if below else "check the logdir that the exporter was given"
    others = len(_files(path))
    return f"expected a directory with a gradflow run, got {str(path)!r} with {others} log files of others; {hint}."
