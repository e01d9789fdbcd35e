"""What every writer promises, run over every writer."""

import subprocess
import sys

import numpy as np
import pytest

from gradflow_export.errors import ArgumentError, ArgumentTypeError, StorageError
from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import ConsoleWriter, JsonlWriter, MemoryWriter, TensorBoardWriter, Writer, make_writer

INFO = RunInfo("1700000000123-0", 1700000000.123, "Net", 10, ("a", "b"), 0, 1, {"every": 1}, {"torch": "2"})
NAMES = ("console", "jsonl", "memory", "tensorboard")
STORING = ("jsonl", "memory", "tensorboard")
FILES = ("jsonl", "tensorboard")


def sample_records():
    """Build records that hold every state of a value, an issue that opens and heals, and a histogram."""
    odd = [None, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38, 0.1]
    sites = tuple(f"layer/{i}.weight" for i in range(len(odd)))
    opened = Issue(IssueType.DEAD, Severity.HIGH, "a", 2, float("nan"), 0.9, "dead.", "do.", ("a", "b"))
    healed = Issue(IssueType.DEAD, Severity.HIGH, "a", 2, 0.1, float("inf"), "alive.", "do.", ("a", "b"), 4)
    histogram = Histogram("parameter.weight", "a", np.array([0.0, 0.1, 1.0]), np.array([1, 2]), 3)
    return [
        StepRecord(1, 10.5, (Reading.of("parameter.gradient_norm", sites, odd), Reading.run("loss", float("nan")))),
        StepRecord(2, 11.5, (Reading.of("loss", ("",), [None]),), (), (opened,)),
        StepRecord(4, 12.5, (Reading.run("loss", 0.0),), (histogram,), (healed,)),
        StepRecord(5, 13.5, (Reading.run("loss", float("inf")),), phase="evaluation"),
        StepRecord(9, 14.5),
    ]


def stored(writer, logdir):
    """Return the info and records that a storing writer kept."""
    kept = writer if isinstance(writer, MemoryWriter) else read_run(logdir)
    return kept.info, list(kept.records)


@pytest.fixture(params=NAMES)
def writer(request, tmp_path):
    return make_writer(request.param, tmp_path / "run")


def test_every_writer_is_a_writer(writer):
    """Each has a name and the four methods, and is found by its name."""
    assert isinstance(writer, Writer)
    assert writer.name in NAMES


def test_a_life_of_open_write_flush_close(writer):
    """Flushing and closing may be done at any time and any number of times, and writing after close is ignored."""
    writer.flush()
    writer.open(INFO)
    writer.flush()
    for record in sample_records():
        writer.write(record)
        writer.flush()
    for _ in range(2):
        writer.close()
        writer.flush()
    writer.write(StepRecord(10, 15.0))


def test_a_writer_that_was_never_opened_closes(writer):
    """A run that failed before its first step leaves nothing behind."""
    writer.close()
    writer.close()


def test_an_empty_run_is_fine(writer):
    """A run without records can be opened and closed."""
    writer.open(INFO)
    writer.close()


@pytest.mark.parametrize("name", STORING)
def test_every_state_of_a_value_survives(name, tmp_path):
    """Missing, 0.0, -0.0, NaN and the infinities come back as what they were, with issues and histograms."""
    writer = make_writer(name, tmp_path)
    writer.open(INFO)
    for record in sample_records():
        writer.write(record)
    writer.close()
    assert stored(writer, tmp_path) == (INFO, sample_records())


@pytest.mark.parametrize("name", STORING)
def test_flushed_records_are_readable_before_close(name, tmp_path):
    """Others read what was flushed while the run goes on."""
    writer = make_writer(name, tmp_path)
    writer.open(INFO)
    for done, record in enumerate(sample_records(), start=1):
        writer.write(record)
        writer.flush()
        assert stored(writer, tmp_path)[1] == sample_records()[:done]
    writer.close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", ["file/below", "gs://bucket/run"])
def test_an_unusable_place_raises_when_constructed(name, place, tmp_path, monkeypatch):
    """The error comes before training and says what was expected, what came and what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"expects a .*directory.*, got .*(pass|write to)") as caught:
        make_writer(name, place)
    assert place in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", FILES)
def test_writing_before_open_says_so(name, tmp_path):
    """A record without a run has no file to go to."""
    with pytest.raises(StorageError, match="call open first"):
        make_writer(name, tmp_path).write(StepRecord(1, 0.0))


FULL_DISK = """
import resource, signal, sys
from gradflow_export.records.step_record import Reading, RunInfo, StepRecord
from gradflow_export.writers import make_writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000))
writer = make_writer(sys.argv[1], sys.argv[2])
writer.open(RunInfo("1-0", 1.0))
sites = tuple(f"s{i}" for i in range(100))
for step in range(1, 2001):
    writer.write(StepRecord(step, float(step), (Reading.of("block.gain", sites, [step / 7] * 100),)))
writer.flush()
writer.close()
print(writer.lost.first, writer.lost.last, writer.lost.steps, writer.lost.reason)
"""


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_reported_once_and_costs_only_the_end(name, tmp_path):
    """What was written before stays readable without damage; the file size limit plays the full disk."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, name, tmp_path], capture_output=True, text=True, check=True)
    run = read_run(tmp_path)
    kept = len(run.records)
    assert run.skipped == 0
    assert 10 < kept < 2000
    assert list(run.records.steps) == list(range(1, kept + 1))
    assert len([line for line in done.stderr.splitlines() if "cannot write to" in line]) == 1
    first, last, steps, reason = done.stdout.split(maxsplit=3)
    assert (int(last), int(steps), reason) == (2000, 2001 - int(first), "File too large\n")
    assert int(first) in ([kept + 1] if name == "jsonl" else range(kept - 256, kept + 2))  # a part may be in the draft


KILLED = """
import sys
from gradflow_export.records.step_record import Reading, RunInfo, StepRecord
from gradflow_export.writers import make_writer
writer = make_writer(sys.argv[1], sys.argv[2])
writer.open(RunInfo("1-0", 1.0))
for step in range(1, 400):
    writer.write(StepRecord(step, float(step), (Reading.run("loss", step / 7),)))
    if step == 300:
        writer.flush()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", FILES)
def test_kill_9_costs_only_what_was_not_flushed(name, tmp_path):
    """After SIGKILL everything up to the last flush is there."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, name, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    run = read_run(tmp_path)
    assert run.info == RunInfo("1-0", 1.0)
    assert run.records.steps[:300] == tuple(range(1, 301))
    assert run.records[299] == StepRecord(300, 300.0, (Reading.run("loss", 300 / 7),))


def test_make_writer_names_the_nearest():
    """A misspelt backend is answered with the right one."""
    with pytest.raises(ArgumentError, match="did you mean 'tensorboard'"):
        make_writer("tensorbord", ".")


def test_make_writer_passes_writers_through_and_nothing_else():
    """An instance is used as it is; a class or any other object is refused with an example."""
    mine = MemoryWriter()
    assert make_writer(mine, ".") is mine
    for wrong in (MemoryWriter, 3, None):
        with pytest.raises(ArgumentTypeError, match="pass 'tensorboard', or an instance"):
            make_writer(wrong, ".")


def test_importing_writers_and_store_loads_no_torch():
    """Reading and writing records needs no framework, and naming the writers loads none of them."""
    code = (
        "import sys, gradflow_export.writers as w; assert 'gradflow_export.writers.tensorboard' not in sys.modules;"
        "assert 'tensorboard' not in sys.modules; w.TensorBoardWriter, w.JsonlWriter; import gradflow_export.storage.reader;"
        "assert not {'torch', 'tensorflow', 'wandb'} & set(sys.modules);"
        "assert 'tensorboard.summary.writer.event_file_writer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_the_classes():
    """The lazy names give the classes themselves, and an unknown one fails as usual."""
    import gradflow_export.writers as package

    assert {ConsoleWriter.name, JsonlWriter.name, MemoryWriter.name, TensorBoardWriter.name} == set(NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


@pytest.mark.parametrize("name", FILES)
def test_two_sessions_never_share_a_file(name, tmp_path):
    """A restart in the same directory leaves the first session's file alone."""
    for number in (1, 2):
        writer = make_writer(name, tmp_path)
        writer.open(RunInfo(f"{number}-0", float(number)))
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
