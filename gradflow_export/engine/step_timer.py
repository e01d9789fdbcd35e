"""How long steps take, what share of them is the exporter's own, and how much less it reads to keep to its budget."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 32
"""Recorded steps whose median gives the throughput."""

"""The budget by default: the larger of this share of the time, and of so much for each step."""

DECIDED_EVERY, LEAST_EVENTS = 32, 4
"""Between two decisions there are so many steps, and so many records of the kind that is decided about, at least."""

NEW, FADES = 0.1, 0.995
"""Weight of the newest plain record in what one usually takes, and of that after a record that was not plain."""

MOST = 4096
"""The greatest factor."""

RELAXED, PATIENCE = 0.4, 2
"""A factor is halved when between so many decisions in a row less than this share of its part of the budget was used:
twice which it will cost then, so that the factor does not go back and forth."""


class _Factor:
    """A power of two by which something is done less often, until what it costs keeps within what it may cost.

    Attributes:
        value: The factor.
        share: What it will use of what it may cost, as far as is known.
    """

    def __init__(self) -> None:
        self.value, self.share = 1, 1.0
        self._cheap = 0
        self.begin()

    def begin(self) -> None:
        """Forget what was spent so far."""
        self._spent = self._allowed = 0.0
        self._steps = self._events = 0

    def book(self, spent: float, allowed: float, *, steps: int, happened: bool, room: float = 1.0) -> None:
        """Count what was spent, and decide once it has happened often enough.

        Args:
            spent: Seconds.
            allowed: Seconds that could have been spent.
            steps: How many have passed.
            happened: Whether it was done at the last of them.
            room: How many times what could have been spent may be, where another leaves some of its own.
        """
        self._spent, self._allowed = self._spent + spent, self._allowed + allowed
        self._steps, self._events = self._steps + steps, self._events + happened
        if self._steps < DECIDED_EVERY or self._events < LEAST_EVENTS:
            return
        excess, before = self._spent / max(self._allowed * room, 1e-12), self.value
        if excess > 1:
            self.value = min(self.value << math.ceil(math.log2(min(excess, MOST))), MOST)
        self._cheap = self._cheap + 1 if excess < RELAXED else 0
        if self._cheap == PATIENCE:
            self.value, self._cheap = max(self.value >> 1, 1), 0
        self.share = min(excess * before / self.value, 1.0)
        self.begin()


class StepClock:
    """Times steps; with a budget, decides of how many steps one is recorded, and how far the intervals are stretched.

    Both factors are powers of two: runs that cost about the same read the same steps. What costs what is counted
    apart: half of the budget is for steps at which an instrument with an interval is read; the other half, and what
    these leave, is for records, and decides how far apart they are. A record at which more is read costs what a plain
    one does, and the rest is the instruments'. The CPU time of the worker counts as the exporter's own.

    Args:
        budget: Greatest share of the time that the exporter may take, ``None`` for no limit.
        floor: Seconds a step that it may take in any case.
    """

    def __init__(self, budget: float | None = None, floor: float = 0.0) -> None:
        self.budget, self.floor = budget, floor
        self.last: float | None = None
        self._spacing, self._stretch = _Factor(), _Factor()
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._ranked: list[float] = []
        self._spent_before = 0.0
        self._worker_before = 0.0, 0.0
        self._usual = 0.0, 0.0  # what a plain record takes: on this thread, and on the worker's

    @property
    def spacing(self) -> int:
        """Of how many steps one is recorded."""
        return self._spacing.value

    @property
    def stretch(self) -> int:
        """By what factor intervals are longer than they are set."""
        return self._stretch.value

    def lap(
        self,
        now: float,
        spent: float,
        *,
        sampled: bool = False,
        steps: int = 1,
        worker: tuple[float, float] = (0.0, 0.0),
        fixed: bool = False,
    ) -> dict[str, float]:
        """End a recorded step.

        Args:
            now: Time at its end, in seconds.
            spent: Seconds spent inside the exporter on this thread since it began.
            sampled: Whether an instrument with an interval was read.
            steps: Steps since the last call, this one among them.
            worker: CPU seconds of the worker since it began: for plain records, and for those of sampled steps.
            fixed: Whether the plan of this step was independent of the budget; nothing is decided then.

        Returns:
            Step time, throughput and share of this step, and the factors where there is a budget; without the times at
            the first step, which has no beginning.
        """
        out: dict[str, float] = {}
        if self.budget is not None:
            out = {"schedule.stretch": float(self.stretch), "schedule.spacing": float(self.spacing)}
        if self.last is not None:
            elapsed, own = now - self.last, spent - self._spent_before
            out["runtime.step_time"] = elapsed / steps
            out["runtime.throughput"] = 1.0 / max(self._median(elapsed / steps), 1e-9)
            out["overhead"] = min(own / max(elapsed, 1e-9), 1.0)
            if self.budget is not None:
                self._book(elapsed, own, worker, sampled=sampled, steps=steps, fixed=fixed)
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

    def _book(
        self, elapsed: float, own: float, worker: tuple[float, float], *, sampled: bool, steps: int, fixed: bool
    ) -> None:
        """Count what was spent on records, and on what else was read."""
        before, self._worker_before = self._worker_before, worker
        if fixed or self.budget is None:
            self._spacing.begin()
            self._stretch.begin()
            return
        allowed = max(self.budget * elapsed, self.floor * steps) / 2
        late, late_more = worker[0] - before[0], worker[1] - before[1]
        here, there = self._usual
        if sampled:  # where no record is plain any more, what it would take fades
            self._usual = here, there = min(here, own), FADES * there
        else:
            self._usual = here + NEW * (own - here), there + NEW * (late - there)
        plain = here + there if sampled else own
        self._stretch.book(max(own - plain, 0.0) + late_more, allowed, steps=steps, happened=sampled)
        room = 2.0 - self._stretch.share
        self._spacing.book(plain + late, allowed, steps=steps, happened=True, room=room)
