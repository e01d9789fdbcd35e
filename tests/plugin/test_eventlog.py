"""The project's own reader of a log directory tells what TensorBoard's provider tells."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorboard import context as tensorboard_context
from tensorboard.data.provider import RunTagFilter

from gradflow_export.storage.reader import read_run
from tensorboard_plugin_gradflow.data import list_runs, run_issues, run_meta
from tensorboard_plugin_gradflow.eventlog import EventLog
from tensorboard_plugin_gradflow.histograms import list_histograms
from tensorboard_plugin_gradflow.standalone import open_source

OLD = Path(__file__).with_name("old")


@pytest.fixture
def both(tmp_path, logs, read_anew):
    """The same log in both readers."""
    logs.sick_run(tmp_path / "a", steps=600)
    logs.write_run(tmp_path / "b" / "c", logs.plain_records(range(1, 9)))
    own = EventLog(tmp_path)
    own.reload()
    return own, read_anew(tmp_path)


def test_it_lists_and_reads_what_tensorboards_provider_does(both):
    """Runs, tags, descriptions, times and tensors are equal."""
    own, theirs = both
    context = tensorboard_context.RequestContext()
    expected = theirs.list_tensors(context, experiment_id="", plugin_name="gradflow")
    found = own.list_tensors(context, experiment_id="", plugin_name="gradflow")
    assert {run: set(tags) for run, tags in found.items()} == {run: set(tags) for run, tags in expected.items()}
    for run, tags in expected.items():
        for tag, series in tags.items():
            assert found[run][tag].plugin_content == series.plugin_content
            assert found[run][tag].max_wall_time == series.max_wall_time
    wanted = {"plugin_name": "gradflow", "run_tag_filter": RunTagFilter(runs=["a"], tags=sorted(expected["a"]))}
    tensors = own.read_tensors(context, experiment_id="", downsample=1, **wanted)
    for tag, data in theirs.read_tensors(context, experiment_id="", downsample=1, **wanted)["a"].items():
        mine, other = tensors["a"][tag][-1].numpy, data[-1].numpy
        if other.dtype == object:
            assert str(mine) == other.item().decode()
        else:
            assert np.asarray(mine).tobytes() == other.tobytes()


def test_what_is_appended_is_read_from_where_it_stopped(tmp_path, logs):
    """A frame that is not there as a whole yet is read when it is; nothing is read twice."""
    logs.write_run(tmp_path / "whole" / "a", logs.plain_records(range(1, 100)), rows=8)
    (path,) = (tmp_path / "whole" / "a").iterdir()
    data, grown = path.read_bytes(), tmp_path / "log" / "a" / path.name
    grown.parent.mkdir(parents=True)
    own, seen = EventLog(tmp_path / "log"), []
    for share in (0.1, 0.35, 0.36, 0.8, 1.0):
        grown.write_bytes(data[: int(share * len(data))])
        own.reload()
        seen.append(len(own.list_tensors(plugin_name="gradflow").get("a", {})))
    whole = EventLog(tmp_path / "whole")
    whole.reload()
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    assert own.list_tensors(plugin_name="gradflow").keys() == whole.list_tensors(plugin_name="gradflow").keys()
    assert seen[-1] == len(whole.list_tensors(plugin_name="gradflow")["a"])


def test_a_run_that_is_deleted_is_forgotten(tmp_path, logs):
    """And one that takes its place is read anew."""
    for name in ("a", "b"):
        logs.write_run(tmp_path / name, logs.plain_records(range(1, 9)))
    own = EventLog(tmp_path)
    own.reload()
    shutil.rmtree(tmp_path / "a")
    own.reload()
    assert list(own.list_tensors(plugin_name="gradflow")) == ["b"]
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 3)))
    own.reload()
    assert sorted(own.list_tensors(plugin_name="gradflow")) == ["a", "b"]


def test_progress_ends_at_the_size_of_the_log(tmp_path, logs):
    """It never goes back."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*tfevents*"))
    told = []
    EventLog(tmp_path, lambda done, total: told.append((done, total))).reload()
    assert told[-1] == (size, size)
    assert told == sorted(told)


def test_a_log_of_an_older_version_is_read(tmp_path):
    """Panel and report read what was written before the tags of TensorBoard's own pages had groups."""
    shutil.copytree(OLD, tmp_path / "old")
    source = open_source(tmp_path)
    (run,) = list_runs(source)["runs"]
    assert (run["run"], run["first"], run["last"], run["damaged"]) == ("old", 1, 41, 0)
    assert {item["name"] for item in run_meta(source, "old")["metrics"]} == {"block.gain", "loss"}
    assert run_issues(source, "old")["issues"][0]["layer"] == "h.1"
    assert list_histograms(source, "old")["items"] == [{"metric": "parameter.gradient", "site": "h.0.weight"}]
    records = read_run(tmp_path / "old").records
    assert [record.step for record in records] == list(range(1, 42))
    assert records[0].value("block.gain", "h.1") == 1.125
    assert records[-1].notes == ()
    assert json.dumps(run)
