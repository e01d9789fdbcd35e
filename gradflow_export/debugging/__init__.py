"""Tools that take part in training: guarding the numbers, checking gradients, following memory, profiling.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "GradientClippingConfig",
    "NaNHandlingConfig",
    "PyTorchDebuggingConfig",
]

_HOMES = (("config", ("GradientClippingConfig", "NaNHandlingConfig", "PyTorchDebuggingConfig")),)


def __getattr__(name: str) -> Any:
    """Load the module that a public name stands in."""
    for home, names in _HOMES:
        if name in names:
            return getattr(importlib.import_module(f"gradflow_export.debugging.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
