"""The binary answer of ``/series``; ``http_api.md`` describes it for readers in other languages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GFS1"
_ALIGN = 8


def encode_series(
    header: Mapping[str, Any], columns: Sequence[npt.NDArray[np.float64]], blocks: Sequence[npt.NDArray[np.float32]]
) -> bytes:
    """Pack a series: magic, header length, JSON header, float64 arrays, float32 blocks, all little-endian.

    Args:
        header: JSON-ready description.
        columns: What is known per column: first step, last step, wall time, readings. Shape of each: ``[columns]``.
        blocks: One per reducer, in stored form. Shape of each: ``[columns, sites]``; written site by site.

    Returns:
        The bytes. The header is padded with spaces so that the arrays lie on multiples of 8.
    """
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % _ALIGN)
    parts = [MAGIC, len(text).to_bytes(4, "little"), text]
    parts += [np.ascontiguousarray(column, dtype="<f8").tobytes() for column in columns]
    parts += [np.ascontiguousarray(block.T, dtype="<f4").tobytes() for block in blocks]
    return b"".join(parts)
