"""What a log must be like to be read: whatever is not costs itself, and nothing beside it.

Checksums detect bits that fell over on a disk. They do not detect a foreign writer, one that is half compatible,
or of somebody who means harm, and a panel that a colleague's log can stop is of no use.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto import types_pb2

from tensorboard_plugin_gradflow.index import Chunk

if TYPE_CHECKING:
    from typing import TypeGuard

MOST_BYTES = 64 * 2**20
"""Of one tensor; ours have some hundred kB."""
MOST_TEXT = 16 * 2**20
"""Of one JSON text, which takes several times as much memory once it is parsed."""
MOST_NAME = 2**12
_STEPS = 2**53
_SIZES = ((types_pb2.DT_FLOAT, 4), (types_pb2.DT_DOUBLE, 8), (types_pb2.DT_INT64, 8))

Array = npt.NDArray[Any]


def guarded(provider: Any) -> Any:
    """Return a data provider of which a tensor that says it is larger than it is, or is none of ours, cannot be read.

    TensorBoard opens whatever it reads: one number that is declared as 40 000 x 40 000 fills 6 GB, and one that cannot
    be opened fails the answer about all others. So they are taken out before it sees them, where the provider is one of
    TensorBoard's two; another one is returned as it is.

    Args:
        provider: TensorBoard's; it is not changed.
    """
    for name, guard in (("_stub", _GuardedStub), ("_multiplexer", _GuardedMultiplexer)):
        inner = getattr(provider, name, None)
        if inner is not None:
            reader = copy.copy(provider)
            setattr(reader, name, guard(inner))
            return _Guarded(provider, reader)
    return provider


class _Guarded:
    """A data provider whose tensors are read through the checks."""

    def __init__(self, provider: Any, reader: Any) -> None:
        self._provider = provider
        self.read_tensors = reader.read_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)


class _GuardedStub:
    """TensorBoard's data server, seen through the checks."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    def ReadTensors(self, request: Any) -> Any:  # noqa: N802 - the data server's name
        """Return what the server answers, without what cannot be opened."""
        answer = self._stub.ReadTensors(request)
        for run in answer.runs:
            for tag in run.tags:
                if not all(map(_can_be_opened, tag.data.value)):
                    tag.data.Clear()
        return answer


class _GuardedMultiplexer:
    """TensorBoard's Python reader, seen through the checks."""

    def __init__(self, multiplexer: Any) -> None:
        self._multiplexer = multiplexer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._multiplexer, name)

    def Tensors(self, run: str, tag: str) -> list[Any]:  # noqa: N802 - the reader's name
        """Return the events of one tag that can be opened."""
        return [event for event in self._multiplexer.Tensors(run, tag) if _can_be_opened(event.tensor_proto)]


def _can_be_opened(tensor: Any) -> bool:
    """Whether a tensor holds exactly the entries that it declares, of a type and size that ours have."""
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if len(shape) > 2 or any(size < 0 for size in shape):
        return False
    entries = math.prod(shape)
    if tensor.dtype == types_pb2.DT_STRING:
        return bool(entries == len(tensor.string_val) == 1 and len(tensor.string_val[0]) <= MOST_TEXT)
    size = dict(_SIZES).get(tensor.dtype)
    if size is None or entries * size > MOST_BYTES:
        return False
    if tensor.tensor_content:
        return bool(len(tensor.tensor_content) == entries * size)
    held = {4: tensor.float_val, 8: tensor.double_val}[size] if tensor.dtype != types_pb2.DT_INT64 else tensor.int64_val
    return bool(len(held) == entries)


def is_sound(chunk: Chunk, stored: Array | str) -> bool:
    """Return whether a tensor is what its description says; a site table must still fit its values.

    Args:
        chunk: The description.
        stored: The tensor.
    """
    kind = chunk.content.get("kind")
    if kind not in {"clock", "values"}:
        return isinstance(stored, str)
    steps = kind == "clock" and chunk.parts.name == "steps"
    if isinstance(stored, str) or stored.dtype.kind != ("i" if steps else "f"):
        return False
    if len(stored.shape) != (1 if kind == "clock" else 2) or stored.shape[0] != chunk.content["rows"]:
        return False
    if not steps:
        return kind == "values" or bool(np.isfinite(stored).all())
    first, last = chunk.content["first"], chunk.content["last"]
    return bool(len(stored) and (np.diff(stored) > 0).all() and stored[0] == first and stored[-1] == last)


def fits(chunk: Chunk, data: Any) -> bool:
    """Return whether what a JSON text says is of the form that its kind has.

    Args:
        chunk: The description.
        data: What the text says.
    """
    kind = chunk.content.get("kind")
    if kind == "sites":
        return is_names(data)
    if kind == "gap":
        return isinstance(data, dict) and all(is_whole(data.get(name)) for name in ("first", "last", "steps"))
    return isinstance(data, dict if kind in {"meta", "end"} else list)


def parsed(stored: Any) -> Any:
    """Return the JSON of a text, ``None`` where it is none."""
    try:
        return json.loads(stored) if isinstance(stored, str) and len(stored) <= MOST_TEXT else None
    except (ValueError, RecursionError):
        return None


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is a step or another whole number that is counted from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _STEPS


def is_number(value: Any) -> bool:
    """Return whether a value is a number, finite or given by name."""
    if isinstance(value, str):
        return value in {"NaN", "Infinity", "-Infinity"}
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_number(value: Any) -> Any:
    """Return a number as the panel receives it: one that is not finite by its name."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def is_names(value: Any) -> bool:
    """Return whether a value is a list of names, none of which is absurdly long."""
    return isinstance(value, list) and all(isinstance(name, str) and len(name) <= MOST_NAME for name in value)


def is_issue(value: Any) -> bool:
    """Return whether a value has what every issue has, in the right types."""
    if not isinstance(value, Mapping):
        return False
    texts = all(isinstance(value.get(name), str) for name in ("issue_type", "severity", "layer", "message", "advice"))
    numbers = all(value.get(name) is None or is_number(value[name]) for name in ("value", "threshold"))
    healed = value.get("healed_step")
    steps = (value.get("step"), value.get("before", 0), 0 if healed is None else healed)
    whole = all(map(is_whole, steps))
    return texts and numbers and whole and is_names(value.get("layers"))


def is_histogram(value: Any) -> bool:
    """Return whether a value has what every histogram has, in the right types."""
    if not isinstance(value, Mapping):
        return False
    edges, counts = value.get("edges"), value.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) + 1:
        return False
    named = isinstance(value.get("metric"), str) and isinstance(value.get("site"), str)
    bins = all(is_number(edge) and not isinstance(edge, str) for edge in edges) and all(map(is_whole, counts))
    return named and bins and is_whole(value.get("nonfinite"))


def is_note(value: Any) -> bool:
    """Return whether a value has what every note has, in the right types."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(value.get(name), str) for name in ("kind", "text")) and is_whole(value.get("step"))
