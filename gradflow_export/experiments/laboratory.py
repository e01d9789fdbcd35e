"""Starts runs of a program, several at a time, and collects what came of them."""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import psutil

from gradflow_export.errors import ArgumentError, GradflowError
from gradflow_export.experiments import survey as surveys
from gradflow_export.experiments.fresh import Apart, Counted, FreshProcesses, RunOnce
from gradflow_export.experiments.measure import Measure
from gradflow_export.experiments.runs import STEPS, Request, Result, unpacked_result
from gradflow_export.experiments.sandbox import NONE, Sandbox, choose, end_tree, enterable
from gradflow_export.experiments.survey import Survey, Training
from gradflow_export.experiments.target import Target
from gradflow_export.experiments.trunk import FAILED, MESSAGE, READY, UNSAFE, Trunk, fork, speak

if TYPE_CHECKING:
    from typing_extensions import Self

_Reader = TypeVar("_Reader", int, socket.socket)

SURVEYED = 3.0
"""Seconds of processor time for which a script is followed to see whether it trains another model."""
NAP = 0.2
"""Seconds after which it is looked for an interrupt."""
ENDED = "the script ended its process before the doctor was done, as os._exit does."
PATIENCE = 20
"""A run may take so many times as long as the survey says, and at least a minute."""


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StoppedError(GradflowError):
    """The script cannot be examined."""


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
        self.target, self.early, self.measure = target, early, measure
        fresh |= not hasattr(os, "fork") or sys.platform == "darwin"
        self.jobs = jobs or min(processors(), 4)
        self.cpu = 0.0
        self.runs = 0
        self.survey = Survey()
        self._scratch = Path(tempfile.mkdtemp(prefix="gradflow-doctor-"))
        self._memory = int(psutil.virtual_memory().available * 0.8 / self.jobs)
        self._trunks: dict[int, tuple[int, socket.socket]] = {}
        self._others: set[int] = set()
        self._numbers = 0
        self._training = Training(0, 0, 1)
        self._interrupted = False
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            # A KeyboardInterrupt in the middle of a fork would be lost, or raised in two processes.
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        self._fresh = FreshProcesses(self._scratch, self._raise_interrupt) if fresh else None
        if not fresh:
            surveys.warm()
        folders = (Path.cwd(), target.folder, Path.home())
        box = (
            Sandbox(NONE, (), self._scratch, network)
            if in_place
            else choose(folders, self._scratch, network=network, allowed=self._enterable if fresh else enterable)
        )
        if box is None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise ArgumentError(
                f"doctor expects to run {target.name} where it can do no harm, but this system allows no overlay and "
                f"{Path.cwd()} is too large to copy; run it in a smaller folder, or give --in-place to let it write."
            )
        self.sandbox = box

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove what they wrote."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
        self._end_trunks()
        if self._fresh is not None:
            self._fresh.close()
        for child in list(self._others):
            self.end(child)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def fresh(self) -> bool:
        """Whether runs are not forked from this process."""
        return self._fresh is not None

    @property
    def reach(self) -> str:
        """What becomes of the files that the program writes, in one sentence."""
        if self.sandbox.kind == NONE:
            return "what the script writes is kept, and each start writes it again."
        safe = ", ".join(map(str, self.sandbox.folders))
        return (
            f"what the script writes below {safe} is thrown away; elsewhere it is written, at each of several starts."
        )

    def end(self, child: int) -> None:
        """End a child process and all that it started."""
        end_tree(child)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        self._others.discard(child)

    def look(self, *, steps: int = STEPS, seconds: float = SURVEYED, limit: float = 600.0) -> Survey:
        """Run the program once and count.

        Args:
            steps: Steps that each run will train.
            seconds: Of processor time, after which it is enough.
            limit: Seconds after which a script that has not made its steps is given up.

        Raises:
            StoppedError: It did not come to its steps in time.
        """
        if self._fresh is not None:
            data = self._fresh.ask(Counted(self.target, self.sandbox, steps, seconds), limit)
        else:
            data = self._counted(steps, seconds, limit)
        if not data:
            raise StoppedError(f"{self.target.name} did not make {steps} steps within {limit:.0f} s.")
        self.survey = surveys.received(data)
        return self.survey

    def _counted(self, steps: int, seconds: float, limit: float) -> bytes:
        child, wire = fork(lambda theirs: surveys.count(self.target, self.sandbox, theirs, steps, seconds))
        self._others.add(child)
        try:
            return wire.recv(MESSAGE) if self._wait([wire], limit) else b""
        finally:
            self.end(child)
            wire.close()

    def _enterable(self, sandbox: Sandbox) -> bool:
        assert self._fresh is not None
        return self._fresh.ask(Apart(sandbox, os.getpid), 60.0) != b""

    def apart(self, work: Callable[[], Any], out: TextIO, err: TextIO) -> Any:
        """Do something in the sandbox, in a process of its own, and return what it returns.

        Args:
            work: Called there; what it prints is passed on, and what it returns can be pickled.
            out: Where its standard output goes.
            err: Where its standard error goes.

        Raises:
            StoppedError: The process ended before it was done.
        """
        if self._fresh is not None:
            data = self._fresh.ask(Apart(self.sandbox, work), math.inf, (out, err))
            if not data:
                raise StoppedError(ENDED)
            return pickle.loads(data)
        streams = [os.pipe() for _ in range(3)]

        def inside(_wire: socket.socket) -> None:
            self.sandbox.enter()
            speak(streams[0][1], streams[1][1])
            done = work()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            with os.fdopen(streams[2][1], "wb") as result:
                result.write(pickle.dumps(done))
            end_tree(os.getpid(), itself=False)
            os._exit(0)

        child, wire = fork(inside)
        self._others.add(child)
        for _, writer in streams:
            os.close(writer)
        try:
            return pickle.loads(relayed([reader for reader, _ in streams], (out, err), self._wait))
        finally:
            self.end(child)
            wire.close()

    def examine(self, training: Training) -> None:
        """Let runs begin at a training from now on."""
        self._end_trunks()
        self._training = training

    def run(self, requests: deque[Request]) -> Iterator[tuple[Request, Result]]:
        """Do the runs, several at a time, and yield each as it ends.

        Args:
            requests: Taken from the left as there is room; more may be added while the results come.

        Raises:
            StoppedError: The program does not come to its first step.
        """
        if self._fresh is not None:
            yield from self._run_fresh(self._fresh, requests)
            return
        running: dict[int, Request] = {}
        while requests or running:
            while requests and len(running) < self.jobs:
                request = self._numbered(requests.popleft())
                running[request.number] = request
                self._trunk(request.seed)[1].send(request.packed())
            for result in self._results():
                done = running.pop(result.number, None)
                if done is not None:
                    self.cpu += result.cpu
                    self.runs += 1
                    yield done, result

    def _run_fresh(self, fresh: FreshProcesses, requests: deque[Request]) -> Iterator[tuple[Request, Result]]:
        def made(request: Request) -> RunOnce:
            return RunOnce(self.target, self.sandbox, self._numbered(request), self._training.skipped, self.measure)

        for request, result in fresh.run(requests, self.jobs, self._memory, made):
            self.cpu += result.cpu
            self.runs += 1
            yield request, result

    def _numbered(self, request: Request) -> Request:
        """Return a request with a number of its own and the time that it may take."""
        self._numbers += 1
        whole = self.early or self._fresh is not None
        seconds = max(PATIENCE * self.survey.run_seconds(request.steps), 60.0) + whole * 10 * self.survey.setup
        return replace(request, number=self._numbers, seconds=seconds)

    def _raise_interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _interrupt(self, _signal: int, _frame: object) -> None:
        self._interrupted = True

    def _wait(self, readers: Sequence[_Reader], seconds: float) -> list[_Reader]:
        """Return those that can be read, after so many seconds at most.

        Raises:
            KeyboardInterrupt: It was asked for since the last time.
        """
        limit = time.monotonic() + seconds
        while True:
            self._raise_interrupt()
            left = limit - time.monotonic()
            ready, _, _ = select.select(readers, [], [], max(min(left, NAP), 0.0))
            if ready or left <= 0:
                return ready

    def _results(self) -> Iterator[Result]:
        wires = [wire for _, wire in self._trunks.values()]
        for wire in self._wait(wires, 1.0):
            message = wire.recv(MESSAGE)
            if not message:
                raise StoppedError("a process of the doctor ended by itself.")
            yield unpacked_result(message)

    def _trunk(self, seed: int) -> tuple[int, socket.socket]:
        if seed in self._trunks:
            return self._trunks[seed]
        while True:
            inside = self._inside(seed)
            child, wire = fork(inside)
            self._others.add(child)
            limit = time.monotonic() + max(PATIENCE * self.survey.setup, 120.0)
            message = b""
            while not message and time.monotonic() < limit:
                if self._wait([wire], 1.0):
                    message = wire.recv(MESSAGE)
                    break
            if message == READY:
                self._others.discard(child)
                self._trunks[seed] = child, wire
                return self._trunks[seed]
            self.end(child)
            wire.close()
            if not message.startswith(UNSAFE) or self.early:
                why = message.removeprefix(FAILED).decode(errors="replace").strip().rpartition("\n")[2]
                raise StoppedError(f"{self.target.name} does not come to its first step: {why or 'it takes too long'}.")
            self.early = True

    def _inside(self, seed: int) -> Callable[[socket.socket], object]:
        skipped = self._training.skipped
        early, memory, measure = self.early, self._memory, self.measure

        def inside(theirs: socket.socket) -> None:
            Trunk(
                self.target,
                theirs,
                self.sandbox,
                seed=seed,
                skipped=skipped,
                early=early,
                memory=memory,
                measure=measure,
            ).run()

        return inside

    def _end_trunks(self) -> None:
        for child, wire in self._trunks.values():
            self.end(child)
            wire.close()
        self._trunks = {}


def relayed(
    readers: Sequence[int], streams: Sequence[TextIO], wait: Callable[[Sequence[int], float], Sequence[int]]
) -> bytes:
    """Pass on what comes from the first readers, and return all that comes from the last.

    Args:
        readers: Pipes.
        streams: Where what comes from each but the last goes.
        wait: Waits so many seconds for some of them, and returns those that have something.

    Raises:
        StoppedError: The last was closed and gave nothing.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in streams]
    left, data, done = list(readers), b"", False
    while left:
        ready = wait(left, 0.0 if done else 1.0)
        if done and not ready:
            break
        for reader in ready:
            got = os.read(reader, MESSAGE)
            if not got:
                left.remove(reader)
                os.close(reader)
                done |= reader == readers[-1]
            elif reader == readers[-1]:
                data += got
            else:
                number = readers.index(reader)
                streams[number].write(decoders[number].decode(got))
    for reader in left:
        # A process that the program left behind may hold it for ever.
        os.close(reader)
    if not data:
        raise StoppedError(ENDED)
    return data
