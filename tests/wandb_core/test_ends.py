"""The end of a run while its server is in trouble: it is reached, and what may still be sent is sent."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradflow_export.records.step_record import Reading


@pytest.fixture
def server(beside_server, port):
    """A fresh server."""
    with beside_server.LoopbackServer(port) as made:
        yield made


def outside(server):
    """Return the environment of a process that is not of these tests."""
    own = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_MODE")}
    return own | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"], "GRADFLOW_VERBOSE": "0"}


TROUBLE = {
    "up": lambda server: None,
    "503": lambda server: setattr(server, "down", 503),
    "413": lambda server: setattr(server, "down", 413),
    "gone": lambda server: server.stop(),
    "hanging": lambda server: setattr(server, "hanging", True),
    "slow": lambda server: setattr(server, "slow", 10.0),
}
SCRIPT = """
import torch, wandb
from torch import nn
from gradflow_export import Exporter
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = Exporter(model, wandb={"project": "test", "settings": wandb.Settings(console="off")}).watch()
print(wandb.run.dir, flush=True)
input()
for step in range(50):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    wandb.log({"mine": step})
exporter.close()
print("closed", flush=True)
"""


@pytest.fixture
def processes(beside_server, place):
    """Play the script beside a server in each kind of trouble, all at the same time; return what each left."""
    playing = []
    for how, befall in TROUBLE.items():
        server = beside_server.LoopbackServer()
        server.__enter__()
        script = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], text=True, env=outside(server), cwd=place,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        playing.append((how, befall, server, script))
    for number, (how, befall, server, script) in enumerate(playing):
        folder = Path(script.stdout.readline().strip()).parent
        befall(server)
        script.stdin.write("go\n")
        script.stdin.flush()
        playing[number] = (how, server, script, folder)
    yield playing
    for _, server, script, _ in playing:
        script.kill()
        server.stop()


def test_a_process_ends_whatever_the_server_does(processes, offline):
    """``close`` comes back and the process ends without an error; the user's rows are on disk, each once."""
    for how, server, script, folder in processes:
        printed, errors = script.communicate(timeout=800)
        assert (how, printed, script.returncode) == (how, "closed\n", 0), errors
        assert "Traceback" not in errors
        rows = [row["mine"] for row in offline.read_log(folder).history]
        assert rows == list(range(50)), how
        if how == "up":
            assert [row["mine"] for row in server.history(next(iter(server.runs)))] == rows


@pytest.mark.parametrize("limit", [0.0, 100.0])
def test_no_alert_is_dropped_while_the_users_finish_waits(server, begin, make, monkeypatch, limit):
    """A server that takes longer for each answer than we wait is waited for as long as the user waits."""
    monkeypatch.setattr("gradflow_export.writers.wandb.writer._LAST_SECONDS", 0.2)
    run, writer = begin(settings={**server.settings(), "finish_timeout": limit}), make.writer()
    server.slow = 1.0
    for step in range(1, 4):
        writer.write(make.record(step, issues=(make.issue(layer=f"layer{step}", step=step),) if step == 3 else ()))
        run.log({"mine": step})
    run.finish()
    writer.close()
    assert [alert["title"] for alert in server.alerts] == ["gradflow: EXPLODING in layer3"]


def test_a_row_that_is_too_large_for_a_proxy_stops_no_training(server, begin, make, read):
    """After 413 the rows stay on disk, and ``wandb sync`` sends them once the limit is raised."""
    run, writer = begin(settings=server.settings()), make.writer()
    server.down = 413
    for step in range(1, 31):
        writer.write(make.record(step))
        run.log({"mine": step}, step=step)
    ending = threading.Thread(target=lambda: (writer.close(), run.finish()))
    ending.start()
    ending.join(200.0)
    assert not ending.is_alive()
    assert [row["mine"] for row in read(run).history] == list(range(1, 31))
    server.down = None
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(Path(run.dir).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=outside(server), check=False)
    assert [row["mine"] for row in server.history(run.id)] == list(range(1, 31)), done.stdout + done.stderr


def test_files_go_to_the_server_while_a_run_lives(server, begin, make):
    """Each ``file_seconds`` of the records' clock the artifact has a new version with all steps so far."""
    run, writer = begin(settings=server.settings()), make.writer(file_seconds=100.0)
    for step in range(1, 33):
        writer.write(make.record(step, Reading.run("loss", 0.5), wall_time=1e9 + 10 * step))
        run.log({"mine": step})
        assert writer._lane.wait(100)
    parts = [f"steps-{make.info.session}-{number:04d}.parquet" for number in (1, 2, 3)]
    while not all(any(name.endswith(part) for name in server.uploads) for part in parts):  # W&B sends them by and by
        time.sleep(0.05)
    writer.close()
    run.finish()
    kept = [artifact for artifact in server.artifacts.values() if artifact["name"].startswith(f"gradflow-{run.id}-")]
    assert len(kept) == 4
    assert all(artifact["committed"] for artifact in kept)
