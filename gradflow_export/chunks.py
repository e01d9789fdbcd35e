"""How records lie in an event file: many steps packed into a few uniquely tagged tensors (floor 0: numpy only).

TensorBoard's readers keep a random subset of the records of each *tag*, and drop older records when a step number comes
twice in one tag. A tag that is used once escapes both. Hence every chunk of every metric has a tag of its own::

    gradflow/<session>/meta/0              string   the RunInfo as JSON
    gradflow/<session>/sites/<id>          string   a table of site names as JSON; named by other chunks
    gradflow/<session>/steps/<chunk>-<k>   int64    [rows]          step numbers: a clock
    gradflow/<session>/wall/<chunk>-<k>    float64  [rows]          seconds since the epoch, same rows as steps
    gradflow/<session>/run/<chunk>-<k>     float32  [rows, metrics] run-level; the site table holds the names
    gradflow/<session>/<metric>/<chunk>-<k> float32 [rows, sites]   one per-site metric
    gradflow/<session>/issues/<chunk>-0    string   issues that opened or healed, as JSON
    gradflow/<session>/histograms/<chunk>-0 string  histograms as JSON

``k`` numbers the parts of a chunk: metrics read at different steps refer to different clocks. ``steps/<chunk>-0`` is
the clock of every record in the chunk. The small ``content`` of each blob says which clock and site table it uses, so
that a reader can choose by step range without opening the tensors.

In float32 tensors three NaNs are told apart by their bits: ``MISSING`` (the site was read, nothing arrived), ``ABSENT``
(the run-level metric was not read in that step) and the canonical NaN, which is a value.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import StorageError
from gradflow_export.records import (
    RUN_SITE,
    BoolArray,
    FloatArray,
    Histogram,
    Issue,
    Reading,
    RunInfo,
    StepRecord,
    info_from_json,
    info_to_json,
    issue_from_json,
    issue_to_json,
)

PLUGIN_NAME = "gradflow"
FORMAT = 1
MISSING_BITS = 0x7FC0A11E
ABSENT_BITS = 0x7FC0AB5E
NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class Blob:
    """One tagged tensor: what is written as one summary value.

    Attributes:
        tag: Unique within the log directory.
        data: A numpy array, or a string for JSON blobs.
        content: What a reader must know before opening ``data``; stored in the summary metadata.
        step: The last step of the chunk, for the event that carries it.
    """

    tag: str
    data: npt.NDArray[Any] | str
    content: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class Tag:
    """The parts of a tag."""

    session: str
    name: str
    part: str

    @property
    def chunk(self) -> int:
        """Number of the chunk, counted from 0 in each session."""
        return int(self.part.partition("-")[0])


def parse_tag(tag: str) -> Tag | None:
    """Split a tag of ours; ``None`` when it is not one."""
    pieces = tag.split("/")
    if len(pieces) != 4 or pieces[0] != PLUGIN_NAME:
        return None
    head, _, tail = pieces[3].partition("-")
    if not head.isdigit() or (tail and not tail.isdigit()):
        return None
    return Tag(*pieces[1:])


def mask_values(values: FloatArray, present: BoolArray) -> FloatArray:
    """Write *missing* into a float32 array. Shape of all: any, equal."""
    out = np.array(values, dtype=np.float32)
    out.view(np.uint32)[~present] = MISSING_BITS
    return out


def unmask_values(stored: npt.NDArray[np.float32]) -> tuple[FloatArray, BoolArray]:
    """Return values and presence of a stored float32 array; NaN and the infinities stay as they are."""
    out = np.array(stored, dtype=np.float32)
    bits = out.view(np.uint32)
    present = (bits != MISSING_BITS) & (bits != ABSENT_BITS)
    out[~present] = 0.0
    return out, present


def pack_info(info: RunInfo) -> Blob:
    """Return the blob that describes a run; written first in every session."""
    return Blob(f"{PLUGIN_NAME}/{info.session}/meta/0", json.dumps(info_to_json(info)), {"v": FORMAT, "kind": "meta"})


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

    @property
    def rows(self) -> int:
        """Number of records that wait for :meth:`take`."""
        return len(self._waiting.steps)

    def add(self, record: StepRecord) -> None:
        """Take in one record, of the same phase and rank as those that wait."""
        self._waiting.add(record)

    def take(self) -> list[Blob]:
        """Return what waits as one chunk; at least one record must.

        Returns:
            New site tables first, then clocks, then values.
        """
        waiting, self._waiting = self._waiting, _Waiting()
        head, clocks, first, last = f"{self._chunk}-", _Clocks(self._prefix, self._chunk, waiting), *waiting.ends
        tables: list[Blob] = []
        values: list[Blob] = []
        clocks.tag_for(range(len(waiting.steps)))
        for part, (name, sites, rows, stored) in enumerate(waiting.columns()):
            table = self._table(sites, tables)
            content = {
                "v": FORMAT,
                "kind": "values",
                "metric": name,
                "sites": table,
                "clock": clocks.tag_for(rows),
                "rows": len(rows),
                "first": waiting.steps[rows[0]],
                "last": waiting.steps[rows[-1]],
            }
            values.append(Blob(f"{self._prefix}/{name}/{head}{part}", stored, content, last))
        for kind, items in (("issues", waiting.issues), ("histograms", waiting.histograms)):
            if items:
                content = {"v": FORMAT, "kind": kind, "first": first, "last": last}
                values.append(Blob(f"{self._prefix}/{kind}/{head}0", f"[{', '.join(items)}]", content, last))
        self._chunk += 1
        return tables + clocks.blobs + values

    def _table(self, sites: tuple[str, ...], out: list[Blob]) -> int:
        number, new = self._tables.number(sites)
        if new:
            out.append(Blob(f"{self._prefix}/sites/{number}", json.dumps(sites), {"v": FORMAT, "kind": "sites"}))
        return number


class _Column:
    """The stored values of one metric, row after row, and the numbers of those rows."""

    def __init__(self) -> None:
        self.rows = array("q")
        self.stored = bytearray()

    def add(self, row: int, reading: Reading) -> None:
        self.rows.append(row)
        self.stored += mask_values(reading.values, reading.present).tobytes()

    def values(self, sites: int) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.stored, dtype=np.float32).reshape(len(self.rows), sites)


class _Waiting:
    """The records of a chunk that is not full yet."""

    def __init__(self) -> None:
        self.steps, self.wall = array("q"), array("d")
        self.phase, self.rank = "", 0
        self.issues: list[str] = []
        self.histograms: list[str] = []
        self._run: dict[str, _Column] = {}
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
        for reading in record.readings:
            if reading.sites == (RUN_SITE,):
                column = self._run.get(reading.metric) or self._run.setdefault(reading.metric, _Column())
            else:
                key = reading.metric, reading.sites
                column = self._wide.get(key) or self._wide.setdefault(key, _Column())
            column.add(row, reading)
        self.issues += (json.dumps([record.step, issue_to_json(issue)]) for issue in record.issues)
        self.histograms += (json.dumps([record.step, histogram_to_json(h)]) for h in record.histograms)

    def columns(self) -> Iterable[tuple[str, tuple[str, ...], tuple[int, ...], npt.NDArray[np.float32]]]:
        """Yield (name, sites, rows, stored values): first the table of run-level metrics, then each per-site metric."""
        if self._run:
            names = tuple(sorted(self._run))
            stored = np.zeros((len(self.steps), len(names)), dtype=np.float32)
            stored.view(np.uint32)[:] = ABSENT_BITS
            for index, name in enumerate(names):
                column = self._run[name]
                stored[column.rows, index] = column.values(1)[:, 0]
            yield "run", names, tuple(range(len(self.steps))), stored
        for (metric, sites), column in self._wide.items():
            yield metric, sites, tuple(column.rows), column.values(len(sites))


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


@dataclass
class Unpacker:
    """Collects the blobs of one session, in any order, and gives the records back."""

    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    contents: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sites: dict[int, tuple[str, ...]] = field(default_factory=dict)
    info: RunInfo | None = None
    issues: dict[int, list[Issue]] = field(default_factory=dict)
    histograms: dict[int, list[Histogram]] = field(default_factory=dict)

    def add(self, tag: Tag, data: npt.NDArray[Any] | str, content: Mapping[str, Any]) -> None:
        """Take in one blob.

        Raises:
            StorageError: It was written by a newer version of this package.
        """
        if int(content.get("v", 0)) > FORMAT:
            raise StorageError(
                f"{tag} has format {content['v']}, this version reads up to {FORMAT}; update gradflow-export."
            )
        if isinstance(data, str):
            self._add_json(tag, json.loads(data))
        else:
            self.arrays[f"{tag.name}/{tag.part}"] = data
            self.contents[f"{tag.name}/{tag.part}"] = content

    def _add_json(self, tag: Tag, data: Any) -> None:
        if tag.name == "meta":
            self.info = info_from_json(data)
        elif tag.name == "sites":
            self.sites[int(tag.part)] = tuple(data)
        elif tag.name == "issues":
            for step, item in data:
                self.issues.setdefault(step, []).append(issue_from_json(item))
        elif tag.name == "histograms":
            for step, item in data:
                self.histograms.setdefault(step, []).append(histogram_from_json(item))

    def records(self) -> list[StepRecord]:
        """Return every record whose chunk is complete, in step order."""
        walls: dict[int, tuple[float, str, int]] = {}
        for key, content in self.contents.items():
            wall = self.arrays.get(key.replace("steps/", "wall/", 1))
            if key.startswith("steps/") and key.endswith("-0") and wall is not None:
                for step, seconds in zip(self.arrays[key].tolist(), wall.tolist(), strict=True):
                    walls[step] = (seconds, content["phase"], content["rank"])
        readings: dict[int, list[Reading]] = {step: [] for step in walls}
        for key, content in self.contents.items():
            if content.get("kind") == "values" and content["clock"] in self.arrays and content["sites"] in self.sites:
                self._spread(key, content, readings)
        return [
            StepRecord(
                step,
                seconds,
                tuple(readings[step]),
                tuple(self.histograms.get(step, ())),
                tuple(self.issues.get(step, ())),
                phase,
                rank,
            )
            for step, (seconds, phase, rank) in sorted(walls.items())
        ]

    def _spread(self, key: str, content: Mapping[str, Any], readings: dict[int, list[Reading]]) -> None:
        sites, stored = self.sites[content["sites"]], self.arrays[key]
        values, present = unmask_values(stored)
        absent = stored.view(np.uint32) == ABSENT_BITS
        for row, step in enumerate(self.arrays[content["clock"]].tolist()):
            if step not in readings:
                continue
            if content["metric"] != "run":
                readings[step].append(Reading(content["metric"], sites, values[row], present[row]))
                continue
            for column, name in enumerate(sites):
                if not absent[row, column]:
                    cell = slice(column, column + 1)
                    readings[step].append(Reading(name, (RUN_SITE,), values[row, cell], present[row, cell]))


def histogram_to_json(histogram: Histogram) -> dict[str, Any]:
    """Return the histogram ready for ``json.dumps``."""
    return {
        "metric": histogram.metric,
        "site": histogram.site,
        "edges": histogram.edges.tolist(),
        "counts": histogram.counts.tolist(),
        "nonfinite": histogram.nonfinite,
    }


def histogram_from_json(data: Mapping[str, Any]) -> Histogram:
    """Undo :func:`histogram_to_json`."""
    return Histogram(
        data["metric"],
        data["site"],
        np.array(data["edges"]),
        np.array(data["counts"], dtype=np.int64),
        data["nonfinite"],
    )
