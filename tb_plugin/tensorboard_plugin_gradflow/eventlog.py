"""A log directory read without TensorBoard: where each tensor of ours lies, and the tensors when they are asked for.

It has the part of TensorBoard's data provider that the panel asks for. TensorBoard's own reader in Python checks and
keeps everything; this one looks at each frame once, keeps the descriptions, and goes on where it stopped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
from tensorboard.compat.proto import event_pb2

from gradflow_export.storage.event_codec import FrameReader, event_blobs
from tensorboard_plugin_gradflow.metadata import PLUGIN_NAME

PLUGINS = (PLUGIN_NAME, "hparams")
_ENDING = ".gradflow"
_PEEKED_FRAMES = 16
_TAIL = 2**12
_LONG = 2**16
_TOLD_BYTES = 2**22

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies, and what TensorBoard's provider reports about it."""

    path: Path
    offset: int
    plugin_content: bytes
    max_wall_time: float


@dataclass
class _File:
    """One event file.

    Attributes:
        run: TensorBoard's name of its folder.
        offset: Where what is not read yet begins.
        ours: Whether something of ours is in it; another one's beginning is read alone.
        entries: What was found, by plugin and tag.
    """

    run: str
    offset: int = 0
    ours: bool = False
    entries: dict[str, dict[str, _Entry]] = field(default_factory=lambda: {name: {} for name in PLUGINS})


class EventLog:
    """What a log directory holds of ours, as TensorBoard's data provider would tell it; safe for several threads.

    Args:
        logdir: A folder of runs, or a run's folder.
        progress: Called now and then with how many bytes of how many are read.
    """

    def __init__(self, logdir: Path, progress: Progress | None = None) -> None:
        self._logdir = Path(logdir)
        self._progress = progress
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()

    def reload(self) -> None:
        """Read what is new, and forget what is gone."""
        with self._lock:
            there = dict(self._find())
            for path in self._files.keys() - there.keys():
                del self._files[path]
            left = {
                path: size - self._files[path].offset if path in self._files else size for path, size in there.items()
            }
            done, total = 0, sum(left.values())
            for path, size in there.items():
                file = self._files.setdefault(path, _File(self._run_of(path)))
                if size < file.offset:  # another file took its place
                    file = self._files[path] = _File(file.run)
                if size > file.offset:
                    self._read(path, file, done, total)
                done += left[path]
            if self._progress is not None:
                self._progress(total, total)

    def list_tensors(self, _ctx: Any = None, *, plugin_name: str, run_tag_filter: Any = None, **_: Any) -> Any:
        """Return entries by run and tag, as TensorBoard's provider does."""
        runs = None if run_tag_filter is None else run_tag_filter.runs
        out: dict[str, dict[str, _Entry]] = {}
        with self._lock:
            for file in self._files.values():
                entries = file.entries.get(plugin_name)
                if entries and (runs is None or file.run in runs):
                    out.setdefault(file.run, {}).update(entries)
        return out

    def read_tensors(self, _ctx: Any = None, *, plugin_name: str, run_tag_filter: Any, **_: Any) -> Any:
        """Return tensors by run and tag, as TensorBoard's provider does; none for one that cannot be opened."""
        runs, tags = set(run_tag_filter.runs or ()), set(run_tag_filter.tags or ())
        with self._lock:
            wanted = [
                (file.run, tag, entry)
                for file in self._files.values()
                if file.run in runs
                for tag, entry in _chosen(file.entries.get(plugin_name, {}), tags)
            ]
        out: dict[str, dict[str, list[Any]]] = {}
        open_files: dict[Path, BinaryIO] = {}
        try:
            for run, tag, entry in sorted(wanted, key=lambda item: (str(item[2].path), item[2].offset)):
                out.setdefault(run, {})[tag] = _open(tag, entry, open_files)
        finally:
            for stream in open_files.values():
                stream.close()
        return out

    def _find(self) -> Iterator[tuple[Path, int]]:
        """Yield event files and their sizes; links are followed as TensorBoard does, but into no folder from within."""
        for name, below, files in os.walk(self._logdir, followlinks=True):
            here = os.path.realpath(name)
            below[:] = sorted(d for d in below if not f"{here}/".startswith(f"{os.path.realpath(Path(name, d))}/"))
            for file in sorted(files):
                if "tfevents" in file:
                    path = Path(name, file)
                    try:
                        yield path, path.stat().st_size
                    except OSError:  # gone meanwhile
                        continue

    def _run_of(self, path: Path) -> str:
        return path.parent.relative_to(self._logdir).as_posix()

    def _read(self, path: Path, file: _File, done: int, total: int) -> None:
        try:
            with path.open("rb", buffering=1 << 20) as stream:
                reader = FrameReader(stream, file.offset)
                first = file.offset == 0
                file.ours = file.ours or path.name.endswith(_ENDING)
                told = file.offset
                for offset, payload in reader if file.ours or not first else islice(reader, _PEEKED_FRAMES):
                    if _may_hold(payload):
                        _note(payload, path, offset, file)
                    if self._progress is not None and offset - told >= _TOLD_BYTES:
                        told = offset
                        self._progress(done + offset, total)
                if not file.ours and file.entries[PLUGIN_NAME]:
                    file.ours = True
                    for offset, payload in reader:
                        if _may_hold(payload):
                            _note(payload, path, offset, file)
                # Of a file of others nothing more is wanted.
                file.offset = reader.resume if file.ours else path.stat().st_size
        except OSError:  # gone, or not to be read
            return


def _chosen(entries: dict[str, _Entry], tags: Collection[str]) -> Iterator[tuple[str, _Entry]]:
    if len(tags) < len(entries):
        yield from ((tag, entries[tag]) for tag in tags if tag in entries)
    else:
        yield from ((tag, entry) for tag, entry in entries.items() if tag in tags)


def _may_hold(payload: bytes) -> bool:
    """Whether a plugin's name is in a frame: that of a long one stands behind its tensor."""
    if len(payload) > _LONG and _MARKS[0] in payload[-_TAIL:]:
        return True
    return any(mark in payload for mark in _MARKS)


# As field 1 of the plugin's data is written: its number and type, the length, the name.
_MARKS = tuple(bytes((10, len(name))) + name.encode() for name in PLUGINS)


def _note(payload: bytes, path: Path, offset: int, file: _File) -> None:
    try:
        event = event_pb2.Event.FromString(payload)
    except Exception:  # each protobuf runtime has a DecodeError of its own
        return
    for value in event.summary.value:
        entries = file.entries.get(value.metadata.plugin_data.plugin_name)
        if entries is not None:
            entries[value.tag] = _Entry(path, offset, value.metadata.plugin_data.content, event.wall_time)


def _open(tag: str, entry: _Entry, open_files: dict[Path, BinaryIO]) -> list[Any]:
    try:
        stream = open_files.get(entry.path)
        if stream is None:
            stream = open_files[entry.path] = entry.path.open("rb")
        blobs = event_blobs(FrameReader(stream).payload_at(entry.offset))
    except (OSError, ValueError, RecursionError):
        return []
    return [SimpleNamespace(numpy=np.asarray(blob.data)) for blob in blobs if blob.tag == tag]
