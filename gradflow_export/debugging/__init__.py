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
        "nan.anomaly",
        (
            "AnomalyMode",
            "anomaly_mode",
        ),
    ),
    (
        "service.async_logger",
        (
            "AsyncTrainingLogger",
            "TrainingPhase",
        ),
    ),
    (
        "nan.config",
        (
            "GradientClippingConfig",
            "NaNHandlingConfig",
            "PyTorchDebuggingConfig",
        ),
    ),
    ("inspect.debugger", ("PyTorchDebugger",)),
    ("service.devices", ("CudaDevices",)),
    ("inspect.diffusion", ("DiffusionModelDebugger",)),
    ("nan.faults", ("NumericalAnomalyError",)),
    (
        "inspect.gradcheck",
        (
            "GradientCheck",
            "check_gradients",
        ),
    ),
    (
        "service.leaks",
        (
            "MemoryWatch",
            "TensorCensus",
        ),
    ),
    ("inspect.levels", ("DebugLevel",)),
    ("service.manager", ("PyTorchDebuggingManager",)),
    ("service.plots", ("plot_debug_session",)),
    ("service.profiling", ("ProfilerWindow",)),
    ("inspect.schedules", ("NoiseSchedule",)),
    (
        "nan.stability",
        (
            "NumericalStabilityManager",
            "TrainingWrapper",
            "create_training_wrapper",
        ),
    ),
    ("inspect.tensor_info", ("TensorInfo",)),
    ("inspect.training", ("TrainingDebugger",)),
    ("inspect.watch", ("debug_context",)),
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
