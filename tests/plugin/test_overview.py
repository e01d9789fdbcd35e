"""The table of all runs: what each came to, and with which hyperparameters."""

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from werkzeug.test import Client

from gradflow_export.records.step_record import IssueType, RunInfo, Severity, StepRecord
from gradflow_export.storage.event_codec import frame, summary_metadata, version_event
from gradflow_export.writers import TensorBoardWriter
from tensorboard_plugin_gradflow.hyperparameters import Hyperparameters
from tensorboard_plugin_gradflow.standalone import ViewerApp


def write_hparams(folder, **values):
    """Write what SummaryWriter.add_hparams writes."""
    data = plugin_data_pb2.HParamsPluginData(version=0)
    for name, value in values.items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(data.session_start_info.hparams[name], kind, value)
    metadata = summary_metadata("hparams", data.SerializeToString(), summary_pb2.DATA_CLASS_UNKNOWN)
    value = summary_pb2.Summary.Value(tag="_hparams_/session_start_info", metadata=metadata)
    event = event_pb2.Event(wall_time=1.0, summary=summary_pb2.Summary(value=[value]))
    folder.mkdir(parents=True, exist_ok=True)
    payloads = [version_event(1.0), event.SerializeToString()]
    (folder / "events.out.tfevents.1.host").write_bytes(b"".join(map(frame, payloads)))


@pytest.fixture(params=["view", "tensorboard"])
def ask(request, tmp_path, open_client):
    """Return the overview of the log directory, by either server."""

    def ask(more=""):
        client = Client(ViewerApp(tmp_path)) if request.param == "view" else open_client(tmp_path)
        answer = client.get(f"/overview{more}", headers={"Host": "localhost"}).json
        return answer["total"], {run["run"]: run for run in answer["runs"]}

    return ask


def test_each_run_tells_what_it_came_to(tmp_path, logs, ask):
    """The worst open issue that is no note, how many are no consequence of another, the loss as /meta has it, and its way there."""
    records = logs.plain_records(range(1, 401))
    found = (
        logs.issue(layer="a", step=9, severity=Severity.INFO),
        logs.issue(kind=IssueType.DEAD, severity=Severity.CRITICAL, layer="b", step=20, healed=30),
        logs.issue(kind=IssueType.DEAD, severity=Severity.LOW, layer="b", step=40),
        logs.issue(layer="a", step=50),
        logs.issue(kind=IssueType.DEAD, severity=Severity.MEDIUM, layer="a", step=55),
    )
    records.append(StepRecord(401, logs.EPOCH + 401, issues=found))
    logs.write_run(tmp_path / "sick", records, rows=16, model="Net", parameters=12)
    logs.write_run(tmp_path / "fine", logs.plain_records(range(1, 4)), start=9000)
    total, runs = ask()
    assert total == 2
    assert list(runs) == ["sick", "fine"] or list(runs) == ["fine", "sick"]
    sick = runs["sick"]
    assert sick["verdict"] == {"issue_type": "EXPLODING", "severity": "HIGH", "layer": "a", "step": 50}
    assert (sick["issues"], sick["problems"]) == ({"open": 3, "healed": 1, "ended": 0}, 2)
    assert (sick["model"], sick["parameters"], sick["damaged"]) == ("Net", 12, 0)
    steps = [step for step, _ in sick["trend"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 400
    assert len(steps) <= 32
    assert all(1 / (2 + step) < value <= 1.0 for step, value in sick["trend"])
    assert sick["loss"]["last"] == pytest.approx(float(np.median([1 / (1 + step) for step in range(396, 401)])))
    assert runs["fine"]["verdict"] is None
    assert runs["fine"]["loss"] is None


@pytest.mark.parametrize("error", ["", "KeyError: 'x' (step 3)"])
def test_the_exception_that_ended_a_run_is_told(tmp_path, logs, ask, error):
    """As gradflow report tells it; the end of a session is no damaged record."""
    writer = TensorBoardWriter(tmp_path / "a")
    writer.open(RunInfo(logs.session_name(), logs.EPOCH))
    for record in logs.plain_records(range(1, 4)):
        writer.write(record)
    writer.ended_by(error)
    writer.close()
    run = ask()[1]["a"]
    assert (run["damaged"], run["state"]) == (0, "closed")
    assert (f"ended by an exception {error}" in str(run["said"])) is bool(error)


def test_a_run_that_grows_is_told_anew(tmp_path, logs):
    """What is kept is kept under the version."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 21)))
    app = ViewerApp(tmp_path)
    client = Client(app)
    first = client.get("/overview", headers={"Host": "localhost"}).json["runs"][0]
    logs.write_run(tmp_path / "a", logs.plain_records(range(21, 41)), start=100)
    app._log._read = float("-inf")  # as two seconds later
    client.get("/runs", headers={"Host": "localhost"})
    second = client.get("/overview", headers={"Host": "localhost"}).json["runs"][0]
    assert first["trend"][-1][0] == 20
    assert second["trend"][-1][0] == 40


def test_an_impatient_client_gets_what_is_known_and_asks_again(tmp_path, logs):
    """Each answer holds more runs, those written last first, until none is pending; then all of them are as ever."""
    for number in range(130):
        logs.write_run(tmp_path / f"run-{number:03}", logs.plain_records(range(1, 3)), start=10 * number)
    client = Client(ViewerApp(tmp_path))

    def ask(more):
        return client.get(f"/overview{more}", headers={"Host": "localhost"}).json

    answers = [ask("?patience=0")]
    while answers[-1]["pending"]:
        answers.append(ask("?patience=0"))
        assert answers[-1]["pending"] < answers[-2]["pending"]
    first = answers[0]
    assert 0 < first["pending"] < 130
    told = [run["run"] for run in first["runs"] if not run.get("pending")]
    assert told == [f"run-{number:03}" for number in range(129, 129 - len(told), -1)]
    assert {run["verdict"] for run in first["runs"]} == {None}
    assert answers[-1] == ask("") == Client(ViewerApp(tmp_path)).get("/overview", headers={"Host": "localhost"}).json


def test_some_runs_can_be_asked_for(tmp_path, logs, ask):
    """By name, several at once."""
    for name in ("a", "b", "c"):
        logs.write_run(tmp_path / name, logs.plain_records(range(1, 9)))
    total, runs = ask("?run=a&run=c")
    assert (total, sorted(runs)) == (2, ["a", "c"])


def test_hyperparameters_come_from_hparams_and_wandb(tmp_path, logs, ask):
    """Of the run's folder, or of one below it, where add_hparams writes; W&B's file adds what is not there."""
    for name in ("own", "below", "wandb", "both", "none"):
        logs.write_run(tmp_path / name, logs.plain_records(range(1, 9)))
    write_hparams(tmp_path / "own", lr=0.5, amp=True, optimizer="AdamW")
    write_hparams(tmp_path / "below" / "1700000000.0", lr=0.25)
    write_hparams(tmp_path / "both", lr=0.125)
    text = "wandb_version: 1\n_wandb: {value: {x: 1}}\nlr: {desc: null, value: 7}\nnet: {value: {depth: 3, sizes: [1, 2]}}\n"
    for name in ("wandb", "both"):
        (tmp_path / name / "config.yaml").write_text(text)
    (tmp_path / "none" / "config.yaml").write_text("lr: {value: 3}\n")
    _, runs = ask()
    given = {name: (run["hyperparameters"], run["hyperparameters_from"]) for name, run in runs.items()}
    assert given["own"] == ({"amp": True, "lr": 0.5, "optimizer": "AdamW"}, ["hparams"])
    assert given["below"] == ({"lr": 0.25}, ["hparams"])
    assert given["wandb"] == ({"lr": 7, "net.depth": 3, "net.sizes": "1, 2"}, ["wandb"])
    assert given["both"] == ({"lr": 0.125, "net.depth": 3, "net.sizes": "1, 2"}, ["hparams", "wandb"])
    assert given["none"] == ({}, [])


def test_a_configuration_that_refers_to_itself_stays_small(tmp_path):
    """A billion laughs are not laughed, and what is no YAML is left out."""
    lines = ["wandb_version: 1", "a0: &a0 {value: {x: 1, y: 2}}"]
    lines += [f"a{n}: &a{n} {{value: {{p: *a{n - 1}, q: *a{n - 1}, r: *a{n - 1}}}}}" for n in range(1, 30)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("\n".join(lines))
    assert len(Hyperparameters({}, tmp_path).of("a")["hyperparameters"]) <= 100
    for text in ("[", "[" * 5000, "x: !!python/object/apply:os.system [ls]", "\0"):
        (tmp_path / "a" / "config.yaml").write_text(text)
        assert Hyperparameters({}, tmp_path).of("a")["hyperparameters"] == {}
