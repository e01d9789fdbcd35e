"""Runs, sessions and issues as the panel is told them."""

import math
import os
import re
from dataclasses import replace

import pytest

from gradflow_export.cli.report import summarise
from gradflow_export.records.catalog import MetricSpec
from gradflow_export.records.lost import UNSEEN
from gradflow_export.records.step_record import IssueType, Note, Reading, RunInfo, Severity, StepRecord
from gradflow_export.schedule import INTERVALS
from gradflow_export.storage.reader import read_run
from gradflow_export.writers import TensorBoardWriter
from tensorboard_plugin_gradflow import standalone
from tensorboard_plugin_gradflow.cache import Remembered
from tensorboard_plugin_gradflow.data import catalog, list_runs, run_issues, run_meta
from tensorboard_plugin_gradflow.errors import RequestError
from tensorboard_plugin_gradflow.howto import how_to_read
from tensorboard_plugin_gradflow.moment import read_moment
from tensorboard_plugin_gradflow.overview import overview
from tensorboard_plugin_gradflow.story import time_axis


def issue_record(logs, step, *issues):
    """Return a record that holds nothing but issues."""
    return StepRecord(step, logs.EPOCH + step, issues=issues)


def test_runs_with_our_data_are_listed_newest_first(tmp_path, logs, open_source):
    """A directory without GradFlow data is no run of ours."""
    logs.write_run(tmp_path / "old", logs.plain_records(range(1, 5)))
    logs.write_run(tmp_path / "new" / "nested", logs.plain_records(range(10, 90)), start=5)
    (tmp_path / "other").mkdir()
    runs = list_runs(open_source(tmp_path))["runs"]
    assert [(run["run"], run["first"], run["last"]) for run in runs] == [("new/nested", 10, 89), ("old", 1, 4)]


def test_an_empty_directory_has_no_runs(tmp_path, open_source):
    """Nothing written is an empty list and no error."""
    assert list_runs(open_source(tmp_path))["runs"] == []


def test_the_version_changes_when_and_only_when_something_is_new(tmp_path, logs, open_source):
    """A client may poll the list of runs alone."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 5)))
    first, again = (list_runs(open_source(tmp_path))["runs"][0]["version"] for _ in range(2))
    logs.write_run(tmp_path / "a", logs.plain_records(range(5, 9)), start=60)
    assert first == again
    assert list_runs(open_source(tmp_path))["runs"][0]["version"] != first


def test_meta_describes_the_run_and_every_metric_it_holds(tmp_path, logs, open_source):
    """Model, sessions, and each metric with its catalogue entry and how many sites it has."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 100)), model="Net", parameters=7, blocks=("a", "b"))
    meta = run_meta(open_source(tmp_path), "a")
    assert (meta["sessions"][0]["model"], meta["sessions"][0]["parameters"]) == ("Net", 7)
    found = {item["name"]: (item["kind"], item["sites"], item["first"], item["last"]) for item in meta["metrics"]}
    assert found == {"block.gain": ("block", 2, 1, 99), "loss": ("run", 1, 1, 99)}


def test_a_metric_outside_the_catalogue_is_described_plainly(tmp_path, logs, open_source):
    """A log of another version stays readable."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 5), metric="parameter.of_tomorrow"))
    names = {item["name"]: item["kind"] for item in run_meta(open_source(tmp_path), "a")["metrics"]}
    assert names["parameter.of_tomorrow"] == "parameter"


def test_what_is_evidence_today_is_no_metric_of_an_old_log(tmp_path, logs, open_source):
    """Runs of earlier versions hold it as metrics: the panel lists the others, of layers and of the whole run."""
    layers = logs.plain_records(range(1, 5), metric="parameter.wiring")
    records = [replace(r, readings=(*r.readings, Reading.run("loss.nested", 1.0))) for r in layers]
    logs.write_run(tmp_path / "a", records)
    assert {item["name"] for item in run_meta(open_source(tmp_path), "a")["metrics"]} == {"loss"}


def test_issues_come_open_first_and_worst_first(tmp_path, logs, open_source):
    """What matters most stands at the top; healed ones come last."""
    written = (
        logs.issue(severity=Severity.LOW, layer="low"),
        logs.issue(severity=Severity.CRITICAL, layer="healed", healed=9),
        logs.issue(severity=Severity.HIGH, layer="late", step=9),
        logs.issue(severity=Severity.HIGH, layer="early", step=2),
    )
    logs.write_run(tmp_path / "a", [issue_record(logs, 20, *written)])
    answer = run_issues(open_source(tmp_path), "a")
    assert [item["layer"] for item in answer["issues"]] == ["early", "late", "low", "healed"]
    assert [item["state"] for item in answer["issues"]] == ["open", "open", "open", "healed"]
    assert answer["open"] == 3


def test_the_last_word_about_an_issue_counts(tmp_path, logs, open_source):
    """An issue that opened and healed is one healed issue."""
    opened, healed = logs.issue(), logs.issue(healed=8)
    logs.write_run(tmp_path / "a", [issue_record(logs, 3, opened), issue_record(logs, 8, healed)], rows=1)
    issues = run_issues(open_source(tmp_path), "a")["issues"]
    assert [(item["state"], item["healed_step"], item["seen"]) for item in issues] == [("healed", 8, 8)]


def test_an_issue_left_open_by_an_earlier_session_is_not_called_open(tmp_path, logs, open_source):
    """Nothing watches it any more; one beyond the point of resumption never happened."""
    kept, undone = logs.issue(step=3), logs.issue(IssueType.DEAD, step=7)
    logs.write_run(tmp_path / "a", [issue_record(logs, 3, kept), issue_record(logs, 7, undone)], rows=1)
    logs.write_run(tmp_path / "a", logs.plain_records(range(5, 9)), start=60)
    issues = run_issues(open_source(tmp_path), "a")["issues"]
    assert [(item["issue_type"], item["state"]) for item in issues] == [("EXPLODING", "ended")]


def test_of_several_ranks_the_lowest_is_read(tmp_path, logs, open_source):
    """Ranks of one run never mix."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 5)), rank=0)
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 9)), rank=1, start=9)
    meta = run_meta(open_source(tmp_path), "a")
    assert [session["session"] for session in meta["sessions"]] == [logs.session_name()]
    assert meta["last"] == 4


def test_an_unknown_run_is_a_request_error(tmp_path, logs, open_source):
    """The error says what came."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 3)))
    for answer in (run_meta, run_issues):
        with pytest.raises(RequestError, match="'b'") as caught:
            answer(open_source(tmp_path), "b")
        assert caught.value.status == 404


def test_the_catalogue_is_served_whole():
    """Every metric comes with unit, formula and source, and with what makes a run hold it."""
    metrics = catalog()["metrics"]
    assert len(metrics) == len({item["name"] for item in metrics})
    assert all(item["formula"] and item["unit"] and item["source"] for item in metrics)
    assert all(item["how"].endswith(".") and item["code"] for item in metrics)
    named = {word for item in metrics for word in re.findall(r'intervals={"(\w+)"', item["code"])}
    assert {"activations", "ranks", "attention"} <= named <= set(INTERVALS)


def test_a_metric_of_an_unknown_family_is_explained_by_its_sites():
    """A new instrument needs no new panel."""
    new = MetricSpec("tomorrow.entropy", "entropy", "nats", "head", "f", "s", "c")
    assert "attention" in how_to_read(new)["how"]


def test_an_issue_names_the_metrics_that_show_its_layer(tmp_path, logs, open_source):
    """Those read at the layer itself, else those read inside it; the phases of each metric are told as well."""
    both = (Reading.of("block.gain", ("h.0",), [1.0]), Reading.of("activation.dead_share", ("h.0.act",), [0.9]))
    found = tuple(logs.issue(layer=name) for name in ("h.0", "h.0.act", "h", "z"))
    logs.write_run(tmp_path / "a", [StepRecord(1, logs.EPOCH, both, issues=found)])
    metrics = {item["layer"]: item["metrics"] for item in run_issues(open_source(tmp_path), "a")["issues"]}
    assert metrics == {
        "h.0": ["block.gain"],
        "h.0.act": ["activation.dead_share"],
        "h": ["activation.dead_share", "block.gain"],
        "z": [],
    }
    assert [item["phases"] for item in run_meta(open_source(tmp_path), "a")["metrics"]] == [["train"], ["train"]]


def test_sessions_that_ran_at_the_same_time_are_two_runs(tmp_path, logs, open_source):
    """Two processes that were given one folder: each has its own steps, values and issues."""
    first = logs.plain_records(range(1, 100))
    other = logs.plain_records(range(1, 60), value=lambda step, site: -step)
    found = logs.issue(step=30)
    logs.write_run(tmp_path / "a", first, rows=10)
    logs.write_run(tmp_path / "a", [*other, StepRecord(60, logs.EPOCH + 60, issues=(found,))], start=5, rows=10)
    source = open_source(tmp_path)
    runs = {run["run"]: (run["first"], run["last"]) for run in list_runs(source)["runs"]}
    name = f"a [{logs.session_name(5)}]"
    assert runs == {"a": (1, 99), name: (1, 60)}
    assert [len(run_meta(source, run)["sessions"]) for run in runs] == [1, 1]
    assert [len(run_issues(source, run)["issues"]) for run in ("a", name)] == [0, 1]


def killed_run(folder, logs):
    """Write a run whose process ends with some records in the draft only; return all of them."""
    records = logs.plain_records(range(1, 30), sites=("a", "b", "c"))
    writer = TensorBoardWriter(folder, rows=10, flush_seconds=1e9)
    writer.open(RunInfo(logs.session_name(), logs.EPOCH, model="Net"))
    for record in records:
        writer.write(record)
        if record.step % 3 == 0:
            writer.keep()
    writer.keep()
    return records


def test_what_a_killed_process_had_drafted_is_shown(tmp_path, logs):
    """Once nobody can be writing it as a chunk any more, with values like those of the chunks before."""
    records = killed_run(tmp_path / "a", logs)
    (draft,) = (tmp_path / "a").glob("*.draft")
    fresh = run_meta(standalone.open_source(tmp_path), "a")
    assert (fresh["first"], fresh["last"]) == (1, 20)
    os.utime(draft, (draft.stat().st_mtime - 60,) * 2)
    source = standalone.open_source(tmp_path)
    meta = run_meta(source, "a")
    assert (meta["first"], meta["last"], len(meta["sessions"])) == (1, 29, 1)
    for step in (1, 15, 21, 29):
        shown = read_moment(source, "a", step, ("block.gain",))["metrics"]["block.gain"]
        assert shown["step"] == step
        assert dict(zip(shown["sites"], shown["values"], strict=True)) == records[step - 1].get("block.gain").as_dict()


def lossy_records(logs, first, last, lost=None):
    """Return records whose loss jumps about, with a running total of lost steps."""
    more = () if lost is None else (Reading.run("runtime.dropped", lost),)
    return [
        StepRecord(step, logs.EPOCH + step, (Reading.run("loss", math.sin(step * step) + 30 / step), *more))
        for step in range(first, last)
    ]


@pytest.mark.parametrize(("steps", "rows"), [(9, 64), (10, 3), (12, 5), (300, 64), (300, 7)])
def test_first_and_last_loss_are_those_of_the_command_line(tmp_path, logs, open_source, steps, rows):
    """However the records lie in chunks, panel and ``gradflow report`` tell the same two numbers, or none."""
    logs.write_run(tmp_path / "a", lossy_records(logs, 1, steps + 1), rows=rows)
    expected = summarise(read_run(tmp_path / "a")).loss
    found = run_meta(open_source(tmp_path), "a")["loss"]
    assert found == (None if expected is None else {"first": expected[0], "last": expected[1]})
    assert (expected is None) == (steps < 10)


def unseen(logs, step):
    """Return the record of an end of which nothing could be read."""
    note = Note(UNSEEN, "the end was not seen: nothing was read after step 12", step)
    return StepRecord(step, logs.EPOCH + step, notes=(note,))


def told(source, run):
    """Return what the panel says of a run on one line."""
    said = run_meta(source, run)["said"]
    return said["tone"], ": ".join(filter(None, (said["headline"], said["detail"])))


@pytest.mark.parametrize("rows", [3, 64])
def test_the_verdict_is_that_of_the_command_line(tmp_path, logs, open_source, rows):
    """Panel and list of runs say what ``gradflow report`` says, in the same words, whatever became of the run."""
    kinds = [logs.issue(IssueType(kind), Severity.MEDIUM, layer) for kind in ("DEAD", "EVAL_RANDOM") for layer in "abc"]

    def losses(values, first=1):
        return [StepRecord(s, logs.EPOCH + s, (Reading.run("loss", v),)) for s, v in enumerate(values, start=first)]

    def rivals(one, other):
        return [
            StepRecord(s, logs.EPOCH + s, (Reading.run("loss", 3.0), Reading.of("optimizer.loss", ("g", "d"), pair)))
            for s, pair in enumerate([(one, other)] * 12, start=1)
        ]

    runs = {
        "fell": (losses([2.0, 1.0] * 6 + [0.5] * 6), "good", "healthy: "),
        "flat": (losses([1.0] * 12), "warn", "the loss has not fallen: "),
        "hardly": (losses([1.0] * 6 + [0.99] * 6), "warn", "the loss hardly fell: "),
        "leapt": (
            [
                StepRecord(64 * place, logs.EPOCH + place, (Reading.run("loss", loss),))
                for place, loss in enumerate([2.0] * 6 + [0.1, 0.2] * 8 + [1.9], start=1)
            ],
            "warn",
            "the loss fell, but was far higher when last read: from 2 to 0.2 (medians of 5), then 1.9 at step 1472; ",
        ),
        "nan": (losses([2.0] * 6 + [1.0] * 6 + [math.nan]), "bad", "the loss is NaN: "),
        "rivals": (rivals(1.0, 2.0), "good", "healthy: "),
        "shared": (rivals(3.0, 3.0), "warn", "the loss has not fallen: "),
        "lost": (lossy_records(logs, 1, 40, lost=3.0), "warn", "healthy as far as recorded: "),
        "unseen": ([*losses([2.0] * 6 + [1.0] * 6), unseen(logs, 13)], "warn", "healthy as far as recorded: "),
        "mild": ([*losses([1.0] * 9), issue_record(logs, 10, *kinds)], "warn", "6 problems: "),
        "grave": (
            [*losses([1.0] * 9), issue_record(logs, 10, logs.issue(), logs.issue(healed=9, layer="z"))],
            "bad",
            "1 ",
        ),
        "blind": ([StepRecord(1, logs.EPOCH, (Reading.run("learning_rate", 1.0),))], "none", "no verdict: "),
        "note": (
            [*losses([2.0] * 6 + [1.0] * 6), issue_record(logs, 13, logs.issue(severity=Severity.INFO))],
            "good",
            "h",
        ),
    }
    for name, (records, *_) in runs.items():
        logs.write_run(tmp_path / name, records, rows=rows)
    source = open_source(tmp_path)
    listed = {row["run"]: row["said"] for row in overview(source, Remembered(), tmp_path)["runs"]}
    for name, (_, tone, words) in runs.items():
        got, line = told(source, name)
        assert (got, line) == (tone, summarise(read_run(tmp_path / name)).verdict), name
        assert line.startswith(words), line
        assert listed[name] == run_meta(source, name)["said"]


def test_the_verdict_on_a_resumed_run_names_what_was_left_open(tmp_path, logs, open_source):
    """Once the later session reports it too, it is one issue since its first step."""
    logs.write_run(tmp_path / "a", [*logs.plain_records(range(1, 9)), issue_record(logs, 9, logs.issue())])
    logs.write_run(tmp_path / "a", logs.plain_records(range(10, 30)), start=60)
    source = open_source(tmp_path)
    tone, line = told(source, "a")
    assert (tone, line) == ("warn", summarise(read_run(tmp_path / "a")).verdict)
    assert line.startswith("1 problem left open by an earlier session: EXPLODING in a since step 3; no other open")
    again = [*logs.plain_records(range(30, 40)), issue_record(logs, 40, logs.issue(step=33))]
    logs.write_run(tmp_path / "a", again, start=120)
    source = open_source(tmp_path)
    assert told(source, "a") == ("bad", "1 problem: EXPLODING in a since step 3")
    assert summarise(read_run(tmp_path / "a")).verdict == told(source, "a")[1]
    assert [(each["step"], each["state"]) for each in run_issues(source, "a")["issues"]] == [(3, "open")]


def test_lost_steps_are_added_up_over_sessions(tmp_path, logs, open_source):
    """Each session counts from 0; nothing lost is 0, also in a run without a loss."""
    logs.write_run(tmp_path / "a", lossy_records(logs, 1, 40, lost=3.0), rows=7)
    logs.write_run(tmp_path / "a", lossy_records(logs, 40, 60, lost=2.0), start=60)
    logs.write_run(tmp_path / "b", [StepRecord(1, logs.EPOCH, (Reading.run("gain.depth", 1.0),))])
    source = open_source(tmp_path)
    assert run_meta(source, "a")["lost"] == 5
    assert summarise(read_run(tmp_path / "a")).lost_steps.total == 5
    assert (run_meta(source, "b")["lost"], run_meta(source, "b")["loss"]) == (0, None)


def test_steps_between_a_killed_session_and_the_next_are_lost(tmp_path, logs, open_source):
    """The panel counts them as the command line does, and marks them on the time axis."""
    writer = TensorBoardWriter(tmp_path / "a", rows=7)
    writer.open(RunInfo("1700000000000-ab-0", 1700000000.0, settings={"every": 1, "budget": None}))
    for each in lossy_records(logs, 1, 22):
        writer.write(StepRecord(each.step, 1700000000.0 + each.step, each.readings))
    logs.write_run(tmp_path / "a", lossy_records(logs, 30, 60), start=60)
    source = open_source(tmp_path)
    assert run_meta(source, "a")["lost"] == summarise(read_run(tmp_path / "a")).lost_steps.total == 8
    (gap,) = [each for each in time_axis(source, "a")["annotations"] if each["kind"] == "gap"]
    assert (gap["step"], gap["last"]) == (22, 29)
