"""A worker that lags costs waiting, never a record that was read; what is lost all the same is said first."""

import threading
import time

import pytest

from gradflow_export import Exporter, JsonlWriter, MemoryWriter
from gradflow_export.cli.report import summarise
from gradflow_export.engine import backlog, exporter_report
from gradflow_export.engine.transfer import Bundle
from gradflow_export.records.step_record import Gap, Reading, RunInfo, StepRecord
from gradflow_export.storage.jsonl import LineEncoder
from gradflow_export.storage.reader import read_run
from tensorboard_plugin_gradflow import standalone
from tensorboard_plugin_gradflow.data import list_runs, run_meta


class Slow:
    """A writer that takes a while for each record, or holds the worker until it is let go."""

    name = "slow"

    def __init__(self, seconds=None):
        self.seconds = seconds
        self.go, self.entered = threading.Event(), threading.Event()
        self.steps, self.closed = [], False

    def open(self, run):
        """Begin."""

    def write(self, record):
        """Wait."""
        self.entered.set()
        if self.seconds is None:
            assert self.go.wait(100)
        else:
            time.sleep(self.seconds)
        self.steps.append(record.step)

    def flush(self):
        """Do nothing."""

    def close(self):
        """Finish."""
        self.closed = True


@pytest.fixture
def hurried(monkeypatch):
    """Let training wait for a moment only."""
    for name in ("ROOM_SECONDS", "JUDGE_SECONDS", "WRITER_SECONDS"):
        monkeypatch.setattr(backlog, name, 0.06)


@pytest.mark.parametrize("capacity", [4, 1024])
def test_a_slow_writer_costs_waiting_and_no_record(loop, monkeypatch, capacity):
    """However little may wait: every step is judged and written, and the waiting is counted where there was any."""
    monkeypatch.setattr(backlog, "CAPACITY", capacity)
    slow = Slow(0.002)
    exporter = Exporter(loop.model, backends=[slow]).watch()
    loop.train(120)
    exporter.close()
    assert loop.trained_as_unwatched(120)
    assert slow.steps == list(range(1, 121))
    summary = exporter.summary()
    assert (summary["dropped"], summary["waiting"]) == (0, 0)
    assert "lost" not in summary["verdict"]
    if capacity == 4:
        assert summary["waited"]["steps"] > 0
        assert summary["waited"]["seconds"] > 0


def test_what_waits_is_bounded_and_nothing_that_was_read_is_dropped(loop, monkeypatch, hurried):
    """Behind a writer that stands still training waits once, then reads nothing until there is room, and says so."""
    monkeypatch.setattr(backlog, "CAPACITY", 8)
    slow, memory = Slow(), MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory, slow]).watch()
    loop.train(2)
    assert slow.entered.wait(100)
    loop.train(30)
    assert len(exporter._worker.backlog) <= 8
    assert exporter._worker.backlog.delayed <= 2
    slow.go.set()
    exporter.summary()
    loop.train(3)
    exporter.close()
    summary, worker = exporter.summary(), exporter._worker
    assert summary["dropped"] >= 30 - 10
    assert len(memory.records) == worker.backlog.taken == 35 - summary["dropped"]
    assert slow.steps == [record.step for record in memory.records]
    assert memory.records[-1].value("runtime.dropped") == summary["dropped"]
    assert memory.records[-1].value("runtime.waited") > 0
    lost = f"{summary['dropped']} steps were lost (writers too slow)"
    assert summary["lost"]["dropped"] == {"writers too slow": summary["dropped"]}
    assert f"no open problem in the {len(memory.records)} records; {lost}" in summary["verdict"]
    assert lost in exporter.report().splitlines()[1]


def test_records_are_not_kept_back_however_many_steps_wait(loop, monkeypatch):
    """A worker that is behind judges first, but writes what has become old: the end of the process costs little."""
    monkeypatch.setattr(backlog, "DEFERRED_SECONDS", 0.0)
    held, waiting, memory = threading.Event(), [], MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory], budget=None)
    exporter.register_analyzer("held", lambda _record: held.wait(100) and None)
    write = memory.write
    monkeypatch.setattr(memory, "write", lambda r: (waiting.append(len(exporter._worker.backlog.queue)), write(r)))
    exporter.watch()
    loop.train(25)
    held.set()
    exporter.close()
    assert [record.step for record in memory.records] == list(range(1, 26))
    assert waiting[0] > backlog.FEW


def test_what_waiting_steps_took_is_no_leak_of_the_loop(loop, monkeypatch):
    """The most that steps took while they waited counts as kept, for the allocator seldom gives it back."""
    monkeypatch.setattr(Bundle, "nbytes", 2**20)
    slow = Slow()
    exporter = Exporter(loop.model, backends=[memory := MemoryWriter(), slow]).watch()
    loop.train(2)
    assert slow.entered.wait(100)
    loop.train(20)
    slow.go.set()
    exporter.summary()
    loop.train(3)
    exporter.close()
    kept = [record.value("runtime.kept") for record in memory.records]
    assert 20 <= kept[-1] <= 22
    assert kept[-1] >= max(kept) - 0.1


def test_close_goes_on_as_long_as_something_is_written(loop, monkeypatch):
    """Closing takes many times as long as it waits for a sign of life, and loses nothing."""
    monkeypatch.setattr(exporter_report, "CLOSE_SECONDS", 1.0)
    slow = Slow(0.06)
    exporter = Exporter(loop.model, backends=[slow]).watch()
    loop.train(30)
    exporter.close()
    assert slow.steps == list(range(1, 31))
    assert slow.closed
    assert exporter.summary()["dropped"] == 0


def test_a_worker_that_stands_still_is_given_up_and_said(loop, monkeypatch, hurried, said):
    """One line and the verdict say how many steps were lost; what is written after all is not counted as lost."""
    monkeypatch.setattr(exporter_report, "CLOSE_SECONDS", 0.3)
    slow = Slow()
    exporter = Exporter(loop.model, backends=[slow]).watch()
    loop.train(10)
    exporter.close()
    (line,) = said()
    assert "no progress for 0 s inside a writer and is given up; 10 steps were lost" in line
    assert exporter.summary()["lost"]["dropped"] == {"closed before they were written": 10}
    assert "10 steps were lost (closed before they were written)" in exporter.report().splitlines()[1]
    slow.go.set()
    exporter._worker._thread.join(100)
    assert slow.steps == list(range(1, 11))
    assert exporter.summary()["dropped"] == 0


def test_a_step_that_cannot_be_processed_is_lost_and_said(loop, monkeypatch, said):
    """Its record is missing, the others are there, and each later one tells of it."""
    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory]).watch()
    check = exporter._judge.check

    def broken(record, told):
        if record.step == 3:
            raise ZeroDivisionError("no such thing")
        return check(record, told)

    monkeypatch.setattr(exporter._judge, "check", broken)
    loop.train(5)
    exporter.close()
    assert [record.step for record in memory.records] == [1, 2, 4, 5]
    assert [record.value("runtime.dropped") for record in memory.records] == [None, None, 1.0, 1.0]
    assert "1 step was lost (could not be processed)" in exporter.summary()["verdict"]
    assert len(said()) == 1


def test_what_a_writer_did_not_take_is_said(loop, said):
    """A writer that fails for good lacks every later step, while the others have them."""

    class Full(Slow):
        name = "full"

        def write(self, record):
            if record.step > 6:
                raise OSError(28, "No space left on device")

    memory = MemoryWriter()
    exporter = Exporter(loop.model, backends=[memory, Full(0)]).watch()
    loop.train(10)
    exporter.close()
    assert len(memory.records) == 10
    assert exporter.summary()["lost"]["unwritten"] == {"full": 4}
    assert "10 records; 4 steps were not written by full" in exporter.summary()["verdict"]


def test_the_report_of_a_folder_tells_what_was_lost(loop, tmp_path, monkeypatch):
    """What the records tell of steps without a record stands in the first line of ``gradflow report`` too."""
    exporter = Exporter(loop.model, backends=["jsonl"], logdir=tmp_path).watch()
    check = exporter._judge.check

    def broken(record, told):
        if record.step in {3, 4}:
            raise ZeroDivisionError("no such thing")
        return check(record, told)

    monkeypatch.setattr(exporter._judge, "check", broken)
    loop.train(8)
    exporter.close()
    assert (
        summarise(read_run(tmp_path)).verdict
        == "healthy as far as recorded: no open problem in the 6 records; 2 steps were lost (without a record)"
    )


@pytest.mark.parametrize("first", [1, 7])
@pytest.mark.parametrize("backends", [["jsonl"], ["tensorboard"], ["jsonl", "tensorboard"]])
def test_what_is_lost_after_the_last_record_stands_in_the_files(loop, tmp_path, monkeypatch, backends, first):
    """No record tells of it, so that the end of the files does: once, however many files there are."""
    exporter = Exporter(loop.model, backends=backends, logdir=tmp_path).watch()
    check = exporter._judge.check

    def broken(record, told):
        if record.step >= first:
            raise ZeroDivisionError("no such thing")
        return check(record, told)

    monkeypatch.setattr(exporter._judge, "check", broken)
    loop.train(8)
    exporter.close()
    lost = f"{9 - first} steps were lost"
    assert f"{lost} (could not be processed)" in exporter.summary()["verdict"]
    assert f"{lost} (not written)" in summarise(read_run(tmp_path)).verdict
    if "tensorboard" in backends:
        source = standalone.open_source(tmp_path)
        (run,) = list_runs(source)["runs"]
        assert f"{lost} (not written)" in run_meta(source, run["run"])["said"]["detail"]


def test_a_gap_in_the_files_stands_in_the_first_line_too(tmp_path):
    """What a writer could not write, and said so in its file, is lost to whoever reads it."""
    info = RunInfo(session="1732143600123-0", started=1732143600.123)
    writer = JsonlWriter(tmp_path)
    writer.open(info)
    writer.write(StepRecord(1, 1.0, (Reading.run("loss", 1.0),)))
    writer.close()
    with writer.path.open("ab") as file:
        file.write(LineEncoder(info.session).gap(Gap(2, 5, 4, "No space left on device")))
    verdict = summarise(read_run(tmp_path)).verdict
    assert verdict == "healthy as far as recorded: no open problem in the 1 record; 4 steps were lost (not written)"


def test_a_disk_that_was_full_from_the_start_is_said(tmp_path):
    """A session without any record says what is missing all the same."""
    info = RunInfo(session="1732143600123-0", started=1732143600.123)
    writer = JsonlWriter(tmp_path)
    writer.open(info)
    writer.close()
    with writer.path.open("ab") as file:
        file.write(LineEncoder(info.session).gap(Gap(1, 5, 5, "No space left on device")))
    assert summarise(read_run(tmp_path)).verdict == "no step recorded yet: 5 steps were lost (not written)"


def test_steps_left_out_on_purpose_are_counted_apart(loop):
    """``every`` and ``pause()`` skip steps, which are no losses."""
    exporter = Exporter(loop.model, backends=[MemoryWriter()], every=3).watch()
    loop.train(7)
    exporter.pause()
    loop.train(5)
    exporter.close()
    summary = exporter.summary()
    assert summary["steps"]["count"] == 3
    assert summary["skipped"] == {"every": 4, "budget": 0, "paused": 5}
    assert summary["dropped"] == 0
    assert "lost" not in summary["verdict"]


def test_a_child_of_a_fork_reads_nothing_more(loop):
    """In a process without a worker no step is read or waited for, so that none is kept."""
    exporter = Exporter(loop.model, backends=[MemoryWriter()]).watch()
    loop.train(3)
    exporter._worker.close(30)  # what a fork does to the thread
    loop.train(3)
    assert len(exporter._worker.backlog) == 0
    assert exporter._worker.lost_steps.dropped["the worker had ended"] >= 2
    exporter.close()
