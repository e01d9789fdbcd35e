"""The whole way: a model that trains, the exporter's own thread, and a W&B run that is read back."""

import os
import sys
from pathlib import Path

import pytest
import torch
import wandb
from torch import nn

from gradflow_export import Exporter
from gradflow_export.errors import ArgumentError, ArgumentTypeError, MissingPackageError
from gradflow_export.records.step_record import Reading
from gradflow_export.storage.reader import read_run
from gradflow_export.storage.table import read_parquet
from gradflow_export.writers import WandbWriter
from gradflow_export.writers.wandb import runs as wandb_runs
from gradflow_export.writers.wandb.picks import RUN_KEYS


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
    rows = {row["step"]: row for row in ours(log)}
    assert [(row["_step"], row["mine"]) for row in log.history] == [(step, step) for step in range(60)]
    assert max(rows) == log.summary["gradflow/last_step"] == 60
    for step, row in rows.items():
        (record,) = (record for record in kept.records if record.step == step)
        assert row["loss"] == record.value("loss")
        assert row["gradient.total_norm"] == record.value("gradient.total_norm")
    assert {key for row in rows.values() for key in row if key.startswith("block.gain/")}
    assert exporter.summary()["set_aside"] == []
    columns, cells = log.table(log.summary["gradflow/health"])
    assert {"0", "2", "4"} <= {row[0] for row in cells}
    columns, cells = log.table(log.summary["gradflow/steps"])
    assert [row[columns.index("step")] for row in cells] == list(kept.records.steps)
    (folder,) = Path(run.dir).parent.glob("gradflow/gradflow")
    read_back = [record for part in sorted(folder.glob("*.parquet")) for record in read_parquet(part)]
    assert [(record.step, record.readings) for record in read_back] == [
        (record.step, tuple(present(reading) for reading in record.readings if reading.present.any()))
        for record in kept.records
    ]


def present(reading):
    """Return a reading without what is missing, which a table has no row for."""
    sites = tuple(site for site, here in zip(reading.sites, reading.present, strict=True) if here)
    return Reading.of(reading.metric, sites, reading.values[reading.present])


class Block(nn.Module):
    """A layer of a small transformer."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


def convolutions(depth=6):
    layers = [(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for n in range(depth)]
    return nn.Sequential(
        *[nn.Sequential(*each) for each in layers], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


def transformer(depth=6):
    return nn.Sequential(nn.Embedding(11, 16), *[Block() for _ in range(depth)], nn.Flatten(), nn.Linear(64, 5))


def chain(size):
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(size)], nn.Linear(32, 5))


MODELS = {
    "mlp of 2 blocks": lambda: (chain(2), torch.randn(8, 32)),
    "mlp of 400 tensors": lambda: (chain(199), torch.randn(8, 32)),
    "cnn": lambda: (convolutions(), torch.randn(8, 3, 8, 8)),
    "gpt": lambda: (transformer(), torch.randint(11, (8, 4))),
}


def keys(begin, place, ours, read, make, seed, steps=4):
    """Return our keys in the rows of a run of some steps; the losses, and so the worst layers, differ by the seed."""
    run = begin()
    torch.manual_seed(seed)
    model, x = make()
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-3)
    logdir = place / f"keys-{run.id}"
    exporter = Exporter(model, backends=["wandb"], logdir=logdir, synchronous=True).watch(criterion)
    for step in range(steps):
        optimizer.zero_grad()
        criterion(model(x), torch.randint(5, (8,))).backward()
        optimizer.step()
        run.log({"mine": step})
    exporter.close()
    run.finish()
    return {key for row in ours(read(run)) for key in row}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_any_size_has_few_curves_and_the_same_in_each_run(begin, place, ours, read, name):
    """At most 20 keys but for flagged layers, of which there are six at most, and the same whatever the weights are."""
    runs = [keys(begin, place, ours, read, MODELS[name], seed) for seed in (0, 1)]
    shown = [{key for key in run if not key.startswith("flagged/")} for run in runs]
    assert shown[0] == shown[1]
    assert len(shown[0]) <= 20
    assert all(len(run - few) <= 6 for run, few in zip(runs, shown, strict=True))
    assert 0 < len([key for key in shown[0] if key.startswith(("block.gain/", "parameter.gradient_norm/"))]) <= 5


@pytest.mark.parametrize("first_clipped", [0, 12])
@pytest.mark.parametrize("acts", [False, True])
def test_whatever_a_loop_does_rows_and_run_have_few_keys(begin, place, ours, read, acts, first_clipped):
    """Clipping from any step on, a policy and histograms at once: numbers are all there, and histograms make room."""
    run = begin()
    torch.manual_seed(0)
    model = chain(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = Exporter(
        model, wandb={"rows": "fold"}, intervals={"histograms": 1}, synchronous=True, logdir=place / f"few-{run.id}"
    ).watch()
    for step in range(20):
        optimizer.zero_grad()
        policy = torch.distributions.Categorical(logits=model(torch.randn(8, 32)))
        loss = -policy.log_prob(policy.sample()).mean()
        if acts:
            exporter.observe(policy=policy)
        loss.backward()
        if step >= first_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        run.log({"mine": step})
    exporter.close()
    run.finish()
    rows = [{key for key in row if not key.startswith("flagged/")} for row in ours(read(run))]
    assert max(map(len, rows)) <= 20
    assert set(RUN_KEYS) - set().union(*rows) == (set() if acts else {"policy.entropy"})
    assert len({key for key in set().union(*rows) if key.startswith("block.gain/")}) == 5
    drawn = sum(f"histogram/{which}" in rows[-1] for which in ("first", "last"))
    assert drawn == (0 if acts else 1)
    summary = read(run).summary
    assert len(summary.get("gradflow/histograms", {})) == drawn


def test_alerts_are_the_issues_that_opened(begin, place, read):
    """A run that diverges raises one alert, which names what came with it."""
    run = begin()
    exporter = train(place, run, rate=1e4, steps=40)
    run.finish()
    (alert,) = read(run).alerts
    titles = [f"gradflow: {issue.issue_type} in {issue.layer or 'the whole model'}" for issue in exporter.issues]
    assert alert.title in titles
    assert all(str(issue.issue_type) in alert.title + alert.text for issue in exporter.issues)
    assert "EXPLODING" in alert.title + alert.text


@pytest.fixture(scope="module")
def server(beside_server, port):
    """A server that keeps the alerts of every run."""
    with beside_server.LoopbackServer(port) as made:
        yield made


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rate", "steps", "kind"),
    [(1e4, 20, "EXPLODING"), (1e-9, 250, "STAGNATION"), (0.1, 60, None)],
    ids=["diverging", "stagnating", "healthy"],
)
def test_alerts_reach_the_server(begin, place, server, rate, steps, kind, seed):
    """A run that diverges and one that learns nothing are told once, whatever the seed, and a healthy one never."""
    run = begin(settings=server.settings())
    train(place, run, rate=rate, steps=steps, seed=seed, user=False, backends=["wandb"])
    run.finish()
    alerts = [alert for alert in server.alerts if alert["runName"] == run.id]
    assert len(alerts) == (kind is not None)
    assert all(f"{kind}" in alert["title"] + alert["text"] for alert in alerts)


ENDS = {"plain": "", "exception": "raise RuntimeError('on purpose')", "exit": "sys.exit(3)"}


def test_the_end_of_a_script_keeps_the_newest_values(place, offline, programs):
    """Without ``close`` and without ``finish``, whatever the end: the rows are the user's, the summary has the rest."""
    code = """
import sys, torch, wandb
from torch import nn
from gradflow_export import Exporter
import gradflow_export.writers.wandb.writer as limits
limits._QUIET_SECONDS, limits._SETTLE_SECONDS, limits._LAST_SECONDS = 3.0, 100.0, 100.0
run = wandb.init(project="test", settings=wandb.Settings(x_disable_stats=True, console="off"))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = Exporter(model, backends=["wandb"], verbose=0).watch()
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if step % 5 == 0:
        run.log({"mine": step}, step=step)
print(run.dir, flush=True)
"""
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not the tests' wandb-core
    scripts = {how: programs.start(code + end, env=own) for how, end in ENDS.items()}
    for how, script in scripts.items():
        script.wait()
        log = offline.wait_for_log(Path(script.out.strip()).parent)
        assert [(row["_step"], row["mine"]) for row in log.history] == [(step, step) for step in range(0, 20, 5)]
        assert log.summary["gradflow/last_step"] == log.summary["gradflow/step"] >= 19
        assert log.exit_code == {"plain": 0, "exception": 1, "exit": 3}[how]
        assert script.err == "" or how == "exception"


def test_a_missing_package_is_told_with_the_way_out(monkeypatch):
    """Asking for W&B without it raises at once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'wandb>=0\.28'"):
        Exporter(nn.Linear(2, 2), backends=["wandb"])


def test_options_are_checked_when_constructed():
    """A misspelt argument of ``wandb.init`` is answered with the nearest before training begins."""
    with pytest.raises(ArgumentError, match="did you mean 'project'"):
        WandbWriter(projet="x")
    with pytest.raises(ArgumentError, match="fold, own, companion"):
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
    assert [row["step"] for row in ours(read(run)) if "loss" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("backends", "options", "words"),
    [
        (["wandb"], {"projet": "x"}, "did you mean 'project'"),
        (["wandb"], "mine", "must be a dictionary of arguments of wandb.init or a run"),
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


def test_the_run_may_be_handed_over(begin, place, read):
    """``Exporter(wandb=run)`` writes to it although it is not ``wandb.run``; without it the only run alive is used."""
    for given in (True, False):
        run = begin(reinit="create_new")
        assert wandb.run is None
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"wandb": run} if given else {"backends": ["tensorboard", "wandb"]}
        with Exporter(model, logdir=place / f"given-{given}", **options).watch():
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                run.log({"mine": 1})
        run.finish()
        assert read(run).summary["gradflow/last_step"] == 5


def test_of_several_runs_none_is_guessed(begin, make, said):
    """Where several are alive and none is ``wandb.run`` nothing is sent, and one line says how to name the run."""
    runs = [begin(reinit="create_new") for _ in range(2)]
    make.writer().close()
    for run in runs:
        run.finish()
    (line,) = said("several runs are alive")
    assert line.endswith("pass the one to use, WandbWriter(run=run)")
