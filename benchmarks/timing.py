"""How one instrument is timed on one workload: a bare and a watched model take turns in a process of their own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from tqdm import tqdm
from workloads import Workload

from instruments import Instrument, Trainer

WARM_UP = 3
_BACKWARD = torch.autograd.backward
_PROCESS_WIDE = [
    hooks
    for module in (modules, optimizers)
    for name, hooks in vars(module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc
_PR_SET_PDEATHSIG = 1  # sys/prctl.h
Parameters, Result = ParamSpec("Parameters"), TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        workload: Name of the training program.
        instrument: What watched it.
        thread_ratio: CPU time of the training thread, with / without.
        process_ratio: CPU time of all threads and of helper processes, with / without.
        wall_ratio: Median wall time of a step, with / without.
        bare_ms: Training-thread CPU of a mean step without it.
        added_ms: Training-thread CPU added to a mean step.
        bytes_per_step: Growth of the log directory.
        memory_mb: Resident size of the process and its helpers after the timed steps, less before the instrument and
            its libraries were loaded.
        noise: thread_ratio of the two halves of the timed steps, as a half difference.
        startup_ms: Training-thread CPU added per step of the dense start; 0 for rivals.
        steps: Timed steps.
        times_ours: ``added_ms`` as a multiple of that of ``gradflow_every_step``, of instruments that read at every
            step too; ``None`` otherwise.
    """

    workload: str
    instrument: str
    thread_ratio: float
    process_ratio: float
    wall_ratio: float
    bare_ms: float
    added_ms: float
    bytes_per_step: float
    memory_mb: float
    noise: float
    startup_ms: float
    steps: int
    times_ours: float | None = None


def measure(workload: Workload, instrument: Instrument, count: int, *, quiet: bool) -> Row:
    """Time one instrument on one workload; what the bare twin takes is no time of which an exporter may use a share.

    Args:
        workload: The training program.
        instrument: What watches one of the two models.
        count: Timed steps of each.
        quiet: Whether to show no progress.
    """
    logging.getLogger("gradflow_export").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    bare, watched = Trainer(workload), Trainer(workload)
    _take_turns(bare, watched, WARM_UP)
    before = resident()
    title = f"{workload.name} {instrument.name}"
    with tempfile.TemporaryDirectory() as folder, instrument.watch(watched, Path(folder)):
        startup = 0.0
        if instrument.dense_start:
            from gradflow_export.schedule import SETTLING_STEPS

            bare.forget()
            watched.forget()
            _take_turns(bare, watched, SETTLING_STEPS, f"{title} start", small=True, quiet=quiet)
            startup = statistics.mean(watched.thread) - statistics.mean(bare.thread)
        _take_turns(bare, watched, WARM_UP)
        bare.forget()
        watched.forget()
        gc.collect()
        gc.disable()
        size, process, thread = _bytes(Path(folder)), _all_cpu(), time.thread_time()
        _take_turns(bare, watched, count, title, quiet=quiet)
        others = (_all_cpu() - process) - (time.thread_time() - thread)
        gc.enable()
        grown, memory = _bytes(Path(folder)) - size, resident() - before
    half = count // 2
    without, added = statistics.mean(bare.thread), statistics.mean(watched.thread) - statistics.mean(bare.thread)
    first, second = (
        statistics.mean(watched.thread[part]) / statistics.mean(bare.thread[part])
        for part in (slice(None, half), slice(half, None))
    )
    return Row(
        workload=workload.name,
        instrument=instrument.name,
        thread_ratio=round(1 + added / without, 4),
        process_ratio=round(1 + (added + others / count) / without, 4),
        wall_ratio=round(statistics.median(watched.wall) / statistics.median(bare.wall), 4),
        bare_ms=round(without * 1e3, 3),
        added_ms=round(added * 1e3, 3),
        bytes_per_step=round(grown / count),
        memory_mb=round(memory / 2**20, 1),
        noise=round(abs(first - second) / 2, 4),
        startup_ms=round(startup * 1e3, 3),
        steps=count,
    )


def _take_turns(
    bare: Trainer, watched: Trainer, count: int, title: str = "", *, small: bool = False, quiet: bool = True
) -> None:
    for number in tqdm(range(count), title, disable=quiet, leave=False):
        # In changing order: what one step leaves in caches and allocator, the next one finds.
        for trainer in (bare, watched) if number % 2 == 0 else (watched, bare):
            with _alone() if trainer is bare else contextlib.nullcontext():
                trainer.step(small=small)
            if trainer is bare and watched.away is not None:
                watched.away(bare.wall[-1])


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Put what watches the whole process aside: it would slow down the bare model too, and seem to cost less."""
    kept, backward = [dict(hooks) for hooks in _PROCESS_WIDE], torch.autograd.backward
    for hooks in _PROCESS_WIDE:
        hooks.clear()
    torch.autograd.backward = _BACKWARD
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for hooks, before in zip(_PROCESS_WIDE, kept, strict=True):
            hooks.update(before)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _all_cpu() -> float:
    helpers = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return time.process_time() + sum(times.user + times.system for times in helpers)


def keep_memory() -> None:
    """Let the allocator keep what is freed: a large gradient would cost page faults, not arithmetic, at every step."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(option, value)


def resident() -> int:
    """Return the resident bytes of this process and its helpers, after giving back what is free."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library: freed memory stays in the figure
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def apart(function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
    """Call a function in a new process, whose memory holds nothing of other measurements."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _end_with_parent() -> None:
    # A worker whose parent was killed would wait for work forever.
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before it could be watched
        os._exit(1)
