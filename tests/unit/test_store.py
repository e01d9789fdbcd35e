"""Reading runs back: where they lie, several sessions, and what damage costs."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2

from gradflow_export.cli.report import summarise
from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import Gap, Histogram, Reading, RunInfo, StepRecord
from gradflow_export.storage.event_chunks import Blob
from gradflow_export.storage.event_codec import FrameReader, blob_event, event_blobs, frame, tensor_proto, version_event
from gradflow_export.storage.reader import find_runs, read_run
from gradflow_export.writers import JsonlWriter, TensorBoardWriter, make_writer

FILES = ("jsonl", "tensorboard")


def record(step, loss=None, sites=("a", "b")):
    gain = Reading.of("block.gain", sites, [step / 7] * len(sites))
    return StepRecord(step, float(step), (gain, Reading.run("loss", step / 3 if loss is None else loss)))


def write(writer, rows, session="1000-0", rank=0, started=None):
    """Write a whole session."""
    writer.open(RunInfo(session, float(session.split("-")[0]) / 1000 if started is None else started, rank=rank))
    for row in rows:
        writer.write(row)
    writer.close()
    return writer


def rows_of(first, last, **kwargs):
    return [record(step, **kwargs) for step in range(first, last + 1)]


@pytest.mark.parametrize("name", FILES)
def test_records_are_a_sequence_that_can_be_read_again(name, tmp_path):
    """Length, index, slice, steps and repeated iteration all agree with what was written, over several pages."""
    rows = rows_of(1, 1500)
    write(make_writer(name, tmp_path), rows)
    run = read_run(tmp_path)
    assert len(run.records) == 1500
    assert run.records == rows
    assert list(run.records) == list(run.records) == rows
    assert run.records[-1] == rows[-1]
    assert run.records[700:703] == rows[700:703]
    assert run.records.steps == tuple(range(1, 1501))
    assert run.records != rows[:-1]
    assert run.records != 3
    assert run.skipped == 0


@pytest.mark.parametrize("name", FILES)
def test_a_later_session_wins_where_steps_come_twice(name, tmp_path):
    """A run resumed from a checkpoint repeats some steps; steps rise strictly all the same."""
    write(make_writer(name, tmp_path), rows_of(1, 10, loss=1.0), "9000-0")
    write(make_writer(name, tmp_path), rows_of(6, 15, loss=2.0), "10000-0")
    run = read_run(tmp_path)
    assert run.sessions == ("9000-0", "10000-0")
    assert run.info.session == "10000-0"
    assert [row.value("loss") for row in run.records] == [1.0] * 5 + [2.0] * 10
    assert run.records.steps == tuple(range(1, 16))


@pytest.mark.parametrize("name", FILES)
def test_a_run_started_over_replaces_the_longer_one_before_it(name, tmp_path):
    """A cell run twice into one directory shows the second run alone, not the tail of the first."""
    write(make_writer(name, tmp_path), rows_of(1, 10, loss=1.0), "9000-0")
    write(make_writer(name, tmp_path), rows_of(1, 4, loss=2.0), "10000-0")
    assert [row.value("loss") for row in read_run(tmp_path).records] == [2.0] * 4


def unclosed(folder, rows, session, settings):
    """Write a session that ends as a killed process's does."""
    writer = JsonlWriter(folder)
    writer.open(RunInfo(session, float(session.split("-")[0]) / 1000, settings=settings))
    for row in rows:
        writer.write(row)
    writer.keep()


@pytest.mark.parametrize(
    ("steps", "first", "settings", "lost"),
    [
        (range(1, 143), 162, {"every": 1, "budget": None}, Gap(143, 161, 19, "")),
        (range(1, 143), 162, {"every": 1, "budget": 0.05}, Gap(143, 161, 19, "")),
        (range(1, 143), 143, {"every": 1, "budget": None}, None),
        (range(1, 143), 120, {"every": 1, "budget": None}, None),
        (range(10, 150, 10), 170, {"every": 10, "budget": None}, Gap(150, 160, 2, "")),
        (range(10, 150, 10), 150, {"every": 10, "budget": None}, None),
        (range(20, 150, 20), 152, {"every": 1, "budget": 0.05}, None),
        ((1,), 10, {"every": 10, "budget": None}, None),
        ((1, 10), 20, {"every": 10, "budget": None}, None),
    ],
)  # fmt: skip
def test_steps_that_a_killed_session_had_not_written_are_a_gap(steps, first, settings, lost, tmp_path):
    """A run resumed from a checkpoint behind the last record on disk has lost what lies between, as often as it records."""
    unclosed(tmp_path, [record(step) for step in steps], "1000-0", settings)
    write(JsonlWriter(tmp_path), rows_of(first, first + 5), "1000000-0")
    found = [replace(gap, reason="") for gap in read_run(tmp_path).gaps]
    assert found == ([] if lost is None else [lost])
    assert summarise(read_run(tmp_path)).lost_steps.total == sum(gap.steps for gap in found)


@pytest.mark.parametrize(
    ("settings", "steps"), [({"every": 1, "budget": None}, 9), ({"budget": 0.05}, 0), ({"every": 4}, 0)]
)
def test_steps_after_a_closed_session_are_a_gap_where_it_would_have_recorded_them(settings, steps, tmp_path):
    """What its interval or budget left out is no loss."""
    writer = JsonlWriter(tmp_path)
    writer.open(RunInfo("1000-0", 1.0, settings=settings))
    for row in rows_of(1, 10):
        writer.write(row)
    writer.close()
    write(JsonlWriter(tmp_path), rows_of(20, 25), "1000000-0")
    assert sum(gap.steps for gap in read_run(tmp_path).gaps) == steps


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("first", "lost"), [(282, range(241, 282)), (262, range(241, 262)), (241, ()), (220, ())])
def test_a_gap_that_a_later_session_recorded_is_none(name, first, lost, tmp_path):
    """Training went on at 282, without the steps from 241 on, and then from another checkpoint."""
    for number, steps in enumerate(((1, 300), (201, 240), (282, 300), (first, 310)), 1):
        write(make_writer(name, tmp_path), rows_of(*steps), f"{number}000000-0")
    run = read_run(tmp_path)
    assert run.records.steps == tuple(step for step in range(1, 311) if step not in lost)
    assert [step for gap in run.gaps for step in range(gap.first, gap.last + 1)] == list(lost)


def test_one_session_in_two_forms_is_one_session(tmp_path):
    """An event file and JSON lines of the same session complete each other."""
    rows = rows_of(1, 20)
    write(TensorBoardWriter(tmp_path), rows[:15])
    write(JsonlWriter(tmp_path), rows)
    run = read_run(tmp_path)
    assert run.sessions == ("1000-0",)
    assert run.records == rows


def test_ranks_are_not_mixed(tmp_path):
    """Processes of a distributed run count the same steps; the lowest rank is read unless another is asked for."""
    write(TensorBoardWriter(tmp_path), rows_of(1, 3, loss=0.0), "1000-0")
    write(TensorBoardWriter(tmp_path), rows_of(1, 3, loss=1.0), "1001-1", rank=1)
    assert [row.value("loss") for row in read_run(tmp_path).records] == [0.0] * 3
    assert [row.value("loss") for row in read_run(tmp_path, rank=1).records] == [1.0] * 3
    with pytest.raises(StorageError, match=r"got 2; ranks there: \[0, 1\]"):
        read_run(tmp_path, rank=2)


def test_a_single_file_can_be_read(tmp_path):
    """A file that was sent by mail needs no directory, nor its old name when it holds our records."""
    rows = rows_of(1, 3)
    for writer in (TensorBoardWriter(tmp_path), JsonlWriter(tmp_path / "b.jsonl")):
        path = write(writer, rows).path
        assert read_run(path).records == rows
    event_file = next(tmp_path.glob("*.gradflow"))
    renamed = tmp_path / "other" / "my.tfevents"
    renamed.parent.mkdir()
    event_file.rename(renamed)
    assert read_run(renamed.parent).records == rows


def test_runs_are_found_and_named_like_tensorboard_names_them(tmp_path):
    """Names are relative with slashes, and the top directory is a dot; directories of others are not runs."""
    for place in (tmp_path, tmp_path / "a", tmp_path / "b" / "c"):
        write(TensorBoardWriter(place), [])
    write(JsonlWriter(tmp_path / "d" / "my log.jsonl"), [])
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "events.out.tfevents.1.host").write_bytes(frame(version_event(1.0)))
    (tmp_path / "e" / "data.jsonl").write_text('{"session": 1}\n')
    assert find_runs(tmp_path) == {
        ".": tmp_path,
        "a": tmp_path / "a",
        "b/c": tmp_path / "b" / "c",
        "d": tmp_path / "d",
    }


def test_linked_directories_are_followed_but_not_in_circles(tmp_path):
    """A link to a run elsewhere is a run; a link to a directory above is not walked into."""
    write(TensorBoardWriter(tmp_path / "elsewhere"), [])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "up").symlink_to(tmp_path / "runs")
    assert list(find_runs(tmp_path / "runs")) == ["linked"]


def test_a_run_without_records_is_a_run(tmp_path):
    """It has its description and no records."""
    write(TensorBoardWriter(tmp_path), [])
    run = read_run(tmp_path)
    assert (run.info.session, list(run.records), run.skipped) == ("1000-0", [], 0)


def test_a_file_cut_off_before_its_description_is_a_run(tmp_path):
    """A process killed at its very start leaves a file whose name alone says whose it is."""
    path = write(TensorBoardWriter(tmp_path), []).path
    path.write_bytes(path.read_bytes()[:60])
    run = read_run(tmp_path)
    assert (run.info, run.sessions, len(run.records), run.skipped) == (None, (), 0, 1)


def test_wrong_directories_are_explained(tmp_path):
    """The error says what was expected, what came, and where runs are."""
    with pytest.raises(StorageError, match=r"expected a log directory.*does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"expected a directory with a gradflow run, got.*check the logdir"):
        read_run(tmp_path)
    write(TensorBoardWriter(tmp_path / "runs" / "a"), [])
    with pytest.raises(StorageError, match="there are runs below it: runs/a"):
        read_run(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(StorageError, match="holds nothing of ours"):
        read_run(tmp_path / "notes.txt")
    with pytest.raises(StorageError, match="is a file; pass the directory above"):
        find_runs(tmp_path / "notes.txt")
    with pytest.raises(StorageError, match="does not exist"):
        find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_tail_costs_the_tail(name, tmp_path):
    """Cut anywhere, a file gives every record before the cut."""
    rows = rows_of(1, 40)
    writer = make_writer(name, tmp_path) if name == "jsonl" else TensorBoardWriter(tmp_path, rows=10)
    path = write(writer, rows).path
    whole = path.read_bytes()
    kept = set()
    for cut in range(len(whole) - 1, len(whole) // 2, -97):
        path.write_bytes(whole[:cut])
        run = read_run(tmp_path)
        assert [row.step for row in run.records] == [row.step for row in rows[: len(run.records)]]
        assert run.skipped <= 1
        kept.add(len(run.records))
    assert len(kept) > 1


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_byte_costs_one_chunk_or_line(name, tmp_path):
    """Wherever a byte is wrong, nothing raises, and records that do come back are right."""
    rows = rows_of(1, 60)
    writer = make_writer(name, tmp_path) if name == "jsonl" else TensorBoardWriter(tmp_path, rows=10)
    path = write(writer, rows).path
    whole = path.read_bytes()
    for place in range(40, len(whole), 211):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        run = read_run(tmp_path)
        right = sum(row == rows[row.step - 1] for row in run.records)
        assert run.skipped >= 1
        if place > len(whole) // 2:  # behind the site table, on which everything depends
            assert right >= (50 if name == "tensorboard" else 58)


def test_damage_in_a_length_is_stepped_over(tmp_path):
    """The next intact frame is found by its checksum, also behind a block of zeros."""
    frames = [frame(bytes([65 + n]) * 50) for n in range(4)]
    path = tmp_path / "frames"
    path.write_bytes(frames[0] + b"\xff" + frames[1][1:] + b"\0" * 3_000_000 + frames[2] + frames[3][:-1])
    with path.open("rb") as stream:
        reader = FrameReader(stream)
        assert [payload[:1] for _, payload in reader] == [b"A", b"C"]
        assert reader.skipped == 2


def test_records_of_others_are_passed_over(tmp_path):
    """Scalars of other writers, foreign lines and messages of other kinds are neither records nor damage."""
    rows = rows_of(1, 3)
    event_file = write(TensorBoardWriter(tmp_path), rows).path
    value = summary_pb2.Summary.Value(tag="gradflow/1000-0/loss/0-0", simple_value=1.0)
    foreign = event_pb2.Event(step=9, summary=summary_pb2.Summary(value=[value])).SerializeToString()
    event_file.write_bytes(event_file.read_bytes() + frame(foreign))
    lines = write(JsonlWriter(tmp_path), rows).path
    lines.write_text(lines.read_text() + '{"kind": "note"}\n[1, 2]\n\n{"mine": true}\n')
    run = read_run(tmp_path)
    assert (run.records, run.skipped) == (rows, 0)


def test_frames_with_right_checksums_and_wrong_content_are_skipped(tmp_path):
    """Half-compatible writers cost what they wrote, never a traceback."""
    path = write(TensorBoardWriter(tmp_path), rows_of(1, 3)).path
    good = path.read_bytes()
    prefix = "gradflow/1000-0"
    wrong = [
        Blob(f"{prefix}/meta/0", "not json"),
        Blob(f"{prefix}/meta/0", np.zeros(2, np.float32)),
        Blob(f"{prefix}/sites/7", '"x'),
        Blob(f"{prefix}/steps/5-0", np.zeros((2, 2))),
    ]
    path.write_bytes(good + b"".join(frame(blob_event(blob, 1.0)) for blob in wrong) + frame(b"\xff\xff\xff"))
    run = read_run(tmp_path)
    assert (run.records, run.skipped) == (rows_of(1, 3), 5)


def test_a_step_whose_readings_cannot_be_opened_stays_a_step(tmp_path):
    """The clock of a chunk stands even when its values have a shape they must not have."""
    path = write(TensorBoardWriter(tmp_path), rows_of(1, 2)).path
    content = {"kind": "values", "metric": "block.gain", "sites": 0, "clock": "steps/0-0", "rows": 1}
    bad = Blob("gradflow/1000-0/block.gain/0-9", np.zeros((1, 1), np.float32), content)
    path.write_bytes(path.read_bytes() + frame(blob_event(bad, 1.0)))
    run = read_run(tmp_path)
    assert list(run.records) == [StepRecord(1, 1.0), StepRecord(2, 2.0)]


def test_newer_formats_ask_for_an_update(tmp_path):
    """A file of a newer version is not read wrongly."""
    path = write(TensorBoardWriter(tmp_path / "a"), []).path
    path.write_bytes(path.read_bytes() + frame(blob_event(Blob("gradflow/1-0/x/0-0", "{}", {"v": 99}), 1.0)))
    lines = write(JsonlWriter(tmp_path / "b"), []).path
    lines.write_text(lines.read_text().replace('"v":1', '"v":99'))
    for place in ("a", "b"):
        with pytest.raises(StorageError, match=r"format 99.*update gradflow-export"):
            read_run(tmp_path / place)


def test_lines_whose_session_line_is_lost_are_still_read(tmp_path):
    """The file's name says which session it was."""
    rows = rows_of(1, 3)
    path = write(JsonlWriter(tmp_path), rows).path
    path.write_bytes(b"#" + path.read_bytes())
    run = read_run(tmp_path)
    assert (run.info, run.sessions, run.skipped) == (None, ("1000-0",), 1)
    assert run.records == rows


def test_an_event_holds_what_was_put_in():
    """Dtype and rank survive, rank 0 included; types that no reader of ours knows are refused."""
    for data in (np.float32(1.5).reshape(()), np.arange(3), np.zeros((2, 0)), "text\n"):
        blob = Blob("gradflow/1-0/x/0-0", data, {"v": 1}, 7)
        (back,) = event_blobs(blob_event(blob, 1.0))
        assert (back.tag, back.content, back.step) == (blob.tag, blob.content, 7)
        assert np.array_equal(back.data, data)
        assert np.shape(back.data) == np.shape(data)
    with pytest.raises(ValueError, match="got float16; convert"):
        tensor_proto(np.zeros(1, np.float16))


def test_the_memory_of_a_reader_does_not_grow_with_the_run(tmp_path):
    """Reading a 40 MB run needs a fraction of its size, because pages are read when they are asked for."""
    writer = TensorBoardWriter(tmp_path, rows=64)
    writer.open(RunInfo("1-0", 1.0))
    sites = tuple(f"s{i}" for i in range(5000))
    values = np.ones(5000, np.float32)
    for step in range(1, 2001):
        writer.write(StepRecord(step, float(step), (Reading.of("block.gain", sites, values),)))
    writer.close()
    code = (
        "import resource, sys\nfrom gradflow_export.storage.reader import read_run\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\nassert sum(1 for _ in read_run(sys.argv[1]).records) == 2000\nprint(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert writer.path.stat().st_size > 40_000_000
    assert float(done.stdout) < 25


def test_histograms_are_read_back(tmp_path):
    """They lie beside the stock page's copy, which holds less."""
    histogram = Histogram("parameter.gradient", "a/0", [0.0, 1.0], [3], 2)
    row = StepRecord(1, 1.0, (), (histogram,))
    write(TensorBoardWriter(tmp_path), [row])
    assert read_run(tmp_path).records == [row]


@pytest.mark.parametrize("kind", [TensorBoardWriter, JsonlWriter])
def test_records_with_some_metrics_have_all_else_that_a_verdict_needs(kind, tmp_path):
    """Steps, times, issues and notes are those of the whole records; of the readings at least those that are named."""
    rows = rows_of(1, 30)
    write(kind(tmp_path), rows)
    records = read_run(tmp_path).records
    some = records.only({"loss"})
    assert records == rows
    assert some.steps == records.steps
    for whole, part in zip(records, some, strict=True):
        assert (part.step, part.wall_time, part.issues, part.notes) == (
            whole.step, whole.wall_time, whole.issues, whole.notes,
        )  # fmt: skip
        assert part.value("loss") == whole.value("loss")
        assert {"loss"} <= set(part.metrics) <= set(whole.metrics)
    assert (set(some[-1].metrics) == {"loss"}) is (kind is TensorBoardWriter)
