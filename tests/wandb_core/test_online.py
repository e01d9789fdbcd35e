"""Runs sent over real wandb-core to a server on the loopback: what arrives, and what happens when it goes away."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from gradflow_export.records.step_record import Reading
from gradflow_export.writers.wandb import alerts as wandb_alerts


@pytest.fixture
def server(beside_server, port):
    """A fresh server."""
    with beside_server.LoopbackServer(port) as made:
        yield made


@pytest.fixture
def brief(monkeypatch):
    """The shipped limit on the last tables, which wait for a server."""
    monkeypatch.setattr("gradflow_export.writers.wandb.writer._LAST_SECONDS", 2.0)


def ours(server, run, key="loss"):
    """Return our step and one number of the rows that arrived."""
    rows = server.history(run)
    return [(row["gradflow/step"], row[f"gradflow/{key}"]) for row in rows if f"gradflow/{key}" in row]


def test_everything_arrives(server, begin, make):
    """History of both, alerts, tables as artifacts, config and summary."""
    gradient = Reading.of("parameter.gradient_norm", ("fc.weight",), [3.0])
    run, writer = begin(settings=server.settings()), make.writer()
    for step in range(1, 31):
        issues = (make.issue(layer="fc"),) if step == 3 else ()
        writer.write(make.record(step, Reading.run("loss", 0.5), gradient, issues=issues))
        writer._lane.wait(100)
        run.log({"mine": step}, step=step)
    writer.close()
    run.finish()
    rows = server.history(run.id)
    assert [row["mine"] for row in rows if "mine" in row] == list(range(1, 31))
    assert ours(server, run.id) == [(step, 0.5) for step in range(1, 31)]
    assert [alert["title"] for alert in server.alerts] == ["gradflow: EXPLODING in fc"]
    assert [alert["severity"] for alert in server.alerts] == ["ERROR"]
    summary = server.summary(run.id)
    assert {f"gradflow/{name}" for name in ("health", "issues", "steps", "verdict", "told")} <= set(summary)
    kept = [artifact["name"] for artifact in server.artifacts.values() if artifact["committed"]]
    assert len([name for name in kept if name.startswith("run-")]) >= 4
    assert len([name for name in kept if name.startswith(f"gradflow-{run.id}-")]) == 1
    assert [name for name in server.uploads if "health" in name and name.endswith("table.json")]
    assert [name for name in server.uploads if name.endswith(".parquet")]
    assert summary["gradflow/verdict"] == "1 problem: EXPLODING in fc since step 3"
    assert '"Net"' in server.runs[run.id]["config"]


def resumed(server, begin, make, every, how, *, alone):
    """Log two sessions of 150 steps each into one run, as a user would; return the rows that the server has."""
    for first in (0, 150):
        run = begin(id=f"{how}-{every}-{alone}", resume="allow", settings=server.settings())
        writer = None if alone else make.writer()
        for step in range(first, first + 150):
            if writer:
                writer.write(make.record(step + 1, issues=(make.issue(step=step + 1),) if step % 150 == 3 else ()))
            if step % every == 0:
                run.log({"mine": step}, **({"step": step} if how == "step" else {}))
        if writer and first:
            writer.close()
        run.finish()
        if writer:
            writer.close()
    rows = server.history(run.id)
    return [{key: row[key] for key in ("_step", "mine") if key in row} for row in rows], rows


@pytest.mark.parametrize("how", ["step", "plain"])
@pytest.mark.parametrize("every", [1, 5])
def test_a_resumed_run_has_the_rows_that_it_has_without_us(server, begin, make, capfd, every, how):
    """Every row of the user's is there at its step, none is added, and no alert is told twice."""
    alone, _ = resumed(server, begin, make, every, how, alone=True)
    capfd.readouterr()
    got, rows = resumed(server, begin, make, every, how, alone=False)
    assert got == alone
    assert len(alone) == 300 // every
    newest = [1 + step for step in range(0, 300, every)]
    if how == "step":  # W&B keeps the last row of a session open: it has the newest values of the session
        newest[150 // every - 1], newest[-1] = 150, 300
    assert [row["gradflow/step"] for row in rows] == newest
    assert [alert["title"] for alert in server.alerts] == ["gradflow: EXPLODING in a"]
    assert "less than the current step" not in "".join(capfd.readouterr())


SOON = {
    f"x_{part}_retry_wait_{bound}_seconds": 1
    for part in ("graphql", "file_stream", "file_transfer")
    for bound in ("min", "max")
}


def test_ten_seconds_of_503_lose_nothing(server, begin, make):
    """While the server answers 503, often, everything waits, and then arrives once and in order, alerts too."""
    run, writer = begin(settings={**server.settings(), **SOON}), make.writer()
    server.down = 503
    over = time.monotonic() + 10.0
    for step in range(1, 101):
        issues = (make.issue(layer=f"layer{step}", step=step),) if step % 20 == 0 else ()
        writer.write(make.record(step, Reading.run("loss", 0.5), issues=issues))
        run.log({"mine": step})
        time.sleep(max(0.0, over - time.monotonic()) / (101 - step))
    while server.refused < 5:  # a slow machine asks less often
        time.sleep(0.05)
    alerts = len(server.alerts)
    server.down = None
    writer.close()
    run.finish()
    assert alerts == 0
    assert [row["mine"] for row in server.history(run.id) if "mine" in row] == list(range(1, 101))
    assert ours(server, run.id) == [(step, 0.5) for step in range(1, 101)]
    assert [alert["title"][-5:] for alert in server.alerts] == ["yer20", "yer40", "yer60", "yer80", "er100"]


@pytest.mark.parametrize("how", ["gone", "hanging"])
def test_a_server_in_trouble_does_not_keep_the_end_waiting(server, make, read, how, brief):
    """A run of our own is closed although the server never comes back, and all of it is on disk for ``wandb sync``."""
    writer = make.writer(project="test", settings={**server.settings(), "finish_timeout": 2.0})
    run = wandb.run
    writer.write(make.record(1))
    server.hanging = True
    if how == "gone":
        server.stop()
    for step in range(2, 51):
        writer.write(make.record(step))
        run.log({"mine": step})
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(100.0)
    assert not closing.is_alive()
    assert wandb.run is None
    rows = [row for row in read(run).history if "gradflow/loss" in row]
    assert [row["gradflow/step"] for row in rows] == list(range(2, 51))


@pytest.mark.parametrize("whose", ["ours", "the user's"])
@pytest.mark.parametrize("how", ["gone", "hanging"])
def test_an_alert_does_not_keep_the_end_waiting(server, begin, make, read, said, how, whose, brief):
    """While the server is away alerts are held back, so that a limit on the run's end holds; one line says so."""
    settings = {**server.settings(), "finish_timeout": 1.0}
    run = begin(settings=settings) if whose == "the user's" else None
    writer = make.writer() if run else make.writer(project="test", settings=settings)
    run = wandb.run
    writer.write(make.record(1))
    server.hanging = True
    if how == "gone":
        server.stop()
    for step in range(2, 31):
        writer.write(
            make.record(step, issues=(make.issue(layer=f"layer{step}", step=step),) if step in (2, 15) else ())
        )
        run.log({"mine": step})
    ending = threading.Thread(target=run.finish if whose == "the user's" else writer.close)
    ending.start()
    ending.join(100.0)
    assert not ending.is_alive()
    writer.close()
    log = read(run)
    assert [row["gradflow/step"] for row in log.history if "gradflow/loss" in row] == list(range(2, 31))
    assert log.alerts == []
    assert said("does not answer") == [
        "gradflow: the W&B server does not answer; 2 alerts are not sent, the issues are in the table gradflow/issues"
    ]


def test_alerts_held_back_are_sent_when_the_server_is_back(server, begin, make, monkeypatch):
    """Each once, in order, before the run ends."""
    monkeypatch.setattr(wandb_alerts, "RETRY_SECONDS", 0.0)
    run, writer = begin(settings={**server.settings(), **SOON, "finish_timeout": 100.0}), make.writer()
    server.down = 503
    for step in range(1, 31):
        issues = (make.issue(layer=f"layer{step}", step=step),) if step in (1, 15) else ()
        writer.write(make.record(step, issues=issues))
        assert writer._alerts._lane.wait(100)
        run.log({"mine": step})
    held = len(server.alerts)
    server.down = None
    writer.write(make.record(31))
    assert writer._alerts._lane.wait(100)
    run.finish()
    writer.close()
    assert held == 0
    assert [alert["title"][-7:] for alert in server.alerts] == [" layer1", "layer15"]


def test_whether_a_server_answers(server, place):
    """Any answer but a failure counts, through a proxy too, and where Python cannot tell it is left to wandb."""

    def asked(url=server.url, **more):
        return wandb_alerts.answers(SimpleNamespace(settings=wandb.Settings(base_url=url, **more)))

    found = [asked(), asked(server.url.replace("http", "https")), asked("http://w.invalid", http_proxy=server.url)]
    server.down = 503
    found.append(asked())
    server.stop()
    found.append(asked())
    assert found == [True, True, True, False, False]


def test_a_server_that_never_was_means_offline(beside_server, make, read, said):
    """A run of our own is recorded where it can be, under the id that it was given, and one line says how to send it."""
    with beside_server.LoopbackServer() as server:
        settings = server.settings()
    writer = make.writer(project="test", id="chosen", settings={**settings, "init_timeout": 1.0})
    run = wandb.run
    writer.write(make.record(1))
    run.log({"mine": 1})
    writer.close()
    assert run.offline
    assert (run.id, [row["gradflow/step"] for row in read(run).history]) == ("chosen", [1])
    assert len(said("recording offline")) == 1


KILLED = """
import os, signal, wandb
from gradflow_export.records.step_record import Reading, RunInfo, StepRecord
from gradflow_export.writers import WandbWriter
run = wandb.init(project="test", id="killed", settings=wandb.Settings(x_disable_stats=True, console="off"))
writer = WandbWriter()
writer.open(RunInfo("1-0", 1.0))
for step in range(1, 1001):
    writer.write(StepRecord(step, float(step), (Reading.run("loss", 0.5),)))
    run.log({"mine": step}, step=step)
run.step
print(run.dir, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_wandb_sync_sends_what_is_on_disk(server, place):
    """All but the last rows reach the server, the user's and ours in order."""
    outside = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    outside |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"]}
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, env=outside, check=False)
    folder = str(Path(killed.stdout.strip()).parent)
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", folder]
    done = subprocess.run(command, capture_output=True, text=True, env=outside, check=False)
    rows = server.history("killed")
    mine, steps = [row["mine"] for row in rows if "mine" in row], [row[0] for row in ours(server, "killed")]
    assert killed.returncode == -9
    assert len(mine) > 500, done.stdout + done.stderr
    assert mine == list(range(1, len(mine) + 1))
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= len(mine) - 1
