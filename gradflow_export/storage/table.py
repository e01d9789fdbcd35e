"""Records as a table with one row per value, for pandas, polars, spreadsheets and DuckDB; never imports torch.

The columns are ``step``, ``wall_time``, ``metric``, ``site`` (empty for the whole run) and ``value``. What is *missing*
has no row; 0.0, NaN and Inf have one, and every number is read back with the same bits. Records are taken one by one,
so that a run may be larger than memory.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import ArgumentError, MissingPackageError, StorageError, nearest
from gradflow_export.records.retired import RETIRED
from gradflow_export.records.step_record import (
    Issue,
    Reading,
    RunInfo,
    StepRecord,
    info_from_json,
    info_to_json,
    issue_from_json,
    issue_to_json,
    number_to_json,
)

COLUMNS = ("step", "wall_time", "metric", "site", "value")
GROUP_ROWS = 1 << 16
"""Rows of one row group of a Parquet file, and so about what is held in memory."""


def write_table(path: str | os.PathLike[str], records: Iterable[StepRecord], info: RunInfo | None = None) -> None:
    """Write records into a file; what stood there is replaced once all of it is written.

    Args:
        path: Ends in ``.csv``, ``.parquet`` or ``.json``.
        records: In step order.
        info: What is known of the run; in the JSON form alone.

    Raises:
        ArgumentError: The path has another ending.
        MissingPackageError: It ends in ``.parquet`` and pyarrow is not installed.
        StorageError: The file cannot be written.
    """
    target = Path(path)
    form = target.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ArgumentError(
            f"expected a path ending in .{', .'.join(FORMATS)}; got {str(path)!r}{nearest(form, FORMATS)}"
        )
    part = target.with_name(f"{target.name}.part")
    try:
        if form == "parquet":
            write_parquet(part, records)
        else:
            with part.open("w", encoding="utf-8", newline="") as stream:
                FORMATS[form](stream, records, info)
        part.replace(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"expected a place to write to, got {str(path)!r}: {error.strerror or error}; choose another."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_csv(stream: IO[str], records: Iterable[StepRecord], info: RunInfo | None = None) -> None:
    """Write a header and one line per value; NaN and Inf as ``NaN``, ``Infinity`` and ``-Infinity``."""
    del info
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        time = repr(record.wall_time)
        for metric, sites, values in _readings(record):
            # The decimal form of a float64 is read back exactly as such, and as the float32 that it came from.
            numbers = (number_to_json(value) for value in values.tolist())
            writer.writerows((record.step, time, metric, site, n) for site, n in zip(sites, numbers, strict=True))


def write_json(stream: IO[str], records: Iterable[StepRecord], info: RunInfo | None = None) -> None:
    """Write one object: ``info``, and ``records`` with ``step``, ``wall_time``, ``phase``, ``metrics`` and ``issues``.

    ``metrics`` maps metric to site to value; *missing* is ``null``, NaN and Inf are strings.
    """
    stream.write(f'{{"info": {json.dumps(None if info is None else info_to_json(info), allow_nan=False)}, "records": [')
    for index, record in enumerate(records):
        metrics = {r.metric: {site: number_to_json(v) for site, v in r.as_dict().items()} for r in record.readings}
        line = {
            "step": record.step,
            "wall_time": record.wall_time,
            "phase": record.phase,
            "metrics": metrics,
            "issues": [issue_to_json(issue) for issue in record.issues],
        }
        stream.write(("," if index else "") + "\n" + json.dumps(line, allow_nan=False))
    stream.write("\n]}\n")


def write_parquet(path: Path, records: Iterable[StepRecord]) -> None:
    """Write a Parquet file: int64, float64, two dictionaries of strings, float32.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    rows, part = LongRows(), PartWriter(path)
    try:
        for record in records:
            if not rows.fits(record):
                part.write(rows)
                rows.clear()
            rows.add(record)
        part.write(rows)
    finally:
        part.close()


class LongRows:
    """Rows of the table in packed form: none of it is an object that Python's garbage collection looks at."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._numbers: dict[tuple[str, ...], npt.NDArray[np.int32]] = {}
        self._room(GROUP_ROWS)
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def fits(self, record: StepRecord) -> bool:
        """Return whether a record's values find room; a single record always does."""
        return not self._filled or self._filled + _size(record) <= len(self._value)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        begin = self._filled
        if begin + _size(record) > len(self._value):
            self._room(_size(record))
        for reading in record.readings:
            sites = self._numbers.get(reading.sites)
            if sites is None:
                sites = self._numbers[reading.sites] = np.array([self._word(site) for site in reading.sites], np.int32)
            values = reading.values
            if not reading.present.all():
                sites, values = sites[reading.present], values[reading.present]
            part = slice(self._filled, self._filled + len(values))
            self._metric[part], self._site[part], self._value[part] = self._word(reading.metric), sites, values
            self._filled = part.stop
        self._step[begin : self._filled], self._wall[begin : self._filled] = record.step, record.wall_time

    def clear(self) -> None:
        """Forget all rows."""
        self._filled = 0
        self._words.clear()
        self._numbers.clear()
        if len(self._value) > GROUP_ROWS:
            self._room(GROUP_ROWS)

    def columns(self) -> tuple[list[str], list[npt.NDArray[Any]]]:
        """Return the words, and step, time, number of the metric, number of the site and value of each row."""
        columns = (self._step, self._wall, self._metric, self._site, self._value)
        return list(self._words), [column[: self._filled] for column in columns]

    def _word(self, word: str) -> int:
        return self._words.setdefault(word, len(self._words))

    def _room(self, rows: int) -> None:
        self._step, self._wall = np.zeros(rows, np.int64), np.zeros(rows, np.float64)
        self._metric, self._site = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._value = np.zeros(rows, np.float32)


class PartWriter:
    """Writes one Parquet file in groups of rows; it can be read once it is closed.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._arrow, parquet = _pyarrow()
        self._path, words = path, self._arrow.dictionary(self._arrow.int32(), self._arrow.string())
        kinds = (self._arrow.int64(), self._arrow.float64(), words, words, self._arrow.float32())
        self._schema = self._arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
        self._file = parquet.ParquetWriter(str(path), self._schema)

    def write(self, rows: LongRows) -> None:
        """Write some rows as one group."""
        if len(rows):
            arrow, (words, columns) = self._arrow, rows.columns()
            texts = arrow.array(words, arrow.string())
            columns = [
                arrow.DictionaryArray.from_arrays(arrow.array(column), texts) if name in {"metric", "site"} else column
                for name, column in zip(COLUMNS, columns, strict=True)
            ]
            self._file.write_table(arrow.table(columns, schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def abandon(self) -> None:
        """Remove the file."""
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_parquet(path: str | os.PathLike[str]) -> Iterator[StepRecord]:
    """Read the records of one Parquet file back, one row group in memory at a time.

    Args:
        path: What :func:`write_table` or a W&B writer wrote. Issues, histograms and missing values are not in it.

    Raises:
        MissingPackageError: pyarrow is not installed.
        StorageError: It is no such file.
    """
    arrow, parquet = _pyarrow()
    step, wall, readings = -1, 0.0, dict[str, tuple[list[str], list[npt.NDArray[Any]]]]()
    try:
        with parquet.ParquetFile(str(path)) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(COLUMNS))
                steps, walls, metrics, sites, values = (
                    column.to_numpy(zero_copy_only=False) for column in table.itercolumns()
                )
                for rows in _runs(steps, metrics):
                    if steps[rows.start] != step:
                        if readings:
                            yield _record(step, wall, readings)
                        step, wall, readings = int(steps[rows.start]), float(walls[rows.start]), {}
                    names, parts = readings.setdefault(str(metrics[rows.start]), ([], []))
                    names.extend(map(str, sites[rows]))
                    parts.append(values[rows])
    except (arrow.ArrowException, KeyError, ValueError) as error:
        raise StorageError(f"expected a Parquet file that gradflow wrote, got {str(path)!r}: {error}") from error
    if readings:
        yield _record(step, wall, readings)


class StepTables:
    """The Parquet files that a W&B writer left of a session: in its artifact, or beside its run.

    Args:
        parts: Their paths, in order.

    Attributes:
        info: What is known of the run; ``None`` where the file beside them that says so is missing.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = tuple(parts)
        folder = self._parts[0].parent
        self.info: RunInfo | None = None
        self._issues: dict[int, list[Issue]] = {}
        with contextlib.suppress(FileNotFoundError):
            self.info = info_from_json(json.loads((folder / "run.json").read_text(encoding="utf-8")))
        with contextlib.suppress(FileNotFoundError):
            for line in (folder / "issues.jsonl").read_text(encoding="utf-8").splitlines():
                found = json.loads(line)
                self._issues.setdefault(int(found.pop("at")), []).append(issue_from_json(found))

    @classmethod
    def below(cls, path: Path) -> StepTables | None:
        """Return what a folder or a single Parquet file holds; ``None`` where it is neither."""
        parts = [path] if path.suffix == ".parquet" and path.is_file() else sorted(path.glob("steps-*.parquet"))
        return cls(parts) if parts else None

    @property
    def records(self) -> StepTables:
        """The records: iterated anew each time."""
        return self

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[StepRecord]:
        for part in self._parts:
            for record in read_parquet(part):
                yield replace(record, issues=tuple(self._issues.get(record.step, ())))


def _runs(*columns: npt.NDArray[Any]) -> Iterator[slice]:
    """Yield the stretches of rows in which no column changes."""
    changes = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(columns[0])]
    return (slice(first, last) for first, last in pairwise(bounds) if last > first)


def _record(step: int, wall: float, readings: Mapping[str, tuple[list[str], list[npt.NDArray[Any]]]]) -> StepRecord:
    known = (item for item in readings.items() if item[0] not in RETIRED)
    made = (Reading.of(metric, sites, np.concatenate(parts)) for metric, (sites, parts) in known)
    return StepRecord(step, wall, tuple(made))


def _size(record: StepRecord) -> int:
    return sum(len(reading.values) for reading in record.readings)


def _readings(record: StepRecord) -> Iterator[tuple[str, list[str], npt.NDArray[np.float32]]]:
    """Yield metric, sites and values of what is not missing."""
    for reading in record.readings:
        if reading.present.all():
            yield reading.metric, list(reading.sites), reading.values
        else:
            where = np.flatnonzero(reading.present).tolist()
            yield reading.metric, [reading.sites[index] for index in where], reading.values[where]


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingPackageError(
            f"a .parquet file needs pyarrow, got {error}; install it: pip install 'gradflow-export[parquet]', or write "
            "a .csv file."
        ) from error


FORMATS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"csv": write_csv, "json": write_json, "parquet": write_parquet}
)
