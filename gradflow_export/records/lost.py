"""Steps that were to be recorded and are not: counted by reason, and named in one phrase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradflow_export.records.step_record import StepRecord

DROPPED = "runtime.dropped"


@dataclass(frozen=True)
class LostSteps:
    """What a run has lost.

    Attributes:
        dropped: Steps of which there is no record, by reason.
        unwritten: Records that a writer did not take, by the writer's name.
        after: The last step in the files of a run that was not closed, of which nobody knows what came then.
    """

    dropped: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    after: int | None = None

    def __bool__(self) -> bool:
        return self.total > 0 or self.after is not None

    @property
    def total(self) -> int:
        """Steps that are missing somewhere: one that two writers did not take counts once."""
        return sum(self.dropped.values()) + max(self.unwritten.values(), default=0)

    @property
    def phrase(self) -> str:
        """What was lost and why, such as ``3 steps were lost (writers too slow)``; empty when nothing was."""
        open_end = "" if self.after is None else f"not closed: what came after step {self.after} is not known"
        if not self.total:
            return open_end
        found = {reason or "without a record": count for reason, count in self.dropped.items() if count}
        found |= {f"not written by {name}" if name else "not written": n for name, n in self.unwritten.items() if n}
        why = ", ".join(reason if len(found) == 1 else f"{count} {reason}" for reason, count in found.items())
        count = self.total
        lost = f"{count} step{' was' if count == 1 else 's were'} lost ({why})"
        return f"{lost}; {open_end}" if open_end else lost


class StoredLost:
    """Follows the running total in the records of a run, each session of which begins at 0."""

    def __init__(self) -> None:
        self._before = self._now = 0

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        value = record.value(DROPPED)
        if value is not None:
            self._before += self._now if value < self._now else 0
            self._now = int(value)

    @property
    def lost_steps(self) -> LostSteps:
        """What the records tell; the reason is not stored."""
        return LostSteps({"": self._before + self._now})
