"""The JSON-lines writer: what stands in the file."""

import json

import pytest

from gradflow_export.errors import StorageError
from gradflow_export.records.step_record import Histogram, Reading, RunInfo, StepRecord
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import JsonlWriter

GOLDEN = """\
{"kind":"run","v":1,"session":"1-0","started":1.5,"model":"Net","parameters":3,"blocks":[],"rank":0,"world_size":1,\
"settings":{"limit":"NaN"},"versions":{},"entries":0,"tensors":0,"frozen":0}
{"kind":"sites","session":"1-0","id":0,"sites":["a","b","c"]}
{"kind":"step","session":"1-0","step":1,"wall_time":2.5,"phase":"train","rank":0,"run":{"loss":"Infinity"},\
"sites":{"block.gain":[0,[0.5,null,"NaN"]]}}
{"kind":"step","session":"1-0","step":2,"wall_time":3.5,"phase":"train","rank":0,"run":{},"sites":{"block.gain":[0,[0.0,-0.0,1.0]]}}
{"kind":"end","session":"1-0","step":2}
"""


def write_pinned_run(writer):
    """Write two records whose values are pinned."""
    writer.open(RunInfo("1-0", 1.5, "Net", 3, settings={"limit": float("nan")}))
    sites = ("a", "b", "c")
    gain = Reading.of("block.gain", sites, [0.5, None, float("nan")])
    writer.write(StepRecord(1, 2.5, (gain, Reading.run("loss", float("inf")))))
    writer.write(StepRecord(2, 3.5, (Reading.of("block.gain", sites, [0.0, -0.0, 1.0]),)))
    writer.close()


def refuse_constant(name):
    raise AssertionError(f"bare {name} in the file")


def test_the_file_is_this_text(tmp_path):
    """One strict JSON object per line; site names stand once; null is missing, NaN and Inf are strings."""
    writer = JsonlWriter(tmp_path)
    write_pinned_run(writer)
    text = writer.path.read_text()
    assert writer.path == tmp_path / "gradflow-1-0.jsonl"
    assert text == GOLDEN
    for line in text.splitlines():
        json.loads(line, parse_constant=refuse_constant)


def test_histograms_with_infinite_edges_stay_strict_json(tmp_path):
    """Even an edge at infinity does not put a bare Infinity into the file."""
    histogram = Histogram("parameter.weight", "a", [0.0, float("inf")], [4])
    writer = JsonlWriter(tmp_path)
    writer.open(RunInfo("1-0", 1.0))
    writer.write(StepRecord(1, 1.0, (), (histogram,)))
    writer.close()
    json.loads(writer.path.read_text().splitlines()[1], parse_constant=refuse_constant)
    assert read_run(tmp_path).records[0].histograms == (histogram,)


def test_a_named_file_is_appended_to(tmp_path):
    """A second session goes below the first, on a new line even where a kill cut the last one short."""
    path = tmp_path / "deep" / "log.jsonl"
    first = JsonlWriter(path)
    write_pinned_run(first)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])[:-20])
    second = JsonlWriter(path)
    second.open(RunInfo("2-0", 2.0))
    second.write(StepRecord(7, 9.0))
    second.close()
    run = read_run(path)
    assert (run.sessions, run.records.steps, run.skipped) == (("1-0", "2-0"), (1, 7), 1)
    assert run.info == RunInfo("2-0", 2.0)
    assert run.closed


def test_a_directory_named_like_a_file_is_refused(tmp_path):
    """The error says what was found there."""
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(StorageError, match="is a directory or read-only; pass another path"):
        JsonlWriter(tmp_path / "x.jsonl")
