"""The stability manager and each tool beside it; the table of docs/debugging.md."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instruments.base import Instrument, Trainer


@contextlib.contextmanager
def managed(
    trainer: Trainer, logdir: Path, *, mode: str = "none", policy: str = "detect", **debug: Any
) -> Iterator[None]:
    """Put a stability manager between backward and the optimizer; ``debug`` are settings of a session."""
    from gradflow_export import (
        GradientClippingConfig,
        NaNHandlingConfig,
        NumericalStabilityManager,
        PyTorchDebuggingConfig,
    )

    endless = {"max_debug_iterations": 10**6, "debug_timeout": 1e6, "debug_output_dir": str(logdir), **debug}
    losses: list[Any] = []
    seen = trainer.criterion.register_forward_hook(lambda _module, _args, loss: losses.append(loss.detach()))
    with NumericalStabilityManager(
        GradientClippingConfig(mode=mode),
        NaNHandlingConfig(policy=policy),
        PyTorchDebuggingConfig(**endless) if debug else None,
    ).watch(trainer.model) as manager:
        trainer.before = lambda _step, model: manager.step(model, losses.pop(), trainer.optimizer) and None
        yield
    trainer.before = None
    seen.remove()


@contextlib.contextmanager
def library_clipping(trainer: Trainer, _logdir: Path) -> Iterator[None]:
    """Only clip by the library and ask whether the norm is finite: the least that guarding a step can cost."""
    from torch.nn.utils import clip_grad_norm_

    trainer.before = lambda _step, model: bool(clip_grad_norm_(model.parameters(), 1.0).isfinite()) and None
    yield
    trainer.before = None


@contextlib.contextmanager
def around(trainer: Trainer, context: Any) -> Iterator[None]:
    """Open a context around each step: for switches that the other, bare model of this process must not feel."""
    step = trainer.step

    def inside(*, small: bool = False) -> None:
        with context():
            step(small=small)

    trainer.step = inside  # type: ignore[method-assign]  # one instance, for a while
    yield
    trainer.step = step  # type: ignore[method-assign]  # as above


def anomaly_mode(trainer: Trainer, _logdir: Path) -> contextlib.AbstractContextManager[None]:
    """PyTorch's own anomaly mode, which the mode "raise" has on."""
    from gradflow_export import anomaly_mode as mode

    return around(trainer, mode)


def profiler(trainer: Trainer, _logdir: Path) -> contextlib.AbstractContextManager[None]:
    """Steps within a window of torch.profiler, memory included; writing the trace comes after it."""
    from torch.profiler import ProfilerActivity, profile

    return around(trainer, lambda: profile(activities=[ProfilerActivity.CPU], profile_memory=True))


def _managed(name: str, **settings: Any) -> Instrument:
    return Instrument(name, lambda trainer, logdir: managed(trainer, logdir, **settings), every_step=True)


INSTRUMENTS = (
    Instrument("clip_grad_norm_", library_clipping, every_step=True),
    _managed("debug_detect"),
    _managed("debug_clip_norm", mode="norm"),
    _managed("debug_clip_adaptive", mode="adaptive"),
    _managed("debug_skip", policy="skip"),
    _managed("debug_rewind", policy="rewind"),
    _managed("debug_anomaly", enable_autograd_anomaly=True),
    Instrument("debug_anomaly_raise", anomaly_mode, every_step=True),
    _managed("debug_gradcheck", enable_grad_check=True, grad_check_interval=1),
    _managed("debug_memory", enable_memory_debugging=True),
    _managed("debug_memory_scan", memory_profiling=True, memory_scan_interval=1),
    Instrument("debug_profiler", profiler, every_step=True),
)
