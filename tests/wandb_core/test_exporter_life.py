"""An exporter whose run is disabled, ends early, is shared, or cannot be had: one line, and training goes on."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from torch import nn

from gradflow_export import Exporter
from gradflow_export.errors import MissingPackageError
from gradflow_export.storage.reader import read_run

STEPS = 6


def watch(folder, **more):
    """Return an exporter that writes to a folder and to W&B, and a function that takes one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    criterion, optimizer = nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
    exporter = Exporter(model, backends=["tensorboard", "wandb"], logdir=folder, **more).watch(criterion)

    def step():
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return exporter, step


def fit(folder, **more):
    """Take some steps and close; returns the exporter."""
    exporter, step = watch(folder, **more)
    for _ in range(STEPS):
        step()
    exporter.close()
    return exporter


def numbers(log, ours, prefix="gradflow"):
    """Return the steps of our rows."""
    return [row["step"] for row in ours(log, prefix)]


@pytest.fixture
def disabled(place, monkeypatch):
    """What a script sees that is started with ``WANDB_MODE=disabled``, which wandb reads once in a process."""
    wandb.teardown()
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        patch.setattr(wandb, "run", None)  # and again afterwards: a disabled run stays there when it is finished
        yield
    wandb.teardown()


@pytest.mark.parametrize("options", [None, {"project": "mine"}], ids=["the user's", "ours"])
@pytest.mark.usefixtures("disabled")
def test_a_disabled_wandb_costs_one_line(place, said, options):
    """With ``WANDB_MODE=disabled`` nothing is sent, the event file is whole, and one line says so."""
    run = None if options else wandb.init(project="test")
    exporter = fit(place / f"disabled-{options is None}", wandb=options)
    if run:
        run.finish()
    assert exporter.summary()["set_aside"] == []
    assert list(read_run(exporter.logdir).records.steps) == list(range(1, STEPS + 1))
    assert said() == ["gradflow: wandb is disabled; nothing is sent to it"]


def test_the_run_may_end_before_the_exporter(begin, place, read, ours, said, unhurried):
    """The newest step before ``run.finish()`` is in the summary; later ones are in the event file only, which one line says."""
    run = begin()
    exporter, step = watch(place / "early")
    for _ in range(STEPS):
        step()
    run.finish()
    for _ in range(STEPS):
        step()
    exporter.close()
    assert read(run).summary["gradflow/last_step"] == STEPS
    assert list(read_run(exporter.logdir).records.steps) == list(range(1, 2 * STEPS + 1))
    assert said() == ["gradflow: the W&B run has ended; later steps are not sent to it"]


def test_two_exporters_share_a_run(begin, place, read, ours, said):
    """Each has its own keys, and one line names those of the second."""
    run = begin()
    pairs = [watch(place / f"shared-{number}") for number in (1, 2)]
    for number in range(STEPS):
        for _, step in pairs:
            step()
        run.log({"mine": number}, step=number)
    for exporter, _ in pairs:
        exporter.close()
    run.finish()
    log = read(run)
    assert [row["mine"] for row in log.history if "mine" in row] == list(range(STEPS))
    assert all(numbers(log, ours, prefix) for prefix in ("gradflow", "gradflow_2"))
    assert [log.summary[f"{prefix}/last_step"] for prefix in ("gradflow", "gradflow_2")] == [STEPS] * 2
    assert said() == ["gradflow: another exporter writes to this W&B run; keys of this one begin with gradflow_2/"]


@pytest.mark.parametrize("options", [None, {"project": "mine"}])
def test_a_missing_package_is_one_line_with_the_way_out(monkeypatch, tmp_path, options):
    """It is told before training begins, whether a run is asked for or not."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=r"^the wandb backend .* pip install 'wandb>=0\.28'$"):
        watch(tmp_path, wandb=options)


@pytest.mark.parametrize("reason", ["login", "network"])
def test_without_login_or_network_the_run_is_recorded_offline(place, read, ours, said, monkeypatch, reason):
    """The run that was asked for is on disk with every step, and one line says how to send it."""
    settings = {"init_timeout": 1.0}
    if reason == "login":
        monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody to ask for a key
        monkeypatch.setenv("NETRC", str(place / "netrc"))
    else:
        settings["api_key"] = "0" * 40  # the address of the tests is a closed port
    exporter, step = watch(place / reason, wandb={"project": "mine", "mode": "online", "settings": settings})
    run = wandb.run
    for _ in range(STEPS):
        step()
    exporter.close()
    assert wandb.run is None
    assert run.offline
    assert read(run).summary["gradflow/last_step"] == STEPS
    (line,) = said()
    assert line.startswith("gradflow: W&B could not start a run (")
    assert "\n" not in line
    assert line.endswith("recording offline, `wandb sync <run directory>` sends it later")


PROCESS = """
import json, logging, os, sys, torch, wandb
from torch import nn
from gradflow_export import Exporter
from gradflow_export.writers.wandb import runs as wandb_runs
import gradflow_export.writers.wandb.writer as limits
wandb_runs.FINISH_SECONDS = wandb_runs.INIT_SECONDS = limits._LAST_SECONDS = 100.0
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("gradflow_export").addHandler(handler)
logging.getLogger("gradflow_export").setLevel(logging.INFO)
torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"project": "test", "rows": "own"}
exporter = Exporter(model, backends=["tensorboard", "wandb"], logdir=f"{folder}/logs", wandb=options).watch()
began = wandb.run is not None
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(3, 4) + rank).sum().backward()
    optimizer.step()
exporter.close()
torch.distributed.destroy_process_group()
print(json.dumps({"lines": lines, "began": began}))
"""


def test_of_two_processes_only_rank_0_writes(place, offline, tmp_path):
    """In a DDP run rank 0 begins the W&B run and holds every step; rank 1 writes nothing and says that rank 0 does."""
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not the tests' wandb-core
    own["WANDB_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=own)
        for rank in (0, 1)
    ]
    first, second = (json.loads(process.communicate(timeout=800)[0].splitlines()[-1]) for process in processes)
    (folder,) = Path(tmp_path).glob("wandb/offline-run-*")
    log = offline.wait_for_log(folder)
    assert [row["gradflow/step"] for row in log.history if "gradflow/loss" in row] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "logs").glob("events.out.tfevents.*"))) == 1
    # A machine under load may add that the other rank was not heard of for a while.
    said = [[line for line in one["lines"] if "W&B" in line or "writes" in line] for one in (first, second)]
    assert said == [[], ["gradflow: rank 1 of 2 writes nothing; rank 0 does"]]
    assert (first["began"], second["began"]) == (True, False)
