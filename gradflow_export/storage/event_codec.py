"""The bytes of an event file: checksummed frames that hold Event messages (floor 0: numpy, protos, no torch).

A frame is ``length u64 | masked crc32c(length) u32 | payload | masked crc32c(payload) u32``, little endian: the
TFRecord form that every TensorBoard reads. Damage in one frame costs that frame only: after a bad length the reader
looks for the next place whose eight bytes match the checksum behind them.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

from gradflow_export.storage.event_chunks import PLUGIN_NAME, Blob

_HEADER = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
# A length below 4 GiB that is not zero; a run of zeros, which a power cut leaves behind, offers no candidate.
_CANDIDATE = re.compile(rb"(?=(?!\0{4})[\s\S]{4}\0{4}[\s\S]{4})")
_WINDOW = 1 << 20

MOST_PAYLOAD = 1 << 28
"""A frame that says it is longer is damaged: TensorBoard's data server could not send it either."""


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of ``data`` that TFRecord frames carry."""
    crc = int(google_crc32c.value(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as one frame."""
    length = _LENGTH.pack(len(payload))
    return b"".join((length, _CHECK.pack(masked_crc(length)), payload, _CHECK.pack(masked_crc(payload))))


class FrameReader:
    """Iterates over the intact frames of a stream as (offset, payload), one payload in memory at a time.

    Args:
        stream: What is read.
        start: Where to begin: 0, or ``resume`` of an earlier reader of the same file.

    Attributes:
        skipped: Damaged or truncated frames seen so far.
        resume: Where what is not read yet begins: behind the last frame, or at one that may be still on its way.
    """

    def __init__(self, stream: BinaryIO, start: int = 0) -> None:
        self._stream = stream
        self.skipped = 0
        self.resume = start

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        size = self._stream.seek(0, io.SEEK_END)
        offset = self.resume
        while offset < size:
            length = self._length_at(offset)
            end = 0 if length is None else offset + _HEADER.size + length + _CHECK.size
            if length is None or length > MOST_PAYLOAD or end > size:
                self.skipped += 1
                following = self._next_header(offset + 1, size)
                if following is None:
                    return
                offset = self.resume = following
                continue
            body = self._stream.read(length + _CHECK.size)
            payload = body[:length]
            self.resume = end
            if len(body) == length + _CHECK.size and _CHECK.unpack(body[length:])[0] == masked_crc(payload):
                yield offset, payload
            else:
                self.skipped += 1
            offset = end

    def payload_at(self, offset: int) -> bytes:
        """Return the payload of the frame that was yielded with ``offset``; empty when it is no longer there."""
        length = self._length_at(offset)
        return b"" if length is None else self._stream.read(length)

    def _length_at(self, offset: int) -> int | None:
        self._stream.seek(offset)
        head = self._stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return None
        length, check = _HEADER.unpack(head)
        return int(length) if masked_crc(head[: _LENGTH.size]) == check else None

    def _next_header(self, start: int, size: int) -> int | None:
        """Return where the next frame begins that is there as a whole."""
        while True:
            self._stream.seek(start)
            window = self._stream.read(_WINDOW + _HEADER.size)
            for match in _CANDIDATE.finditer(window):
                head = window[match.start() : match.start() + _HEADER.size]
                length, check = _HEADER.unpack(head)
                end = start + match.start() + _HEADER.size + length + _CHECK.size
                if end <= size and length <= MOST_PAYLOAD and masked_crc(head[: _LENGTH.size]) == check:
                    return start + match.start()
            if len(window) < _WINDOW + _HEADER.size:
                return None
            start += _WINDOW


def version_event(wall_time: float) -> bytes:
    """Return the serialised Event that opens every event file."""
    return bytes(event_pb2.Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())


def tensor_proto(data: npt.NDArray[Any] | str) -> Any:
    """Return a TensorProto that keeps dtype and rank, including rank 0.

    Args:
        data: A float32, float64 or int64 array of any shape, or a string.
    """
    if isinstance(data, str):
        return tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[data.encode()], tensor_shape=_shape(()))
    return tensor_pb2.TensorProto(dtype=_type_of(data), tensor_shape=_shape(data.shape), tensor_content=data.tobytes())


def blob_event(blob: Blob, wall_time: float) -> bytes:
    """Return one blob as a serialised Event of its own.

    Args:
        blob: What to store; its tag must not have been used in this log directory.
        wall_time: Seconds since the epoch.
    """
    content = json.dumps(dict(blob.content), separators=(",", ":")).encode()
    metadata = summary_metadata(PLUGIN_NAME, content, summary_pb2.DATA_CLASS_TENSOR)
    value = summary_pb2.Summary.Value(tag=blob.tag, tensor=tensor_proto(blob.data), metadata=metadata)
    event = event_pb2.Event(wall_time=wall_time, step=blob.step, summary=summary_pb2.Summary(value=[value]))
    return bytes(event.SerializeToString())


def summary_metadata(plugin: str, content: bytes, data_class: int) -> Any:
    """Return the metadata that says which plugin a summary value belongs to."""
    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    return summary_pb2.SummaryMetadata(plugin_data=data, data_class=data_class)


def event_blobs(payload: bytes) -> list[Blob]:
    """Return the blobs of ours in a serialised Event; what other plugins wrote is left out.

    Raises:
        ValueError: The payload is no Event, or a value with our name cannot be opened.
    """
    try:
        event = event_pb2.Event.FromString(payload)
    except Exception as error:  # each protobuf runtime has a DecodeError of its own
        raise ValueError("not an Event message") from error
    return [
        Blob(value.tag, _open_tensor(value.tensor), _open_content(value.metadata.plugin_data.content), event.step)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == PLUGIN_NAME
    ]


def _type_of(data: npt.NDArray[Any]) -> int:
    for code, dtype in _dtypes().items():
        if data.dtype == dtype:
            return code
    raise ValueError(f"expected a float32, float64 or int64 array, got {data.dtype}; convert it first")


def _dtypes() -> Mapping[int, npt.DTypeLike]:
    return {
        types_pb2.DT_FLOAT: np.dtype("<f4"),
        types_pb2.DT_DOUBLE: np.dtype("<f8"),
        types_pb2.DT_INT64: np.dtype("<i8"),
    }


def _shape(shape: tuple[int, ...]) -> Any:
    return tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape])


def _open_tensor(tensor: Any) -> npt.NDArray[Any] | str:
    if tensor.dtype == types_pb2.DT_STRING:
        if len(tensor.string_val) != 1:
            raise ValueError(f"expected one string, got {len(tensor.string_val)}")
        return str(tensor.string_val[0].decode())
    dtype = _dtypes().get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"tensor type {tensor.dtype} is none of ours")
    return np.frombuffer(tensor.tensor_content, dtype).reshape([dim.size for dim in tensor.tensor_shape.dim])


def _open_content(content: bytes) -> Mapping[str, Any]:
    opened = json.loads(content)
    if not isinstance(opened, dict):
        raise ValueError(f"expected a JSON object as plugin content, got {type(opened).__name__}")  # noqa: TRY004 - one kind for damage
    return opened
