"""The worker thread: assembles records, asks the rules, feeds the writers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from gradflow_export.engine.assemble import Assembler, Ranks
from gradflow_export.engine.backlog import DEFERRED, Backlog
from gradflow_export.engine.external_issues import ToldJudge
from gradflow_export.engine.sessions.forked import begun_here, call_at_exit, writers_here
from gradflow_export.engine.step_timer import Spent
from gradflow_export.engine.transfer import Bundle
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.metrics.arrays.algebra import use_one_thread
from gradflow_export.records.lost import DISABLED, DROPPED, LostCount, LostSteps
from gradflow_export.records.step_record import Issue, Note, Reading, RunInfo, StepRecord
from gradflow_export.report.summary import RunSummary
from gradflow_export.writers.base import Writer
from gradflow_export.writers.together import WriterSet

_log = logging.getLogger("gradflow_export")

POLL_SECONDS = 0.1
BURST_SECONDS, MOST_PAUSE_SECONDS = 0.001, 0.02
"""After so much work there is a pause, which lasts as long as the work did but for at most so long. The training thread
asks for the GIL at each tensor operation and waits for it while Python code runs here: without pauses a step would last
as long as all that waits takes."""
IDLE_SECONDS = 5.0
"""After this long without a step, writers are asked to make what they hold readable."""
CHILD_SECONDS = 10.0
"""How long the end of a forked child may wait for its last steps to be written."""

KEEP_SECONDS = 0.6
"""Between two times that writers are asked to see to it that what they hold outlives the process."""

ENDED = "the worker had ended"

Analyze = Callable[[StepRecord], Mapping[str, float] | None]


class Analyzers:
    """What users have registered to be asked about every record; one that fails is disabled."""

    def __init__(self) -> None:
        self._all: dict[str, Analyze] = {}

    def add(self, name: str, analyzer: Any) -> None:
        """Ask an analyzer about every record from now on.

        Raises:
            ArgumentTypeError: It is neither callable nor has ``analyze_custom_metric``, or the name is no text.
        """
        if not isinstance(name, str) or not name.strip():
            raise ArgumentTypeError(f"name must be a short word, got {name!r}; for example 'accuracy'.")
        analyze = getattr(analyzer, "analyze_custom_metric", analyzer)
        if not callable(analyze):
            raise ArgumentTypeError(
                f"analyzer must be callable or have analyze_custom_metric(record), got {type(analyzer).__name__}."
            )
        self._all[name] = analyze

    def ask(self, record: StepRecord, told: list[Issue | Note]) -> list[Reading]:
        """Return what they say of a record; add a note on each that fails."""
        return [reading for name in tuple(self._all) for reading in self._ask(name, record, told)]

    def _ask(self, name: str, record: StepRecord, told: list[Issue | Note]) -> list[Reading]:
        try:
            values = self._all[name](record) or {}
            return [Reading.run(f"custom.{name}.{key}", float(value)) for key, value in values.items()]
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            _log.warning(
                "gradflow: analyzer %r failed at step %d and is disabled: %s: %s (%s, line %s)",
                name, record.step, type(error).__name__, error, last.filename, last.lineno,
            )  # fmt: skip
            self._all.pop(name, None)
            told.append(Note(DISABLED, f"analyzer {name}", record.step))
            return []


class Worker:
    """Takes bundles from the training thread and turns them into records, issues and files.

    The training thread appends to a deque. This one looks every ``POLL_SECONDS``, or sooner when many steps wait, and
    takes all that is there, with pauses unless it is behind. It judges a step before it writes it, and judges others
    first when many wait, so that a slow writer delays no verdict. Nothing that was read is dropped: when there is no
    room the training thread waits, see :class:`~gradflow_export.engine.backlog.Backlog`. A writer that raises is
    reported once and disabled.

    Args:
        info: The run.
        judge: Asks the rules.
        writers: Where records go.
        device: Reads the memory of the device, given the bytes that waiting steps took.
        on_issue: Called with each issue, and with the step of its record.
        strict: Keep the first error of a writer.
        synchronous: Have :meth:`put` return when the step is judged and written.
    """

    def __init__(
        self,
        info: RunInfo,
        judge: ToldJudge,
        writers: Sequence[Writer],
        *,
        device: Callable[[float], Mapping[str, float]],
        on_issue: Callable[[Issue, int], None],
        strict: bool = False,
        synchronous: bool = False,
    ) -> None:
        self.analyzers = Analyzers()
        self._judge = judge
        self._device, self._on_issue, self._strict = device, on_issue, strict
        self._synchronous = synchronous
        self._begin(info, writers)

    def _begin(self, info: RunInfo | None, writers: Sequence[Writer]) -> None:
        """Take the state of a worker that has done nothing, in this process."""
        self._pid = os.getpid()
        self.summary, self.outlets, self.ended_by = RunSummary(info), WriterSet(writers), ""
        self._error: BaseException | None = None
        self._assembler, self._lost = Assembler(), LostCount()
        self._lock, self.spent = threading.Lock(), Spent()
        self._closing = self._gave_up = self._finished = self._unflushed = False
        self._kept = self._last_record = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gradflow-worker", daemon=True)
        self.backlog = Backlog(self._thread.is_alive)
        self.backlog.serve(writers)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child that has not trained yet: all of it is the parent's."""
        return os.getpid() != self._pid

    @property
    def error(self) -> BaseException | None:
        """What a step first failed with, or where errors are let through a writer; ``None`` when nothing failed."""
        return self._error or (self.outlets.error if self._strict else None)

    def describe(self, blocks: tuple[str, ...], intervals: Mapping[str, int]) -> None:
        """Complete the run's description before :meth:`start`."""
        info = self.summary.info
        if info is not None:
            settings = {**info.settings, "intervals": dict(intervals)}
            self.summary.info = replace(info, blocks=blocks, settings=settings)

    def start(self) -> None:
        """Open the writers and start the thread."""
        self.outlets.open(self.summary.info)
        self._thread.start()

    def join(self, ranks: Ranks) -> None:
        """Send every step to rank 0 from now on, or on rank 0 join what the others send; before :meth:`start`."""
        self._assembler.ranks = ranks

    @property
    def lost_steps(self) -> LostSteps:
        """What was lost so far."""
        early = {"closed before they were written": self.backlog.taken - self.backlog.done} if self._gave_up else {}
        unwritten = {name: gap.steps for name, gap in self.outlets.lost.items()}
        return LostSteps({**self._lost.reasons, **early}, unwritten, error=self.ended_by)

    def has_room(self, step: int) -> bool:
        """Return whether a step may be read; one that may not is counted as lost."""
        if self.inherited:  # the step begins a session of this process
            return True
        if self.backlog.full or not self._thread.is_alive():
            self._lost.add(step, "writers too slow" if self._thread.is_alive() else ENDED)
            return False
        return True

    def wait_past(self, step: int) -> None:
        """Wait, for a bounded time, until every record up to a step is judged."""
        if threading.current_thread() is not self._thread and not self.inherited:
            self.backlog.wait_past(step)

    def put(self, bundle: Bundle) -> None:
        """Hand over one step; waits where there is no room, and in synchronous mode until the step is done."""
        if self.inherited:
            self._begin_in_child()
        if self._closing or not self._thread.is_alive():
            self._lost.add(bundle.step, ENDED)
        elif threading.current_thread() is self._thread:  # an analyzer that asks for the report ends the open step
            self.backlog.queue.append(bundle)
            self.backlog.taken += 1
        else:
            self.backlog.put(bundle, wait=self._synchronous)

    def _begin_in_child(self) -> None:
        """Go on in a forked child, with a session of its own: the thread did not come along."""
        spread = self._assembler.ranks is not None  # the parent is the one that the other ranks know
        self._begin(begun_here(self.summary.info), () if spread else writers_here(self.outlets.working))
        self._judge.begin_again()
        call_at_exit(partial(self.close, CHILD_SECONDS))
        self.start()

    def drain(self, timeout: float) -> bool:
        """Wait until all that was handed over so far is written; False when there was no progress for ``timeout`` s."""
        backlog, wanted = self.backlog, self.backlog.taken
        return threading.current_thread() is not self._thread and backlog.wait(lambda: backlog.done >= wanted, timeout)

    def read_summary(self, use: Callable[[RunSummary], Any]) -> Any:
        """Call ``use`` on the summary while no record is being added."""
        # A fork may find the lock held for ever.
        with self._lock if self._thread.is_alive() else contextlib.nullcontext():
            self.summary.lost_steps = self.lost_steps
            return use(self.summary)

    def close(self, timeout: float) -> None:
        """Process what is waiting, close the writers, and end the thread.

        Args:
            timeout: Seconds without any progress after which what is left is given up.
        """
        self._closing = True
        if threading.current_thread() is self._thread:  # the model was collected while this thread ran
            return
        self.backlog.wait(lambda: self._finished, timeout)
        if self._finished:
            self._thread.join(timeout)
        else:
            self._gave_up = True
            _log.warning(
                "gradflow: the worker made no progress for %.0f s%s and is given up; %s",
                timeout,
                " inside a writer" if self.backlog.writing else "",
                self.lost_steps.phrase or "nothing was lost",
            )

    def _run(self) -> None:
        use_one_thread()
        backlog, kind, busy = self.backlog, None, 0.0
        while True:
            backlog.idle = True
            backlog.wake.wait(POLL_SECONDS)
            backlog.idle = False
            backlog.wake.clear()
            closing = self._closing
            while len(backlog):
                began = time.thread_time()
                kind = backlog.queue[0].kind if backlog.queue else kind
                if backlog.queue and len(backlog.judged) < DEFERRED:
                    self._judge_next()
                if backlog.ripe:
                    self._write_next()
                    self._keep()
                took = time.thread_time() - began
                self.spent.add(kind, took)
                busy += took
                if busy >= BURST_SECONDS and not backlog.awaited:
                    backlog.wake.wait(min(busy, MOST_PAUSE_SECONDS))
                    busy = 0.0
            self._keep()
            self._flush_when_idle()
            if closing and not len(backlog) and not self._conclude():
                break
        if self._assembler.ranks is not None:
            self._assembler.ranks.close()
        self.outlets.close(self.ended_by, self._lost.since(self.summary.last))
        self._finished = True
        backlog.move()

    def _conclude(self) -> bool:
        """Have the end of the run judged; return whether there is a last record to write."""
        with self._lock:
            self.backlog.judged.extend(() if self.ended_by else _last_record(self._judge, self.summary))
        return bool(self.backlog.judged)

    def _judge_next(self) -> None:
        """Turn the first step that waits into a record; it stays the first until whatever it asks for is known."""
        backlog = self.backlog
        bundle = backlog.queue[0]
        try:
            record = self._record(bundle)
            with self._lock:
                issues = self._judge.check(record, [item for item in bundle.told if isinstance(item, Issue)])
                notes = (*filter(_is_note, bundle.told), *self._judge.take_notes())
                record = replace(record, issues=issues, notes=notes) if issues or notes else record
                self.summary.add(record)
            self._lost.note(record)
            for issue in issues:
                self._on_issue(issue, record.step)
            backlog.judged.append(record)
        except Exception as error:
            backlog.done += 1
            self._lost.add(bundle.step, "could not be processed")
            self._error = self._error or error
            if self._error is error:
                _log.warning("gradflow: step %d could not be recorded; training goes on", bundle.step, exc_info=True)
        finally:
            backlog.queue.popleft()
            self.spent.count(bundle.kind)
            backlog.move()

    def _write_next(self) -> None:
        """Write the first record that waits."""
        backlog = self.backlog
        record = backlog.judged[0]
        backlog.writing = True
        self.outlets.write(record)
        backlog.writing = False
        backlog.judged.popleft()
        backlog.done += 1
        self._unflushed, self._last_record = True, time.monotonic()
        backlog.move()

    def _record(self, bundle: Bundle) -> StepRecord:
        readings, histograms, evidence = self._assembler.assemble(bundle)
        readings.extend(Reading.run(metric, value) for metric, value in self._known(bundle).items())
        record = StepRecord(
            bundle.step, bundle.wall_time, tuple(readings), tuple(histograms), rank=self.summary.rank, evidence=evidence
        )
        custom = self.analyzers.ask(record, bundle.told)
        return replace(record, readings=record.readings + tuple(custom)) if custom else record

    def _known(self, bundle: Bundle) -> dict[str, float]:
        """Return the memory of the device, and what the worker knows of itself where there is something to tell."""
        dropped = sum(self.lost_steps.dropped.values()) if self._lost.reasons or self._gave_up else 0
        own = {DROPPED: float(dropped), "runtime.waited": self.backlog.waited}
        return {**self._device(self.backlog.weigh(bundle)), **{name: value for name, value in own.items() if value}}

    def _keep(self) -> None:
        if time.monotonic() - self._kept >= KEEP_SECONDS:
            self._kept = time.monotonic()
            self.outlets.keep()

    def _flush_when_idle(self) -> None:
        if self._unflushed and time.monotonic() - self._last_record >= IDLE_SECONDS:
            self._unflushed = False
            self.outlets.flush()


def _is_note(item: Issue | Note) -> TypeGuard[Note]:
    return isinstance(item, Note)


def _last_record(judge: ToldJudge, summary: RunSummary) -> Iterator[StepRecord]:
    """Yield the record of what the end of the run shows, where it shows anything."""
    issues = judge.end()
    if issues:
        record = StepRecord(summary.last + 1, time.time(), issues=issues, rank=summary.rank)
        summary.add(record)
        yield record
