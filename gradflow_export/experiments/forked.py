"""Processes forked from this one: the program runs to its first step once for each seed, and goes on in forks."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from gradflow_export.experiments.plan import PATIENCE, Interrupts, Plan, StoppedError, Wire
from gradflow_export.experiments.runs import Request, Result, unpacked_result
from gradflow_export.experiments.sandbox import end_tree, speak
from gradflow_export.experiments.trunk import FAILED, MESSAGE, READY, UNSAFE, Trunk, fork

_Reader = TypeVar("_Reader", int, socket.socket)

NAP = 0.2
"""Seconds after which it is looked for an interrupt."""


class _Pipe:
    """Has the ``send()`` of a socket, for messages of any length."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def send(self, message: bytes) -> int:
        with os.fdopen(self._handle, "wb") as result:
            return result.write(message)


class ForkedProcesses:
    """Starts them and waits for them; each is ended with its whole tree.

    Args:
        interrupts: Raises KeyboardInterrupt where one was asked for.
        early: Whether each run begins with the program and not at its first step.
    """

    def __init__(self, interrupts: Interrupts, *, early: bool = False) -> None:
        self.early = early
        self._interrupts = interrupts
        self._trunks: dict[int, tuple[int, socket.socket]] = {}
        self._others: set[int] = set()

    def close(self) -> None:
        """End all that run."""
        self._end(*self._others)
        self.forget()

    def forget(self) -> None:
        """End the processes that runs are continued from."""
        trunks = list(self._trunks.values())
        self._end(*(child for child, _ in trunks))
        for _, wire in trunks:
            wire.close()
        self._trunks = {}

    def ask(self, job: Callable[[Wire], None], seconds: float, streams: Sequence[TextIO] = ()) -> bytes:
        """Return what a job sends; nothing where it took longer than so many seconds or ended before.

        Args:
            job: What is done.
            seconds: Limit.
            streams: Where its output and errors go.
        """
        pipes = [os.pipe() for _ in range(len(streams) + 1)]

        def inside(_wire: socket.socket) -> None:
            if streams:
                speak(pipes[0][1], pipes[1][1])
            job(_Pipe(pipes[-1][1]))

        child, wire = self._fork(inside)
        for _, writer in pipes:
            os.close(writer)
        try:
            return relayed([reader for reader, _ in pipes], streams, self._wait, seconds)
        finally:
            wire.close()
            self._end(child)

    def run(self, requests: deque[Request], plan: Plan) -> Iterator[tuple[Request, Result]]:
        """Do runs, several at a time, and yield each as it ends.

        Args:
            requests: Taken from the left as there is room; more may be added while the results come.
            plan: How they are made.

        Raises:
            StoppedError: The program does not come to its first step.
        """
        running: dict[int, Request] = {}
        while requests or running:
            while requests and len(running) < plan.jobs:
                request = plan.numbered(requests.popleft(), whole=self.early)
                running[request.number] = request
                self._trunk(request.seed, plan)[1].send(request.packed())
            for result in self._results():
                done = running.pop(result.number, None)
                if done is not None:
                    yield done, result

    def _fork(self, inside: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
        """Fork, and know the child before an interrupt is raised."""
        with self._interrupts.held():
            child, wire = fork(inside)
            self._others.add(child)
        return child, wire

    def _end(self, *children: int) -> None:
        """End child processes and all that they started: first each of them, then it is waited for them."""
        with self._interrupts.held():
            for child in children:
                end_tree(child)
            for child in children:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child, 0)
                self._others.discard(child)

    def _wait(self, readers: Sequence[_Reader], seconds: float) -> list[_Reader]:
        """Return those that can be read, after so many seconds at most.

        Raises:
            KeyboardInterrupt: It was asked for since the last time.
        """
        limit = time.monotonic() + seconds
        while True:
            self._interrupts.check()
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

    def _trunk(self, seed: int, plan: Plan) -> tuple[int, socket.socket]:
        if seed in self._trunks:
            return self._trunks[seed]
        while True:
            child, wire = self._fork(lambda theirs: Trunk(plan, theirs, seed=seed, early=self.early).run())
            limit = time.monotonic() + max(PATIENCE * plan.survey.setup, 120.0)
            message = b""
            while not message and time.monotonic() < limit:
                if self._wait([wire], 1.0):
                    message = wire.recv(MESSAGE)
                    break
            if message == READY:
                with self._interrupts.held():
                    self._others.discard(child)
                    self._trunks[seed] = child, wire
                return self._trunks[seed]
            wire.close()
            self._end(child)
            if not message.startswith(UNSAFE) or self.early:
                why = message.removeprefix(FAILED).decode(errors="replace").strip().rpartition("\n")[2]
                raise StoppedError(f"{plan.target.name} does not come to its first step: {why or 'it takes too long'}.")
            self.early = True


def relayed(
    readers: Sequence[int],
    streams: Sequence[TextIO],
    wait: Callable[[Sequence[int], float], Sequence[int]],
    seconds: float,
) -> bytes:
    """Pass on what comes from the first readers, and return all that comes from the last.

    Args:
        readers: Pipes.
        streams: Where what comes from each but the last goes.
        wait: Waits so many seconds for some of them, and returns those that have something.
        seconds: Limit for all of it.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in streams]
    left, data, done = list(readers), b"", False
    limit = time.monotonic() + seconds
    while left and time.monotonic() < limit:
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
    return data if done else b""
