"""Each adapter against the real tracker, offline, with a short run of a real exporter; run by ``make test-trackers``."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradflow_export import Exporter
from gradflow_export.writers import MemoryWriter, trackers

STEPS = 15


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home that trackers may write to."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(sink, rate=0.1):
    """Train a small network; returns the records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=rate)
    memory = MemoryWriter()
    inputs, targets = torch.randn(64, 8), torch.randint(3, (64,))
    with Exporter(model, backends=[memory, sink]).watch(criterion) as exporter:
        for _ in range(STEPS):
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    assert exporter.summary()["set_aside"] == []
    return memory.records


def losses(records):
    """Return step and loss of each record."""
    return [(record.step, record.value("loss")) for record in records]


def test_mlflow(tmp_path):
    """Metrics, NaN, tables, description and alerts are read back from its SQLite store."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = mlflow.create_experiment("mine", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        records = train(trackers.MlflowSink(), rate=1e30)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "gradflow/loss")
    got = sorted((metric.step, metric.value) for metric in history)
    assert [step for step, _ in got] == [step for step, _ in losses(records)]
    assert any(not math.isfinite(loss) for _, loss in got)
    files = {path.name for path in (tmp_path / "artifacts").rglob("*.json")}
    assert {"health.json", "issues.json", "run.json"} <= files
    tags = client.get_run(run.info.run_id).data.tags
    assert [name for name in tags if name.startswith("gradflow.alert.")]


def test_swanlab(tmp_path):
    """The run's file holds our numbers."""
    import swanlab

    run = swanlab.init(project="mine", mode="offline", log_dir=str(tmp_path / "swan"))
    train(trackers.SwanlabSink())
    run.finish()
    (stored,) = (tmp_path / "swan").rglob("*.swanlab")
    assert b"gradflow/loss" in stored.read_bytes()
    assert b"gradflow/gradient.total_norm" in stored.read_bytes()


def test_aim(tmp_path):
    """Metrics, tables and description are read back from its storage."""
    import aim

    repository = aim.Repo.from_path(str(tmp_path), init=True)
    run = aim.Run(repo=repository, system_tracking_interval=None, log_system_params=False)
    records = train(trackers.AimSink(run), rate=1e30)
    (metric,) = (metric for metric in run.metrics() if metric.name == "gradflow/loss")
    _, values = metric.values.sparse_numpy()
    wanted = [loss for _, loss in losses(records)]
    assert len(values) == len(wanted)
    assert sorted(filter(math.isfinite, values)) == pytest.approx(sorted(filter(math.isfinite, wanted)))
    assert run["gradflow"]["model"] == "Sequential"
    assert run["gradflow/issues"]["data"]
    run.close()


def test_clearml():
    """The session's files hold scalars, tables and messages."""
    from clearml import Task

    Task.set_offline(True)
    task = Task.init("mine", "run", auto_connect_frameworks=False, auto_resource_monitoring=False)
    train(trackers.ClearmlSink(task), rate=1e30)
    task.flush(wait_for_uploads=True)
    folder = Path(task.get_offline_mode_folder())
    task.close()
    metrics = (folder / "metrics.jsonl").read_text()
    assert '"loss"' in metrics
    assert "gradflow" in (folder / "task.json").read_text()
    assert "gradflow: " in (folder / "log.jsonl").read_text()


@pytest.mark.parametrize("sink", [trackers.MlflowSink, trackers.SwanlabSink])
def test_without_a_run_the_message_says_what_to_do(sink):
    """Nothing is started unasked."""
    with pytest.raises(Exception, match="expects an active run"):
        sink()
