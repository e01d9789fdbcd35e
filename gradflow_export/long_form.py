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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gradflow_export.errors import ArgumentError, MissingPackageError, StorageError, nearest
from gradflow_export.records import RunInfo, StepRecord, info_to_json, issue_to_json, number_to_json

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
    arrow, parquet = _pyarrow()
    words = arrow.dictionary(arrow.int32(), arrow.string())
    kinds = (arrow.int64(), arrow.float64(), words, words, arrow.float32())
    schema = arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    with parquet.ParquetWriter(str(path), schema) as writer:
        for group in _groups(records):
            columns = [arrow.array(column, type=kind) for column, kind in zip(group, kinds, strict=True)]
            writer.write_table(arrow.Table.from_arrays(columns, schema=schema))


def _readings(record: StepRecord) -> Iterator[tuple[str, list[str], npt.NDArray[np.float32]]]:
    """Yield metric, sites and values of what is not missing."""
    for reading in record.readings:
        if reading.present.all():
            yield reading.metric, list(reading.sites), reading.values
        else:
            where = np.flatnonzero(reading.present).tolist()
            yield reading.metric, [reading.sites[index] for index in where], reading.values[where]


def _groups(records: Iterable[StepRecord]) -> Iterator[list[Any]]:
    """Yield columns of at least ``GROUP_ROWS`` rows, and what is left."""
    group: list[list[Any]] = [[], [], [], [], []]
    for record in records:
        for metric, sites, values in _readings(record):
            parts: tuple[Iterable[Any], ...] = (
                [record.step] * len(sites), [record.wall_time] * len(sites), [metric] * len(sites), sites, values,
            )  # fmt: skip
            for column, part in zip(group, parts, strict=True):
                column.extend(part)
        if len(group[0]) >= GROUP_ROWS:
            yield group
            group = [[], [], [], [], []]
    if group[0]:
        yield group


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
