"""Memory of a session: read at every step, judged by the exporter's rule, and counted by groups of live tensors."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from gradflow_export.hooks.instances import instances
from gradflow_export.instruments.runtime import MEGABYTE, RuntimeInstrument, device_memory
from gradflow_export.records.step_record import Issue, Reading, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.memory import MemoryLeak


def no_memory() -> dict[str, dict[str, float | None]]:
    """Return memory that was not read."""
    return {
        "cpu_memory": {"rss": None, "vms": None, "percent": None},
        "cuda_memory": {"allocated": None, "cached": None, "max_allocated": None},
    }


@dataclass(frozen=True)
class TensorGroup:
    """Live tensors that are alike.

    Attributes:
        shape: Their shape.
        dtype: Their dtype, such as ``"float32"``.
        device: Where they lie.
        made_by: The operation that made them, ``"Parameter"``, or ``"leaf"`` for those that no graph made.
        count: How many there are, or by how many more.
        megabytes: Memory they hold, each storage counted once, or by how much more.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    made_by: str
    count: int
    megabytes: float

    def as_dict(self) -> dict[str, object]:
        """Return all fields, ready for JSON."""
        return {**vars(self), "shape": list(self.shape)}


_Key = tuple[tuple[int, ...], str, str, str]


class TensorCensus:
    """Counts live tensors by shape, dtype, device and what made them.

    Tensors that only autograd's C++ side holds are not seen; what holds them, such as a kept loss, is.
    """

    def __init__(self) -> None:
        self._first: dict[_Key, tuple[int, float]] | None = None
        self._last: dict[_Key, tuple[int, float]] = {}

    def take(self) -> None:
        """Count now; the first count is what growth is measured against."""
        self._last = _count()
        if self._first is None:
            self._first = self._last

    def growing(self, top: int = 5) -> list[TensorGroup]:
        """Return the groups that grew most between the first and the last count, greatest first."""
        before = self._first or {}
        grown = []
        for key, (count, megabytes) in self._last.items():
            past, held = before.get(key, (0, 0.0))
            if megabytes > held:
                grown.append(TensorGroup(*key, count - past, megabytes - held))
        return sorted(grown, key=lambda group: -group.megabytes)[:top]


def _count() -> dict[_Key, tuple[int, float]]:
    counts: Counter[_Key] = Counter()
    sizes: Counter[_Key] = Counter()
    seen: set[tuple[str, int]] = set()
    for item in instances(Tensor):
        # Sparse, fake and functional tensors own no storage.
        with contextlib.suppress(RuntimeError, NotImplementedError, ReferenceError):
            key = _key(item)
            storage = item.untyped_storage()
            place = str(item.device), storage.data_ptr()
            counts[key] += 1
            if place not in seen:
                seen.add(place)
                sizes[key] += storage.nbytes()
    return {key: (count, sizes[key] / MEGABYTE) for key, count in counts.items()}


def _key(tensor: Tensor) -> _Key:
    if isinstance(tensor, torch.nn.Parameter):
        made_by = "Parameter"
    else:
        made_by = "leaf" if tensor.grad_fn is None else str(tensor.grad_fn.name())
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device), made_by


class MemoryWatch:
    """Reads memory step by step.

    Args:
        scan_interval: Steps between two counts of live tensors, 0 for none.

    Attributes:
        peak: Greatest resident size so far in MB.
        leak: What the rule MEMORY_LEAK found, ``None`` while it found nothing.
    """

    def __init__(self, scan_interval: int = 0) -> None:
        self._memory, self._total = RuntimeInstrument(), psutil.virtual_memory().total / MEGABYTE
        self._judge = Judge((MemoryLeak(),))
        self._interval = scan_interval
        self.census = TensorCensus()
        self.peak = 0.0
        self.leak: Issue | None = None

    def read(self, step: int) -> dict[str, dict[str, float | None]]:
        """Read memory and judge it.

        Args:
            step: Rises from call to call.

        Returns:
            ``cpu_memory`` and ``cuda_memory`` in MB, ``percent`` of the machine's memory; ``None`` where there is no
            CUDA device in use.
        """
        if self._interval and step % self._interval == 1 % self._interval:
            self.census.take()
        here, device = self._memory.numbers(), device_memory()
        rss = here["runtime.rss"]
        self.peak = max(self.peak, rss)
        names = ("runtime.rss", "runtime.cuda_allocated")
        readings = [Reading.run(name, value) for name, value in {**here, **device}.items() if name in names]
        for issue in self._judge.check(StepRecord(step, time.time(), tuple(readings))):
            self.leak = issue
            if issue.open and self._interval:
                self.census.take()
        return {
            "cpu_memory": {"rss": rss, "vms": here["runtime.vms"], "percent": 100 * rss / self._total},
            "cuda_memory": {
                "allocated": device.get("runtime.cuda_allocated"),
                "cached": device.get("runtime.cuda_reserved"),
                "max_allocated": device.get("runtime.cuda_peak"),
            },
        }

    def verdict(self) -> dict[str, object]:
        """Return whether memory leaks, how fast, the peak, and the groups of tensors that grew most."""
        leaks = self.leak is not None and self.leak.open
        return {
            "leaks": leaks,
            "message": self.leak.message if self.leak is not None else "",
            "megabytes_per_step": self.leak.value if self.leak is not None and leaks else None,
            "peak_rss": self.peak,
            "growing": [group.as_dict() for group in self.census.growing()],
        }
