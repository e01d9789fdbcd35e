"""Log files get over a disk that is full, broken or gone; what is lost is counted, told and marked in the file."""

import os
import shutil
import types
from dataclasses import replace

import pytest

from gradflow_export.records.step_record import Gap, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import JsonlWriter, TensorBoardWriter, journal, places

INFO = RunInfo("1700000000123-ab-0", 1700000000.5, "Net")
NAMES = ("jsonl", "tensorboard")


class Disk:
    """What the writers know of the system; a call that is named fails with the error, a write after half its bytes."""

    def __init__(self):
        self.error, self.calls, self.torn = None, ("write", "open"), False
        self.now = 1000.0

    def __getattr__(self, name):
        if self.error is None or name not in self.calls:
            return getattr(os, name)

        def fail(*args, **_kwargs):
            if name == "write" and self.torn and len(args[1]) > 60:
                return os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise OSError(self.error, os.strerror(self.error))

        return fail


@pytest.fixture
def disk(monkeypatch):
    """Put a disk that can be broken between the writers and the system, and a clock that passes when told."""
    faulty = Disk()
    monkeypatch.setattr(places, "os", faulty)
    monkeypatch.setattr(journal, "time", types.SimpleNamespace(monotonic=lambda: faulty.now))
    monkeypatch.setattr(journal.Journal.__init__, "__kwdefaults__", {"clock": lambda: faulty.now})
    return faulty


def opened(name, folder, disk):
    """Return an open writer that puts every record on disk at once."""
    writer = (
        JsonlWriter(folder) if name == "jsonl" else TensorBoardWriter(folder, flush_seconds=0, clock=lambda: disk.now)
    )
    writer.open(INFO)
    return writer


def record(step, sites=("a", "b")):
    """Return a record of which everything can be compared."""
    return StepRecord(step, 100.0 + step, (Reading.of("block.gain", sites, [step / 7] * len(sites)),))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS", "EDQUOT", "ESTALE"])
@pytest.mark.parametrize("calls", [("write", "open"), ("write", "open", "ftruncate")])
def test_nothing_is_lost_while_it_fits_into_memory(name, error, calls, disk, tmp_path, caplog):
    """A disk that fails for a while, in the middle of a write too, costs nothing, and two lines tell of it."""
    writer = opened(name, tmp_path, disk)
    for step in range(1, 40):
        if step == 10:
            disk.error, disk.calls, disk.torn = getattr(__import__("errno"), error), calls, True
        if step == 30:
            disk.error = None
        disk.now += 1
        writer.write(record(step, sites=(f"s{step // 5}", "b")))
    disk.now += 60
    writer.keep()
    writer.close()
    run = read_run(tmp_path)
    assert run.records == [record(step, sites=(f"s{step // 5}", "b")) for step in range(1, 40)]
    assert (run.gaps, writer.lost) == ((), None)
    # A torn line that cannot be cut off stays; behind it, each attempt may have left whole site tables.
    assert run.skipped <= 4 * (name == "jsonl" and "ftruncate" in calls)
    assert [("cannot write" in m, "writes again" in m) for m in caplog.messages] == [(True, False), (False, True)]


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_counted_told_and_marked(name, disk, tmp_path, monkeypatch, caplog):
    """Memory stays bounded; the gap has first and last step, number and reason, in the file and on the writer."""
    monkeypatch.setattr(journal, "HELD_BYTES", 3000)
    writer = opened(name, tmp_path, disk)
    for step in range(1, 301):
        disk.error = 28 if 100 <= step < 200 else None
        disk.now += 1
        writer.write(record(step))
        held = sum(len(data) for data, _ in writer._journal._held)
        assert held < 3000 + 4000
    writer.close()
    run = read_run(tmp_path)
    kept, lost = set(run.records.steps), writer.lost
    assert run.gaps == (lost,)
    assert lost.reason == "No space left on device"
    assert set(range(1, 301)) - kept == set(range(lost.first, lost.last + 1))
    assert lost.steps == 300 - len(kept)
    assert 100 < lost.first < lost.last < 240
    assert f"missing are steps {lost.first} to {lost.last}" in caplog.text
    assert all(each == record(each.step) for each in run.records)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["directory", "file", "cut"])
def test_a_removed_file_is_begun_anew(name, what, disk, tmp_path):
    """What is written afterwards reads back with the run's description; the gap says what went with the old file."""
    folder = tmp_path / "deep" / "run"
    writer = opened(name, folder, disk)
    for step in range(1, 21):
        if step == 11:
            if what == "cut":
                writer.path.write_bytes(b"")
            elif what == "file":
                writer.path.unlink()
            else:
                shutil.rmtree(tmp_path / "deep")
        disk.now += 1
        writer.write(record(step))
    writer.close()
    run = read_run(folder)
    assert (run.info, run.sessions) == (INFO, (INFO.session,))
    assert run.records == [record(step) for step in range(11, 21)]
    assert run.gaps == (Gap(1, 10, 10, "the file was removed"),) == (writer.lost,)


@pytest.mark.parametrize("name", NAMES)
def test_what_went_with_a_file_that_was_removed_after_the_last_record_is_counted(name, disk, tmp_path):
    """The end of the run begins no new file, and says what is in none."""
    folder = tmp_path / "run"
    writer = opened(name, folder, disk)
    for step in range(1, 11):
        disk.now += 1
        writer.write(record(step))
    writer.flush()
    shutil.rmtree(folder)
    writer.close()
    assert writer.lost == Gap(1, 10, 10, "the file was removed")
    assert not folder.exists()


SICK = Issue(IssueType.VANISHING, Severity.CRITICAL, "a", 3, 1.0, 0.5, "The gradient shrinks.", "Look at it.")
OVER = replace(SICK, layer="b", layers=("b",))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["removed", "full"])
def test_issues_that_are_open_are_written_again_after_a_loss(name, what, disk, tmp_path, monkeypatch):
    """They are reported once, and what was lost may have held them; what has healed meanwhile is known to have healed."""
    monkeypatch.setattr(journal, "HELD_BYTES", 500)
    folder = tmp_path / "run"
    writer = opened(name, folder, disk)
    told = {2: (OVER,), 3: (SICK,), 50: (replace(OVER, healed_step=50),)}
    for step in range(1, 101):
        if what == "full":
            disk.error = 28 if 1 < step < 60 else None
        elif step == 40:
            shutil.rmtree(folder)
        disk.now += 1
        writer.write(replace(record(step), issues=told.get(step, ())))
    writer.close()
    last = {issue.layer: issue.open for each in read_run(folder).records for issue in each.issues}
    assert last == {"a": True, "b": False}


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_while_no_new_file_can_begin_waits(name, disk, tmp_path):
    """A file lies where the directory was, for a while and twice: missing is what went with the directory alone."""
    folder = tmp_path / "run"
    writer = opened(name, folder, disk)
    for step in range(1, 31):
        if step in {11, 21}:
            shutil.rmtree(folder)
            folder.write_text("in the way")
        if step in {16, 26}:
            folder.unlink()
            disk.now += 60
        disk.now += 1
        writer.write(record(step))
    writer.close()
    run = read_run(folder)
    assert run.records == [record(step) for step in range(21, 31)]
    assert run.gaps == (Gap(1, 20, 20, "the file was removed"),) == (writer.lost,)


@pytest.mark.parametrize("name", NAMES)
def test_a_moved_directory_is_written_to_where_it_is_now(name, disk, tmp_path):
    """Nothing is lost where the directory was given another name."""
    writer = opened(name, tmp_path / "a", disk)
    writer.write(record(1))
    (tmp_path / "a").rename(tmp_path / "b")
    disk.now += 1
    writer.write(record(2))
    writer.close()
    assert read_run(tmp_path / "b").records == [record(1), record(2)]
    assert writer.lost is None


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_fails_to_the_end_is_told_of(name, disk, tmp_path, caplog):
    """What was still waiting when the run ended counts as lost."""
    writer = opened(name, tmp_path, disk)
    writer.write(record(1))
    disk.error = 5
    for step in (2, 3):
        disk.now += 1
        writer.write(record(step))
    writer.close()
    assert writer.lost == Gap(2, 3, 2, "Input/output error")
    assert caplog.messages[-1].endswith("could not write steps 2 to 3: Input/output error")
    assert read_run(tmp_path).records == [record(1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_full_from_the_start_is_waited_for(name, disk, tmp_path):
    """The run's description comes first, whenever that is."""
    disk.error, disk.calls = 28, ("write",)
    writer = opened(name, tmp_path, disk)
    writer.write(record(1))
    disk.error = None
    disk.now += 1
    writer.write(record(2))
    writer.close()
    run = read_run(tmp_path)
    assert (run.info, run.records, run.skipped) == (INFO, [record(1), record(2)], 0)


def test_a_gap_is_what_no_file_holds_the_draft_included(tmp_path, monkeypatch, caplog):
    """A disk with room for a word and no chunk: what was drafted is read, and one line says why fewer are missing."""
    room = [1 << 20]

    class Small:
        def __getattr__(self, name):
            def write(file, data):
                if len(data) > room[0]:
                    raise OSError(28, "No space left on device")
                return os.write(file, data)

            return write if name == "write" else getattr(os, name)

    monkeypatch.setattr(places, "os", Small())
    writer = TensorBoardWriter(tmp_path, flush_seconds=1e9)
    writer.open(INFO)
    for step in range(1, 41):
        writer.write(record(step))
        if step == 20:
            writer.keep()
            room[0] = 500
    writer.close()
    run = read_run(tmp_path)
    assert (run.records, writer.lost.steps) == ([record(step) for step in range(1, 21)], 40)
    assert run.gaps == (Gap(21, 40, 20, "No space left on device"),)
    assert "could not write steps 1 to 40" in caplog.messages[-2]
    assert caplog.messages[-1].startswith("gradflow: those of them that ")


def test_attempts_become_rarer(disk, tmp_path):
    """A disk that stays full for hours is asked twice a minute."""
    writer, asked = opened("jsonl", tmp_path, disk), []
    write = journal.AppendFile.append
    disk.error, disk.calls = 28, ("write",)

    def counted(self, data):
        asked.append(disk.now)
        write(self, data)

    journal.AppendFile.append = counted
    try:
        for step in range(1, 6 * 3600):
            disk.now += 1
            writer.write(record(step)) if step < 50 else writer.keep()
    finally:
        journal.AppendFile.append = write
    writer.close()
    assert len(asked) < 6 * 120 + 20


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_drafts_hold_what_waits(rows, tmp_path):
    """After keep(), a reader finds every record, whether it stands in a chunk or waits for one; close() leaves none."""
    now = [0.0]
    writer = TensorBoardWriter(tmp_path, rows=rows, flush_seconds=1e9, clock=lambda: now[0])
    writer.open(INFO)
    rows = []
    for step in range(1, 60):
        sites = (f"s{step // 9}", "b")
        rows.append(record(step, sites))
        writer.write(rows[-1])
        if step % 5 == 0:
            writer.keep()
            assert read_run(tmp_path).records == rows
            now[0] += 0.3
    writer.close()
    assert read_run(tmp_path).records == rows
    assert [path.suffix for path in tmp_path.iterdir()] == [".gradflow"]
