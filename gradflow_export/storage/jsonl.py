"""How records lie in a JSON-lines file (floor 0: numpy only).

Each line is one object with a ``kind``::

    {"kind": "run", "v": 1, "session": ..., ...}            the RunInfo; begins a session
    {"kind": "sites", "session": ..., "id": 0, "sites": ["fc1", "fc2"]}    a table of site names, before it is used
    {"kind": "step", "session": ..., "step": 7, "wall_time": ..., "phase": "train", "rank": 0,
     "run": {"loss": 0.25}, "sites": {"block.gain": [0, [1.5, null]]}, "issues": [...], "histograms": [...],
     "notes": [...], "evidence": [{"kind": "input", "layers": 1, "values": [{"rms": 1.2, "mean": 0.3}]}]}
    {"kind": "gap", "session": ..., "first": 8, "last": 9, "steps": 2, "reason": "..."}    steps that are missing

Each line names its session, so that several may write to one file at the same time; older versions did not.
``null`` is *missing*; NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so that
every line is strict JSON. Numbers are written with all the digits that float32 needs to come back bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import StorageError
from gradflow_export.records.evidence import evidence_from_json, evidence_to_json
from gradflow_export.records.retired import RETIRED
from gradflow_export.records.step_record import (
    RUN_SITE,
    Gap,
    Reading,
    RunInfo,
    StepRecord,
    gap_from_json,
    info_from_json,
    info_to_json,
    issue_from_json,
    issue_to_json,
    note_from_json,
    number_to_json,
)
from gradflow_export.storage.event_chunks import FORMAT, histogram_from_json, histogram_to_json
from gradflow_export.storage.event_packing import SiteTables


class LineEncoder:
    """Turns records of one session into lines; remembers which site tables were written.

    Args:
        session: The session's name.
    """

    def __init__(self, session: str = "") -> None:
        self._session = {"session": session} if session else {}
        self._tables = SiteTables()

    def run(self, info: RunInfo) -> bytes:
        """Return the lines that begin a session: its description, and the site tables that are known."""
        tables = [self._table_line(number, sites) for sites, number in self._tables.known()]
        return b"".join([_line({"kind": "run", "v": FORMAT, **info_to_json(info)}), *tables])

    def gap(self, gap: Gap) -> bytes:
        """Return the line that tells which steps are missing."""
        return _line({"kind": "gap", **self._session, **vars(gap)})

    def end(self, step: int, error: str = "") -> bytes:
        """Return the line that says that the session was closed after this step, and which exception ended it."""
        return _line({"kind": "end", **self._session, "step": step, **({"error": error} if error else {})})

    def record(self, record: StepRecord) -> bytes:
        """Return the line of one record, after those of site tables that it is the first to use."""
        tables: list[bytes] = []
        body: dict[str, Any] = {
            "kind": "step",
            **self._session,
            "step": record.step,
            "wall_time": record.wall_time,
            "phase": record.phase,
            "rank": record.rank,
            "run": {},
            "sites": {},
        }
        for reading in record.readings:
            numbers = _numbers(reading)
            if reading.sites == (RUN_SITE,):
                body["run"][reading.metric] = numbers[0]
            else:
                body["sites"][reading.metric] = [self._table(reading.sites, tables), numbers]
        if record.issues:
            body["issues"] = [issue_to_json(issue) for issue in record.issues]
        if record.histograms:
            body["histograms"] = [histogram_to_json(histogram) for histogram in record.histograms]
        if record.notes:
            body["notes"] = [vars(note) for note in record.notes]
        if record.evidence:
            body["evidence"] = evidence_to_json(record.evidence, lambda layers: self._table(layers, tables))
        return b"".join([*tables, _line(body)])

    def _table(self, sites: tuple[str, ...], out: list[bytes]) -> int:
        number, new = self._tables.number(sites)
        if new:
            out.append(self._table_line(number, sites))
        return number

    def _table_line(self, number: int, sites: tuple[str, ...]) -> bytes:
        return _line({"kind": "sites", **self._session, "id": number, "sites": list(sites)})


@dataclass(frozen=True)
class End:
    """The end of a session that was closed.

    Attributes:
        step: The last step that was handed over.
        error: The exception that ended it, with its step; empty if there was none.
    """

    step: int
    error: str = ""


class LineDecoder:
    """Turns lines back into what they hold, in file order.

    Attributes:
        session: Name of the session that the last line belongs to; of the latest that began where the line has none.
        sites: Site tables of each session by number.
    """

    def __init__(self, sites: dict[str, dict[int, tuple[str, ...]]] | None = None, session: str = "") -> None:
        self.sites = {} if sites is None else sites
        self.session = self._latest = session

    def decode(self, line: bytes) -> RunInfo | StepRecord | Gap | End | None:
        """Return what a line holds.

        Args:
            line: One line of the file, with or without its newline.

        Returns:
            A RunInfo where a session begins, a record, a gap, the end of a session, or ``None`` for a site table or a
            line of somebody else.

        Raises:
            ValueError: The line is damaged.
            StorageError: It was written by a newer version of this package.
        """
        data = json.loads(line)
        kind = data.get("kind") if isinstance(data, dict) else None
        try:
            if kind == "run" and "session" in data:
                return self._begin(data)
            if kind in {"sites", "step", "gap", "end"}:
                self.session = str(data.get("session", self._latest))
            if kind == "sites":
                self.sites.setdefault(self.session, {})[int(data["id"])] = tuple(data["sites"])
            elif kind == "step":
                return self._record(data, self.sites.get(self.session, {}))
            elif kind == "gap":
                return gap_from_json(data)
            elif kind == "end":
                return End(int(data["step"]), str(data.get("error", "")))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a {kind} line lacks a part: {error!r}") from error
        return None

    def _begin(self, data: dict[str, Any]) -> RunInfo:
        if int(data["v"]) > FORMAT:
            raise StorageError(
                f"session {data['session']} has format {data['v']}, this version reads up to {FORMAT}; "
                "update gradflow-export."
            )
        info = info_from_json({key: value for key, value in data.items() if key not in {"kind", "v"}})
        self.session = self._latest = info.session
        return info

    @staticmethod
    def _record(data: dict[str, Any], tables: Mapping[int, tuple[str, ...]]) -> StepRecord:
        run = ((metric, (RUN_SITE,), [number]) for metric, number in data["run"].items())
        wide = ((metric, tables[table], numbers) for metric, (table, numbers) in data["sites"].items())
        readings = [_reading(*each) for each in (*run, *wide) if each[0] not in RETIRED]
        step = int(data["step"])
        return StepRecord(
            step,
            float(data["wall_time"]),
            tuple(readings),
            tuple(histogram_from_json(item) for item in data.get("histograms", ())),
            tuple(issue_from_json(item) for item in data.get("issues", ())),
            data["phase"],
            data["rank"],
            tuple(note_from_json(item) for item in data.get("notes", ())),
            tuple(
                e for item in data.get("evidence", ()) for e in evidence_from_json(step, item, tables[item["layers"]])
            ),
        )


def _line(data: Any) -> bytes:
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a NaN somewhere in settings, issues or edges: rare, so looked for only now
        text = json.dumps(_strict(data), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def _strict(data: Any) -> Any:
    if isinstance(data, float):
        return number_to_json(data)
    if isinstance(data, Mapping):
        return {key: _strict(value) for key, value in data.items()}
    return [_strict(item) for item in data] if isinstance(data, (list, tuple)) else data


def _numbers(reading: Reading) -> list[Any]:
    numbers: list[Any] = reading.values.tolist()
    if reading.present.all() and np.isfinite(reading.values).all():
        return numbers
    return [
        (number if math.isfinite(number) else number_to_json(number)) if here else None
        for number, here in zip(numbers, reading.present.tolist(), strict=True)
    ]


def _reading(metric: str, sites: tuple[str, ...], numbers: list[Any]) -> Reading:
    present: npt.NDArray[np.bool_] = np.array([number is not None for number in numbers], dtype=np.bool_)
    values = np.array([0.0 if number is None else float(number) for number in numbers], dtype=np.float64)
    return Reading(metric, sites, values.astype(np.float32), present)
