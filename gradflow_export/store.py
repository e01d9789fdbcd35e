"""Read a run back, from event files and JSON lines, bit for bit (floor 1; never imports torch).

Nothing is held in memory but an index and the pages being looked at, so a run may be larger than memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import overload

from gradflow_export.errors import StorageError
from gradflow_export.framing import FrameReader, event_blobs
from gradflow_export.pages import EventSession, LineSession, Page, Session, read_events, read_lines
from gradflow_export.records import RunInfo, StepRecord

_KEPT_PAGES = 4
_PEEKED_FRAMES = 4


class Records(Sequence[StepRecord]):
    """The records of a run in step order, read from disk when they are asked for.

    A later session takes over from its first step on, as when training is resumed from a checkpoint: what an earlier
    session holds from there is left out.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._owner: dict[int, Page] = {}
        for session in sessions:
            first = min((min(page.steps) for page in session.pages if page.steps), default=math.inf)
            self._owner = {step: page for step, page in self._owner.items() if step < first}
            for page in session.pages:
                self._owner.update(dict.fromkeys(page.steps, page))
        self._steps = sorted(self._owner)
        self._loaded: dict[Page, dict[int, StepRecord]] = {}

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
            self._loaded[page] = {record.step: record for record in page.load()}
        return self._loaded[page].get(step) or page.bare(step)


@dataclass(frozen=True)
class Run:
    """One run: every session found in one directory, merged.

    Attributes:
        path: The directory or file that was read.
        info: The description in the latest session that has one; ``None`` when none has.
        sessions: Names of the sessions, earliest first.
        records: Every record in strictly rising step order; a lazy sequence.
        skipped: Damaged or cut-off frames and lines that were left out.
    """

    path: Path
    info: RunInfo | None
    sessions: tuple[str, ...]
    records: Records
    skipped: int


def read_run(logdir: str | os.PathLike[str], *, rank: int | None = None) -> Run:
    """Read the run in a directory, or in a single file.

    Args:
        logdir: The directory that a writer was given, or one of its files. Directories below it are other runs.
        rank: Which process of a distributed run; ``None`` is the lowest that wrote here.

    Returns:
        The run. Damage is counted in ``skipped`` and everything around it is read.

    Raises:
        StorageError: There is no run there, or it was written by a newer version of this package.
    """
    path = Path(logdir)
    if not path.exists():
        raise StorageError(
            f"expected a log directory or a file in it, got {str(path)!r}, which does not exist; check it"
        )
    files = [file for file in _files(path) if path.is_file() or _is_ours(file)]
    sessions: list[Session] = []
    skipped = 0
    for file in files:
        found: Sequence[EventSession | LineSession]
        found, damaged = read_lines(file) if file.suffix == ".jsonl" else read_events(file)
        sessions += found
        skipped += damaged
    if not sessions and not any(_named_as_ours(file) for file in files):
        raise StorageError(_nothing_there(path))
    sessions.sort(key=lambda session: (session.started, session.name))
    ranks = {session.rank for session in sessions}
    chosen = min(ranks, default=0) if rank is None else rank
    if ranks and chosen not in ranks:
        raise StorageError(f"expected a rank that wrote to {str(path)!r}, got {rank}; ranks there: {sorted(ranks)}")
    sessions = [session for session in sessions if session.rank == chosen]
    infos = [session.info for session in sessions if session.info is not None]
    names = tuple(dict.fromkeys(session.name for session in sessions))
    return Run(path, infos[-1] if infos else None, names, Records(sessions), skipped)


def find_runs(logdir: str | os.PathLike[str]) -> dict[str, Path]:
    """Find every run at or below a directory.

    Args:
        logdir: Where to look.

    Returns:
        Directories by name: the path relative to ``logdir`` with ``/`` between parts, ``"."`` for ``logdir`` itself, as
        TensorBoard names them; sorted. Empty when there is none.

    Raises:
        StorageError: ``logdir`` is no directory.
    """
    top = Path(logdir)
    if not top.is_dir():
        got = "is a file" if top.exists() else "does not exist"
        raise StorageError(
            f"expected a log directory, got {str(top)!r}, which {got}; pass the directory above the runs"
        )
    found = {
        folder.relative_to(top).as_posix(): folder
        for folder in _folders(top)
        if any(_is_ours(file) for file in _files(folder))
    }
    return dict(sorted(found.items()))


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
    return [path / name for name in names if "tfevents" in name or name.endswith(".jsonl")]


def _named_as_ours(file: Path) -> bool:
    ours, suffix = ("tfevents", ".gradflow") if "tfevents" in file.name else ("gradflow-", ".jsonl")
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
