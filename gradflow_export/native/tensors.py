"""Reads many torch tensors by one call of the C library, which PyTorch's own C interface tells what they are.

That interface (``aoti_torch_*``) is meant for compiled models and is kept stable from one version of torch to the next.
It spares the training thread a handful of Python calls for each tensor at each step.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

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
HEAD = 5
"""Doubles before the copied entries: three products, the sum of all norms, and that of the squares of some entries."""
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


@dataclass(frozen=True)
class Sums:
    """What signed sums are made of.

    Attributes:
        places: Of each tensor, where its entries begin among the sums, or what tells it from the others. Shape:
            ``[tensors]``.
        signs: What :func:`gradflow_export.metrics.arrays.sketch.signs` returns.
        buckets: How many sums; a power of two of at least 1024 where entries share them.
        direct: Whether each entry has a place of its own.
        wide: Whether sums are of float64, as where entries are, else of float32.
    """

    places: Sequence[int]
    signs: npt.NDArray[np.float32]
    buckets: int
    direct: bool
    wide: bool = False

    def continues(self, other: Sums | None) -> bool:
        """Whether sums of the other can be multiplied with these."""
        return other is not None and _form(self) == _form(other)


def _form(sums: Sums) -> tuple[int, bool, bool]:
    return sums.buckets, sums.direct, sums.wide


class _Sketch(ctypes.Structure):
    """``Sketch`` of ``statistics.h``."""

    _fields_: ClassVar = [
        ("signs", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("buckets", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("direct", ctypes.c_int32),
        ("wide", ctypes.c_int32),
    ]


_GROUPS = 4
"""Threads that may make signed sums at once; fixed, so that their order does not depend on how many there are."""


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
        checked: Of how many of the copied entries, from the first on, the squares are summed.
        sums: Signed sums of the judged tensors, which are multiplied with those of the reading before; ``None`` for
            none.
        threads: Greatest number of threads.
        release: Whether other Python threads may run meanwhile.
    """

    def __init__(
        self,
        interface: ctypes.Array[ctypes.c_int64],
        count: int,
        judged: int,
        copies: Sequence[tuple[int, int, int]] = (),
        checked: int = 0,
        sums: Sums | None = None,
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
        self._interface = interface
        self._sizes = tuple(map(ctypes.c_int64, (count, judged, len(copies), checked)))
        self._threads = ctypes.c_int32(threads)
        self._followed: object = None  # what another reader wrote, which is compared with
        self._rows = {rows: ctypes.c_int32(rows) for rows in (1, _ROWS)}
        self._types = {rows: ctypes.c_double * (HEAD + self.copied + rows * judged) for rows in self._rows}
        self._sums = sums
        # What is measured now, and what was before; they take turns.
        self._sketches: list[tuple[Any, ctypes.c_void_p, npt.NDArray[np.floating]]] = []
        self._before: ctypes.c_void_p | None = None  # where they are
        places = () if sums is None else sums.places
        self._places = (ctypes.c_int64 * max(len(places), 1))(*places)
        for _ in range(2):
            groups = 1 if sums is None or sums.direct or not release else _GROUPS
            dtype = np.float64 if sums is None or sums.wide else np.float32
            held = np.zeros((0 if sums is None else sums.buckets) * groups + 1, dtype=dtype)
            signs = None if sums is None else sums.signs.ctypes.data
            buckets, direct = (0, 0) if sums is None else (sums.buckets, int(sums.direct))
            wide = int(sums is not None and sums.wide)
            sketch = _Sketch(signs, held.ctypes.data, buckets, groups, 0, direct, wide)
            self._sketches.append((ctypes.byref(sketch), ctypes.c_void_p(held.ctypes.data), held))

    @property
    def compares(self) -> bool:
        """Whether the next reading has one before it."""
        return self._before is not None

    def forget(self) -> None:
        """Compare the next reading with none."""
        self._before = None

    def follow(self, other: TensorReader) -> None:
        """Compare the next reading with the last one of another reader, where both make the same sums."""
        if self._sums is not None and self._sums.continues(other._sums):
            self._before, self._followed = other._before, (other._sketches, other._followed)

    def read(self, tensors: Sequence[Any], *, everything: bool = False) -> npt.NDArray[np.float64] | None:
        """Read the tensors.

        Args:
            tensors: The tensors, of no subclass.
            everything: Whether to take L1, Linf, mean magnitude, share of zeros and number of non-finite entries too.

        Returns:
            Products of this reading's signed sums with those before (``<a, b>``, ``<a, a>``, ``<b, b>``, NaN without),
            sum of the norms, sum of squares of the checked entries, copied entries, rows; ``None`` where a tensor is
            not contiguous, real, floating, on the CPU, or is shorter than its copy. Shape:
            ``[5 + copied + rows * judged]``.
        """
        if self._call is None:
            return None
        if self._begun is not None:  # and was never asked for: the optimizer's step failed
            self.end()
        rows = _ROWS if everything else 1
        out = self._types[rows]()
        if self._call(*self._arguments(tensors, rows, out)):
            return None
        self._taken()
        return _array(out)

    def begin(self, tensors: Sequence[Any], *, everything: bool = False) -> npt.NDArray[np.float64] | None:
        """Begin to read the tensors, and go on in a thread that needs no lock of the interpreter.

        Args:
            tensors: As for :meth:`read`; what is in them must not change before :meth:`end`.
            everything: As for :meth:`read`.

        Returns:
            As :meth:`read`; the checked sum and copied entries are there, products and all else after :meth:`end`.
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
        self._begun = _Begun(begun, (out, tensors, self._sketches, self._followed, self._places))
        self._taken()
        return _array(out)

    def end(self) -> bool:
        """Wait for what was begun; False where nothing was, or it failed."""
        begun, self._begun = self._begun, None
        return begun is not None and begun.end()

    def _taken(self) -> None:
        """What was measured is what comes before the next reading."""
        if self._sums is not None:
            self._sketches.reverse()
            self._before, self._followed = self._sketches[1][1], None

    def _arguments(self, tensors: Sequence[Any], rows: int, out: ctypes.Array[ctypes.c_double]) -> tuple[Any, ...]:
        self._pack(self._addresses, 0, *map(_ADDRESS, tensors))
        count, judged, parts, checked = self._sizes
        return (
            self._interface, self._addresses, count, judged, self._rows[rows], self._threads, self._copies, parts,
            checked, self._sketches[0][0], self._places, self._before, out,
        )  # fmt: skip


def _array(out: Any) -> npt.NDArray[np.float64]:
    return np.frombuffer(out, dtype=np.float64)
