"""Memory of the process, the machine and the accelerator."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from gradflow_export.instruments.base import Instrument
from gradflow_export.records.catalog import MetricSpec, spec

if TYPE_CHECKING:
    import psutil

MEGABYTE = 2**20
_STATM = Path("/proc/self/statm")
_PAGE = mmap.PAGESIZE
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class RuntimeInstrument(Instrument):
    """Reads memory figures in MB (2^20 bytes), at every recorded step."""

    instrument: ClassVar[str] = "memory"
    interval: ClassVar[int] = 1

    def __init__(self) -> None:
        self._limit = memory_limit() / MEGABYTE
        self._statm = _STATM.open("rb", buffering=0) if _STATM.is_file() else None
        self._pid = os.getpid()
        self._process: psutil.Process | None = None
        if self._statm is not None:
            weakref.finalize(self, self._statm.close)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack closes what is open."""
        stack = super().attach()
        stack.callback(self.close)
        return stack

    def close(self) -> None:
        """Close what is open; memory can be asked for all the same."""
        statm, self._statm = self._statm, None
        if statm is not None:
            statm.close()

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = ("rss", "vms", "memory_limit", "cuda_allocated", "cuda_reserved", "cuda_peak", "cuda_limit")
        return tuple(spec(f"runtime.{name}") for name in names)

    def numbers(self) -> dict[str, float]:
        """Return the memory of the process, at the moment of asking: some microseconds, on the training thread."""
        rss, vms = self._memory()
        return {
            "runtime.rss": rss / MEGABYTE,
            "runtime.vms": vms / MEGABYTE,
            "runtime.memory_limit": self._limit,
        }

    def _memory(self) -> tuple[int, int]:
        """Return resident and virtual size in bytes."""
        if self._pid != os.getpid():  # what was opened before a fork belongs to the parent
            self._pid, self._process = os.getpid(), None
            self._statm = None if self._statm is None else _STATM.open("rb", buffering=0)
        if self._statm is None:
            self._process = self._process or _this_process()
            memory = self._process.memory_info()
            return memory.rss, memory.vms
        # What psutil does, without opening and closing the file at every step.
        # One call of the system: after each the thread waits for the GIL.
        size, resident, *_ = os.pread(self._statm.fileno(), 128, 0).split()
        return int(resident) * _PAGE, int(size) * _PAGE


def device_memory() -> dict[str, float]:
    """Return the memory of the current CUDA device in MB, empty without one; for another thread than training's."""
    if not (torch.cuda.is_initialized() and torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        return {}
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "runtime.cuda_allocated": torch.cuda.memory_allocated() / MEGABYTE,
        "runtime.cuda_reserved": torch.cuda.memory_reserved() / MEGABYTE,
        "runtime.cuda_limit": whole / MEGABYTE,
        "runtime.cuda_peak": torch.cuda.max_memory_allocated() / MEGABYTE,
    }


def memory_limit() -> int:
    """Return the bytes this process may use: the machine's, or the container's when that is less."""
    total = _machine()
    try:
        text = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def _this_process() -> psutil.Process:
    import psutil  # noqa: PLC0415 - most of a megabyte, and on Linux the kernel's own file says the same

    return psutil.Process()


def _machine() -> int:
    """Return the bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        import psutil  # noqa: PLC0415 - as above

        return int(psutil.virtual_memory().total)
