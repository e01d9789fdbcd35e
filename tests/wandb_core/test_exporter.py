"""The whole way: a model that trains, the exporter's own thread, and a W&B run that is read back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from torch import nn

from gradflow_export import Exporter
from gradflow_export.errors import ArgumentError, ArgumentTypeError, MissingPackageError
from gradflow_export.store import read_run
from gradflow_export.writers import WandbWriter, wandb_runs


def train(place, run, rate=0.1, steps=60, seed=0, user=True, backends=("tensorboard", "wandb")):
    """Train a small network beside a user's own log calls; returns the exporter, closed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=rate)
    exporter = Exporter(model, backends=list(backends), logdir=place / f"logs-{run.id}").watch(criterion)
    x = torch.randn(64, 8)
    y = (x[:, :3]).argmax(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if user:
            run.log({"mine": step}, step=step)
    exporter.close()
    return exporter


def test_both_backends_hold_the_same_run(begin, place, read, ours):
    """Every recorded step is in TensorBoard's file and in W&B, with the same numbers."""
    run = begin()
    exporter = train(place, run)
    run.finish()
    log, kept = read(run), read_run(exporter.logdir)
    rows = {row["step"]: row for row in ours(log) if "alerts" in row}
    assert [row["mine"] for row in log.history if "mine" in row] == list(range(60))
    assert list(rows) == list(kept.records.steps)
    for record in kept.records:
        assert rows[record.step]["loss"] == record.value("loss")
        assert rows[record.step]["gradient.total_norm"] == record.value("gradient.total_norm")
    assert {key for key in rows[60] if key.startswith("block.gain/")}
    assert exporter.summary()["set_aside"] == []
    table = next(log.table(row["health"]) for row in reversed(ours(log)) if "health" in row)
    assert {"0", "2", "4"} <= {row[0] for row in table[1]}


def test_alerts_are_the_issues_that_opened(begin, place, read):
    """A run that diverges tells each of its problems once."""
    run = begin()
    exporter = train(place, run, rate=1e4, steps=40)
    run.finish()
    alerts = read(run).alerts
    wanted = {f"gradflow: {issue.issue_type} in {issue.layer or 'the whole model'}" for issue in exporter.issues}
    assert sorted(alert.title for alert in alerts) == sorted(wanted)
    assert len([title for title in wanted if "EXPLODING" in title]) == 1


@pytest.fixture(scope="module")
def server(beside_server):
    """A server that keeps the alerts of every run."""
    with beside_server.LoopbackServer() as made:
        yield made


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("rate", "steps", "kind", "others"),
    [(1e4, 20, "EXPLODING", True), (1e-9, 250, "STAGNATION", False), (0.1, 60, None, False)],
    ids=["diverging", "stagnating", "healthy"],
)
def test_alerts_reach_the_server(begin, place, server, rate, steps, kind, others, seed):
    """A run that diverges and one that learns nothing are told once, whatever the seed, and a healthy one never."""
    run = begin(settings=server.settings())
    train(place, run, rate=rate, steps=steps, seed=seed, user=False, backends=["wandb"])
    run.finish()
    titles = [alert["title"] for alert in server.alerts if alert["runName"] == run.id]
    assert len([title for title in titles if title.startswith(f"gradflow: {kind} in ")]) == (kind is not None)
    assert others or len(titles) == (kind is not None)


def test_the_end_of_a_script_sends_everything(place, offline):
    """Without ``close`` and without ``finish``, what is left goes out when the interpreter ends."""
    code = """
import sys, torch, wandb
from torch import nn
from gradflow_export import Exporter
import gradflow_export.writers.wandb as limits
limits._QUIET_SECONDS, limits._SETTLE_SECONDS, limits._LAST_SECONDS = 3.0, 100.0, 100.0
run = wandb.init(project="test", settings=wandb.Settings(x_disable_stats=True, console="off"))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = Exporter(model, backends=["wandb"]).watch()
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
print(run.dir)
"""
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not the tests' wandb-core
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=own)
    log = offline.wait_for_log(Path(done.stdout.strip()).parent)
    steps = [row["gradflow/step"] for row in log.history if "gradflow/alerts" in row]
    assert steps[:19] == list(range(1, 20))
    assert len(steps) <= 20
    assert done.stderr == ""


def test_a_missing_package_is_told_with_the_way_out(monkeypatch):
    """Asking for W&B without it raises at once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'wandb>=0\.19'"):
        Exporter(nn.Linear(2, 2), backends=["wandb"])


def test_options_are_checked_when_constructed():
    """A misspelt argument of ``wandb.init`` is answered with the nearest before training begins."""
    with pytest.raises(ArgumentError, match="did you mean 'project'"):
        WandbWriter(projet="x")
    with pytest.raises(ArgumentError, match="'ride' or 'own'"):
        WandbWriter(rows="mine")
    with pytest.raises(ArgumentError, match="max_waiting"):
        WandbWriter(max_waiting=1)


def test_a_run_is_started_only_when_asked(place, read, ours):
    """The keyword ``wandb`` starts a run with a limit on its end, and ``close`` finishes it."""
    assert wandb.run is None
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"project": "mine", "rows": "own"}
    with Exporter(model, backends=["tensorboard", "wandb"], logdir=place / "asked", wandb=options).watch():
        run = wandb.run
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert wandb.run is None
    assert (run.project, run.settings.finish_timeout) == ("mine", wandb_runs.FINISH_SECONDS)
    assert [row["step"] for row in ours(read(run)) if "alerts" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("backends", "options", "words"),
    [
        (["wandb"], {"projet": "x"}, "did you mean 'project'"),
        (["tensorboard"], {"project": "x"}, "expects the name 'wandb' among backends"),
        (["wandb"], "mine", "must be a dictionary"),
    ],
)
def test_the_keyword_is_checked_when_constructed(tmp_path, backends, options, words):
    """What cannot be used is answered before training begins, with what to do."""
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        Exporter(nn.Linear(2, 2), backends=backends, logdir=tmp_path, wandb=options)


def test_limits_of_our_own_runs_leave_the_users_wishes(place):
    """Settings given as a dictionary or as ``wandb.Settings`` win over ours."""
    made = []

    class Module:
        Settings, errors = wandb.Settings, wandb.errors
        init = staticmethod(lambda **arguments: made.append(arguments["settings"]))

    for settings in (None, {"finish_timeout": 60.0}, wandb.Settings(finish_timeout=60.0)):
        wandb_runs.start(Module, {} if settings is None else {"settings": settings})
    assert [settings.finish_timeout for settings in made] == [wandb_runs.FINISH_SECONDS, 60.0, 60.0]
    assert [settings.init_timeout for settings in made] == [wandb_runs.INIT_SECONDS] * 3
