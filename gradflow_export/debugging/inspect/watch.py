"""debug_context: a debugger that looks whenever an optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.debugging.inspect.debugger import PyTorchDebugger
from gradflow_export.debugging.inspect.gradients import read_norms
from gradflow_export.debugging.inspect.levels import DebugLevel
from gradflow_export.engine.isolation import Guard
from gradflow_export.hooks.optimizer_hooks import listen


@contextlib.contextmanager
def debug_context(level: DebugLevel | str = DebugLevel.BASIC, **settings: Any) -> Iterator[PyTorchDebugger]:
    """Look at the gradients of every optimizer that steps inside the block.

    What is wrong with them is remembered by the debugger, logged once, and to an exporter where one is given.
    ``DebugLevel.EXTREME`` has PyTorch's anomaly mode on besides, which raises where a backward pass makes a NaN.

    Args:
        level: How much is looked at.
        **settings: As :class:`PyTorchDebugger` takes them.

    Yields:
        The debugger.
    """
    debugger = PyTorchDebugger(level, **settings)
    guard = Guard()
    watch = _OptimizerWatch(debugger)
    with contextlib.ExitStack() as stack:
        stack.callback(listen(guard.part("the debugger's look at gradients")(watch.look)))
        if debugger.preset.anomaly_mode:
            stack.enter_context(debugger.autograd_anomaly_detection())
        yield debugger


class _OptimizerWatch:
    """Reads gradients when an optimizer steps."""

    def __init__(self, debugger: PyTorchDebugger) -> None:
        self._debugger, self._steps = debugger, 0

    def look(self, optimizer: Optimizer, *_: Any) -> None:
        """Read the gradients that an optimizer is about to use."""
        self._steps += 1
        named: dict[str, Tensor] = {}
        for group, settings in enumerate(optimizer.param_groups):
            names = settings.get("param_names")
            for index, parameter in enumerate(settings["params"]):
                if parameter.grad is not None:
                    named[f"group {group}, parameter {index}" if names is None else names[index]] = parameter.grad
        self._debugger.judge_gradients(read_norms(named), type(optimizer).__name__, self._steps)
