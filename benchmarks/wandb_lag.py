"""How far the newest values of ours that a W&B server has are behind the user's rows, live, and after ``kill -9``.

    python benchmarks/wandb_lag.py                     # the table; needs lightning and transformers
    python benchmarks/wandb_lag.py --loop "every step"

Each loop runs in a process of its own, with the settings of its framework as they come and one line of ours, and logs
to a server on the loopback that notes after each message which rows it has. ``step`` is that of the user's newest row,
``ours`` the newest ``gradflow/step``, both counted in optimizer steps; ``rows`` is the number of the user's rows that
came after that step, at the worst message and at the last one. A row that is logged in step *n* shows step *n - 1*, so
that 1 is the least. "killed" ends itself with ``SIGKILL`` in the midst; ``wandb sync`` sends what is on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import wandb
from torch import nn

from gradflow_export import Exporter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "wandb_core"))
from server import STREAM, LoopbackServer

AXES = {"Lightning": ("trainer/global_step", 1), "HF Trainer": ("train/global_step", 0)}
"""The key of a row that has the framework's step, and what makes of it the number of steps that were taken."""
LOOPS = ("Lightning", "HF Trainer", "every 50 steps", "every step", "killed")
SLEEP = 0.04


class Net(nn.Module):
    """A model that the HF Trainer takes too; it rests, so that the run lasts for several messages."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self.rest = rest
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.rest)
        out = self.layers(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def data(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of a toy problem."""
    x = torch.randn(count, 8)
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


def lightning(steps: int, folder: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import WandbLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(SLEEP)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    exporter = Exporter(module, backends=["wandb"]).watch()
    loader = torch.utils.data.DataLoader(data(steps * 4), batch_size=4)
    pl.Trainer(
        max_epochs=1, logger=WandbLogger(project="lag", save_dir=folder), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, accelerator="cpu",
    ).fit(module, loader)  # fmt: skip
    exporter.close()
    wandb.finish()


def hf(steps: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    model = Net(SLEEP)
    exporter = Exporter(model, backends=["wandb"]).watch()
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=50, report_to="wandb",
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data(steps * 4)).train()
    exporter.close()
    wandb.finish()


def plain(steps: int, folder: str, every: int, rest: float, *, killed: bool = False) -> None:
    model = Net(rest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wandb.init(project="lag", dir=folder)
    exporter = Exporter(model, backends=["wandb"]).watch()
    for step, row in enumerate(data(steps)):
        optimizer.zero_grad()
        loss = model(row["x"][None], row["labels"][None])["loss"]
        loss.backward()
        optimizer.step()
        if step % every == every - 1:
            run.log({"loss": loss.item(), "step": step}, step=step)
    if killed:
        print(Path(run.dir).parent, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    exporter.close()
    run.finish()


class Watched(LoopbackServer):
    """A server that notes what it has after each message.

    Args:
        axis: Key of the user's step.
        offset: What makes of it the number of steps taken.
    """

    def __init__(self, axis: str, offset: int) -> None:
        super().__init__()
        self.axis, self.offset = axis, offset
        self.seen: list[tuple[int, int, int]] = []

    def answer(self, method: str, path: str, body: bytes) -> Any:
        out = super().answer(method, path, body)
        if STREAM.match(path) and self.runs:
            self.note()
        return out

    def note(self) -> None:
        """Note the user's newest step, ours, and how many rows of the user's came after it."""
        with self.lock:
            rows = [json.loads(row) for run in self.runs for row in self.streams[run]["wandb-history.jsonl"].values()]
        steps = [int(row[self.axis]) + self.offset for row in rows if self.axis in row]
        newest = max((int(row["gradflow/step"]) for row in rows if "gradflow/step" in row), default=0)
        if steps:
            self.seen.append((max(steps), newest, len({step for step in steps if step > newest})))


def measure(loop: str, steps: int) -> str:
    """Run a loop beside a server; return a line of the table."""
    with tempfile.TemporaryDirectory() as folder, Watched(*AXES.get(loop, ("step", 1))) as server:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        environ |= {f"WANDB_{name}_DIR": f"{folder}/{name}" for name in ("DATA", "CACHE", "CONFIG")}
        environ |= {
            "WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"], "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false", "NO_PROXY": "127.0.0.1", "WANDB_CONSOLE": "off",
            "WANDB_X_DISABLE_STATS": "true", "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "2",
        }  # fmt: skip
        command = [sys.executable, __file__, "--loop", loop, "--steps", str(steps), "--play", folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder)
        if loop == "killed":
            place = done.stdout.split()[-1]
            command = [sys.executable, "-m", "wandb", "sync", "--include-online", place]
            subprocess.run(command, env=environ, capture_output=True, check=True)
        elif done.returncode:
            raise SystemExit(done.stderr)
        server.note()
        live = [seen for seen in server.seen[:-1] if loop != "killed"] or server.seen[-1:]
        worst, last = max(live, key=lambda seen: seen[2]), server.seen[-1]
        cells = "".join(f"{one[0]:>7}{one[1]:>6}{one[2]:>6}" for one in (worst, last))
        return f"{loop:<16}{len(server.seen):>9}{cells}"


def play(loop: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    if loop == "Lightning":
        lightning(steps, folder)
    elif loop == "HF Trainer":
        hf(steps, folder)
    elif loop == "every 50 steps":
        plain(steps, folder, 50, SLEEP)
    elif loop == "every step":
        plain(steps, folder, 1, SLEEP / 8)
    else:
        plain(steps, folder, 1, SLEEP / 8, killed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=LOOPS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play(args.loop, args.steps, args.play)
        return
    print(f"wandb {wandb.__version__}, torch {torch.__version__}; {args.steps} steps; worst message, and the last")
    print(f"{'loop':<16}{'messages':>9}" + f"{'step':>7}{'ours':>6}{'rows':>6}" * 2)
    for loop in [args.loop] if args.loop else LOOPS:
        print(measure(loop, args.steps), flush=True)


if __name__ == "__main__":
    main()
