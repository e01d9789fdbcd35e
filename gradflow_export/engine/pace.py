"""Whether the next step makes a record, and whether everything is read in it because rules asked."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from gradflow_export.engine.step_timer import NOTHING, OWED_STEPS, Spent, Worked
from gradflow_export.schedule import Schedule

DELAY = 32
"""Steps between the record that a request was made of and the step at which it acts.

The worker has usually judged a record long before: so many steps of a small model take it about as long as it takes to
be woken, and a GPU is never asked to have finished what was only just launched.
"""

AGAIN_STEPS = 10
CLOSE_STEPS = 16
"""Recorded steps in a row in which how parameters hang together is read once a step was unlike those before it: as many
readings as rules look back at, so that none of them is older than the change."""
WHOLE_STEPS = 3
"""The first of them, in which everything is read: as many readings as rules are patient for."""
FLAGGED = 64

BURST, LEAST_BURST, SLOWER = 24, 8, 6
"""Once a step was unlike those before it so many steps in a row are recorded at most, or none beyond the budget where
that pays for fewer than the least; then of 2, 4, 8 ... steps one, a sixth as often each, until it is as before."""
EARNED = 32
"""So many ordinary records earn a burst; one may be made in advance."""
STILL_KNOWN = 128
"""Steps after the dense start in which a request earns no burst: what one would read was read there."""


class Handover(Protocol):
    """What the training thread asks of the worker."""

    def wait_past(self, step: int) -> None:
        """Wait, for a bounded time, until every record up to a step is judged."""

    @property
    def spent(self) -> Spent:
        """What the worker has done."""

    def has_room(self, step: int) -> bool:
        """Whether a step may be read; one that may not is counted as lost."""


class Pace:
    """Decides before each step whether it is recorded, and whether it is read densely.

    A request of the record of step ``s`` acts at the first recorded step from ``s + DELAY`` on. The training thread
    waits for the verdict on ``s`` there, so that what is read depends on the records alone; a verdict that has not come
    within the bounds of :class:`~gradflow_export.engine.backlog.Backlog` makes a late request, which acts later.

    Attributes:
        worker: Judges the records; ``None`` where nobody does, and nothing is asked for.
        dense: Whether everything is read at the step under way.
        close: Whether how parameters hang together is.
        late: Requests that came after the step at which they were to act.
        flagged: Layers of the issues for which a request has acted, at most ``FLAGGED``, the newest last.
        last: The last step that made a record, below 1 before there is one.
        skipped: Steps without a record by reason: ``every``, ``budget``, ``paused``.
    """

    def __init__(self) -> None:
        self.worker: Handover | None = None
        self.dense = self.close = self._asked = False
        self.late = 0
        self.skipped = {"every": 0, "budget": 0, "paused": 0}
        self.flagged: dict[str, None] = {}
        self._requests: deque[tuple[int, tuple[str, ...]]] = deque()
        self._doubts: deque[int] = deque(maxlen=2 * DELAY)  # nobody takes them where other ranks would not hear of them
        self.last = self._acted = -DELAY
        self._settled: deque[float] = deque([-math.inf] * WHOLE_STEPS, WHOLE_STEPS)  # when doubts were
        self._since = 1
        self._look: int | None = None  # records since it began
        self._length = self._paid = 0
        self._why: str | None = None
        self._ended: str | None = None

    @property
    def spent(self) -> Worked:
        """CPU seconds of the worker, and records that it has judged."""
        return NOTHING if self.worker is None else self.worker.spent.so_far

    def passed(self, schedule: Schedule, usual: int) -> int:
        """Return over how many steps that could have been recorded the step under way looks back for what is due."""
        return max(min(self._since // schedule.every, usual), 1)

    @property
    def wants(self) -> dict[str, bool]:
        """What the step under way reads beyond its plan."""
        return {"asked": self.dense, "close": self.close}

    def ask(self, step: int, layers: tuple[str, ...] = ()) -> None:
        """Request a dense step because of the record of this one, and of these layers; called by the worker."""
        self._requests.append((step, layers[:FLAGGED]))

    def doubt(self, step: int) -> None:
        """Request what :meth:`ask` does for a rule that has not yet found enough, where readings are stretched.

        Without a budget the next readings come as soon as the rule is made for. Each interval has as many requests as
        most rules are patient for.
        """
        self._doubts.append(step)

    def kind(self, sampled: bool) -> int:
        """Return which of ``spent`` the step under way belongs to."""
        return 2 if self.on_credit else int(sampled)

    @property
    def on_credit(self) -> bool:
        """Whether the step under way is recorded for what was seen, and not because it is its turn."""
        return self._look is not None and self._length > 0

    def spacing(self, usual: int) -> int:
        """Return of how many steps one is recorded now.

        Args:
            usual: What the budget leaves.
        """
        if self._look is None or not self._length:
            return usual
        later = (self._look - self._length) // max(self._length // SLOWER, 1)
        now = 1 if later < 0 else 2 << min(later, 30)
        if now >= usual:
            self._look = None
        return min(now, usual)

    def suspect(self, step: int, schedule: Schedule, stretch: float, *, spacing: int = 1) -> bool:
        """Have the next steps read closely, because this one was unlike those before it; return whether they will be.

        What the training thread sees for itself is waited for by nobody. A run is known once it has settled. Each
        interval earns one look, and one may be had in advance. Where a budget leaves steps out, each is a burst of
        records.

        Args:
            step: Its number.
            schedule: How often connections are read otherwise.
            stretch: By what factor intervals are longer than they are set, to stay within a budget.
            spacing: Of how many steps one is recorded for the same reason.
        """
        length = min(BURST, OWED_STEPS // spacing) if spacing > 1 else 0
        burst = length >= LEAST_BURST
        earned = EARNED * spacing if burst else math.ceil(schedule.intervals["wiring"] * stretch)
        reads = self._look is not None and self._look <= CLOSE_STEPS  # what comes then is read closely already
        if step <= schedule.settled or reads or step + earned < self._paid:
            return False
        self._look, self._length, self._paid = 0, length * burst, max(self._paid, step) + earned
        return True

    def begin(
        self, step: int, schedule: Schedule, *, spacing: int = 1, stretch: float = 1, paused: bool, alone: bool
    ) -> bool:
        """Plan a step; return whether it makes a record.

        Args:
            step: Its number.
            schedule: When there are records at all.
            spacing: Of how many steps one is recorded, to stay within a budget.
            stretch: As for :meth:`suspect`.
            paused: Whether the user has paused the exporter.
            alone: Whether requests count: other ranks would not hear of them.
        """
        self.dense = self.close = self._asked = False
        before = self.last
        if paused:
            self._why = "paused"
        elif schedule.recorded(step, spacing):
            self._why = None
        else:
            self._why = "budget" if schedule.recorded(step) else "every"
        if self._why is not None or self.worker is None:
            return self._why is None
        if not self.worker.has_room(step):
            self._why = "behind"
            return False
        if alone:
            self.worker.wait_past(step - DELAY)
            self._asked = self._is_asked(step)
            # What one reading shows may take several in a row to be known.
            if self._asked and spacing > 1 and step > schedule.settled + STILL_KNOWN:
                self.suspect(step, schedule, stretch, spacing=spacing)
            looked = math.inf if self._look is None else self._look
            # What two steps in a row show is not yet known at the first of a burst.
            self.close = looked < CLOSE_STEPS + self.on_credit
            if self._doubts:
                interval = math.ceil(schedule.intervals["wiring"] * stretch) if stretch > 1 else None
                self._asked |= self._is_doubted(step, interval)
            self._acted = step if self._asked else self._acted
            self.dense = self._asked or looked < WHOLE_STEPS
        self.last = step
        self._since = step - before
        if self._look is not None:
            self._look += 1
            if self._look == CLOSE_STEPS and not self._length:
                self._look = None
        return True

    def _is_asked(self, step: int) -> bool:
        asked = False
        while self._requests and self._requests[0][0] + DELAY <= step:
            asked = True
            request, layers = self._requests.popleft()
            self.late += request + DELAY <= self.last
            for layer in layers:
                self.flagged.pop(layer, None)
                self.flagged[layer] = None
        while len(self.flagged) > FLAGGED:
            del self.flagged[next(iter(self.flagged))]
        return asked and step - self._acted >= AGAIN_STEPS

    def _is_doubted(self, step: int, interval: int | None) -> bool:
        late: list[bool] = []
        while self._doubts and self._doubts[0] + DELAY <= step:
            late.append(self._doubts.popleft() + DELAY <= self.last)
        if interval is None or not late:
            return False
        self.late += sum(late)
        if step < self._settled[0] + interval or step - self._acted < AGAIN_STEPS:
            return False
        self._settled.append(step)
        return True

    def pass_by(self, count: int, step: int, schedule: Schedule, *, paused: bool) -> None:
        """Count steps that nobody looked at.

        Args:
            count: How many.
            step: The first of them.
            schedule: When there would be records without a budget.
            paused: Whether the user has paused the exporter.
        """
        if not count:
            return
        last = step + count - 1
        due = last // schedule.every - (step - 1) // schedule.every
        self._ended = "paused" if paused else "every" if last % schedule.every else "budget"
        if paused:
            self.skipped["paused"] += count
        else:
            self.skipped["budget"] += due
            self.skipped["every"] += count - due

    @property
    def left_out(self) -> bool:
        """Whether a schedule or a budget left the last step without a record."""
        return self._ended in {"every", "budget"}

    def make_up(self) -> bool:
        """Return whether the last step was left out, and is to have a record after all."""
        if not self.left_out:
            return False
        self.skipped[str(self._ended)] -= 1
        self._ended = None
        return True

    def end(self) -> dict[str, float]:
        """End the step; return what its record reports how it was planned."""
        self._ended = self._why
        if self._why in self.skipped:
            self.skipped[self._why] += 1
        out = {"schedule.asked": 1.0} if self._asked else {}
        if self.close:
            out["schedule.suspected"] = 1.0
        if self.late:
            out["schedule.late_requests"] = float(self.late)
        return out
