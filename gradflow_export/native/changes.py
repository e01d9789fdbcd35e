"""Reads what an optimizer changed: its weights are copied before it steps and compared with those after."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.native import function

address_of = attrgetter("_cdata")
"""Gives the address of a tensor's implementation."""


class ChangeReader:
    """Copies tensors and compares them later: the norm of what was there, and of what became different.

    Args:
        interface: What ``native.tensors.interface_of`` returned.
        counts: How many entries each has.
        room: Bytes that one entry takes at most.
    """

    def __init__(self, interface: ctypes.Array[ctypes.c_int64], counts: Sequence[int], room: int) -> None:
        self._count = len(counts)
        self._addresses = (ctypes.c_uint64 * max(len(counts), 1))()
        self._pack = struct.Struct(f"={len(counts)}Q").pack_into
        self._held = np.empty(sum(-(-count * room // 8) * 8 for count in counts) + 8, dtype=np.uint8)
        self._arguments = (
            interface,
            self._addresses,
            ctypes.c_int64(len(counts)),
            (ctypes.c_int64 * max(len(counts), 1))(*counts),
            ctypes.c_void_p(self._held.ctypes.data),
            ctypes.c_int64(self._held.nbytes),
        )
        self._type = ctypes.c_double * (2 * len(counts))
        # The lock of the interpreter is kept: the reading is short, and getting it back may take longer.
        self._call = function("gradflow_compare", release=False)

    def keep(self, tensors: Sequence[Any]) -> bool:
        """Copy; False where a tensor cannot be read."""
        return self._run(tensors, None)

    def compare(self, tensors: Sequence[Any]) -> npt.NDArray[np.float64] | None:
        """Return norms before and of the changes, ``None`` where a tensor cannot be read. Shape: ``[2, tensors]``."""
        out = self._type()
        buffer: Any = out
        return np.frombuffer(buffer).reshape(2, self._count) if self._run(tensors, out) else None

    def _run(self, tensors: Sequence[Any], out: ctypes.Array[ctypes.c_double] | None) -> bool:
        if len(tensors) != self._count:
            return False
        # Asked for each time: torch.utils.swap_tensors gives a tensor another address.
        self._pack(self._addresses, 0, *map(address_of, tensors))
        return not self._call(*self._arguments, out)
