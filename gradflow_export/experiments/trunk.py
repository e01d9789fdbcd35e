"""A process that runs a program up to its first step and then continues it, in a forked child, once for each request.

So the data are read and the model is built once, and every run begins with the same weights, the same data and the
same random numbers, seed or not.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradflow_export.experiments import target as programs
from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.measure import Returns
from gradflow_export.experiments.mending.by_hand import HandUpdates
from gradflow_export.experiments.mending.forgotten import MadeSteps
from gradflow_export.experiments.patient import Patient
from gradflow_export.experiments.plan import Plan, left_to_default
from gradflow_export.experiments.runs import Request, Result, unpacked_request
from gradflow_export.experiments.sandbox import die_with_parent, end_tree, lead_tree, silence, tree_use
from gradflow_export.experiments.treatments import find
from gradflow_export.experiments.watched import Watch

READY, UNSAFE, FAILED = b"ready", b"unsafe", b"failed"
MESSAGE = 2**17
PROCESSES = 64
"""Processes that one run may have."""
_CHECK = 0.5
_PRINTED = 4000
MEASURED_VALUES = 1000
"""Numbers that are read of what a script prints, the last ones."""


class Trunk:
    """The inside of such a process.

    Args:
        plan: How runs are made.
        wire: Where requests come from and results go to.
        seed: Which of our seeds.
        early: Whether it forks before the program begins, and not at its first step.
        given: The one run that this process is for; it then serves no others.
    """

    def __init__(
        self, plan: Plan, wire: Any, *, seed: int = 0, early: bool = False, given: Request | None = None
    ) -> None:
        self._given = given
        self._target, self._wire, self._sandbox = plan.target, wire, plan.sandbox
        self._seed, self._early, self._memory = seed, early, plan.memory
        measure, skipped = plan.measure, plan.training.skipped
        reads = measure is not None and not measure.printed
        self._measure = measure
        self._returns = Returns()
        value = self._value if reads else self._returns.now if measure is None else None
        self._patient = Patient(self._begin, self._end, skipped, value)
        self._forgotten, self._by_hand = plan.training.forgotten, plan.training.by_hand
        self._request: Request | None = None
        self._changes: list[Intervention] = []
        self._printed = -1
        self._began = 0.0

    def run(self) -> NoReturn:
        """Be this process until it ends."""
        try:
            self._again = self._sandbox.enter()
            silence(os.open(os.devnull, os.O_RDWR))
            programs.seed(self._seed)
            self._patient.attach()
            if self._by_hand:
                HandUpdates().attach()
            if self._given is not None:
                self._become(self._given)
            elif self._early:
                self._serve()
            programs.run_target(self._target)
            self._fail("it ended before its training did")
        except SystemExit as ended:
            self._fail(f"SystemExit: {ended.code}" if ended.code else "it ended before its training did")
        except BaseException as raised:
            self._fail(programs.told(raised, self._target))
        programs.leave(1)

    def _fail(self, why: str) -> None:
        if self._request is None:
            self._send(FAILED + why.encode()[-_PRINTED:])
        else:
            self._report(why)

    def _begin(self) -> tuple[Sequence[Intervention], int]:
        if self._request is None:
            reason = unsafe()
            if reason:
                self._send(UNSAFE + reason.encode())
                programs.leave(0)
            self._serve()
        assert self._request is not None
        self._returns.attach()
        return self._changes, self._request.steps

    def _end(self, patient: Patient) -> NoReturn:
        del patient
        self._report("")

    def _report(self, error: str) -> NoReturn:
        """Send what came of this run and end its process at once: the script must not save or log what it learned."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        measured = tuple(self._patient.measured)
        if self._measure is not None and self._measure.printed:
            os.lseek(self._printed, 0, os.SEEK_SET)
            printed = os.read(self._printed, os.fstat(self._printed).st_size).decode(errors="replace")
            measured = self._measure.read(printed)[-MEASURED_VALUES:]
        course, used = self._patient.course, os.times()
        facts: dict[str, Any] = {
            "places": len(course.places),
            "penalized": self._patient.penalized,
            "forgotten": self._forgotten,
            "by_hand": self._by_hand,
        }
        for each in self._changes:
            facts.update(each.told())
        assert self._request is not None
        # A message that is longer than the wire takes would be cut off within it.
        error = error[-_PRINTED:] if course.finite else ""
        result = Result(
            self._request.number,
            tuple(self._patient.losses),
            self._patient.effect,
            all(each.acted for each in self._changes if not isinstance(each, (Facts, Watch))),
            facts,
            used.user + used.system + used.children_user + used.children_system - self._began,
            error,
            measured,
        )
        self._send(result.packed())
        end_tree(os.getpid(), itself=False)
        programs.leave(0)

    def _value(self) -> float:
        assert self._measure is not None
        return self._measure.now(self._target.path.resolve())

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(message)

    def _serve(self) -> None:
        """Fork for each request; returns in each child, and never in this process."""
        gc.collect()
        gc.freeze()
        self._send(READY)
        # A forked process has other random numbers of Python, unlike those of NumPy and torch.
        drawn = random.getstate()
        running: dict[int, tuple[Request, float]] = {}
        looked = time.monotonic()
        while True:
            readable, _, _ = select.select([self._wire], [], [], 0.02 if running else None)
            if readable:
                message = self._wire.recv(MESSAGE)
                if not message:
                    end_tree(os.getpid(), itself=False)
                    programs.leave(0)
                request = unpacked_request(message)
                child = os.fork()
                if not child:
                    random.setstate(drawn)
                    self._become(request)
                    return
                running[child] = request, time.monotonic() + request.seconds
            self._reap(running)
            if time.monotonic() - looked > _CHECK:
                looked = time.monotonic()
                self._limit(running)

    def _become(self, request: Request) -> None:
        """Be the child that does one run."""
        die_with_parent()
        programs.belongs()
        used = os.times()
        self._began = used.user + used.system
        self._request = request
        self._printed = _unnamed_file()
        silence(self._printed)
        self._again()
        self._changes = [find(name).make() for name in request.names]
        if self._forgotten and not any(isinstance(each, MadeSteps) for each in self._changes):
            self._changes.append(MadeSteps())

    def _reap(self, running: dict[int, tuple[Request, float]]) -> None:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                request, _ = running.pop(child)
                if status:
                    why = f"its process ended with {os.waitstatus_to_exitcode(status)}"
                    self._send(Result(request.number, error=why).packed())

    def _limit(self, running: dict[int, tuple[Request, float]]) -> None:
        for child, (request, deadline) in list(running.items()):
            memory, processes = tree_use(child)
            why = ""
            if time.monotonic() > deadline:
                why = f"it took longer than {request.seconds:.0f} s"
            elif memory > self._memory:
                why = f"it held more than {self._memory / 2**30:.1f} GiB"
            elif processes > PROCESSES:
                why = f"it started more than {PROCESSES} processes"
            if why:
                end_tree(child)
                os.waitpid(child, 0)
                del running[child]
                self._send(Result(request.number, error=why).packed())


def _unnamed_file() -> int:
    """Return the handle of a file that nobody else sees."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("printed")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def unsafe() -> str:
    """Return why a process cannot be forked now; empty where it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized"
    if threading.active_count() > 1:
        return "other threads run"
    if multiprocessing.active_children():
        return "it has child processes, such as a loader's workers"
    return ""


def fork(inside: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
    """Run a function in a forked child, which ends when it returns.

    Args:
        inside: Gets the child's end of a socket.

    Returns:
        The child's number, and our end of the socket.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child:
        theirs.close()
        return child, ours
    try:
        ours.close()
        lead_tree()
        left_to_default()
        inside(theirs)
    finally:
        os._exit(1)
