"""A process of its own for one run, begun anew: for systems without ``fork``, and where it is forbidden.

It reads a job from its standard input and writes what came of it to a file. This process imports this module before it
knows the program, and looks for it neither in the current folder nor in that of the program.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from gradflow_export.experiments import survey
from gradflow_export.experiments.plan import Interrupts, Plan, Wire, left_to_default
from gradflow_export.experiments.runs import Request, Result, unpacked_result
from gradflow_export.experiments.sandbox import end_tree, lead_tree, tree_use
from gradflow_export.experiments.trunk import PROCESSES, Trunk

_PACKAGES = str(Path(__file__).resolve().parents[2])
_BEGIN = (
    "import sys; sys.path[:] = [each for each in sys.path if each]; sys.path.insert(0, sys.argv.pop(1)); "
    "from gradflow_export.experiments.fresh import main; sys.path.pop(0); main()"
)
_NAP = 0.05
_LOOK = 0.5


class ToFile:
    """Has the ``send()`` of a socket, and writes to a file, once and whole."""

    def __init__(self, path: str) -> None:
        # The sandbox may cover the path.
        self._handle = os.open(path, os.O_WRONLY)

    def send(self, message: bytes) -> int:
        """Write it."""
        return os.write(self._handle, message)


@dataclass(frozen=True)
class RunOnce:
    """One run of a program, from its beginning.

    Attributes:
        plan: How it is made.
        request: What is wanted.
    """

    plan: Plan
    request: Request

    def __call__(self, wire: Wire) -> None:
        """Do it in this process, which ends with it."""
        Trunk(self.plan, wire, seed=self.request.seed, given=self.request).run()


@dataclass
class Started:
    """A process that does a job.

    Attributes:
        process: The process.
        path: File that its result comes to.
        deadline: Time at which it is ended.
        request: The run, where it is one.
    """

    process: subprocess.Popen[bytes]
    path: Path
    deadline: float
    request: Request = field(default_factory=Request)

    def result(self) -> bytes:
        """Return what it sent."""
        return self.path.read_bytes()

    def end(self) -> None:
        """End it and all that it started."""
        end_tree(self.process.pid)
        self.process.wait()
        self.path.unlink(missing_ok=True)


class FreshProcesses:
    """Starts them and waits for them; each is ended with its whole tree.

    Args:
        scratch: A folder for their results.
        interrupts: Raises KeyboardInterrupt where one was asked for.
    """

    def __init__(self, scratch: Path, interrupts: Interrupts) -> None:
        self.early = True
        self._scratch, self._interrupts = scratch, interrupts
        self._running: list[Started] = []

    def close(self) -> None:
        """End all that run: first each of them, then it is waited for them."""
        for each in self._running:
            end_tree(each.process.pid)
        for each in self._running:
            each.end()
        self._running = []

    def ask(self, job: Callable[[Wire], None], seconds: float, streams: Sequence[TextIO] = ()) -> bytes:
        """Return what a job sends; nothing where it took longer than so many seconds or ended before.

        Args:
            job: Can be pickled.
            seconds: Limit.
            streams: Where its output and errors go.
        """
        started = self._start(job, seconds, streams=streams)
        try:
            while started.process.poll() is None and time.monotonic() < started.deadline:
                self._interrupts.check()
                time.sleep(_NAP)
            return started.result() if started.process.poll() is not None else b""
        finally:
            self._end(started)

    def forget(self) -> None:
        """Do nothing: no run is continued from another."""

    def run(self, requests: deque[Request], plan: Plan) -> Iterator[tuple[Request, Result]]:
        """Do runs, several at a time, and yield each as it ends.

        Args:
            requests: Taken from the left as there is room; more may be added while the results come.
            plan: How they are made.
        """
        looked = time.monotonic()
        while requests or self._running:
            while requests and len(self._running) < plan.jobs:
                request = plan.numbered(requests.popleft(), whole=True)
                self._start(RunOnce(plan, request), request.seconds, request=request)
            self._interrupts.check()
            time.sleep(_NAP)
            due = time.monotonic() > looked + _LOOK
            looked = time.monotonic() if due else looked
            for started in list(self._running):
                why = _too_much(started, plan.memory) if due else ""
                if started.process.poll() is None and not why:
                    continue
                data = b"" if why else started.result()
                ended = f"its process ended with {started.process.returncode}"
                self._end(started)
                yield (
                    started.request,
                    unpacked_result(data) if data else Result(started.request.number, error=why or ended),
                )

    def _start(
        self,
        job: Callable[[Wire], None],
        seconds: float,
        streams: Sequence[TextIO] = (),
        request: Request | None = None,
    ) -> Started:
        handle, path = tempfile.mkstemp(dir=self._scratch)
        os.close(handle)
        where = subprocess.PIPE if streams else subprocess.DEVNULL
        own_group: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {"creationflags": 0x200}
        with self._interrupts.held():
            process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - our own interpreter and code
                [sys.executable, "-c", _BEGIN, _PACKAGES, path],
                stdin=subprocess.PIPE,
                stdout=where,
                stderr=where,
                **own_group,
            )
            started = Started(process, Path(path), time.monotonic() + seconds, request or Request())
            self._running.append(started)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(job))
            process.stdin.close()
        for source, stream in zip((process.stdout, process.stderr), streams, strict=False):
            threading.Thread(target=_copied, args=(source, stream), daemon=True).start()
        return started

    def _end(self, started: Started) -> None:
        with self._interrupts.held():
            self._running.remove(started)
            started.end()


def _copied(source: IO[bytes], stream: TextIO) -> None:
    for line in source:
        with contextlib.suppress(Exception):
            stream.write(line.decode(errors="replace"))


def _too_much(started: Started, memory: int) -> str:
    held, processes = tree_use(started.process.pid)
    if time.monotonic() > started.deadline:
        return f"it took longer than {started.request.seconds:.0f} s"
    if held > memory:
        return f"it held more than {memory / 2**30:.1f} GiB"
    return f"it started more than {PROCESSES} processes" if processes > PROCESSES else ""


def main() -> None:
    """Do the job that the standard input brings."""
    job: Any = pickle.load(sys.stdin.buffer)
    lead_tree()
    left_to_default()
    survey.warm()
    job(ToFile(sys.argv[1]))
