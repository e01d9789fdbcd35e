"""How much a debugger looks at."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest


class DebugLevel(str, enum.Enum):
    """How much a debugger looks at; each level includes the ones before.

    ``BASIC``: whether loss and gradients are finite, norms of gradients, and which of them are above or below the
    thresholds. ``ADVANCED``: mean, spread and extremes of each gradient and each parameter, memory. ``EXTREME``: these
    statistics are kept in the history, histograms of gradients, where in a tensor the first NaN stands and who called;
    :func:`~gradflow_export.debugging.inspect.watch.debug_context` has PyTorch's anomaly mode on.
    """

    BASIC = "basic"
    ADVANCED = "advanced"
    EXTREME = "extreme"

    def __str__(self) -> str:
        """Return the bare word."""
        return self.value


@dataclass(frozen=True)
class Preset:
    """What one level looks at.

    Attributes:
        statistics: Mean, spread and extremes of gradients and parameters.
        memory: Bytes of parameters, buffers and gradients, and of the process.
        keeps: Whether statistics of each tensor are kept in the history.
        histograms: Histograms of gradients.
        context: Where in a tensor the first NaN or Inf stands, the losses before, who called.
        anomaly_mode: PyTorch's anomaly mode in ``debug_context``.
    """

    statistics: bool = False
    memory: bool = False
    keeps: bool = False
    histograms: bool = False
    context: bool = False
    anomaly_mode: bool = False


PRESETS: Mapping[DebugLevel, Preset] = MappingProxyType(
    {
        DebugLevel.BASIC: Preset(),
        DebugLevel.ADVANCED: Preset(statistics=True, memory=True),
        DebugLevel.EXTREME: Preset(True, True, True, True, True, True),
    }
)


def as_level(level: object) -> DebugLevel:
    """Return a level, given as such or as its word.

    Raises:
        ArgumentError: The word is unknown.
        ArgumentTypeError: It is neither.
    """
    if isinstance(level, DebugLevel):
        return level
    if not isinstance(level, str):
        raise ArgumentTypeError(f"level must be a DebugLevel, got {level!r}; for example DebugLevel.BASIC.")
    words = [known.value for known in DebugLevel]
    if level.lower() not in words:
        raise ArgumentError(f"level must be one of {', '.join(words)}; got {level!r}{nearest(level, words)}")
    return DebugLevel(level.lower())
