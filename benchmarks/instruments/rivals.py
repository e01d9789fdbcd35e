"""What users have today."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from instruments.base import Instrument, Trainer


@contextlib.contextmanager
def _run(logdir: Path) -> Iterator[Any]:
    import wandb

    os.environ.update(WANDB_SILENT="true")
    settings = wandb.Settings(x_disable_stats=True, console="off")
    run = wandb.init(mode="offline", dir=str(logdir), settings=settings, project="overhead")
    yield run
    run.finish()


@contextlib.contextmanager
def wandb_log(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Only log the loss into an offline W&B run at every step, as the user of ``gradflow_wandb`` does."""
    with _run(logdir) as run:
        trainer.after = lambda step, _model: run.log({"loss": float(step)})
        yield


@contextlib.contextmanager
def wandb_watch(trainer: Trainer, logdir: Path, log: str) -> Iterator[None]:
    """Watch with ``wandb.watch(log_freq=1)`` and one ``wandb.log`` per step, offline."""
    with _run(logdir) as run:
        run.watch(trainer.model, log=log, log_freq=1)
        trainer.after = lambda step, _model: run.log({"loss": float(step)})
        yield
        run.unwatch(trainer.model)


@contextlib.contextmanager
def tensorboard_naive(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch with the usual loop: norm and histogram of every parameter's gradient."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(logdir))

    def before(step: int, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                writer.add_scalar(f"norm/{name}", p.grad.norm().item(), step)
                writer.add_histogram(f"grad/{name}", p.grad, step)

    trainer.before = before
    yield
    writer.close()


INSTRUMENTS = (
    Instrument("wandb_log", wandb_log),
    Instrument(
        "wandb_watch_gradients", lambda trainer, logdir: wandb_watch(trainer, logdir, "gradients"), every_step=True
    ),
    Instrument("wandb_watch_all", lambda trainer, logdir: wandb_watch(trainer, logdir, "all"), every_step=True),
    Instrument("tensorboard_naive", tensorboard_naive, every_step=True),
)
