"""How long steps take, what share of them is the exporter's own, and how much less it reads to keep to its budget."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 32
"""Recorded steps whose median gives the throughput."""

DECIDED_EVERY, LEAST_EVENTS = 32, 4
"""Between two decisions there are so many steps, and so many records of the kind that is decided about, at least."""

UNUSUAL = 2.0
"""How many times what is usual a record takes is booked at once. The rest, such as another process that ran meanwhile,
is owed, and so is what is recorded on credit: one such record says little of what the next ones take."""

OWED_STEPS = 2048
"""Over about so many steps what is owed is paid back."""

USUAL, NEW, FADES = 9, 0.1, 0.995
"""Records whose median is what is usual on this thread; weight of the newest in the mean of the worker's, and what is
left of that after a record that was not plain."""

Worked = tuple[tuple[float, ...], tuple[int, ...]]
"""CPU seconds of the worker, and how many records it has judged: plain ones, of sampled steps, and on credit."""
NOTHING: Worked = (0.0, 0.0, 0.0), (0, 0, 0)

MOST = 4096
"""The greatest factor."""

RELAXED, PATIENCE = 0.4, 2
"""A factor is halved when between so many decisions in a row less than this share of its part of the budget was used:
twice which it will cost then, so that the factor does not go back and forth."""


class Spent:
    """What the worker has done for steps that a budget decides, by kind: plain, with more read, on credit."""

    def __init__(self) -> None:
        self._seconds, self._counts = [0.0, 0.0, 0.0], [0, 0, 0]

    @property
    def so_far(self) -> Worked:
        """CPU seconds, and how many records were judged."""
        return tuple(self._seconds), tuple(self._counts)

    def add(self, kind: int | None, seconds: float) -> None:
        """Count CPU seconds; of steps that no budget decides none."""
        if kind is not None:
            self._seconds[kind] += seconds

    def count(self, kind: int | None) -> None:
        """Count a record that was judged."""
        if kind is not None:
            self._counts[kind] += 1


class _Factor:
    """A power of two by which something is done less often, until what it costs keeps within what it may cost.

    Attributes:
        value: The factor.
        share: What it will use of what it may cost, as far as is known.
        owed: Seconds that were spent and are booked later.
    """

    def __init__(self) -> None:
        self.value, self.share = 1, 1.0
        self._cheap, self.owed = 0, 0.0
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
        paid = self.owed * min(steps / OWED_STEPS, 1.0)
        self.owed -= paid
        self._spent, self._allowed = self._spent + spent + paid, self._allowed + allowed
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


class _Usual:
    """Takes what one thing costs each time; what is unusual is owed."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=USUAL)
        self.usual = 0.0

    def book(self, seconds: float) -> tuple[float, float]:
        """Return what is booked now, and what is owed."""
        self._last.append(seconds)
        self.usual = sorted(self._last)[(len(self._last) - 1) // 2]
        now = min(seconds, UNUSUAL * self.usual)
        return now, seconds - now


class _Lagging:
    """Takes what another thread has spent, later and for several records at once: each is booked at its mean."""

    def __init__(self) -> None:
        self.mean = 0.0

    def book(self, seconds: float, count: int, *, happened: bool) -> tuple[float, float]:
        """Return what is booked now, where one of them was made, and what is owed: less than nothing for too much."""
        if count:
            weight = min(NEW * count, 1.0) if self.mean > 0 else 1.0
            self.mean += weight * (seconds / count - self.mean)
        now = self.mean if happened else 0.0
        return now, seconds - now

    def fade(self) -> float:
        """Return the mean, which is known the less the longer none was made."""
        self.mean *= FADES
        return self.mean


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
        self._worker_before = NOTHING
        self._here, self._more = _Usual(), _Usual()  # what this thread takes for a plain record, for what else is read
        self._theirs = _Lagging(), _Lagging()  # what the worker takes for a plain record, for one of a sampled step

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
        worker: Worked = NOTHING,
        fixed: bool = False,
        shows: bool = False,
        credit: bool = False,
    ) -> dict[str, float]:
        """End a recorded step.

        Args:
            now: Time at its end, in seconds.
            spent: Seconds spent inside the exporter on this thread since it began.
            sampled: Whether an instrument with an interval was read.
            steps: Steps since the last call, this one among them.
            worker: What the worker has done since it began.
            fixed: Whether the plan of this step was independent of the budget; nothing is decided then.
            shows: Whether the same holds of this step between others that a budget decides; it is not booked.
            credit: Whether it is recorded beyond what the budget leaves, which is paid back later.

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
                self._book(elapsed, own, worker, sampled=sampled, steps=steps, fixed=fixed, shows=shows, credit=credit)
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
        self,
        elapsed: float,
        own: float,
        worker: Worked,
        *,
        sampled: bool,
        steps: int,
        fixed: bool,
        shows: bool,
        credit: bool,
    ) -> None:
        """Count what was spent on records, and on what else was read."""
        before, self._worker_before = self._worker_before, worker
        if fixed or self.budget is None:
            self._spacing.begin()
            self._stretch.begin()
            return
        allowed = max(self.budget * elapsed, self.floor * steps) / 2
        seconds = [now - then for now, then in zip(worker[0], before[0], strict=True)]
        counts = [now - then for now, then in zip(worker[1], before[1], strict=True)]
        (late, owed), (late_more, owed_more) = (
            theirs.book(seconds[kind], counts[kind], happened=sampled is bool(kind) and not (credit or shows))
            for kind, theirs in enumerate(self._theirs)
        )
        plain = more = 0.0
        if shows:
            pass
        elif credit:
            owed += own
        elif sampled:
            # Where no record is plain any more, one that takes less shows what a plain one would at most.
            here, unusual = self._here.book(own) if own < self._here.usual else (self._here.usual, 0.0)
            more, unusual_more = self._more.book(max(own - here, 0.0))
            plain, owed, owed_more = here + self._theirs[0].fade(), owed + unusual, owed_more + unusual_more
        else:
            plain, unusual = self._here.book(own)
            owed += unusual
        self._stretch.owed += owed_more
        self._spacing.owed += owed + seconds[2]
        counts_so = not (credit or shows)
        self._stretch.book(more + late_more, allowed, steps=steps, happened=sampled and counts_so)
        room = 2.0 - self._stretch.share
        self._spacing.book(plain + late, allowed, steps=steps, happened=counts_so, room=room)
