"""Windows of ``torch.profiler`` over some steps of training, written where TensorBoard looks and summed up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import profiler

_log = logging.getLogger("gradflow_export")

TOP = 10
"""Operations that a summary lists."""


class ProfilerWindow:
    """Profiles a few steps; ask it to :meth:`step` after each.

    The trace is written as ``*.pt.trace.json`` into the log folder, for TensorBoard's profiler page, Perfetto or
    ``chrome://tracing``.

    Args:
        folder: TensorBoard's log folder.
        steps: Steps to profile.
        memory: Whether to follow allocations.
        shapes: Whether the trace tells the shapes of what operations were given.
        on_end: Called once with the summary when the window is over.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 3,
        memory: bool = False,
        shapes: bool = False,
        on_end: Callable[[dict[str, Any]], None] = lambda _summary: None,
    ) -> None:
        self._folder, self._left, self._memory, self._on_end = folder, steps, memory, on_end
        self.summary: dict[str, Any] | None = None
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profile = profiler.profile(activities=activities, profile_memory=memory, record_shapes=shapes)
        self._running = False

    @property
    def running(self) -> bool:
        """Whether operations are being recorded."""
        return self._running

    def start(self) -> None:
        """Begin to record; logged and left out where another profiler is at work."""
        try:
            self._profile.start()
            self._running = True
        except RuntimeError as error:
            _log.warning("gradflow: no profile is taken: %s", error)

    def step(self) -> None:
        """End one step; after the last the window is over."""
        if self._running:
            self._left -= 1
            if self._left > 0:
                self._profile.step()
            else:
                self.stop()

    def stop(self) -> None:
        """End the window now; ending it again does nothing."""
        if not self._running:
            return
        self._running = False
        self._profile.stop()
        trace = ""
        with contextlib.suppress(OSError, RuntimeError):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.tensorboard_trace_handler(str(self._folder))(self._profile)
            trace = str(max(self._folder.glob("*.pt.trace.json*"), key=lambda path: path.stat().st_mtime, default=""))
        self.summary = {**summary_of(self._profile, memory=self._memory), "trace": trace}
        self._on_end(self.summary)


def summary_of(profile: profiler.profile, *, memory: bool) -> dict[str, Any]:
    """Return the operations that took most, each with its number of calls.

    Args:
        profile: One that has ended.
        memory: Whether it followed allocations.

    Returns:
        ``by_time``: name, calls and milliseconds in itself, on the CPU and on the device. ``by_memory``: name, calls
        and MB that it allocated in itself.
    """
    averages = list(profile.key_averages())
    by_time = sorted(averages, key=lambda e: -(e.self_cpu_time_total + e.self_device_time_total))[:TOP]
    out: dict[str, Any] = {
        "by_time": [
            {
                "name": e.key, "calls": e.count, "cpu_ms": e.self_cpu_time_total / 1e3,
                "device_ms": e.self_device_time_total / 1e3,
            }
            for e in by_time
        ],
        "by_memory": [],
    }  # fmt: skip
    if memory:
        by_memory = sorted(averages, key=lambda e: -(e.self_cpu_memory_usage + e.self_device_memory_usage))[:TOP]
        out["by_memory"] = [
            {
                "name": e.key,
                "calls": e.count,
                "megabytes": (e.self_cpu_memory_usage + e.self_device_memory_usage) / 2**20,
            }
            for e in by_memory
            if e.self_cpu_memory_usage + e.self_device_memory_usage > 0
        ]
    return out
