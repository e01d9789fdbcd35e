"""What waits between the training thread and the worker: bounded, and none of it is ever dropped."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gradflow_export.engine.transfer import Bundle
from gradflow_export.records.step_record import StepRecord

CAPACITY = 1024
"""Steps that may wait; beyond that the training thread waits, and at last reads no more until there is room."""

WAKE = 16
"""Steps that may wait to be judged before the worker is woken: its own looks are too rare for steps below 5 ms."""

FEW, DEFERRED = 8, 256
"""With more steps than ``FEW`` to be judged writing is deferred, for at most so many records."""

DEFERRED_SECONDS = 0.25
"""And no longer than this after a step, so that the end of the process costs little, however slow the machine is."""

ROOM_SECONDS = 1.0
JUDGE_SECONDS, WRITER_SECONDS = 2.0, 0.1
"""How long the training thread waits without a sign of progress: for room, for a verdict, for one behind a writer."""


class Backlog:
    """The steps under way from the training thread to the writers, and how the one waits for the other.

    Attributes:
        queue: Steps to be judged; the first stays until it is.
        judged: Records to be written; the first stays until it is.
        wake: Set when the worker is to go on without pauses.
        taken: Steps that were handed over.
        done: Steps that were written, or failed.
        waited: Seconds that the training thread has waited.
        delayed: Steps at whose end it did.
        writing: Whether the worker is inside a writer.
        idle: Whether it sleeps until something comes.
        alive: Whether there is a worker at all: after a fork the child has none.
    """

    def __init__(self, alive: Callable[[], bool]) -> None:
        self.alive = alive
        self.queue: deque[Bundle] = deque()
        self.judged: deque[StepRecord] = deque()
        self.wake = threading.Event()
        self.taken = self.done = self.delayed = 0
        self.waited = 0.0
        self.writing = self.idle = self._asked = False
        self._changed = threading.Condition()
        self._waiters = self._progress = self._weighed = self._bytes = 0
        self._most = 0.0
        self._late = False

    def __len__(self) -> int:
        return len(self.queue) + len(self.judged)

    @property
    def full(self) -> bool:
        """Whether nothing more should be read for now."""
        return len(self) >= CAPACITY

    @property
    def ripe(self) -> bool:
        """Whether the first record that waits is to be written now."""
        if not self.judged or len(self.queue) <= FEW or len(self.judged) >= DEFERRED:
            return bool(self.judged)
        return time.time() - self.judged[0].wall_time >= DEFERRED_SECONDS

    @property
    def awaited(self) -> bool:
        """Whether a thread waits for the worker."""
        return self._waiters > 0

    def put(self, bundle: Bundle, *, wait: bool) -> None:
        """Add a step.

        Args:
            bundle: The step.
            wait: Whether to return only when it is done, however long that takes.
        """
        self.taken += 1
        wanted = self.taken
        self.queue.append(bundle)
        if wait:
            self._hold(lambda: self.done >= wanted, math.inf, math.inf)
        elif len(self) >= CAPACITY:
            self._hold(lambda: not self.full, ROOM_SECONDS, ROOM_SECONDS)
        elif self.idle and (self._asked or len(self.queue) >= WAKE):
            self.idle = self._asked = False
            self.wake.set()

    def weigh(self, bundle: Bundle) -> float:
        """Return the most bytes that steps took while they waited, which the allocator seldom gives back.

        Args:
            bundle: The step that is judged next.
        """
        self._weighed, self._bytes = self._weighed + 1, self._bytes + bundle.nbytes
        self._most = max(self._most, len(self.queue) * self._bytes / self._weighed)
        return self._most

    def serve(self, writers: Iterable[object]) -> None:
        """Let writers whose reader is about to look ask for what is new."""
        for writer in writers:
            if hasattr(writer, "ask"):
                writer.ask = self.ask

    def ask(self) -> None:
        """Have what waits, or else the next step, done without waiting for the worker's next look."""
        if self.idle and len(self):
            self.wake.set()
        else:
            self._asked = True

    def wait_past(self, step: int) -> None:
        """Wait until every step up to this one is judged; a worker that stood still is not waited for until it is."""
        if not self._behind(step):
            self._late = False
        elif not self._late:
            # Steps too short for two threads to run side by side, which want the GIL by turns: all at once is cheaper.
            self._hold(lambda: len(self.queue) <= FEW and not self._behind(step), JUDGE_SECONDS, WRITER_SECONDS)
            self._late = self._behind(step)

    def _behind(self, step: int) -> bool:
        try:
            return self.queue[0].step <= step
        except IndexError:
            return False

    def _hold(self, until: Callable[[], bool], seconds: float, in_writer: float) -> bool:
        """Keep the training thread waiting, and count it."""
        began = time.monotonic()
        try:
            return self.wait(until, seconds, in_writer)
        finally:
            self.waited += time.monotonic() - began
            self.delayed += 1

    def wait(self, until: Callable[[], bool], seconds: float, in_writer: float | None = None) -> bool:
        """Wait as long as the worker makes progress.

        Args:
            until: What is waited for.
            seconds: How long to wait without any progress.
            in_writer: The same while the worker is inside a writer; ``None`` for no difference.

        Returns:
            Whether it has come.
        """
        if not self.alive():  # first: a child of a fork may find the locks below held for ever
            return until()
        self.wake.set()
        with self._changed:
            self._waiters += 1
            try:
                progress, since = self._progress, time.monotonic()
                while not until() and self.alive():
                    self._changed.wait(0.05)
                    now = time.monotonic()
                    if progress != self._progress:
                        progress, since = self._progress, now
                    elif now - since >= (in_writer if self.writing and in_writer is not None else seconds):
                        break
            finally:
                self._waiters -= 1
        return until()

    def move(self) -> None:
        """Note that the worker has made progress, and let those go on who waited for it."""
        self._progress += 1
        if self._waiters:
            with self._changed:
                self._changed.notify_all()
