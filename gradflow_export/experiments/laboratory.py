"""Starts runs of a program, several at a time, and collects what came of them."""

from __future__ import annotations

import functools
import math
import os
import pickle
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from gradflow_export.errors import ArgumentError
from gradflow_export.experiments import survey as surveys
from gradflow_export.experiments.forked import ForkedProcesses
from gradflow_export.experiments.fresh import FreshProcesses
from gradflow_export.experiments.measure import Measure
from gradflow_export.experiments.plan import Apart, Counted, Interrupts, Plan, StoppedError
from gradflow_export.experiments.runs import STEPS, Request, Result
from gradflow_export.experiments.sandbox import NONE, Sandbox, choose, entered
from gradflow_export.experiments.survey import Survey, Training
from gradflow_export.experiments.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

SURVEYED = 3.0
"""Seconds of processor time for which a script is followed to see whether it trains another model."""


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Laboratory:
    """Runs of one program. Close it: every process that it started ends.

    Args:
        target: The program.
        jobs: Runs at a time; as many as there are processors, at most four, when ``None``.
        network: Whether the program may reach the network.
        in_place: Whether it may write where it likes, without a sandbox.
        early: Whether each run begins with the program and not at its first step.
        fresh: Whether each run is a process of its own that is not forked from this one, as where there is no fork.
        measure: The user's yardstick.

    Raises:
        ArgumentError: The folder cannot be protected.
    """

    def __init__(
        self,
        target: Target,
        *,
        jobs: int | None = None,
        network: bool = False,
        in_place: bool = False,
        early: bool = False,
        fresh: bool = False,
        measure: Measure | None = None,
    ) -> None:
        self.fresh = fresh | (not hasattr(os, "fork") or sys.platform == "darwin")
        self.cpu = 0.0
        self.runs = 0
        self._interrupts = Interrupts()
        with self._interrupts.held():
            self._scratch = Path(tempfile.mkdtemp(prefix="gradflow-doctor-"))
            self._processes: FreshProcesses | ForkedProcesses = (
                FreshProcesses(self._scratch, self._interrupts)
                if self.fresh
                else ForkedProcesses(self._interrupts, early=early)
            )
        try:
            if not self.fresh:
                surveys.warm()
            self.plan = self._planned(target, jobs or min(processors(), 4), measure, network=network, in_place=in_place)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove what they wrote."""
        self._interrupts.ended()
        self._processes.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._interrupts.close()

    @property
    def target(self) -> Target:
        """The program."""
        return self.plan.target

    @property
    def measure(self) -> Measure | None:
        """The user's yardstick."""
        return self.plan.measure

    @property
    def whole(self) -> bool:
        """Whether each run begins with the program."""
        return self._processes.early

    @property
    def reach(self) -> str:
        """What becomes of the files that the program writes, in one sentence."""
        if self.plan.sandbox.kind == NONE:
            return "what the script writes is kept, and each start writes it again."
        safe = ", ".join(map(str, self.plan.sandbox.folders))
        return (
            f"what the script writes below {safe} is thrown away; elsewhere it is written, at each of several starts."
        )

    def look(self, *, steps: int = STEPS, seconds: float = SURVEYED, limit: float = 600.0) -> Survey:
        """Run the program once and count.

        Args:
            steps: Steps that each run will train.
            seconds: Of processor time, after which it is enough.
            limit: Seconds after which a script that has not made its steps is given up.

        Raises:
            StoppedError: It did not come to its steps in time.
        """
        data = self._processes.ask(Counted(self.plan.target, self.plan.sandbox, steps, seconds), limit)
        if not data:
            raise StoppedError(f"{self.target.name} did not make {steps} steps within {limit:.0f} s.")
        self.plan.survey = surveys.received(data)
        return self.plan.survey

    def _planned(self, target: Target, jobs: int, measure: Measure | None, *, network: bool, in_place: bool) -> Plan:
        # Given relative to the current folder, it is found in a copy of that as well.
        here, path = Path.cwd(), target.path.resolve()
        own = replace(target, path=path.relative_to(here)) if path.is_relative_to(here) else target
        folders = (here, target.folder, Path.home())
        box = (
            Sandbox(NONE, (), self._scratch, network)
            if in_place
            else choose(folders, self._scratch, network=network, allowed=self._enterable)
        )
        if box is None:
            raise ArgumentError(
                f"doctor expects to run {target.name} where it can do no harm, but this system allows no overlay and "
                f"{here} is too large to copy; run it in a smaller folder, or give --in-place to let it write."
            )
        return Plan(own, box, measure, jobs, int(psutil.virtual_memory().available * 0.8 / jobs))

    def _enterable(self, sandbox: Sandbox) -> bool:
        job = Apart(Sandbox(NONE, (), self._scratch), functools.partial(entered, sandbox))
        return self._processes.ask(job, 60.0) != b""

    def apart(self, work: Callable[[], Any], out: TextIO, err: TextIO) -> Any:
        """Do something in the sandbox, in a process of its own, and return what it returns.

        Args:
            work: Called there; what it prints is passed on, and what it returns can be pickled.
            out: Where its standard output goes.
            err: Where its standard error goes.

        Raises:
            StoppedError: The process ended before it was done.
        """
        data = self._processes.ask(Apart(self.plan.sandbox, work), math.inf, (out, err))
        if not data:
            raise StoppedError("the script ended its process before the doctor was done, as os._exit does.")
        return pickle.loads(data)

    def examine(self, training: Training) -> None:
        """Let runs begin at a training from now on."""
        self._processes.forget()
        self.plan.training = training

    def run(self, requests: deque[Request]) -> Iterator[tuple[Request, Result]]:
        """Do the runs, several at a time, and yield each as it ends.

        Args:
            requests: Taken from the left as there is room; more may be added while the results come.

        Raises:
            StoppedError: The program does not come to its first step.
        """
        for request, result in self._processes.run(requests, self.plan):
            self.cpu += result.cpu
            self.runs += 1
            yield request, result
