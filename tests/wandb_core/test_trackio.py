"""The same writer over trackio: real package, local database, nothing beyond the loopback."""

import importlib
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, WandbSink
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.records.step_record import Histogram, Reading


@pytest.fixture(scope="module")
def trackio(tmp_path_factory):
    """The package, with its files in a folder of their own and nobody logged in to anything."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "TRACKIO_SPACE_ID",
            "TRACKIO_SERVER_URL",
            "TRACKIO_WEBHOOK_URL",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("TRACKIO_DIR", str(folder / "runs"))
        patch.setenv("HF_HOME", str(folder / "home"))
        assert "trackio" not in sys.modules
        module = importlib.import_module("trackio")
        assert folder / "runs" == module.TRACKIO_DIR
        yield module


@pytest.fixture(autouse=True)
def stay_here(monkeypatch):
    """Refuse every connection and every look-up that leaves this machine, and fail the test that tried."""
    tried, connect, look_up = [], socket.socket.connect, socket.getaddrinfo

    def allowed(host):
        if str(host) not in ("127.0.0.1", "localhost", "::1"):
            tried.append(host)
            raise OSError(f"{host} is beyond the loopback")

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX:
            allowed(address[0])
        return connect(self, address)

    def guarded_look_up(host, *more, **named):
        allowed(host)
        return look_up(host, *more, **named)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
    yield
    assert tried == []


@pytest.fixture
def stored(trackio, request):
    """A project of the test's own, and its rows, alerts and config as trackio reads them back."""

    project, storage = request.node.name, trackio.sqlite_storage.SQLiteStorage
    return SimpleNamespace(
        project=project,
        storage=storage,
        start={"project": project, "auto_log_cpu": False, "auto_log_gpu": False},
        rows=lambda run, key: [row for row in storage.get_logs(project, run) if key in row],
    )


@pytest.fixture
def sink(trackio, make):
    """Return a function that makes a writer over trackio and opens it."""

    def made(**options):
        writer = WandbSink(module=trackio, **options)
        writer.open(make.info)
        return writer

    return made


def test_a_run_of_its_own_holds_everything(trackio, stored, sink, make):
    """Scalars at their own steps, NaN, histogram, tables, report, alert and config are read back."""
    writer = sink(name="own", **stored.start)
    edges, counts = np.linspace(0, 1, 65), np.arange(64)
    for step in range(1, 11):
        gains = Reading.of("block.gain", ("a", "b"), [1.0, None if step == 2 else 38.0])
        loss = Reading.run("loss", float("nan") if step == 4 else 1 / step)
        histograms = (Histogram("parameter.gradient", "a", edges, counts),) if step == 5 else ()
        issues = (make.issue(),) if step == 3 else ()
        writer.write(make.record(3 * step, loss, gains, issues=issues, histograms=histograms))
        writer._lane.wait(100)
    writer.close()
    rows = stored.rows("own", "gradflow/loss")
    assert [row["step"] for row in rows] == [row["gradflow/step"] for row in rows] == list(range(3, 33, 3))
    assert [row["gradflow/loss"] for row in rows[:3]] == [float(np.float32(1 / step)) for step in (1, 2, 3)]
    assert np.isnan(float(rows[3]["gradflow/loss"]))
    assert [row["gradflow/block.gain/b"] for row in rows if "gradflow/block.gain/b" in row] == [38.0] * 9
    (row,) = stored.rows("own", "gradflow/histogram/first")
    assert sum(row["gradflow/histogram/first"]["values"]) == counts.sum()
    tables = stored.rows("own", "gradflow/health")
    assert [row["step"] for row in tables] == [9, 30]
    assert [row["layer"] for row in tables[-1]["gradflow/health"]["_value"]] == ["a", "b"]
    pages = [row["gradflow/gain_report"]["file_path"] for row in tables]
    assert all("EXPLODING in a" in (trackio.utils.MEDIA_DIR / page).read_text() for page in pages)
    (alert,) = stored.storage.get_alerts(stored.project)
    assert (alert["title"], alert["level"], alert["step"]) == ("gradflow: EXPLODING in a", "error", 3)
    assert stored.storage.get_run_config(stored.project, "own")["gradflow"]["model"] == "Net"


@pytest.mark.parametrize("how", ["plain", "with step", "never"])
def test_neither_side_loses_a_row(trackio, stored, sink, make, how):
    """However the user logs beside us, all rows of both are there; ours keep their own steps."""
    run = trackio.init(name="user", **stored.start)
    writer = sink()
    for step in range(1, 31):
        if how == "plain":
            trackio.log({"mine": step})
        elif how == "with step":
            trackio.log({"mine": step}, step=10 * step)
        writer.write(make.record(step))
    writer.close()
    run.finish()
    mine = [] if how == "never" else list(range(1, 31))
    assert [row["mine"] for row in stored.rows("user", "mine")] == mine
    if how == "with step":
        assert [row["step"] for row in stored.rows("user", "mine")] == [10 * step for step in mine]
    assert [row["step"] for row in stored.rows("user", "gradflow/loss")] == list(range(1, 31))


def test_an_exporter_finds_the_run_of_the_thread_that_made_it(trackio, stored, tmp_path, unhurried):
    """trackio tells only its own thread of a run; the exporter's worker writes to it all the same, also after its end."""
    run = trackio.init(name="whole", **stored.start)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    sink = WandbSink(module=trackio)
    with Exporter(model, backends=[sink], logdir=tmp_path).watch(criterion) as exporter:
        for _ in range(20):
            optimizer.zero_grad()
            criterion(model(torch.randn(16, 4)), torch.randint(2, (16,))).backward()
            optimizer.step()
        run.finish()
    assert [row["step"] for row in stored.rows("whole", "gradflow/loss")] == list(range(1, 21))
    assert exporter.summary()["set_aside"] == []


def test_without_a_run_one_line_says_what_to_do(trackio, sink, make, said):
    """Nothing is started unasked, and nothing raises."""
    trackio.context_vars.current_run.set(None)
    writer = sink()
    for step in range(1, 6):
        writer.write(make.record(step))
    writer.close()
    (line,) = said("no W&B run is active")
    assert "call trackio.init() before the writer is made" in line


def test_an_argument_that_init_does_not_know_is_said_so(trackio):
    """The signature is that of the module in hand."""
    with pytest.raises(ArgumentError, match=r"trackio\.init know no argument 'projet'; did you mean 'project'"):
        WandbSink(module=trackio, projet="mine")


def test_a_module_that_is_not_like_wandb_is_refused():
    """The message says what it lacks."""
    with pytest.raises(ArgumentTypeError, match="has no init, Table, Histogram"):
        WandbSink(module=socket)
