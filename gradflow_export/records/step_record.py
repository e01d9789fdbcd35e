"""The frozen data that travels from instruments to rules, writers and the panel (floor 0: numpy only).

Four states of a value are kept apart everywhere: *missing* (nothing arrived), ``0.0``, NaN and Inf.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import ArgumentError
from gradflow_export.records.evidence import Evidence, Facts, Value, facts_of
from gradflow_export.records.issues import (
    Issue,
    IssueType,
    Severity,
    issue_from_json,
    issue_to_json,
    number_from_json,
    number_to_json,
)
from gradflow_export.records.run_info import RunInfo, info_from_json, info_to_json

__all__ = [
    "RUN_SITE",
    "Evidence",
    "Histogram",
    "Issue",
    "IssueType",
    "Reading",
    "RunInfo",
    "Severity",
    "StepRecord",
    "info_from_json",
    "info_to_json",
    "issue_from_json",
    "issue_to_json",
    "number_from_json",
    "number_to_json",
    "to_float32",
]

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

RUN_SITE = ""
"""The one site of a run-level metric; also the ``layer`` of an issue that concerns the whole model."""

RUN_SITES = (RUN_SITE,)
"""The sites of a run-level metric."""

_HERE = np.frombuffer(b"\1", dtype=np.bool_)
_name_of = attrgetter("metric")
_pack, _unpack = struct.Struct("=f").pack, struct.Struct("=f").unpack

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def to_float32(values: npt.ArrayLike) -> FloatArray:
    """Round to float32 so that finite stays finite and non-zero stays non-zero.

    Args:
        values: Numbers of any float width. Shape: any.

    Returns:
        The same shape in float32; finite values beyond the float32 range become its largest magnitude, non-zero
        values below it become its smallest, and every NaN becomes the one canonical NaN.
    """
    wide = np.asarray(values)
    if wide.dtype == np.float32:
        narrow = np.array(wide)
    else:
        wide = np.asarray(wide, dtype=np.float64)
        sizes = np.abs(wide)
        if wide.size and np.minimum.reduce(sizes, None) >= _SMALLEST and np.maximum.reduce(sizes, None) <= _LARGEST:
            return wide.astype(np.float32)
        with np.errstate(over="ignore", under="ignore"):
            narrow = np.array(wide, dtype=np.float32)
        lost = None if narrow.all() else (narrow == 0) & (wide != 0)
        if lost is not None and lost.any():
            np.copyto(narrow, np.copysign(_SMALLEST, wide), where=lost, casting="same_kind")
        if np.isfinite(narrow).all():
            return narrow
        np.copyto(narrow, np.copysign(_LARGEST, wide), where=np.isinf(narrow) & np.isfinite(wide), casting="same_kind")
    np.copyto(narrow, np.nan, where=np.isnan(narrow))
    return narrow


@dataclass(frozen=True, eq=False)
class Reading:
    """One metric read at every site in one step.

    Attributes:
        metric: A name of the metric catalogue.
        sites: Names of the layers or parameters, ``("",)`` for a run-level metric.
        values: float32. Shape: ``[len(sites)]``. What stands where ``present`` is False has no meaning and is 0.
        present: False where nothing arrived (*missing*). Shape: ``[len(sites)]``.
        number: The value of a run-level metric, ``None`` where it is missing and of any other metric.
    """

    metric: str
    sites: tuple[str, ...]
    values: FloatArray
    present: BoolArray
    number: float | None = field(init=False, repr=False)
    _stored: ClassVar[bytes] = b""

    def __post_init__(self) -> None:
        self._hold(to_float32(self.values), np.array(self.present, dtype=np.bool_))

    def _hold(self, values: FloatArray, present: BoolArray) -> None:
        """Take arrays that nobody else holds, or that cannot be written to."""
        if values.shape != (len(self.sites),) or present.shape != values.shape:
            raise ArgumentError(
                f"Reading {self.metric!r} needs one value per site; got {len(self.sites)} sites, values of shape "
                f"{values.shape} and a presence mask of shape {present.shape}. Pass 1-D arrays of equal length."
            )
        if not present.all():
            values[~present] = 0.0
        values.setflags(write=False)
        present.setflags(write=False)
        number = float(values[0]) if self.sites == RUN_SITES and present[0] else None
        self.__dict__.update(values=values, present=present, number=number)

    if not TYPE_CHECKING:  # for type checkers the field above says it all

        def __getattr__(self, name: str) -> Any:
            """Return the values of a run-level reading: most are never asked for as an array."""
            if name == "values" and self._stored:
                return np.frombuffer(self._stored, dtype=np.float32)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def owned(cls, metric: str, sites: tuple[str, ...], values: FloatArray, present: BoolArray) -> Reading:
        """Build a reading without copying anything.

        Args:
            metric: A name of the metric catalogue.
            sites: One name per value.
            values: What :func:`to_float32` returned, held by nobody else. Shape: ``[len(sites)]``.
            present: Held by nobody else, or not to be written to. Shape: ``[len(sites)]``.

        Returns:
            The frozen reading.
        """
        # Dozens in each step are made this way: what the constructor does to arrays of others costs ten times as much.
        reading: Reading = object.__new__(cls)
        reading.__dict__.update(metric=metric, sites=sites)
        reading._hold(values, present)
        return reading

    @classmethod
    def of(cls, metric: str, sites: Sequence[str], values: Sequence[float | None] | npt.NDArray[Any]) -> Reading:
        """Build a reading from numbers, with ``None`` for *missing*.

        Args:
            metric: A name of the metric catalogue.
            sites: One name per value.
            values: Floats, or ``None`` where nothing arrived. Shape: ``[len(sites)]``.

        Returns:
            The frozen reading.
        """
        if isinstance(values, np.ndarray):
            return cls(metric, tuple(sites), values, np.ones(values.shape, dtype=np.bool_))
        present = np.array([value is not None for value in values], dtype=np.bool_)
        numbers = np.array([0.0 if value is None else value for value in values], dtype=np.float64)
        return cls.owned(metric, tuple(sites), to_float32(numbers), present)

    @classmethod
    def run(cls, metric: str, value: float) -> Reading:
        """Build a run-level reading with one value."""
        # A number that fits needs none of what else rounding takes.
        fits = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
        stored = _pack(value) if fits else to_float32((value,)).tobytes()
        reading: Reading = object.__new__(cls)
        reading.__dict__.update(
            metric=metric, sites=RUN_SITES, present=_HERE, number=_unpack(stored)[0], _stored=stored
        )
        return reading

    def tobytes(self) -> bytes:
        """Return the bytes of the values."""
        return self._stored or self.values.tobytes()

    def as_dict(self) -> dict[str, float | None]:
        """Return ``{site: value}`` with ``None`` for *missing*."""
        pairs = zip(self.sites, self.values.tolist(), strict=True)
        if self.present.all():
            return dict(pairs)
        return {site: value if here else None for (site, value), here in zip(pairs, self.present, strict=True)}

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit: NaN equals NaN, 0.0 differs from missing."""
        if not isinstance(other, Reading):
            return NotImplemented
        return (
            self.metric == other.metric
            and self.sites == other.sites
            and self.tobytes() == other.tobytes()
            and self.present.tobytes() == other.present.tobytes()
        )

    def __hash__(self) -> int:
        return hash((self.metric, self.sites, self.tobytes(), self.present.tobytes()))


@dataclass(frozen=True, eq=False)
class Histogram:
    """How the entries of one tensor are spread in one step.

    Attributes:
        metric: ``"parameter.gradient"`` or ``"parameter.weight"``.
        site: The parameter's name.
        edges: Bin edges, rising, float64. Shape: ``[bins + 1]``.
        counts: Finite entries per bin, int64. Shape: ``[bins]``.
        nonfinite: How many NaN or Inf entries were left out of the bins.
    """

    metric: str
    site: str
    edges: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    nonfinite: int = 0

    def __post_init__(self) -> None:
        edges = np.array(self.edges, dtype=np.float64)
        counts = np.array(self.counts, dtype=np.int64)
        if edges.ndim != 1 or counts.shape != (max(len(edges) - 1, 0),):
            raise ArgumentError(
                f"Histogram of {self.site!r} needs one more edge than counts; got edges of shape {edges.shape} and "
                f"counts of shape {counts.shape}."
            )
        edges.setflags(write=False)
        counts.setflags(write=False)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        """Compare bit for bit."""
        if not isinstance(other, Histogram):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str, bytes, bytes, int]:
        return self.metric, self.site, self.edges.tobytes(), self.counts.tobytes(), self.nonfinite


@dataclass(frozen=True)
class Note:
    """Something that is reported beside the numbers.

    Attributes:
        kind: ``"mark"`` and ``"checkpoint"`` belong on a time axis; others do not.
        text: In words.
        step: The step it belongs to.
        data: What goes with it, ready for ``json.dumps``.
    """

    kind: str
    text: str
    step: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """All that was learned in one optimizer step.

    Attributes:
        step: Counts optimizer steps from 1; strictly increasing within a session.
        wall_time: Seconds since the epoch when the step ended.
        readings: At most one per metric; kept sorted by metric name.
        histograms: Kept sorted by metric and site.
        issues: Issues that opened or healed at this step, in the order they were found.
        phase: ``"train"`` or the user's own word.
        rank: Rank of the process in a distributed run.
        notes: What was reported during the step beside the numbers.
        evidence: What checks of silent mistakes saw in the step.
        metrics: The readings by metric, sorted by its name.
        facts: The evidence by ``kind.name`` and layer.
    """

    step: int
    wall_time: float
    readings: tuple[Reading, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    issues: tuple[Issue, ...] = ()
    phase: str = "train"
    rank: int = 0
    notes: tuple[Note, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    metrics: Mapping[str, Reading] = field(init=False, repr=False)
    facts: Mapping[str, Facts] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        readings = tuple(sorted(self.readings, key=_name_of))
        by_metric = {reading.metric: reading for reading in readings}
        if len(by_metric) != len(readings):
            names = [reading.metric for reading in readings]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ArgumentError(f"StepRecord {self.step} holds {twice} twice; merge them into one Reading per metric.")
        object.__setattr__(self, "readings", readings)
        if self.histograms != ():
            object.__setattr__(self, "histograms", tuple(sorted(self.histograms, key=lambda h: (h.metric, h.site))))
        object.__setattr__(self, "metrics", by_metric)
        object.__setattr__(self, "facts", facts_of(self.evidence))

    def get(self, metric: str) -> Reading | None:
        """Return the reading of ``metric``, or ``None`` when this step has none."""
        return self.metrics.get(metric)

    def value(self, metric: str, site: str = RUN_SITE) -> float | None:
        """Return one value, or ``None`` when nothing arrived."""
        reading = self.metrics.get(metric)
        if reading is None or site not in reading.sites:
            return None
        if reading.sites == RUN_SITES:
            return reading.number
        index = reading.sites.index(site)
        return float(reading.values[index]) if reading.present[index] else None

    def fact(self, name: str, layer: str = RUN_SITE) -> Value:
        """Return one value of the evidence, or ``None`` where there is none."""
        return self.facts.get(name, {}).get(layer)

    def __eq__(self, other: object) -> bool:
        """Compare everything bit for bit."""
        if not isinstance(other, StepRecord):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.step, self.wall_time))

    def _key(self) -> tuple[Any, ...]:
        told = self.histograms, self.issues, self.notes, self.evidence
        return self.step, self.wall_time, self.readings, *told, self.phase, self.rank


@dataclass(frozen=True)
class Gap:
    """Steps that a file lacks: recorded and not kept by its writer, or lost after the last record.

    Attributes:
        first: The first of them.
        last: The last of them; some between the two may have been kept.
        steps: How many they are.
        reason: Why, in words.
    """

    first: int
    last: int
    steps: int
    reason: str

    def __str__(self) -> str:
        """Return it in words."""
        which = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        part = "" if self.steps == self.last - self.first + 1 else f" ({self.steps} of them)"
        return f"{which}{part}: {self.reason}"

    def after(self, earlier: Gap | None) -> Gap:
        """Return one gap that covers an earlier one too, with the reason of this one."""
        if earlier is None:
            return self
        first, last = min(self.first, earlier.first), max(self.last, earlier.last)
        return Gap(first, last, self.steps + earlier.steps, self.reason)


_ALONE = frozenset(f"wiring.{which}_passes" for which in ("lonely", "gathering", "lost", "stopped"))


def passes_alone(record: StepRecord) -> bool:
    """Whether a record reports backward passes that led to no optimizer step."""
    return not _ALONE.isdisjoint(record.facts)


def note_from_json(data: Mapping[str, Any]) -> Note:
    """Return a note from a mapping of its attributes, which may hold more."""
    return Note(str(data["kind"]), str(data["text"]), int(data["step"]), dict(data.get("data", {})))


def gap_from_json(data: Mapping[str, Any]) -> Gap:
    """Return a gap from a mapping of its attributes, which may hold more."""
    return Gap(int(data["first"]), int(data["last"]), int(data["steps"]), str(data["reason"]))
