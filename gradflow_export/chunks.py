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
from collections.abc import Iterable, Mapping, Sequence
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


class Packer:
    """Packs consecutive records of one session into blobs; remembers which site tables were written."""

    def __init__(self, session: str) -> None:
        self._prefix = f"{PLUGIN_NAME}/{session}"
        self._site_ids: dict[tuple[str, ...], int] = {}
        self._chunk = 0

    def pack(self, records: Sequence[StepRecord]) -> list[Blob]:
        """Return the blobs of one chunk.

        Args:
            records: Consecutive records of one phase and rank, in order; not empty.

        Returns:
            New site tables first, then clocks, then values.
        """
        head, clocks = f"{self._chunk}-", _Clocks(self._prefix, self._chunk, records)
        tables: list[Blob] = []
        values: list[Blob] = []
        clocks.tag_for(range(len(records)))
        for part, (name, sites, rows, stored) in enumerate(_columns(records)):
            table = self._table(sites, tables)
            content = {
                "v": FORMAT,
                "kind": "values",
                "metric": name,
                "sites": table,
                "clock": clocks.tag_for(rows),
                "rows": len(rows),
                "first": records[rows[0]].step,
                "last": records[rows[-1]].step,
            }
            values.append(Blob(f"{self._prefix}/{name}/{head}{part}", stored, content, records[-1].step))
        issues = [[record.step, issue_to_json(issue)] for record in records for issue in record.issues]
        histograms = [[record.step, histogram_to_json(h)] for record in records for h in record.histograms]
        for kind, items in (("issues", issues), ("histograms", histograms)):
            if items:
                content = {"v": FORMAT, "kind": kind, "first": records[0].step, "last": records[-1].step}
                values.append(Blob(f"{self._prefix}/{kind}/{head}0", json.dumps(items), content, records[-1].step))
        self._chunk += 1
        return tables + clocks.blobs + values

    def _table(self, sites: tuple[str, ...], out: list[Blob]) -> int:
        if sites not in self._site_ids:
            number = self._site_ids[sites] = len(self._site_ids)
            out.append(Blob(f"{self._prefix}/sites/{number}", json.dumps(sites), {"v": FORMAT, "kind": "sites"}))
        return self._site_ids[sites]


class _Clocks:
    """The step and wall-time tensors of one chunk, one pair for each set of rows that some metric was read at."""

    def __init__(self, prefix: str, chunk: int, records: Sequence[StepRecord]) -> None:
        self._prefix, self._chunk, self._records = prefix, chunk, records
        self._tags: dict[tuple[int, ...], str] = {}
        self.blobs: list[Blob] = []

    def tag_for(self, rows: Iterable[int]) -> str:
        key = tuple(rows)
        if key not in self._tags:
            suffix = f"{self._chunk}-{len(self._tags)}"
            chosen = [self._records[row] for row in key]
            content = {
                "v": FORMAT,
                "kind": "clock",
                "rows": len(key),
                "first": chosen[0].step,
                "last": chosen[-1].step,
                "phase": chosen[0].phase,
                "rank": chosen[0].rank,
            }
            step = chosen[-1].step
            steps = np.array([record.step for record in chosen], dtype=np.int64)
            wall = np.array([record.wall_time for record in chosen], dtype=np.float64)
            self._tags[key] = f"steps/{suffix}"
            self.blobs.append(Blob(f"{self._prefix}/steps/{suffix}", steps, content, step))
            self.blobs.append(Blob(f"{self._prefix}/wall/{suffix}", wall, content, step))
        return self._tags[key]


def _columns(
    records: Sequence[StepRecord],
) -> Iterable[tuple[str, tuple[str, ...], tuple[int, ...], npt.NDArray[np.float32]]]:
    """Yield (name, sites, rows, stored values): first the table of run-level metrics, then each per-site metric."""
    run: dict[str, dict[int, float]] = {}
    wide: dict[tuple[str, tuple[str, ...]], list[tuple[int, Reading]]] = {}
    for row, record in enumerate(records):
        for reading in record.readings:
            if reading.sites == (RUN_SITE,):
                bits = mask_values(reading.values, reading.present)[0]
                run.setdefault(reading.metric, {})[row] = bits
            else:
                wide.setdefault((reading.metric, reading.sites), []).append((row, reading))
    if run:
        names = tuple(sorted(run))
        stored = np.zeros((len(records), len(names)), dtype=np.float32)
        stored.view(np.uint32)[:] = ABSENT_BITS
        for column, name in enumerate(names):
            for row, value in run[name].items():
                stored[row, column] = value
        yield "run", names, tuple(range(len(records))), stored
    for (metric, sites), pairs in wide.items():
        masked = np.stack([mask_values(reading.values, reading.present) for _, reading in pairs])
        yield metric, sites, tuple(row for row, _ in pairs), masked


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
