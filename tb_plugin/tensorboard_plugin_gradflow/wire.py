"""The binary answer of ``/series``; ``http_api.md`` describes it for readers in other languages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GFS1"
_ALIGN = 8

Part = tuple[slice, npt.NDArray[np.float32]]


def encode_series(
    header: Mapping[str, Any],
    columns: Sequence[npt.NDArray[np.float64]],
    blocks: Sequence[Iterable[Part]],
    rows: int,
) -> bytearray:
    """Pack a series: magic, header length, JSON header, float64 arrays, float32 blocks, all little-endian.

    Args:
        header: JSON-ready description.
        columns: What is known per column: first step, last step, wall time, readings. Shape of each: ``[columns]``.
        blocks: One per reducer: which columns and their values in stored form, of shape ``[columns, rows]``, part after
            part; written row by row. In parts, so that an answer does not lie in memory several times.
        rows: How many rows there are.

    Returns:
        The bytes. The header is padded with spaces so that the arrays lie on multiples of 8.
    """
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % _ALIGN)
    head = [MAGIC, len(text).to_bytes(4, "little"), text]
    head += [np.ascontiguousarray(column, dtype="<f8").tobytes() for column in columns]
    # Filled in place: joined from arrays, a large answer would lie in memory twice.
    out = bytearray(b"".join(head))
    begin, shape = len(out), (len(blocks), rows, len(columns[0]))
    out += bytes(4 * math.prod(shape))
    cells = np.frombuffer(out, "<f4", offset=begin).reshape(shape)
    for number, parts in enumerate(blocks):
        for where, values in parts:
            cells[number, :, where] = values.T
    return out
