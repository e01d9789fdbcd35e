"""The event-file writer: when it writes, and what TensorBoard's own readers find."""

import gc
import math
import re
import socket
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
from google.protobuf.message import Message
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter

from gradflow_export.errors import ArgumentError, StorageError
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.step_record import Histogram, Issue, IssueType, Reading, RunInfo, Severity, StepRecord
from gradflow_export.storage.event_codec import frame, version_event
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import TensorBoardWriter
from gradflow_export.writers.stock import MOST_SCALARS, StockPages, tag_of

INFO = RunInfo("1700000000123-0", 1700000000.5, "Net")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def issue(step):
    return Issue(IssueType.DEAD, Severity.HIGH, "a", step, 1.0, 0.9, "m", "do")


def opened(tmp_path, **kwargs):
    """Return an open writer, and a function that gives the steps on disk."""
    writer = TensorBoardWriter(tmp_path, **kwargs)
    writer.open(INFO)
    return writer, lambda: read_run(writer.path).records.steps


@pytest.mark.parametrize("end", ["flush", "close"])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_reader_misses_nothing_that_is_written_out_meanwhile(place, end, tmp_path, monkeypatch):
    """A draft becomes a chunk, and its file is emptied or removed, before any of the files is opened."""
    writer, _ = opened(tmp_path)
    records = [StepRecord(step, float(step), (Reading.run("loss", step / 7),)) for step in range(1, 9)]
    for record in records:
        writer.write(record)
    writer.keep()
    open_as, count = Path.open, []

    def and_write(path, *args):
        count.append(path)
        if len(count) == place:
            getattr(writer, end)()
        return open_as(path, *args)

    monkeypatch.setattr(Path, "open", and_write)
    run = read_run(tmp_path)
    assert list(run.records) == records
    assert run.skipped == 0
    writer.close()


def provider(logdir):
    """Read a log directory with TensorBoard's own Python reader."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    return MultiplexerDataProvider(multiplexer, str(logdir))


def test_the_file_is_named_for_tensorboard_and_for_us(tmp_path):
    """Start, host, process and session make the name unique, and the end tells whose it is."""
    writer, _ = opened(tmp_path)
    assert writer.path.name.startswith("events.out.tfevents.01700000000.")
    assert writer.path.name.endswith(".1700000000123-0.gradflow")
    writer.close()


def test_syncing_tools_do_not_follow_our_file(tmp_path):
    """wandb's sync picks files named after this host, and would leave the user's file for one of ours."""
    writer, _ = opened(tmp_path)
    assert re.search(rf"tfevents\.(\d+)\.{re.escape(socket.gethostname())}", writer.path.name) is None
    writer.close()


def test_the_users_own_scalars_stay_live_beside_our_file(tmp_path):
    """TensorBoard's Python reader goes on reading a SummaryWriter's file that is older than ours."""
    theirs = tmp_path / "events.out.tfevents.1699999999.host.1.0"
    theirs.write_bytes(frame(version_event(1.0)))
    writer, _ = opened(tmp_path, flush_seconds=0)
    reader = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    for step in (1, 2, 3):
        value = summary_pb2.Summary.Value(tag="loss", simple_value=step)
        event = event_pb2.Event(step=step, wall_time=step, summary=summary_pb2.Summary(value=[value]))
        with theirs.open("ab") as stream:
            stream.write(frame(event.SerializeToString()))
        writer.write(StepRecord(step, 1.0))
        reader.Reload()
    writer.close()
    assert [event.step for event in reader.Tensors(".", "loss")] == [1, 2, 3]


def test_a_chunk_is_written_when_rows_wait(tmp_path):
    """The number of buffered records is bounded."""
    writer, steps = opened(tmp_path, rows=3, clock=Clock())
    for step in range(1, 6):
        writer.write(StepRecord(step, 0.0))
    assert steps() == (1, 2, 3)
    writer.close()
    assert steps() == (1, 2, 3, 4, 5)


def test_the_flush_interval_grows_with_the_run(tmp_path):
    """Two seconds at the start; after an hour, a minute."""
    clock = Clock()
    writer, steps = opened(tmp_path, clock=clock)
    writer.write(StepRecord(1, 0.0))
    assert steps() == ()
    clock.now += 2
    writer.write(StepRecord(2, 0.0))
    assert steps() == (1, 2)
    clock.now += 3600
    writer.write(StepRecord(3, 0.0))
    clock.now += 59
    writer.write(StepRecord(4, 0.0))
    assert steps() == (1, 2, 3)
    clock.now += 1
    writer.write(StepRecord(5, 0.0))
    assert steps() == (1, 2, 3, 4, 5)
    writer.close()


def test_a_fixed_flush_interval_stays(tmp_path):
    """With flush_seconds=0 every record is a chunk."""
    writer, steps = opened(tmp_path, clock=Clock(), flush_seconds=0)
    writer.write(StepRecord(1, 0.0))
    assert steps() == (1,)
    writer.close()


def test_an_issue_is_written_at_once_but_not_too_often(tmp_path):
    """The first issue is on disk when write returns; a storm of them makes one chunk in two seconds."""
    clock = Clock()
    writer, steps = opened(tmp_path, clock=clock, flush_seconds=1e6)
    writer.write(StepRecord(1, 0.0, issues=(issue(1),)))
    assert steps() == (1,)
    for step in range(2, 50):
        writer.write(StepRecord(step, 0.0, issues=(issue(step),)))
    assert steps() == (1,)
    clock.now += 2
    writer.write(StepRecord(50, 0.0))
    assert steps() == tuple(range(1, 51))
    writer.close()


def test_a_phase_is_written_when_it_ends(tmp_path):
    """A chunk holds one phase."""
    writer, steps = opened(tmp_path, clock=Clock())
    writer.write(StepRecord(1, 0.0))
    writer.write(StepRecord(2, 0.0, phase="evaluation"))
    assert steps() == (1,)
    writer.close()
    assert [record.phase for record in read_run(tmp_path).records] == ["train", "evaluation"]


def test_an_empty_flush_writes_nothing(tmp_path):
    """Flushing often costs nothing on disk."""
    writer, _ = opened(tmp_path)
    size = writer.path.stat().st_size
    writer.flush()
    assert writer.path.stat().st_size == size
    writer.close()


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"flush_seconds": -1.0}, {"flush_seconds": float("nan")}])
def test_impossible_arguments_are_refused(wrong, tmp_path):
    """The error names the argument and what came."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        TensorBoardWriter(tmp_path, **wrong)


def test_a_session_that_exists_is_not_overwritten(tmp_path):
    """Two writers with one session name would mix their chunks, so the second is told."""
    writer, _ = opened(tmp_path)
    with pytest.raises(StorageError, match="File exists; give each session"):
        TensorBoardWriter(tmp_path).open(INFO)
    writer.close()


def test_tensorboard_finds_every_chunk(tmp_path):
    """Each chunk arrives through TensorBoard's reader with its metadata, though that keeps ten records per tag."""
    writer, _ = opened(tmp_path, rows=5)
    for step in range(1, 101):
        writer.write(StepRecord(step, float(step), (Reading.of("block.gain", ("a", "b"), [step / 7, None]),)))
    writer.close()
    reader, context = provider(tmp_path), RequestContext()
    tags = reader.list_tensors(context, experiment_id="", plugin_name="gradflow")["."]
    gains = sorted(tag for tag in tags if "/block.gain/" in tag)
    assert len(gains) == 20
    assert b'"metric":"block.gain"' in tags[gains[0]].plugin_content
    data = reader.read_tensors(
        context, experiment_id="", plugin_name="gradflow", run_tag_filter=RunTagFilter(tags=gains), downsample=100
    )["."]
    found = {float(row[0]) for series in data.values() for row in series[0].numpy}
    assert found == {float(np.float32(step / 7)) for step in range(1, 101)}
    assert {series[0].numpy.shape for series in data.values()} == {(5, 2)}


def test_headline_scalars_are_on_the_stock_scalars_page(tmp_path):
    """Headline metrics are listed and read as scalars, NaN and Inf as they are, missing ones left out."""
    writer, _ = opened(tmp_path)
    losses = [2.5, float("nan"), None, float("inf")]
    for step, loss in enumerate(losses, start=1):
        readings = (Reading.of("loss", ("",), [loss]), Reading.run("logits.std", 1.0))
        writer.write(StepRecord(step, 100.0 + step, readings))
    writer.close()
    reader, context = provider(tmp_path), RequestContext()
    listed = reader.list_scalars(context, experiment_id="", plugin_name="scalars")["."]
    assert list(listed) == ["gradflow_loss/loss"]
    assert listed["gradflow_loss/loss"].description == "loss [loss]"
    points = reader.read_scalars(context, experiment_id="", plugin_name="scalars", downsample=100)["."][
        "gradflow_loss/loss"
    ]
    assert [(point.step, point.wall_time) for point in points] == [(1, 101.0), (2, 102.0), (4, 104.0)]
    assert points[0].value == 2.5
    assert math.isnan(points[1].value)
    assert points[2].value == math.inf


def test_the_scalars_page_gets_few_tags(tmp_path):
    """A record with every metric of the catalogue gives at most twenty scalars."""
    writer, _ = opened(tmp_path)
    readings = tuple(Reading.run(name, 1.0) for name, spec in CATALOG.items() if spec.kind == "run")
    for step in (1, 2):
        writer.write(StepRecord(step, 1.0, readings))
    writer.close()
    listed = provider(tmp_path).list_scalars(RequestContext(), experiment_id="", plugin_name="scalars")["."]
    assert 10 < len(listed) <= MOST_SCALARS
    assert {tag.partition("/")[2] for tag in listed} <= {name for name, s in CATALOG.items() if s.headline}
    groups = {tag.partition("/")[0] for tag in listed}
    assert groups == {f"gradflow_{group}" for group in ("loss", "gradient", "update", "policy", "runtime")}


def test_readers_of_the_community_find_scalars(tmp_path):
    """TensorBoard's EventAccumulator, which tbparse and others are made of, reads steps and values."""
    writer, _ = opened(tmp_path)
    losses = [2.5, float("nan"), -0.0, float("inf")]
    for step, loss in enumerate(losses, start=1):
        writer.write(StepRecord(step, 100.0 + step, (Reading.run("loss", loss), Reading.run("overhead", 0.5))))
    writer.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert sorted(found.Tags()["scalars"]) == ["gradflow_loss/loss", "gradflow_runtime/overhead"]
    read = found.Scalars("gradflow_loss/loss")
    assert [(event.step, event.wall_time) for event in read] == [(step, 100.0 + step) for step in range(1, 5)]
    assert np.array([event.value for event in read], np.float32).tobytes() == np.array(losses, np.float32).tobytes()


def test_scalars_are_the_event_that_protobuf_would_write():
    """Filled in or built anew, an Event of scalars has the same bytes, whatever the values are."""
    pages, names = StockPages(), ("loss", "gradient.total_norm")
    for step, value in enumerate(
        (1.0, 0.0, -0.0, math.nan, math.inf, np.frombuffer(b"\xfe" * 4, np.float32)[0]), start=5
    ):
        readings = tuple(Reading.run(name, value) for name in names)
        (written,) = pages.events(StepRecord(step, 100.0 + step, readings))
        if step > 5:  # the first one has descriptions
            values = [
                summary_pb2.Summary.Value(tag=tag_of(reading.metric), simple_value=reading.values[0])
                for reading in readings
            ]
            event = event_pb2.Event(step=step, wall_time=100.0 + step, summary=summary_pb2.Summary(value=values))
            assert written == event.SerializeToString()


def test_no_message_lives_as_long_as_the_writer(tmp_path):
    """What is assigned to a protobuf message takes memory until the message goes: a kept one would grow with the run."""
    writer, _ = opened(tmp_path)
    histogram = Histogram("parameter.gradient", "fc/1", [0.0, 0.5, 1.0], [1, 2])
    for step in range(1, 4):
        writer.write(StepRecord(step, 1.0, (Reading.run("loss", 1.0),), (histogram,)))
    held, found = [writer], {id(writer): writer}
    while held:
        for thing in gc.get_referents(held.pop()):
            if id(thing) not in found and not isinstance(thing, (type, ModuleType, FunctionType)):
                found[id(thing)] = thing
                held.append(thing)
    assert len(found) > 50  # it did look
    assert not [thing for thing in found.values() if isinstance(thing, Message)]
    writer.close()


def test_histograms_are_on_the_stock_histograms_page(tmp_path):
    """Each is a tensor of left edge, right edge and count, at its step."""
    writer, _ = opened(tmp_path)
    for step in (1, 2):
        histogram = Histogram("parameter.gradient", "fc/1", [0.0, 0.5, 1.0], [step, 2])
        writer.write(StepRecord(step, 1.0, (), (histogram,)))
    writer.close()
    reader, context = provider(tmp_path), RequestContext()
    tag = "gradflow_gradient/parameter.gradient/fc/1"
    assert list(reader.list_tensors(context, experiment_id="", plugin_name="histograms")["."]) == [tag]
    points = reader.read_tensors(context, experiment_id="", plugin_name="histograms", downsample=10)["."][tag]
    assert [point.numpy.tolist() for point in points] == [[[0, 0.5, 1], [0.5, 1, 2]], [[0, 0.5, 2], [0.5, 1, 2]]]
