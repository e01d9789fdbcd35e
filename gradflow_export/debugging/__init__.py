"""Tools that take part in training: guarding the numbers, checking gradients, following memory, profiling.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "AnomalyMode",
    "AsyncTrainingLogger",
    "CudaDevices",
    "DebugLevel",
    "DiffusionModelDebugger",
    "GradientCheck",
    "GradientClippingConfig",
    "MemoryWatch",
    "NaNHandlingConfig",
    "NoiseSchedule",
    "NumericalAnomalyError",
    "NumericalStabilityManager",
    "ProfilerWindow",
    "PyTorchDebugger",
    "PyTorchDebuggingConfig",
    "PyTorchDebuggingManager",
    "TensorCensus",
    "TensorInfo",
    "TrainingDebugger",
    "TrainingPhase",
    "TrainingWrapper",
    "anomaly_mode",
    "check_gradients",
    "create_training_wrapper",
    "debug_context",
    "plot_debug_session",
]

_HOMES = (
    (
        "anomaly",
        (
            "AnomalyMode",
            "anomaly_mode",
        ),
    ),
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
    ("devices", ("CudaDevices",)),
    ("diffusion", ("DiffusionModelDebugger",)),
    ("faults", ("NumericalAnomalyError",)),
    (
        "gradcheck",
        (
            "GradientCheck",
            "check_gradients",
        ),
    ),
    (
        "leaks",
        (
            "MemoryWatch",
            "TensorCensus",
        ),
    ),
    ("levels", ("DebugLevel",)),
    ("manager", ("PyTorchDebuggingManager",)),
    ("plots", ("plot_debug_session",)),
    ("profiling", ("ProfilerWindow",)),
    ("schedules", ("NoiseSchedule",)),
    (
        "stability",
        (
            "NumericalStabilityManager",
            "TrainingWrapper",
            "create_training_wrapper",
        ),
    ),
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
