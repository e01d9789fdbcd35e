"""A training step that is timed, and what an instrument is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from workloads import Workload

After = Callable[[int, nn.Module], None]


class Trainer:
    """One model with its optimizer, stepped and timed."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(0)
        self.model = workload.model()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch, self.small = workload.batch(workload.size), workload.batch(2)
        self.before: After | None = None
        """Called with steps taken and model after backward, before the optimizer's step."""
        self.after: After | None = None
        """The same, after the optimizer's step."""
        self.away: Callable[[float], None] | None = None
        """Called with the seconds in which another trainer took a turn; what has a budget leaves them out."""
        self.steps = 0
        self.thread: list[float] = []
        self.wall: list[float] = []

    def step(self, *, small: bool = False) -> None:
        """Take one step; ``small`` ones are for winding schedules forward."""
        inputs, targets = self.small if small else self.batch
        wall, thread = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), targets)
        loss.backward()
        if self.before is not None:
            self.before(self.steps, self.model)
        self.optimizer.step()
        if self.after is not None:
            self.after(self.steps, self.model)
        self.thread.append(time.thread_time() - thread)
        self.wall.append(time.perf_counter() - wall)
        self.steps += 1

    def forget(self) -> None:
        """Drop the times so far."""
        self.thread.clear()
        self.wall.clear()


@dataclass(frozen=True)
class Instrument:
    """One way to watch a training program.

    Attributes:
        name: Word used in tables and after ``--instrument``.
        watch: Called with the trainer and a folder for logs; watches while its context is open. Imports what it needs
            itself, so that the memory of its libraries counts as its own.
        every_step: Whether it reads all that it reads at every step.
        dense_start: Whether it is an exporter, which reads more densely in its first 100 steps: these are timed apart,
            and then one whole cycle of intervals.
        requires: Package that must be installed, of the extra ``benchmarks``.
    """

    name: str
    watch: Callable[[Trainer, Path], contextlib.AbstractContextManager[object]]
    every_step: bool = False
    dense_start: bool = False
    requires: str | None = None
