"""Sessions of a user of W&B, each in a process of its own: ``python sessions.py`` with one as JSON on each line of its input.

The process imports torch and wandb once and is forked for each session, which then ends as a script does: the way that
is asked for. A line of output tells that the session of that number is over.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import wandb
from torch import nn
from wandb.sdk.data_types import _private as wandb_media

sys.path.insert(0, str(Path(__file__).parent))
import trainers

from gradflow_export import Exporter
from gradflow_export.writers.wandb import runs as wandb_runs
from gradflow_export.writers.wandb import writer as limits

STEPS = 20
FIRST = {"allow", "must", "auto", "preempted", "reopened", "rewind", "fork"}
"""Ways in which a second session takes up the run of the first."""

Session = dict[str, object]


def settings(session: Session) -> wandb.Settings:
    return wandb.Settings(
        base_url=str(session["url"]), api_key="0" * 40, x_disable_stats=True, x_disable_meta=True, console="off",
        finish_timeout=60.0, init_timeout=60.0, x_save_requirements=False,
    )  # fmt: skip


def begin(session: Session) -> wandb.Run:
    """Begin the run, or take it up again."""
    mode, run = str(session["mode"]), str(session["run"])
    more: dict[str, object] = {"id": run, "mode": "shared" if mode.startswith("shared") else "online"}
    if mode in {"allow", "preempted"} or (mode == "reopened" and session["second"]):
        more["resume"] = "allow"
    elif mode == "must" and session["second"]:
        more["resume"] = "must"
    elif mode == "auto":
        more["resume"] = "auto"
        if session["second"]:
            del more["id"]
    elif session["second"] and mode == "rewind":
        more = {"resume_from": f"{run}?_step={STEPS // 2 - 1}"}
    elif session["second"] and mode == "fork":
        more = {"id": f"{run}-fork", "fork_from": f"{run}?_step={STEPS // 2 - 1}"}
    elif mode == "sweep":
        more = {}
    return wandb.init(project="test", dir=str(session["folder"]), settings=settings(session), **more)


def log(run: wandb.Run, mode: str, step: int) -> None:
    """Log a step in one of the ways that users do."""
    if mode == "pieces":
        run.log({"mine": step}, commit=False)
        run.log({"more": step})
    elif mode == "seldom":
        if step % 5 == 0:
            run.log({"mine": step}, step=step)
    elif mode in {"step", "allow", "auto", "preempted", "rewind", "fork", "shared step"}:
        run.log({"mine": step}, step=step)
    elif mode == "defined":
        run.log({"mine": step, "epoch": step // 5})
    else:
        run.log({"mine": step})


def train(model: nn.Module, run: wandb.Run, mode: str, first: int) -> None:
    """Train by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        log(run, mode, step)


def play(session: Session) -> None:
    """Train beside a run, and end as is asked for."""
    mode, end, second = str(session["mode"]), session["end"], bool(session["second"])
    run = begin(session)
    print(run.dir, flush=True)
    if mode == "reopened" and second:
        run.log({"test": 0.5})
        run.summary["score"] = 1
        return
    if mode == "defined":
        run.define_metric("epoch")
        run.define_metric("*", step_metric="epoch")
    if mode == "preempted" and not second:
        run.mark_preempting()
    first = 0 if not second else STEPS // 2 if mode in {"rewind", "fork"} else STEPS
    torch.manual_seed(0)
    trainer = trainers.TRAINERS.get(mode)
    model = nn.Linear(4, 2) if trainer is None else trainers.Net(STEPS - trainers.EVERY, end)
    exporter = Exporter(model, wandb=run, start_step=first).watch() if session["ours"] else None
    if exporter:  # on a busy machine twenty steps may be over before the worker had its turn
        model.register_forward_pre_hook(lambda *_: exporter._worker.drain(60.0) and None)
    if trainer is None:
        train(model, run, mode, first)
    else:
        trainer(model, STEPS, str(session["folder"]))
    if exporter and end == "finish":
        run.finish()
    if exporter and end in {"finish", "close"}:
        exporter.close()
    if end in {"finish", "close"} and mode != "sweep":
        run.finish()
    if end == "exception":
        raise RuntimeError("on purpose")
    if end == "kill":
        run.step  # noqa: B018 - what was logged is with wandb-core now
        os.kill(os.getpid(), signal.SIGKILL)


def sweep(session: Session) -> None:
    """Have an agent of W&B's run two trials."""
    for name, value in (("BASE_URL", session["url"]), ("API_KEY", "0" * 40), ("DIR", session["folder"])):
        os.environ[f"WANDB_{name}"] = str(value)
    wandb.agent(str(session["run"]), lambda: play(session), project="test", entity="tester", count=2)


def load(lines: list[str]) -> None:
    """Import, once for all forks, what a session imports on its way."""
    wandb_runs.load()
    for name in ("pandas", "psutil", "pyarrow.parquet", "requests", "wandb.apis.public", "wandb.sdk.launch", "yaml"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    if any(json.loads(line)["mode"] in trainers.TRAINERS for line in lines):
        trainers.load()
    gc.freeze()  # a fork would copy every page of it at its end


def main() -> int:
    """Fork for each line of the input; return 0 where this is the parent."""
    limits._QUIET_SECONDS, limits._SETTLE_SECONDS, limits._LAST_SECONDS = 3.0, 100.0, 100.0
    lines = sys.stdin.read().splitlines()
    load(lines)
    children: dict[int, int] = {}

    def ended() -> None:
        process, _ = os.wait()
        print(children.pop(process), flush=True)

    for number, line in enumerate(lines):
        while len(children) >= 6:
            ended()
        if child := os.fork():
            children[child] = number
            continue
        session: Session = json.loads(line)
        Path(str(session["folder"])).mkdir(exist_ok=True, parents=True)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{session['folder']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(str(session["folder"]))
        # Names of files are random, and the same in each fork.
        wandb_media.MEDIA_TMP._finalizer.detach()
        wandb_media.MEDIA_TMP.name = f"{session['folder']}/media-{number}"
        Path(wandb_media.MEDIA_TMP.name).mkdir()
        (sweep if session["mode"] == "sweep" else play)(session)
        return 0
    while children:
        ended()
    return 0


if __name__ == "__main__":
    sys.exit(main())
