"""Packs consecutive records into blobs, as ``storage/event_chunks.py`` describes them (numpy only)."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.records.evidence import evidence_to_json
from gradflow_export.records.step_record import RUN_SITES, StepRecord, issue_to_json
from gradflow_export.storage.event_chunks import ABSENT_BITS, FORMAT, PLUGIN_NAME, Blob, histogram_to_json, mask_values

_TEXTS = ("issues", "histograms", "notes", "evidence")
_NOTHING: tuple[int, ...] = (0, 0, 0, 0, 0)


class SiteTables:
    """Numbers the site tables of a session, and says which are to be written.

    A model that takes another way at every step has ever new ones: only so many are remembered, and one that was
    forgotten is written once more under a new number.
    """

    def __init__(self, most: int = 512) -> None:
        self._most, self._next = most, 0
        self._numbers: dict[tuple[str, ...], int] = {}

    def number(self, sites: tuple[str, ...]) -> tuple[int, bool]:
        """Return the number of a table, and whether it must be written first."""
        known = self._numbers.get(sites)
        if known is not None:
            return known, False
        if len(self._numbers) >= self._most:
            self._numbers.clear()
        number = self._numbers[sites] = self._next
        self._next += 1
        return number, True

    def known(self) -> Iterable[tuple[tuple[str, ...], int]]:
        """Return the tables that are remembered, with their numbers."""
        return self._numbers.items()


class Packer:
    """Packs consecutive records of one session into blobs; remembers which site tables were written.

    A record is packed as it comes: what waits for the end of its chunk is bytes and strings, which Python's garbage
    collector does not look at. Records kept by the hundred would bring its full collections forward.
    """

    def __init__(self, session: str) -> None:
        self._prefix = f"{PLUGIN_NAME}/{session}"
        self._tables = SiteTables()
        self._chunk = 0
        self._waiting = _Waiting()
        self._drafts = _Drafts()

    @property
    def rows(self) -> int:
        """Number of records that wait for :meth:`take`."""
        return len(self._waiting.steps)

    @property
    def steps(self) -> tuple[int, int, int]:
        """First step, last step and number of the records that wait; at least one must."""
        return (*self._waiting.ends, self.rows)

    def add(self, record: StepRecord) -> None:
        """Take in one record, of the same phase and rank as those that wait."""
        self._waiting.add(record)

    def take(self) -> list[Blob]:
        """Return what waits as one chunk; at least one record must.

        Returns:
            New site tables first, then clocks, then values.
        """
        waiting, self._waiting = self._waiting, _Waiting()
        self._drafts = _Drafts()
        self._chunk += 1
        return self._blobs(waiting, self._chunk - 1, self._tables, _NOTHING)

    def draft(self) -> list[Blob]:
        """Return what waits and is in no draft yet as a chunk for a file of its own, which :meth:`take` makes useless.

        Returns:
            As :meth:`take`; the drafts since it was last called share their site tables and are numbered from 0.
        """
        waiting, drafts = self._waiting, self._drafts
        since, drafts.since = drafts.since, (self.rows, *(len(waiting.texts[kind]) for kind in _TEXTS))
        if since[0] == self.rows:
            return []
        drafts.number += 1
        return self._blobs(waiting, drafts.number - 1, drafts.tables, since)

    def tables(self) -> list[Blob]:
        """Return the site tables that were written and are remembered, for a file that begins in the middle."""
        return [self._table_blob(number, sites) for sites, number in self._tables.known()]

    def _blobs(self, waiting: _Waiting, chunk: int, known: SiteTables, since: tuple[int, ...]) -> list[Blob]:
        head, clocks, tables, values = f"{chunk}-", _Clocks(self._prefix, chunk, waiting), list[Blob](), list[Blob]()
        row, *told = since
        first, last = waiting.steps[row], waiting.steps[-1]
        clocks.tag_for(range(row, len(waiting.steps)))
        for part, (name, sites, rows, stored) in enumerate(waiting.columns(row)):
            table, new = known.number(sites)
            if new:
                tables.append(self._table_blob(table, sites))
            about = {
                "v": FORMAT,
                "kind": "values",
                "metric": name,
                "sites": table,
                "clock": clocks.tag_for(rows),
                "rows": len(rows),
                "first": waiting.steps[rows[0]],
                "last": waiting.steps[rows[-1]],
            }
            values.append(Blob(f"{self._prefix}/{name}/{head}{part}", stored, about, last))
        for kind, before in zip(_TEXTS, told, strict=True):
            items = waiting.texts[kind][before:]
            if items:
                content: dict[str, Any] = {"v": FORMAT, "kind": kind, "first": first, "last": last}
                if kind == "evidence":
                    content["tables"] = []
                    for layers in waiting.layers:
                        table, new = known.number(layers)
                        content["tables"].append(table)
                        if new:
                            tables.append(self._table_blob(table, layers))
                values.append(Blob(f"{self._prefix}/{kind}/{head}0", f"[{', '.join(items)}]", content, last))
        return tables + clocks.blobs + values

    def _table_blob(self, number: int, sites: tuple[str, ...]) -> Blob:
        return Blob(f"{self._prefix}/sites/{number}", json.dumps(sites), {"v": FORMAT, "kind": "sites"})


class _Drafts:
    """What of a chunk that is not full was drafted.

    Attributes:
        tables: Those that were in a draft.
        number: How many drafts there were.
        since: How many records are in one, and how many texts of each kind.
    """

    def __init__(self) -> None:
        self.tables, self.number, self.since = SiteTables(), 0, _NOTHING


class _Column:
    """The stored values of one metric, or of all run-level ones of a record, row after row, and the rows' numbers."""

    def __init__(self) -> None:
        self.rows = array("q")
        self.stored = bytearray()

    def add(self, row: int, stored: bytes) -> None:
        self.rows.append(row)
        self.stored += stored

    def values(self, sites: int, since: int = 0) -> npt.NDArray[np.float32]:
        """Return a copy of the entries from the ``since``-th on: bytes that an array looks at could not grow."""
        with memoryview(self.stored) as view:
            return np.frombuffer(bytes(view[4 * sites * since :]), dtype=np.float32).reshape(
                len(self.rows) - since, sites
            )


class _Waiting:
    """The records of a chunk that is not full yet."""

    def __init__(self) -> None:
        self.steps, self.wall = array("q"), array("d")
        self.phase, self.rank = "", 0
        self.texts: dict[str, list[str]] = {kind: [] for kind in _TEXTS}
        self.layers: dict[tuple[str, ...], int] = {}  # tables of the evidence, numbered within the chunk
        self._run: dict[tuple[str, ...], _Column] = {}  # by the names of a record: most records have the same
        self._wide: dict[tuple[str, tuple[str, ...]], _Column] = {}

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last step."""
        return self.steps[0], self.steps[-1]

    def add(self, record: StepRecord) -> None:
        row = len(self.steps)
        if not row:
            self.phase, self.rank = record.phase, record.rank
        self.steps.append(record.step)
        self.wall.append(record.wall_time)
        names, numbers = [], []
        for metric, reading in record.metrics.items():
            if reading.number is not None:
                names.append(metric)
                numbers.append(reading.tobytes())
                continue
            stored = reading if reading.present.all() else mask_values(reading.values, reading.present)
            if reading.sites == RUN_SITES:
                names.append(metric)
                numbers.append(stored.tobytes())
            else:
                key = metric, reading.sites
                (self._wide.get(key) or self._wide.setdefault(key, _Column())).add(row, stored.tobytes())
        if names:
            run = tuple(names)
            (self._run.get(run) or self._run.setdefault(run, _Column())).add(row, b"".join(numbers))
        self.texts["issues"] += (json.dumps([record.step, issue_to_json(issue)]) for issue in record.issues)
        self.texts["histograms"] += (json.dumps([record.step, histogram_to_json(h)]) for h in record.histograms)
        self.texts["notes"] += (json.dumps([record.step, vars(note)]) for note in record.notes)
        if record.evidence:
            told = evidence_to_json(record.evidence, lambda layers: self.layers.setdefault(layers, len(self.layers)))
            self.texts["evidence"].append(json.dumps([record.step, told]))

    def columns(self, row: int) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], npt.NDArray[np.float32]]]:
        """Yield (name, sites, rows, stored values) from a row on: the table of run-level metrics, then each other."""
        count = len(self.steps) - row
        since = {own: bisect_left(column.rows, row) for own, column in self._run.items()}
        new = {own: self._run[own] for own, first in since.items() if first < len(self._run[own].rows)}
        names = tuple(sorted({name for own in new for name in own}))
        if names:
            place = {name: index for index, name in enumerate(names)}
            stored = np.zeros((count, len(names)), dtype=np.float32)
            stored.view(np.uint32)[:] = ABSENT_BITS
            for own, column in new.items():
                rows = np.array(column.rows[since[own] :]) - row
                stored[rows[:, None], [place[name] for name in own]] = column.values(len(own), since[own])
            yield "run", names, tuple(range(row, row + count)), stored
        for (metric, sites), column in self._wide.items():
            first = bisect_left(column.rows, row)
            if first < len(column.rows):
                yield metric, sites, tuple(column.rows[first:]), column.values(len(sites), first)


class _Clocks:
    """The step and wall-time tensors of one chunk, one pair for each set of rows that some metric was read at."""

    def __init__(self, prefix: str, chunk: int, waiting: _Waiting) -> None:
        self._prefix, self._chunk, self._waiting = prefix, chunk, waiting
        self._steps, self._wall = np.array(waiting.steps, dtype=np.int64), np.array(waiting.wall, dtype=np.float64)
        self._tags: dict[tuple[int, ...], str] = {}
        self.blobs: list[Blob] = []

    def tag_for(self, rows: Iterable[int]) -> str:
        key = tuple(rows)
        if key not in self._tags:
            suffix = f"{self._chunk}-{len(self._tags)}"
            chosen = np.array(key, dtype=np.intp)
            first, last = (self._waiting.steps[row] for row in (key[0], key[-1]))
            content = {
                "v": FORMAT,
                "kind": "clock",
                "rows": len(key),
                "first": first,
                "last": last,
                "phase": self._waiting.phase,
                "rank": self._waiting.rank,
            }
            self._tags[key] = f"steps/{suffix}"
            self.blobs.append(Blob(f"{self._prefix}/steps/{suffix}", self._steps[chosen], content, last))
            self.blobs.append(Blob(f"{self._prefix}/wall/{suffix}", self._wall[chosen], content, last))
        return self._tags[key]
