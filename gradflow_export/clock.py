"""How long steps take, what share of them is the exporter's own, and how far intervals must stretch for a budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW = 32
"""Steps between two decisions, and steps whose median gives the throughput."""

MOST = 64.0
RELAXED, PATIENCE = 0.25, 2
"""The factor is halved when so many windows in a row cost less than this share of the budget: half of which it will
cost then at most, so that the factor does not go back and forth."""


class StepClock:
    """Times steps; with a budget, decides by what factor the intervals of instruments are stretched.

    The factor is a power of two: runs that cost about the same read the same steps.

    What is read at every step (norms, loss, NaN, time) is never given up: where that alone costs more than the budget,
    the factor grows to ``MOST`` and stays.

    Args:
        budget: Greatest share of the training thread's time that the exporter may take, ``None`` for no limit.
    """

    def __init__(self, budget: float | None = None) -> None:
        self.budget = budget
        self.stretch = 1.0
        self.last: float | None = None
        self._spent_before = 0.0
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._ranked: list[float] = []
        self._elapsed = self._spent = 0.0
        self._steps = self._cheap = 0

    def lap(self, now: float, spent: float) -> dict[str, float]:
        """End a step.

        Args:
            now: Time at its end, in seconds.
            spent: Seconds spent inside the exporter since it began.

        Returns:
            Step time, throughput and share of this step, and the factor where there is a budget; without the times at
            the first step, which has no beginning.
        """
        out: dict[str, float] = {} if self.budget is None else {"schedule.stretch": self.stretch}
        if self.last is not None:
            elapsed, own = now - self.last, spent - self._spent_before
            out["runtime.step_time"] = elapsed
            out["runtime.throughput"] = 1.0 / max(self._median(elapsed), 1e-9)
            out["overhead"] = min(own / max(elapsed, 1e-9), 1.0)
            self._judge(elapsed, own)
        self.last, self._spent_before = now, spent
        return out

    def _median(self, elapsed: float) -> float:
        """Return the median of the last steps; their order is kept, because sorting them anew costs more."""
        ranked = self._ranked
        if len(self._times) == WINDOW:
            del ranked[bisect_left(ranked, self._times[0])]
        self._times.append(elapsed)
        insort(ranked, elapsed)
        half = len(ranked) // 2
        return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2

    def _judge(self, elapsed: float, own: float) -> None:
        """Double the factor when a window of steps cost more than the budget; halve it when several cost little."""
        if self.budget is None:
            return
        self._elapsed, self._spent, self._steps = self._elapsed + elapsed, self._spent + own, self._steps + 1
        if self._steps < WINDOW:
            return
        excess = self._spent / max(self._elapsed, 1e-9) / self.budget
        if excess > 1:
            self.stretch = min(self.stretch * (2.0 if excess <= 2 else 4.0), MOST)
        self._cheap = self._cheap + 1 if excess < RELAXED else 0
        if self._cheap == PATIENCE:
            self.stretch, self._cheap = max(self.stretch / 2, 1.0), 0
        self._elapsed = self._spent = 0.0
        self._steps = 0
