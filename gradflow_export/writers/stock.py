"""What of a record goes to TensorBoard's own Scalars and Histograms pages, as serialised Events."""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2

from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import Histogram, StepRecord
from gradflow_export.storage.event_codec import summary_metadata, tensor_proto

MOST_SCALARS = 20
"""More than a few tags make the Scalars page slow and unreadable; the panel has the rest."""

_HEADLINES = tuple(spec.name for spec in CATALOG.values() if spec.headline and spec.kind == "run")[:MOST_SCALARS]
_TEMPLATES = 16
_BLANK = b"\xfe" * 4
"""Holds the place of a float32: neither text nor tags nor lengths have these bytes in a row."""

_GROUPS = MappingProxyType(
    {
        "loss": "loss", "confidence": "loss", "alignment": "loss", "gradient": "gradient", "gain": "gradient",
        "update": "update", "learning_rate": "update", "parameter.gradient": "gradient", "parameter.weight": "update",
    }
)  # fmt: skip


class StockPages:
    """Builds the Events of one session; readers need metadata in the first Event of a tag only, so few have it."""

    def __init__(self) -> None:
        self._described: set[str] = set()
        self._templates: dict[tuple[str, ...], list[bytes]] = {}

    def describe_again(self) -> None:
        """Give the next Event of each tag its metadata once more, for it may be the first of a file."""
        self._described.clear()

    def events(self, record: StepRecord) -> list[bytes]:
        """Return the record's headline scalars as one Event, and its histograms, if any, as another.

        Args:
            record: NaN and Inf are written as they are; a missing value is left out.

        Returns:
            No, one or two serialised Events.
        """
        out = []
        names, contents = [], []
        for name in _HEADLINES:
            reading = record.get(name)
            if reading is not None and len(reading.sites) == 1 and reading.present[0]:
                names.append(name)
                contents.append(reading.tobytes())
        if names:
            out.append(self._scalars(tuple(names), contents, record))
        if record.histograms:
            values = [self._histogram(histogram) for histogram in record.histograms]
            event = event_pb2.Event(step=record.step, wall_time=record.wall_time)
            event.summary.value.extend(values)
            out.append(bytes(event.SerializeToString()))
        return out

    def _scalars(self, names: tuple[str, ...], contents: list[bytes], record: StepRecord) -> bytes:
        new = not self._described.issuperset(names)
        pieces = _pieces(names, describe=True) if new else self._kept(names)
        self._described.update(names)
        # The serialised forms of two messages, one after the other, are that of both merged.
        out = [event_pb2.Event(step=record.step, wall_time=record.wall_time).SerializeToString()]
        for piece, content in zip(pieces, (*contents, b""), strict=True):
            out += piece, content
        return b"".join(out)

    def _kept(self, names: tuple[str, ...]) -> list[bytes]:
        """Filling in a kept Event is many times cheaper than building one.

        It is kept as bytes: what is assigned to a field of a kept message stays in memory until the message goes.
        """
        if names not in self._templates:
            if len(self._templates) >= _TEMPLATES:
                self._templates.clear()
            self._templates[names] = _pieces(names, describe=False)
        return self._templates[names]

    def _histogram(self, histogram: Histogram) -> Any:
        tag = f"{tag_of(histogram.metric)}/{histogram.site}"
        edges, counts = histogram.edges, histogram.counts
        bins = np.stack([edges[:-1], edges[1:], counts.astype(np.float64)], axis=1)  # Shape: [bins, 3]
        value = summary_pb2.Summary.Value(tag=tag, tensor=tensor_proto(bins))
        if tag not in self._described:
            self._described.add(tag)
            value.metadata.CopyFrom(summary_metadata("histograms", b"", summary_pb2.DATA_CLASS_TENSOR))
        return value


def tag_of(metric: str) -> str:
    """Return the tag under which a metric is shown: TensorBoard's pages make a group of what has the same first part.

    Args:
        metric: A name of the metric catalogue.
    """
    topic = metric.partition(".")[0]
    group = _GROUPS.get(metric) or _GROUPS.get(topic) or ("runtime" if topic in {"runtime", "overhead"} else topic)
    return f"gradflow_{group}/{metric}"


def _pieces(names: tuple[str, ...], *, describe: bool) -> list[bytes]:
    """Return the serialised scalars of one Event, cut where their values belong."""
    event = event_pb2.Event()
    for name in names:
        # The older form of a scalar: TensorBoard's pages read both, its EventAccumulator, tbparse and others this one.
        value = event.summary.value.add(tag=tag_of(name), simple_value=struct.unpack("<f", _BLANK)[0])
        if describe:
            value.metadata.CopyFrom(summary_metadata("scalars", b"", summary_pb2.DATA_CLASS_SCALAR))
            value.metadata.summary_description = f"{CATALOG[name].title} [{CATALOG[name].unit}]"
    return bytes(event.SerializeToString()).split(_BLANK)
