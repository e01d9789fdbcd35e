"""Reads many torch tensors by one call of the C library, which PyTorch's own C interface tells what they are.

That interface (``aoti_torch_*``) is meant for compiled models and is kept stable from one version of torch to the next.
It spares the training thread a handful of Python calls for each tensor at each step.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from gradflow_export.native import KINDS, available, function

_FUNCTIONS = (
    "get_data_ptr",
    "get_numel",
    "get_storage_offset",
    "get_storage_size",
    "get_dtype",
    "get_device_type",
    "get_layout",
    "is_contiguous",
)
_HEAD = 4
"""Doubles before the copied entries: three products, and the sum of all norms."""
_ROWS = 6
_ADDRESS = attrgetter("_cdata")
"""Gives the address of a tensor's implementation."""


def interface_of(library: ctypes.CDLL) -> ctypes.Array[ctypes.c_int64] | None:
    """Return what the C library needs to know of PyTorch, ``None`` where this PyTorch lacks a part of it.

    Args:
        library: PyTorch's own library with the functions ``aoti_torch_*``.
    """
    try:
        found = [ctypes.cast(getattr(library, f"aoti_torch_{name}"), ctypes.c_void_p).value for name in _FUNCTIONS]
        codes = [int(getattr(library, f"aoti_torch_dtype_{kind}")()) for kind in KINDS]
    except AttributeError:
        return None
    every = [*(address or 0 for address in found), *codes]
    return (ctypes.c_int64 * len(every))(*every)


class _Begun:
    """A reading that a thread of the library is at: nothing it reads or writes may go before it has ended.

    Args:
        begun: What ``gradflow_begin`` returned.
        held: What it reads and writes.
    """

    def __init__(self, begun: int, held: object) -> None:
        self._begun, self._held = begun, held
        self._process = os.getpid()
        self._is_over = function("gradflow_is_over", release=False)
        # What gives up the lock of the interpreter to wait may wait for it afterwards, behind the worker's thread.
        self._take, self._wait = (function("gradflow_end", release=release) for release in (False, True))

    def end(self) -> bool:
        """Wait for it; False where it failed, or has been waited for."""
        begun, self._begun = self._begun, 0
        # A process that was forked meanwhile has no such thread, and would wait for ever.
        if begun == 0 or self._process != os.getpid():
            return False
        reading = ctypes.c_void_p(begun)
        return not (self._take if self._is_over(reading) else self._wait)(reading)

    def __del__(self) -> None:
        self.end()


class TensorReader:
    """Reads the same number of tensors again and again: statistics of each, and a few entries of some.

    Args:
        interface: What :func:`interface_of` returned.
        count: How many tensors are read.
        judged: Of how many of them, from the first on, statistics are made.
        copies: Entries to copy: place of the tensor, stride from its first entry, and how many.
        compared: How many of the copied entries, from the first on, are multiplied with those of the reading before.
        threads: Greatest number of threads.
        release: Whether other Python threads may run meanwhile.
    """

    def __init__(
        self,
        interface: ctypes.Array[ctypes.c_int64],
        count: int,
        judged: int,
        copies: Sequence[tuple[int, int, int]] = (),
        compared: int = 0,
        threads: int = 1,
        *,
        release: bool = False,
    ) -> None:
        self.count, self.judged = count, judged
        self.copied = sum(entries for _, _, entries in copies)
        # A short call is over before it would have the lock of the interpreter back.
        self._call = function("gradflow_read", release=release) if available() else None
        self._begin: Any = None
        self._begun: _Begun | None = None
        self._pack = struct.Struct(f"={count}Q").pack_into
        self._addresses = (ctypes.c_uint64 * max(count, 1))()
        flat = [number for copy in copies for number in copy]
        self._copies = (ctypes.c_int64 * max(len(flat), 1))(*flat)
        self._before: ctypes.Array[ctypes.c_double] | None = None
        self._interface = interface
        self._sizes = tuple(map(ctypes.c_int64, (count, judged, len(copies), compared)))
        self._threads = ctypes.c_int32(threads)
        self._rows = {rows: ctypes.c_int32(rows) for rows in (1, _ROWS)}
        self._types = {rows: ctypes.c_double * (_HEAD + self.copied + rows * judged) for rows in self._rows}

    @property
    def compares(self) -> bool:
        """Whether the next reading has one before it."""
        return self._before is not None

    def forget(self) -> None:
        """Compare the next reading with none."""
        self._before = None

    def read(self, tensors: Sequence[Any], *, everything: bool = False) -> npt.NDArray[np.float64] | None:
        """Read the tensors.

        Args:
            tensors: The tensors, of no subclass.
            everything: Whether to take L1, Linf, mean magnitude, share of zeros and number of non-finite entries too.

        Returns:
            Products of this reading with the one before (``<a, b>``, ``<a, a>``, ``<b, b>``, NaN without), sum of the
            norms, copied entries, rows; ``None`` where a tensor is not contiguous, real, floating, on the CPU, or
            is shorter than its copy. Shape: ``[4 + copied + rows * judged]``.
        """
        if self._call is None:
            return None
        self.end()  # what was begun and never asked for: the optimizer's step failed
        rows = _ROWS if everything else 1
        out = self._types[rows]()
        if self._call(*self._arguments(tensors, rows, out)):
            return None
        self._before = out
        return _array(out)

    def begin(self, tensors: Sequence[Any], *, everything: bool = False) -> npt.NDArray[np.float64] | None:
        """Begin to read the tensors, and go on in a thread that needs no lock of the interpreter.

        Args:
            tensors: As for :meth:`read`; what is in them must not change before :meth:`end`.
            everything: As for :meth:`read`.

        Returns:
            As :meth:`read`; products and copied entries are there, the sum of norms and the rows after :meth:`end`.
        """
        if self._call is None:
            return None
        self.end()  # what was begun and never asked for: the optimizer's step failed
        if self._begin is None:
            self._begin = function("gradflow_begin", release=False)
            self._begin.restype = ctypes.c_void_p
        rows = _ROWS if everything else 1
        out = self._types[rows]()
        begun = self._begin(*self._arguments(tensors, rows, out))
        if not begun:
            return None
        self._begun = _Begun(begun, (out, tensors))
        self._before = out
        return _array(out)

    def end(self) -> bool:
        """Wait for what was begun; False where nothing was, or it failed."""
        begun, self._begun = self._begun, None
        return begun is not None and begun.end()

    def _arguments(self, tensors: Sequence[Any], rows: int, out: ctypes.Array[ctypes.c_double]) -> tuple[Any, ...]:
        self._pack(self._addresses, 0, *map(_ADDRESS, tensors))
        count, judged, parts, compared = self._sizes
        return (
            self._interface, self._addresses, count, judged, self._rows[rows], self._threads,
            self._copies, parts, compared, self._before, out,
        )  # fmt: skip


def _array(out: Any) -> npt.NDArray[np.float64]:
    return np.frombuffer(out, dtype=np.float64)
