"""One number over all steps of a run in a bounded amount of memory, for a line of a few hundred pixels."""

from __future__ import annotations

import math

POINTS = 128
"""Points at most; when there are as many, each two become one."""


class Trace:
    """Keeps the mean of a number over evenly many readings, and where it was not finite.

    Attributes:
        steps: First step of each point.
        values: Mean of each point; NaN where a reading was not finite.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._each, self._sum, self._count, self._step = 1, 0.0, 0, 0

    def add(self, step: int, value: float) -> None:
        """Take in one reading."""
        if not self._count:
            self._step = step
        self._sum += value if math.isfinite(value) else math.nan
        self._count += 1
        if self._count < self._each:
            return
        self.steps.append(self._step)
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.steps) >= POINTS:
            self.steps = self.steps[::2]
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2
