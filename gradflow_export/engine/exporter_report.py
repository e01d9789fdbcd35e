"""What an exporter tells: issues, summary, report, files."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradflow_export.config import Settings
from gradflow_export.engine.external_issues import ToldJudge, reported
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.notebook import Panel, to_frame
from gradflow_export.engine.training_loop import TrainingLoop
from gradflow_export.engine.worker import Worker
from gradflow_export.errors import ArgumentError
from gradflow_export.extensions import active
from gradflow_export.hooks.block_tree import BlockTree
from gradflow_export.records.lost import INTERRUPTED
from gradflow_export.records.step_record import Issue, IssueType, Note, RunInfo, Severity, StepRecord
from gradflow_export.report.card import card
from gradflow_export.report.summary import write_json
from gradflow_export.storage.table import write_table
from gradflow_export.writers import JsonlWriter, MemoryWriter, TensorBoardWriter
from gradflow_export.writers.base import Writer
from gradflow_export.writers.console import ConsoleWriter

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("gradflow_export")

CLOSE_SECONDS = 10.0
UNWATCHED = "watch() was never called: nothing was read"
MARKS = ("mark", "checkpoint")
MOST_TEXT = 1000
MOST_ERROR = 200


def say_unwatched(wanted: bool) -> None:
    """Report that ``watch()`` of an exporter was never called, unless nothing is printed."""
    if wanted:
        _log.warning("gradflow: %s; call exporter.watch() before the loop.", UNWATCHED)


def ending(step: int) -> str:
    """Return which exception ends a run, and at which step; empty if none does, or one that only asks to stop.

    It is under way where ``with`` or ``finally`` closes, and was reported before a program that it ended closes; a
    ``SystemExit`` never is.
    """
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a notebook goes on after one
    error = sys.exc_info()[1] or last
    if isinstance(error, KeyboardInterrupt):
        return f"{INTERRUPTED} at step {step}"
    early = isinstance(error, SystemExit) and bool(error.code)  # else it is how a program ends
    if not (early or isinstance(error, Exception)) or isinstance(error, (StopIteration, StopAsyncIteration)):
        return ""
    text = ""
    with contextlib.suppress(Exception):  # its text is written by anyone
        text = " ".join(str(error).split())[:MOST_ERROR]
    return f"at step {step} ({type(error).__name__}{': ' if text else ''}{text})"


def _tree(run: RunInfo | None, loop: TrainingLoop | None) -> BlockTree:
    """Return the blocks of a run, none before it begins."""
    name = "a model" if run is None else run.model
    return BlockTree(
        name, *(((), ()) if loop is None else (loop.instruments.blocks.in_order()[0], loop.instruments.blocks.choices))
    )


class Recording:
    """Stops and resumes the recording of :class:`~gradflow_export.exporter.Exporter`."""

    _loop: TrainingLoop | None
    _worker: Worker
    _writers: tuple[Writer, ...]
    _closed: bool
    _paused = _late = False

    def pause(self) -> None:
        """Stop recording, or do not begin with :meth:`~gradflow_export.exporter.Exporter.watch`; steps are counted."""
        self._pause(on=True)

    def resume(self) -> None:
        """Record again after :meth:`pause`."""
        self._pause(on=False)

    @property
    def current_step(self) -> int:
        """The current step, counted from 1; 0 before ``watch()``."""
        return 0 if self._loop is None else self._loop.steps + self._loop.quiet.steps.passed + 1

    def _pause(self, *, on: bool) -> None:
        self._paused = on
        if self._loop is not None:
            self._loop.quiet.pause(on=on)

    def _takes(self, what: str) -> bool:
        """Whether something can be recorded; that it cannot any more is reported once."""
        if self._closed and not self._late:
            self._late = True
            _log.warning("gradflow: this exporter is closed: %s() and what else is passed to it is not recorded.", what)
        return self._loop is not None and not self._closed

    def _end(self) -> None:
        """End the worker; the verdict says if an exception ends the run, or if recording was paused for all of it."""
        self._worker.ended_by = ending(self.current_step)
        count = 0 if self._loop is None else self._loop.pace.skipped["paused"]
        for writer in self._writers if count else ():
            if isinstance(writer, ConsoleWriter):
                writer.unseen = f": recording was paused for all {count} steps; call exporter.resume()"
        self._worker.close(CLOSE_SECONDS)


class Reports(Recording):
    """Results of an :class:`~gradflow_export.exporter.Exporter`; each method waits for the worker to catch up."""

    logdir: Path
    settings: Settings
    _judge: ToldJudge
    _guard: Guard

    _unwatched: weakref.finalize[Any, Any]
    _panel: Panel | None = None

    @property
    def blocks(self) -> BlockTree:
        """Names of the blocks whose gains are measured; prints as a tree of the model with the reasons."""
        return _tree(self._worker.summary.info, self._loop)

    @property
    def issues(self) -> tuple[Issue, ...]:
        """All issues so far: open ones first, most severe first, causes before what they explain; at most 1000 healed.

        It waits for the worker to catch up.
        """
        self._catch_up()
        found: tuple[Issue, ...] = self._worker.read_summary(lambda summary: summary.issues)
        return found

    @property
    def ignored(self) -> tuple[Issue, ...]:
        """Issues suppressed by ``ignore``, the newest 1000; they raise no alert.

        It waits for the worker to catch up.
        """
        self._catch_up()
        found: tuple[Issue, ...] = self._worker.read_summary(lambda summary: summary.ignored)
        return found

    def summary(self) -> dict[str, Any]:
        """Return verdict, step counts, headline statistics and issues; JSON-ready, NaN and Inf as strings.

        ``lost`` counts the lost steps by reason; ``skipped`` those skipped by ``every``, a budget or :meth:`pause`, and
        after a resume those of ``earlier`` sessions, whose reason is not stored; ``waiting`` those that are not written
        yet; ``waited`` is how long training waited for the worker, in seconds.
        """
        self._catch_up()
        worker, pace = self._worker, None if self._loop is None else self._loop.pace
        out, passed = worker.read_summary(lambda summary: (summary.as_dict(), summary.passed))
        return {
            "logdir": str(self.logdir), **out,
            "loss_seen": worker.read_summary(lambda summary: "loss" in summary.headline),
            "dropped": sum(worker.lost_steps.dropped.values()),
            "waiting": worker.backlog.taken - worker.backlog.done,
            "skipped": {} if pace is None else pace.skipped | ({"earlier": passed} if passed else {}),
            "waited": {"seconds": worker.backlog.waited, "steps": worker.backlog.delayed},
            "late_requests": 0 if pace is None else pace.late,
            "set_aside": sorted([*self._guard.failures, *worker.outlets.failed]),
        }  # fmt: skip

    def report(self) -> str:
        """Return the summary as text."""
        self._catch_up()
        text: str = self._worker.read_summary(lambda summary: summary.as_text(str(self.logdir)))
        seen = self._worker.read_summary(lambda summary: summary.loss is not None or "loss" in summary.headline)
        if self._loop is not None and not seen and not self._loop.pace.skipped["paused"]:
            text += "\n  note   no loss was recorded: pass the criterion to watch(), or call observe(loss=loss)"
        skipped = 0 if self._loop is None else self._loop.pace.skipped["budget"]
        if skipped:
            text += f"\n  note   {skipped} steps were left out to keep to the budget; budget=None records every step"
        added = [str(extension) for extension in active() if not extension.error]
        text += f"\n  note   extensions: {', '.join(added)}" if added else ""
        aside = self._worker.outlets.failed
        return text + (f"\n  note   disabled after an error: {', '.join(aside)}" if aside else "")

    def print_report(self) -> None:
        """Print :meth:`report`; letters that the terminal's encoding lacks are escaped."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(self.report().encode(encoding, "backslashreplace").decode(encoding))

    def __repr__(self) -> str:
        """Return model, place, step and verdict as of this moment, without waiting."""
        seen: str = self._worker.read_summary(lambda summary: f"step {summary.last}, {summary.verdict}")
        return f"<Exporter of {self.blocks.model} in {self.logdir}: {seen}>"

    def _repr_html_(self) -> str:
        self._catch_up()
        place = str(self.logdir) if self._in_files() else ""
        command = f"gradflow report {place}, or exporter.show()" if place else "exporter.print_report()"
        return str(self._worker.read_summary(lambda summary: card(summary, place, command)))

    def show(self, height: int = 800) -> Panel:
        """Return the panel of this run, which a notebook displays in the cell; it updates during training.

        It is served on the loopback address of this machine. If the notebook's kernel runs on another machine, use
        ``%load_ext tensorboard`` and ``%tensorboard --logdir runs``.

        Args:
            height: Height of the frame, in pixels.

        Raises:
            ArgumentError: No writer writes files.
            StorageError: The server does not start.
        """
        if not self._in_files():
            raise ArgumentError("show expects a writer of files, got none; add 'tensorboard' to backends.")
        self._catch_up()
        for writer in self._worker.outlets.working:
            if isinstance(writer, TensorBoardWriter):
                writer.flush()
        if self._panel is None or not self._panel.alive:
            self._panel = Panel(self.logdir, height)
        self._panel.height = height
        return self._panel

    def to_pandas(self, metric: str) -> Any:
        """Return one metric as a pandas DataFrame: a row for each step that has it, a column for each layer.

        A missing value is NaN; :meth:`save` distinguishes the two.

        Args:
            metric: Name of a metric, such as ``"loss"`` or ``"parameter.gradient_norm"``.

        Raises:
            ArgumentError: No record has it, or no writer keeps records.
            MissingPackageError: pandas is not installed.
        """
        self._catch_up()
        return to_frame(self._records(), metric)

    def _in_files(self) -> bool:
        return any(isinstance(writer, TensorBoardWriter) for writer in self._writers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the summary or all recorded values to a file.

        Args:
            path: ``.json``: :meth:`summary`. ``.csv`` or ``.parquet``: every value of every record, in the columns
                ``step``, ``wall_time``, ``metric``, ``site`` and ``value``, as :mod:`gradflow_export.storage.table`
                describes; they are read back from what a writer keeps.

        Raises:
            ArgumentError: The path has another ending, or no writer keeps records.
            MissingPackageError: It ends in ``.parquet`` and pyarrow is not installed.
            StorageError: The file cannot be written.
        """
        suffix = os.path.splitext(path)[1]  # noqa: PTH122 - of a string too
        if suffix not in {".json", ".csv", ".parquet"}:
            raise ArgumentError(f"save expects a path ending in .json, .csv or .parquet, got {str(path)!r}.")
        if suffix == ".json":
            write_json(path, self.summary())
            return
        self._catch_up()
        write_table(path, self._records())

    def register_analyzer(self, name: str, analyzer: Any) -> None:
        """Call an analyzer for every record; its numbers become metrics ``custom.<name>.<key>``.

        Args:
            name: Name of the analyzer, a short word.
            analyzer: A callable, or an object with ``analyze_custom_metric``, that takes a
                :class:`~gradflow_export.records.step_record.StepRecord` and returns ``{key: number}`` or ``None``. It
                is called on the worker thread.

        Raises:
            ArgumentTypeError: ``analyzer`` is neither, or the name is no text.
        """
        self._worker.analyzers.add(name, analyzer)

    def add_issue(self, issue: Issue) -> None:
        """Report an issue found by your own code with the next record, like an issue of a rule.

        It is dropped if a rule already reports the same type and layer, and if ``alerts_enabled`` is False.

        Args:
            issue: Its step is set to the current step. Once it is over, pass it again with any ``healed_step``, which
                is also set to the current step.
        """
        wrong = _wrong_with(issue)
        if wrong:
            _log.warning("gradflow: add_issue() expects %s", wrong)
        elif self._takes("add_issue") and self._loop is not None and self.settings.alerts_enabled:
            # The first step of several may be complete only as the next one begins, whose record takes the issue then.
            self._loop.told.append(issue if self._loop.recorded else reported(issue, self.current_step))

    def mark(self, text: str, *, kind: str = "mark") -> None:
        """Add a note to the current step, which is shown on every time axis of the panel.

        Args:
            text: A few words, such as ``"longer sequences"``; at most 1000 characters are kept.
            kind: ``"mark"``, or ``"checkpoint"`` if the model was saved.
        """
        if not isinstance(text, str) or kind not in MARKS:
            _log.warning(
                "gradflow: mark() expects a text and a kind of %s, got %s and %r, and leaves it out; pass a string.",
                MARKS, type(text).__name__, kind,
            )  # fmt: skip
        elif self._takes("mark") and self._loop is not None:
            self._loop.told.append(Note(kind, text[:MOST_TEXT], self.current_step))

    def _verdict(self) -> str:
        """Return the verdict on what was recorded so far, without waiting; for the worker's own thread."""
        summary = self._worker.summary
        summary.lost_steps = self._worker.lost_steps
        return summary.verdict

    def _records(self) -> Iterable[StepRecord]:
        """Return the records that a writer keeps, file or memory; nothing is held here."""
        for writer in self._worker.outlets.all:
            if isinstance(writer, MemoryWriter):
                return writer.records
            if isinstance(writer, (TensorBoardWriter, JsonlWriter)):
                from gradflow_export.storage.reader import read_run  # noqa: PLC0415 - memory that most runs have no use for

                writer.flush()
                info = self._worker.summary.info
                session = None if info is None else info.session
                return read_run(writer.path.parent, session=session).records if writer.path is not None else ()
        names = ", ".join(writer.name for writer in self._writers) or "none"
        raise ArgumentError(
            f"save expects a writer that keeps records, got {names}; add 'tensorboard', 'jsonl' or 'memory' to "
            "backends."
        )

    def __copy__(self) -> Self:
        """Return the exporter itself: a copy of what holds it is watched by nobody, and this one goes on."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the exporter itself, as :meth:`__copy__` does."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type[None], tuple[()]]:
        """Be saved as ``None``: it holds a thread, open files and hooks, and no checkpoint must fail by it."""
        _log.warning(
            "gradflow: what is pickled holds an Exporter, which is saved as None; after loading make a new one, "
            "Exporter(model).watch(). What it found: exporter.save('summary.json')."
        )
        return type(None), ()

    def _catch_up(self) -> None:
        self._unwatched()
        if self._loop is not None and not self._closed:
            self._guard.part("catching up")(self._loop.finish)()
            self._worker.drain(CLOSE_SECONDS)


def _wrong_with(issue: object) -> str:
    """Return what was expected of an issue and came instead, empty where it is as it should be."""
    if not isinstance(issue, Issue):
        return f"an Issue, got {type(issue).__name__}, which is left out; pass Issue(...)."
    if isinstance(issue.issue_type, IssueType) and isinstance(issue.severity, Severity):
        return ""
    got = f"{issue.issue_type!r} and {issue.severity!r}"
    return f"an IssueType and a Severity, got {got}; the issue is left out; pass IssueType.DEAD and Severity.HIGH."
