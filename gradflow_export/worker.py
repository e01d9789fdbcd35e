"""The worker thread: assembles records, asks the rules, feeds the writers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradflow_export.assemble import Assembler, Ranks
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.forked import begun_here, call_at_exit, writers_here
from gradflow_export.metrics.algebra import use_one_thread
from gradflow_export.records import Gap, Issue, Reading, RunInfo, StepRecord
from gradflow_export.rules.judge import Judge
from gradflow_export.summary import RunSummary
from gradflow_export.transfer import Bundle
from gradflow_export.writers.base import Writer
from gradflow_export.writers.together import WriterSet

_log = logging.getLogger("gradflow_export")

CAPACITY = 1024
"""Steps that may wait; beyond that the newest are dropped and counted."""

POLL_SECONDS = 0.1
MOST_PAUSE_SECONDS = 0.02
IDLE_SECONDS = 5.0
"""After this long without a step, writers are asked to make what they hold readable."""
CHILD_SECONDS = 10.0
"""How long the end of a forked child may wait for its last steps to be written."""

KEEP_SECONDS = 0.4
"""Between two times that writers are asked to see to it that what they hold outlives the process."""

Analyze = Callable[[StepRecord], Mapping[str, float] | None]


class Worker:
    """Takes bundles from the training thread and turns them into records, issues and files.

    The training thread only appends to a deque; it neither waits nor wakes this thread, which looks every
    ``POLL_SECONDS`` and takes all that is there, with pauses. A writer that raises is reported once and set aside.
    """

    def __init__(
        self,
        info: RunInfo,
        judge: Judge,
        writers: Sequence[Writer],
        *,
        device: Callable[[], Mapping[str, float]],
        on_issue: Callable[[Issue], None],
        strict: bool = False,
    ) -> None:
        self._judge = judge
        self._device, self._on_issue, self._strict = device, on_issue, strict
        self._analyzers: dict[str, Analyze] = {}
        self._begin(info, writers)

    def _begin(self, info: RunInfo | None, writers: Sequence[Writer]) -> None:
        """Take the state of a worker that has done nothing, in this process."""
        self._pid = os.getpid()
        self.summary = RunSummary(info)
        self.dropped = 0
        self._error: BaseException | None = None
        self._writers = WriterSet(writers)
        self._assembler = Assembler()
        self._queue: deque[Bundle] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._idle = threading.Condition()
        self._taken = self._done = 0
        self._closing = False
        self._last_record = time.monotonic()
        self._unflushed = False
        self._kept = self._last_record
        self._thread = threading.Thread(target=self._run, name="gradflow-worker", daemon=True)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child that has not trained yet: all of it is the parent's."""
        return os.getpid() != self._pid

    @property
    def error(self) -> BaseException | None:
        """What a step first failed with, or where errors are let through a writer; ``None`` when nothing failed."""
        return self._error or (self._writers.error if self._strict else None)

    @property
    def writers(self) -> tuple[Writer, ...]:
        """All writers, those that were set aside too."""
        return self._writers.all

    @property
    def failed_writers(self) -> tuple[str, ...]:
        """Names of writers that were set aside."""
        return self._writers.failed

    @property
    def lost(self) -> Mapping[str, Gap]:
        """Recorded steps that are not in what a writer left behind, by the writer's name."""
        return self._writers.lost

    def describe(self, blocks: tuple[str, ...], intervals: Mapping[str, int]) -> None:
        """Complete the run's description before :meth:`start`."""
        info = self.summary.info
        if info is not None:
            settings = {**info.settings, "intervals": dict(intervals)}
            self.summary.info = replace(info, blocks=blocks, settings=settings)

    def start(self) -> None:
        """Open the writers and start the thread."""
        self._writers.open(self.summary.info)
        self._thread.start()

    def join(self, ranks: Ranks) -> None:
        """Send every step to rank 0 from now on, or on rank 0 join what the others send; before :meth:`start`."""
        self._assembler.ranks = ranks

    def put(self, bundle: Bundle) -> None:
        """Hand over one step; never waits."""
        if self.inherited:
            self._begin_in_child()
        if len(self._queue) >= CAPACITY or self._closing:
            self.dropped += 1
            return
        self._taken += 1
        self._queue.append(bundle)

    def _begin_in_child(self) -> None:
        """Go on in a forked child, with a session of its own: the thread did not come along."""
        spread = self._assembler.ranks is not None  # the parent is the one that the other ranks know
        self._begin(begun_here(self.summary.info), () if spread else writers_here(self._writers.working))
        self._judge.begin_again()
        call_at_exit(partial(self.close, CHILD_SECONDS))
        self.start()

    def add_analyzer(self, name: str, analyzer: Any) -> None:
        """Ask an analyzer about every record from now on.

        Raises:
            ArgumentTypeError: It is neither callable nor has ``analyze_custom_metric``.
        """
        analyze = getattr(analyzer, "analyze_custom_metric", analyzer)
        if not callable(analyze):
            raise ArgumentTypeError(
                f"analyzer must be callable or have analyze_custom_metric(record), got {type(analyzer).__name__}."
            )
        with self._lock:
            self._analyzers[name] = analyze

    def drain(self, timeout: float) -> bool:
        """Wait until everything handed over so far is processed; False when the time is up first."""
        wanted = self._taken
        if threading.current_thread() is self._thread:
            return False
        deadline = time.monotonic() + timeout
        with self._idle:
            while self._done < wanted and self._thread.is_alive():
                self._wake.set()
                self._idle.wait(0.05)
                if time.monotonic() >= deadline:
                    break
        return self._done >= wanted

    def read_summary(self, use: Callable[[RunSummary], Any]) -> Any:
        """Call ``use`` on the summary while no record is being added."""
        with (
            self._lock if self._thread.is_alive() else contextlib.nullcontext()
        ):  # a fork may find the lock held for ever
            return use(self.summary)

    def close(self, timeout: float) -> None:
        """Process what is waiting, close the writers, and end the thread."""
        self._closing = True
        self._wake.set()
        if threading.current_thread() is self._thread:  # the model was collected while this thread ran
            return
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("gradflow: the worker did not finish within %.0f s; the last steps may be missing", timeout)

    def _run(self) -> None:
        use_one_thread()
        while True:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            closing = self._closing
            while self._queue:
                began = time.thread_time()
                self._process(self._queue.popleft())
                # The training thread asks for the GIL at each tensor operation and waits for it while Python code runs
                # here: without pauses a step would last as long as all that waits takes.
                if len(self._queue) < CAPACITY // 4:
                    self._wake.wait(min(time.thread_time() - began, MOST_PAUSE_SECONDS))
            self._keep()
            self._flush_when_idle()
            with self._idle:
                self._idle.notify_all()
            if closing and not self._queue:
                break
        if self._assembler.ranks is not None:
            self._assembler.ranks.close()
        self._writers.close()

    def _process(self, bundle: Bundle) -> None:
        try:
            record = self._record(bundle)
            with self._lock:
                issues = self._judge.check(record)
                record = replace(record, issues=issues)
                self.summary.add(record)
            for issue in issues:
                self._on_issue(issue)
            self._writers.write(record)
        except Exception as error:
            self._error = self._error or error
            if self._error is error:
                _log.warning("gradflow: step %d could not be recorded; training goes on", bundle.step, exc_info=True)
        finally:
            self._done += 1
            self._unflushed, self._last_record = True, time.monotonic()

    def _record(self, bundle: Bundle) -> StepRecord:
        readings, histograms = self._assembler.assemble(bundle)
        readings.extend(Reading.run(metric, value) for metric, value in self._device().items())
        if self.dropped:
            readings.append(Reading.run("runtime.dropped", float(self.dropped)))
        record = StepRecord(bundle.step, bundle.wall_time, tuple(readings), tuple(histograms), rank=self._rank)
        custom = [reading for name in tuple(self._analyzers) for reading in self._analyze(name, record)]
        return replace(record, readings=record.readings + tuple(custom)) if custom else record

    @property
    def _rank(self) -> int:
        return 0 if self.summary.info is None else self.summary.info.rank

    def _analyze(self, name: str, record: StepRecord) -> list[Reading]:
        try:
            values = self._analyzers[name](record) or {}
            return [Reading.run(f"custom.{name}.{key}", float(value)) for key, value in values.items()]
        except Exception:
            _log.warning("gradflow: analyzer %r failed and is set aside", name, exc_info=True)
            with self._lock:
                self._analyzers.pop(name, None)
            return []

    def _keep(self) -> None:
        if time.monotonic() - self._kept >= KEEP_SECONDS:
            self._kept = time.monotonic()
            self._writers.keep()

    def _flush_when_idle(self) -> None:
        if self._unflushed and time.monotonic() - self._last_record >= IDLE_SECONDS:
            self._unflushed = False
            self._writers.flush()
