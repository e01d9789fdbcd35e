"""What users have today."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


@contextlib.contextmanager
def lightning_grad_norm(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch as Lightning's documentation says: ``grad_norm(module, 2)`` before each optimizer step, to its own logger.

    Function and logger are those of the package; the loop around them is ours, so that nothing else of Lightning's
    trainer is timed.
    """
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.utilities import grad_norm

    logger = TensorBoardLogger(str(logdir))
    trainer.before = lambda step, model: logger.log_metrics(
        {name: float(norm) for name, norm in grad_norm(model, norm_type=2).items()}, step
    )
    yield
    logger.finalize("success")


@contextlib.contextmanager
def composer_optimizer_monitor(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch with what Composer documents of its ``OptimizerMonitor`` with Adam, to ``SummaryWriter``.

    Written anew from the table of metrics in its documentation, because the package accepts no torch as new as this
    one; its own cost may differ. Per parameter: norms of gradient, first moment, root of the second moment, weight and
    step, cosines between gradient and moment and gradient and step, and two ratios; and the global gradient norm.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(logdir))
    optimizer = trainer.optimizer

    def after(step: int, model: nn.Module) -> None:
        group = optimizer.param_groups[0]
        found: dict[str, Tensor] = {}
        total = torch.zeros(())
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            metrics = _adam_metrics(p, optimizer.state[p], group)
            found.update((f"{metric}/{name}", value) for metric, value in metrics.items())
            total += metrics["l2_norm/grad"] ** 2
        for name, value in found.items():
            writer.add_scalar(name, value.item(), step)
        writer.add_scalar("l2_norm/grad/global", total.sqrt().item(), step)

    trainer.after = after
    yield
    writer.close()


@torch.no_grad()
def _adam_metrics(weight: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    norm = torch.linalg.vector_norm
    gradient, moment, steps = weight.grad, state["exp_avg"], float(state["step"])
    assert gradient is not None
    first, second = group["betas"]
    root = state["exp_avg_sq"].sqrt()
    update = moment / (1 - first**steps) / (root / (1 - second**steps) ** 0.5 + group["eps"]) * group["lr"]
    norms = {"grad": norm(gradient), "moment": norm(moment), "param": norm(weight), "update": norm(update)}
    return {
        **{f"l2_norm/{name}": value for name, value in norms.items()},
        "l2_norm/second_moment_sqrt": norm(root),
        "cosine/moment_grad": _cosine(moment, gradient),
        "cosine/update_grad": _cosine(update, gradient),
        "l2_norm_ratio/moment_grad": norms["moment"] / norms["grad"],
        "l2_norm_ratio/update_param": norms["update"] / norms["param"],
    }


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    return nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)


INSTRUMENTS = (
    Instrument("wandb_log", wandb_log),
    Instrument(
        "wandb_watch_gradients", lambda trainer, logdir: wandb_watch(trainer, logdir, "gradients"), every_step=True
    ),
    Instrument("wandb_watch_all", lambda trainer, logdir: wandb_watch(trainer, logdir, "all"), every_step=True),
    Instrument("tensorboard_naive", tensorboard_naive, every_step=True),
    Instrument("lightning_grad_norm", lightning_grad_norm, every_step=True, requires="lightning"),
    Instrument("composer_monitor", composer_optimizer_monitor, every_step=True),
)
