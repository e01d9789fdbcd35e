"""Reads a ``.wandb`` log: the package ships no reader.

The file is a LevelDB log: blocks of 32 KiB, chunk headers of 7 bytes (CRC-32, length, type), after a file header of 7
bytes. Each logical record is a ``Record`` of wandb's protocol.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = 32768
CHUNK = struct.Struct("<IHB")
HEADER = struct.Struct("<4sHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def raw_records(data):
    """Yield the bytes of each record; a torn tail ends them."""
    if len(data) < HEADER.size:
        return
    assert HEADER.unpack_from(data) == (b":W&B", 0xBEE1, 0)
    at, parts = HEADER.size, []
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < CHUNK.size:
            at += left
            continue
        if at + CHUNK.size > len(data):
            return
        checksum, length, kind = CHUNK.unpack_from(data, at)
        if kind == 0 and length == 0:
            at += left
            continue
        body = data[at + CHUNK.size : at + CHUNK.size + length]
        if len(body) < length:
            return
        assert zlib.crc32(body, zlib.crc32(bytes([kind]))) == checksum
        at += CHUNK.size + length
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            yield b"".join(parts)


def records(path):
    """Yield the records of a log."""
    from wandb.proto import wandb_internal_pb2

    for raw in raw_records(Path(path).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        yield record


def update(into, items):
    """Put items with plain or nested keys into a dictionary."""
    for item in items:
        path = list(item.nested_key) or [item.key]
        node = into
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = json.loads(item.value_json) if item.value_json else None


@dataclass
class Log:
    """What a log holds."""

    folder: Path
    history: list = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)
    alerts: list = field(default_factory=list)
    exit_code: int | None = None

    def table(self, value):
        """Return columns and rows of a table, given what the history holds of it."""
        loaded = json.loads((self.folder / "files" / value["path"]).read_text())
        return loaded["columns"], loaded["data"]


def read_log(folder):
    """Read the one log in a run's folder."""
    (path,) = Path(folder).glob("*.wandb")
    log = Log(path.parent)
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            update(log.config, record.run.config.update)
        elif kind == "history":
            row = {}
            update(row, record.history.item)
            if record.history.HasField("step"):
                row.setdefault("_step", record.history.step.num)
            log.history.append(row)
        elif kind == "summary":
            update(log.summary, record.summary.update)
        elif kind == "config":
            update(log.config, record.config.update)
        elif kind == "metric":
            log.metrics[record.metric.name or f"glob {record.metric.glob_name}"] = record.metric
        elif kind == "alert":
            log.alerts.append(record.alert)
        elif kind == "exit":
            log.exit_code = record.exit.exit_code
    return log


def wait_for_log(folder):
    """Read a log once it is whole, which is a moment after ``finish`` returned."""
    over = time.monotonic() + 100
    while (log := read_log(folder)).exit_code is None:
        assert time.monotonic() < over, f"the log in {folder} has no exit record"
        time.sleep(0.05)
    return log
