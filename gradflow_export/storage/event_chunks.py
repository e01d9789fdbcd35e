"""How records lie in an event file: many steps packed into a few uniquely tagged tensors (floor 0: numpy only).

TensorBoard's readers keep a random subset of the records of each *tag*, and drop older records when a step number comes
twice in one tag. A tag that is used once escapes both. Hence every chunk of every metric has a tag of its own::

    gradflow/<session>/meta/<n>            string   the RunInfo as JSON; first in the n-th file of the session
    gradflow/<session>/sites/<id>          string   a table of site names as JSON; named by other chunks
    gradflow/<session>/steps/<chunk>-<k>   int64    [rows]          step numbers: a clock
    gradflow/<session>/wall/<chunk>-<k>    float64  [rows]          seconds since the epoch, same rows as steps
    gradflow/<session>/run/<chunk>-<k>     float32  [rows, metrics] run-level; the site table holds the names
    gradflow/<session>/<metric>/<chunk>-<k> float32 [rows, sites]   one per-site metric
    gradflow/<session>/issues/<chunk>-0    string   issues that opened or healed, as JSON
    gradflow/<session>/histograms/<chunk>-0 string  histograms as JSON
    gradflow/<session>/notes/<chunk>-0     string   what was reported beside the numbers, as JSON
    gradflow/<session>/evidence/<chunk>-0  string   what checks saw, as JSON; ``tables`` of its content has the layers
    gradflow/<session>/gap/<n>             string   steps that could not be written, as JSON
    gradflow/<session>/end/0               string   the last step, as JSON: the session was closed; and an exception

``k`` numbers the parts of a chunk: metrics read at different steps refer to different clocks. ``steps/<chunk>-0`` is
the clock of every record in the chunk. The small ``content`` of each blob says which clock and site table it uses, so
that a reader can choose by step range without opening the tensors.

In float32 tensors three NaNs differ in their bits: ``MISSING`` (the site was read, nothing arrived), ``ABSENT``
(the run-level metric was not read in that step) and the canonical NaN, which is a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import StorageError
from gradflow_export.records.evidence import evidence_from_json
from gradflow_export.records.retired import RETIRED
from gradflow_export.records.step_record import (
    RUN_SITE,
    BoolArray,
    FloatArray,
    Gap,
    Histogram,
    Issue,
    Note,
    Reading,
    RunInfo,
    StepRecord,
    info_from_json,
    info_to_json,
    issue_from_json,
    note_from_json,
)
from gradflow_export.storage.continued import LONGEST

PLUGIN_NAME = "gradflow"
DRAFTS = ".draft"
"""End of the name of a file that holds what waits for the end of its chunk, in case the process ends before."""
FORMAT = 1
MISSING_BITS = 0x7FC0A11E
ABSENT_BITS = 0x7FC0AB5E
NAN_BITS = 0x7FC00000

_PART = re.compile(r"[0-9]{1,15}(-[0-9]{1,15})?")


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
    return Tag(*pieces[1:]) if _PART.fullmatch(pieces[3]) else None


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


def pack_info(info: RunInfo, number: int = 0) -> Blob:
    """Return the blob that describes a run; written first in every file of a session.

    Args:
        info: The description.
        number: Which file of the session it is, counted from 0.
    """
    tag = f"{PLUGIN_NAME}/{info.session}/meta/{number}"
    # Which model it is can be known without opening any tensor.
    content = {"v": FORMAT, "kind": "meta", "model": info.model[:LONGEST], "entries": info.entries}
    return Blob(tag, json.dumps(info_to_json(info)), content)


def pack_gap(session: str, gap: Gap, number: int) -> Blob:
    """Return the blob that tells which steps are missing.

    Args:
        session: The session's name.
        gap: The steps.
        number: Which gap of the session it is, counted from 0.
    """
    content = {"v": FORMAT, "kind": "gap", "first": gap.first, "last": gap.last}
    return Blob(f"{PLUGIN_NAME}/{session}/gap/{number}", json.dumps(vars(gap)), content, gap.last)


def pack_end(session: str, step: int, error: str = "") -> Blob:
    """Return the blob that says that a session was closed, so that nothing is missing behind it.

    Args:
        session: Its name.
        step: The last step that was handed over.
        error: The exception that ended it, with its step; empty if there was none.
    """
    content = {"v": FORMAT, "kind": "end", "first": step, "last": step}
    return Blob(
        f"{PLUGIN_NAME}/{session}/end/0",
        json.dumps({"step": step, **({"error": error} if error else {})}),
        content,
        step,
    )


@dataclass
class Unpacker:
    """Collects the blobs of one session, in any order, and gives the records back.

    Attributes:
        wanted: Metrics that the records are to have; ``None`` is all of them.
    """

    wanted: Collection[str] | None = None
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    contents: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sites: dict[int, tuple[str, ...]] = field(default_factory=dict)
    info: RunInfo | None = None
    issues: dict[int, list[Issue]] = field(default_factory=dict)
    histograms: dict[int, list[Histogram]] = field(default_factory=dict)
    notes: dict[int, list[Note]] = field(default_factory=dict)
    evidence: dict[int, list[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)

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
            self._add_json(tag, json.loads(data), content)
        else:
            self.arrays[f"{tag.name}/{tag.part}"] = data
            self.contents[f"{tag.name}/{tag.part}"] = content

    def _add_json(self, tag: Tag, data: Any, content: Mapping[str, Any]) -> None:
        if tag.name == "meta":
            self.info = info_from_json(data)
        elif tag.name == "sites":
            self.sites[int(tag.part)] = tuple(data)
        elif tag.name in {"issues", "histograms", "notes"}:
            for step, item in data:
                self._add_item(tag.name, step, item)
        elif tag.name == "evidence":
            for step, items in data:
                self.evidence[step] = [(content["tables"][item["layers"]], item) for item in items]

    def _add_item(self, kind: str, step: int, item: Any) -> None:
        if kind == "issues":
            self.issues.setdefault(step, []).append(issue_from_json(item))
        elif kind == "histograms":
            self.histograms.setdefault(step, []).append(histogram_from_json(item))
        else:
            self.notes.setdefault(step, []).append(note_from_json(item))

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
                tuple(self.notes.get(step, ())),
                tuple(
                    found
                    for table, item in self.evidence.get(step, ())
                    if table in self.sites
                    for found in evidence_from_json(step, item, self.sites[table])
                ),
            )
            for step, (seconds, phase, rank) in sorted(walls.items())
        ]

    def _wants(self, metric: str) -> bool:
        return metric not in RETIRED and (self.wanted is None or metric in self.wanted)

    def _spread(self, key: str, content: Mapping[str, Any], readings: dict[int, list[Reading]]) -> None:
        sites, stored, metric = self.sites[content["sites"]], self.arrays[key], content["metric"]
        columns = [(column, name) for column, name in enumerate(sites) if metric == "run" and self._wants(name)]
        if not columns and (metric == "run" or not self._wants(metric)):
            return
        values, present = unmask_values(stored)
        absent = stored.view(np.uint32) == ABSENT_BITS
        for row, step in enumerate(self.arrays[content["clock"]].tolist()):
            if step not in readings:
                continue
            if metric != "run":
                readings[step].append(Reading(metric, sites, values[row], present[row]))
            for column, name in columns:
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
