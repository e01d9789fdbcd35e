"""What every run of a program has in common, whichever way its process begins."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gradflow_export.errors import GradflowError
from gradflow_export.experiments import survey as surveys
from gradflow_export.experiments.measure import Measure
from gradflow_export.experiments.runs import Request
from gradflow_export.experiments.sandbox import Sandbox, end_tree
from gradflow_export.experiments.survey import Survey, Training
from gradflow_export.experiments.target import Target

PATIENCE = 20
"""A run may take so many times as long as the survey says, and at least a minute."""


class StoppedError(GradflowError):
    """The script cannot be examined."""


@dataclass
class Plan:
    """How runs are made.

    Attributes:
        target: The program.
        sandbox: Where it is run.
        measure: The user's yardstick.
        jobs: Runs at a time.
        memory: Bytes that one run may hold.
        survey: What is known of the program's steps.
        training: Which of them are examined.
        numbers: Runs that were asked for.
    """

    target: Target
    sandbox: Sandbox
    measure: Measure | None
    jobs: int
    memory: int
    survey: Survey = field(default_factory=Survey)
    training: Training = field(default_factory=lambda: Training(0, 0, 1))
    numbers: int = 0

    def numbered(self, request: Request, *, whole: bool) -> Request:
        """Return a request with a number of its own and the time that it may take.

        Args:
            request: What is wanted.
            whole: Whether the run begins with the program.
        """
        self.numbers += 1
        seconds = max(PATIENCE * self.survey.run_seconds(request.steps), 60.0) + whole * 10 * self.survey.setup
        return replace(request, number=self.numbers, seconds=seconds)


ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
"""Signals that ask a process to end: Ctrl-C, ``kill``, a terminal that is closed."""


class Interrupts:
    """Raises KeyboardInterrupt when Ctrl-C is pressed or another such signal comes, with the number of the signal.

    At once, but never while a process begins or ends: in the middle of a fork it would be raised in two processes, or
    the child would be known to nobody. A signal that is ignored, as by ``nohup``, stays so.
    """

    def __init__(self) -> None:
        self._holders = self._due = 0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._came)

    def close(self) -> None:
        """Leave the signals to the handlers before this one."""
        for number, handler in self._before.items():
            # What was not set by Python cannot be set by it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt where it was swallowed, as it is in ``__del__``."""
        if self._due:
            raise KeyboardInterrupt(self._due)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do something that is not interrupted; what came meanwhile is raised after it."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
        if not self._holders:
            self.check()

    def ended(self) -> None:
        """Raise nothing any more: the processes are being ended."""
        self._holders += 1

    def _came(self, number: int, _frame: object) -> None:
        self._due = number
        if not self._holders:
            raise KeyboardInterrupt(number)


def left_to_default() -> None:
    """Let a process that was forked from this one end by the signals that end others; Ctrl-C is for its parent."""
    with suppress(ValueError):
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


class Wire(Protocol):
    """Where messages go."""

    def send(self, message: bytes, /) -> int:
        """Send one whole."""


@dataclass(frozen=True)
class Counted:
    """A first run that counts.

    Attributes:
        target: The program.
        sandbox: Where it is run.
        steps: Steps that are needed.
        seconds: Of processor time after which it is enough.
    """

    target: Target
    sandbox: Sandbox
    steps: int
    seconds: float

    def __call__(self, wire: Wire) -> None:
        """Count in this process, which ends with it."""
        surveys.count(self.target, self.sandbox, wire, self.steps, self.seconds)


@dataclass(frozen=True)
class Apart:
    """Anything else.

    Attributes:
        sandbox: Where it is done.
        work: What is done; a function that can be found by its name.
    """

    sandbox: Sandbox
    work: Callable[[], object]

    def __call__(self, wire: Wire) -> None:
        """Do it in this process, which ends with it."""
        self.sandbox.enter()
        done = pickle.dumps(self.work())
        for stream in (sys.stdout, sys.stderr):
            # The program may have closed it.
            with suppress(Exception):
                stream.flush()
        wire.send(done)
        end_tree(os.getpid(), itself=False)
        os._exit(0)
