"""The exporter, as it comes and at other cadences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instruments.base import Instrument, Trainer
from instruments.rivals import wandb_log

NEVER = 10**9


@contextlib.contextmanager
def gradflow(trainer: Trainer, logdir: Path, **settings: Any) -> Iterator[None]:
    """Watch with the exporter."""
    from gradflow_export import Exporter

    with Exporter(trainer.model, logdir=logdir, **settings).watch(trainer.criterion) as exporter:

        def away(seconds: float) -> None:
            clock = exporter._loop.clock  # noqa: SLF001 - a twin beside it is a benchmark's alone
            clock.last = None if clock.last is None else clock.last + seconds

        trainer.away = away
        yield
    trainer.away = None


def every_step(trainer: Trainer, logdir: Path) -> contextlib.AbstractContextManager[None]:
    """Watch with L1, L2, Linf, mean, zeros and non-finite of each gradient, block gains and updates at every step."""
    return gradflow(trainer, logdir, intervals=dict.fromkeys(("statistics", "blocks", "updates"), 1), budget=None)


def everything(trainer: Trainer, logdir: Path) -> contextlib.AbstractContextManager[None]:
    """Watch with everything read at every step, histograms and ranks apart: activations, moments, inputs too."""
    from gradflow_export.schedule import INTERVALS

    often = {name: 1 for name in INTERVALS if name not in {"ranks", "histograms"}}
    return gradflow(trainer, logdir, intervals=often, budget=None)


def norms(trainer: Trainer, logdir: Path) -> contextlib.AbstractContextManager[None]:
    """Watch with what is read at every step anyway, loss and gradient norms, and nothing else after the start."""
    from gradflow_export.schedule import INTERVALS

    return gradflow(trainer, logdir, intervals=dict.fromkeys(INTERVALS, NEVER))


@contextlib.contextmanager
def with_wandb(trainer: Trainer, logdir: Path) -> Iterator[None]:
    """Watch with the exporter, to TensorBoard and to an offline W&B run that the user logs into at every step."""
    with wandb_log(trainer, logdir), gradflow(trainer, logdir, backends=["tensorboard", "wandb"]):
        yield


INSTRUMENTS = (
    Instrument("gradflow", gradflow, dense_start=True),
    Instrument("gradflow_norms", norms, every_step=True, dense_start=True),
    Instrument("gradflow_every_step", every_step, every_step=True, dense_start=True),
    Instrument("gradflow_everything", everything, every_step=True, dense_start=True),
    Instrument("gradflow_wandb", with_wandb, dense_start=True),
)
