"""Tools that take part in training: guarding the numbers, checking gradients, following memory, profiling.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "AsyncTrainingLogger",
    "DebugLevel",
    "DiffusionModelDebugger",
    "GradientClippingConfig",
    "NaNHandlingConfig",
    "PyTorchDebugger",
    "PyTorchDebuggingConfig",
    "TensorInfo",
    "TrainingDebugger",
    "TrainingPhase",
    "debug_context",
]

_HOMES = (
    (
        "async_logger",
        (
            "AsyncTrainingLogger",
            "TrainingPhase",
        ),
    ),
    (
        "config",
        (
            "GradientClippingConfig",
            "NaNHandlingConfig",
            "PyTorchDebuggingConfig",
        ),
    ),
    ("debugger", ("PyTorchDebugger",)),
    ("diffusion", ("DiffusionModelDebugger",)),
    ("levels", ("DebugLevel",)),
    ("tensor_info", ("TensorInfo",)),
    ("training", ("TrainingDebugger",)),
    ("watch", ("debug_context",)),
)


def __getattr__(name: str) -> Any:
    """Load the module that a public name stands in."""
    for home, names in _HOMES:
        if name in names:
            return getattr(importlib.import_module(f"gradflow_export.debugging.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
