"""What several sessions in one folder are, and whether a run is over: the panel and the report say the same."""

import json
import time

from gradflow_export.cli import main
from gradflow_export.records.step_record import IssueType, RunInfo, StepRecord
from gradflow_export.writers.tensorboard import TensorBoardWriter
from tensorboard_plugin_gradflow.data import list_runs, run_issues, run_meta
from tensorboard_plugin_gradflow.story import time_axis


def spans_in(source):
    """Return first and last step of each run of the panel."""
    return {run["run"]: (run["first"], run["last"]) for run in list_runs(source)["runs"]}


def reported(capsys, folder):
    """Return how many records each report of a folder is about."""
    main(["report", str(folder), "--json"])
    return sorted(run["steps"]["count"] for run in json.loads(capsys.readouterr().out)["runs"])


def test_a_session_that_began_again_hides_nothing(tmp_path, logs, open_source, capsys):
    """A cell that was run again: the sick run before it is listed with its issue, and nothing was resumed."""
    found = logs.issue(IssueType.NUMERICAL, step=37)
    sick = [*logs.plain_records(range(1, 60)), StepRecord(60, logs.EPOCH + 60, issues=(found,))]
    logs.write_run(tmp_path / "a", sick, model="Net", entries=10)
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 31)), start=600, model="Net", entries=10)
    source = open_source(tmp_path)
    before = f"a [{logs.session_name()}]"
    assert spans_in(source) == {"a": (1, 30), before: (1, 60)}
    assert [run_issues(source, run)["open"] for run in ("a", before)] == [0, 1]
    assert all(time_axis(source, run)["annotations"] == [] for run in ("a", before))
    assert reported(capsys, tmp_path / "a") == [30, 60]


def test_another_model_is_another_run(tmp_path, logs, open_source, capsys):
    """It may even go on counting the steps; the sessions that resumed it are part of it."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 21)), model="Net", entries=10)
    logs.write_run(tmp_path / "a", logs.plain_records(range(16, 31)), start=100, model="Net", entries=10)
    logs.write_run(tmp_path / "a", logs.plain_records(range(31, 41)), start=200, model="Other", entries=10)
    logs.write_run(tmp_path / "a", logs.plain_records(range(41, 51)), start=300, model="Other", entries=10)
    logs.write_run(tmp_path / "a", logs.plain_records(range(51, 61)), start=400, model="Other", entries=20)
    source = open_source(tmp_path)
    assert spans_in(source) == {
        "a": (51, 60),
        f"a [{logs.session_name()}]": (1, 30),
        f"a [{logs.session_name(200)}]": (31, 50),
    }
    assert [item["step"] for item in time_axis(source, f"a [{logs.session_name()}]")["annotations"]] == [16]
    assert reported(capsys, tmp_path / "a") == [10, 20, 30]


def test_runs_that_share_a_folder_are_told_apart_by_their_models(tmp_path, logs, open_source):
    """A generator and a discriminator, which write at the same time."""
    logs.write_run(tmp_path / "gan", logs.plain_records(range(1, 9)), model="Generator", parameters=288)
    logs.write_run(tmp_path / "gan", logs.plain_records(range(1, 9)), start=2, model="Discriminator", parameters=361)
    logs.write_run(tmp_path / "alone", logs.plain_records(range(1, 9)), model="Net")
    runs = list_runs(open_source(tmp_path))["runs"]
    assert sorted((run["model"], run["parameters"]) for run in runs if "model" in run) == [
        ("Discriminator", 361),
        ("Generator", 288),
    ]


def test_only_a_run_that_was_closed_is_known_to_be_whole(tmp_path, logs, open_source):
    """A process that was killed leaves a run that looks like one that goes on, until it is silent for too long."""
    now = time.time()
    for name, age, closed in (("done", 1e6, True), ("killed", 1e6, False), ("running", 1.0, False)):
        writer = TensorBoardWriter(tmp_path / name, rows=10, flush_seconds=1e9)
        writer.open(RunInfo(f"{int(1000 * (now - age - 40))}-0", now - age - 40))
        for record in logs.plain_records(range(1, 31)):
            writer.write(StepRecord(record.step, now - age - 30 + record.step, record.readings))
        if closed:
            writer.close()
        else:
            writer.flush()
    source = open_source(tmp_path)
    states = {run["run"]: run["state"] for run in list_runs(source)["runs"]}
    assert states == {"done": "closed", "killed": "silent", "running": "running"}
    assert run_meta(source, "killed")["state"] == "silent"


def test_a_run_with_long_steps_is_not_called_silent(tmp_path, logs, open_source):
    """What is usual is what the run itself has shown: here a chunk every ten minutes."""
    now = time.time()
    for name, age in (("slow", 1500), ("ended", 2500)):
        writer = TensorBoardWriter(tmp_path / name, rows=1, flush_seconds=0)
        writer.open(RunInfo(f"{int(1000 * (now - 9000))}-0", now - 9000))
        for number, record in enumerate(logs.plain_records(range(1, 5))):
            writer.write(StepRecord(record.step, now - age - 600 * (3 - number), record.readings))
        writer.flush()
    states = {run["run"]: run["state"] for run in list_runs(open_source(tmp_path))["runs"]}
    assert states == {"slow": "running", "ended": "silent"}
