"""The training debugger at each of its levels, looking at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from instruments.base import Instrument, Trainer


@contextlib.contextmanager
def monitored(trainer: Trainer, _logdir: Path, *, level: str) -> Iterator[None]:
    """Look at each step between the backward pass and the optimizer."""
    from gradflow_export import TrainingDebugger

    debugger = TrainingDebugger(level)
    trainer.before = lambda step, model: debugger.monitor_training_step(model, 1.0, step) and None
    try:
        yield
    finally:
        trainer.before = None


def _level(level: str) -> Callable[[Trainer, Path], contextlib.AbstractContextManager[None]]:
    return partial(monitored, level=level)


INSTRUMENTS = (
    Instrument("debug_basic", _level("basic"), every_step=True),
    Instrument("debug_advanced", _level("advanced"), every_step=True),
    Instrument("debug_extreme", _level("extreme"), every_step=True),
)
