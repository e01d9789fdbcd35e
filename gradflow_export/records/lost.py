"""Steps that were to be recorded and are not, and what an error ended: counted by reason, and named in one phrase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gradflow_export.records.step_record import Gap, StepRecord

DROPPED = "runtime.dropped"
INTERRUPTED = "interrupted"
"""How it is said that somebody stopped the run."""
DISABLED = "disabled"
"""Kind of the notes on what an error ended: an instrument, a rule, an analysis."""
UNSEEN = "unseen"
"""Kind of the note on an end of which nothing could be read: the model was gone."""
NOBODY, KILLED = "no session recorded them", "the session before ended before they were written"
"""Why steps between two sessions of a run are in neither."""
SHOWING = frozenset(("loss", "gradient.total_norm", "parameter.weight_norm"))
"""Metrics any of which shows what the steps before it left."""


@dataclass(frozen=True)
class LostSteps:
    """What a run has lost.

    Attributes:
        dropped: Steps of which there is no record, by reason.
        unwritten: Records that a writer did not take, by the writer's name.
        after: The last step in the files of a run that was not closed, of which nobody knows what came then.
        error: What ended the run, such as ``"at step 3 (ValueError)"`` for an exception, ``"interrupted at step 3"``.
        damaged: Parts of the files that could not be read, of which nobody knows what they held.
        disabled: What read or judged until an error of its own ended it, with the step.
        unseen: That the end was not seen, in words; empty where it was.
    """

    dropped: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    after: int | None = None
    error: str = ""
    damaged: int = 0
    disabled: Mapping[str, int] = field(default_factory=dict)
    unseen: str = ""

    def __bool__(self) -> bool:
        return bool(self.phrase)

    @property
    def total(self) -> int:
        """Steps that are in no record or file; what one writer of several did not take is in those of others."""
        return sum(self.dropped.values()) + self.unwritten.get("", 0)

    def joined(self, gaps: Iterable[Gap]) -> LostSteps:
        """Return the same with the steps that the files lack."""
        dropped, unwritten = Counter(self.dropped), Counter(self.unwritten)
        for gap in gaps:
            if gap.reason in {NOBODY, KILLED}:
                dropped[gap.reason] += gap.steps
            else:
                unwritten[""] += gap.steps
        return replace(self, dropped=dropped, unwritten=unwritten)

    @property
    def phrase(self) -> str:
        """What was lost and why, such as ``3 steps were lost (writers too slow)``; empty when nothing was.

        >>> LostSteps({"writers too slow": 3}, {"wandb": 1}).phrase
        '3 steps were lost (writers too slow); 1 step was not written by wandb'
        """
        found = {reason or "without a record": count for reason, count in self.dropped.items() if count}
        if unwritten := self.unwritten.get("", 0):
            found["not written"] = unwritten
        why = ", ".join(reason if len(found) == 1 else f"{count} {reason}" for reason, count in found.items())
        parts = [f"{_steps(self.total)} lost ({why})"] if found else []
        parts += [f"{_steps(count)} not written by {name}" for name, count in self.unwritten.items() if count and name]
        if self.disabled:
            named = ", ".join(f"{name} (step {step})" for name, step in self.disabled.items())
            parts.append(f"disabled after an error: {named}")
        parts += [self.unseen] if self.unseen else []
        if self.damaged:
            parts.append(f"{self.damaged} part{'s' * (self.damaged > 1)} of the files could not be read (damaged)")
        parts += [] if self.after is None else [f"not closed: steps after {self.after} are unknown"]
        how = "" if self.error.startswith(INTERRUPTED) else "ended by an exception "
        parts += [how + self.error] if self.error else []
        return "; ".join(parts)


class LostCount:
    """Counts steps that are in no record, by reason.

    Attributes:
        reasons: How many of each.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self._newest: Gap | None = None
        self._reported = 0

    def add(self, step: int, reason: str) -> None:
        """Count one."""
        self.reasons[reason] += 1
        self._newest = Gap(step, step, 1, reason)

    def note(self, record: StepRecord) -> None:
        """Take notice of a record, which holds the running total."""
        self._reported = int(record.value(DROPPED) or 0)

    def since(self, last: int) -> Gap | None:
        """Return what no record holds, because it was lost after the last of them.

        Args:
            last: Its step.
        """
        count, newest = self.reasons.total() - self._reported, self._newest
        return replace(newest, first=min(last + 1, newest.last), steps=count) if newest and count > 0 else None


def _steps(count: int) -> str:
    return f"{count} step{' was' if count == 1 else 's were'}"


class StoredLost:
    """Follows the running total in the records of a run, each session of which begins at 0."""

    def __init__(self) -> None:
        self._before = self._now = 0
        self._disabled: dict[str, int] = {}
        self._unseen = ""

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        value = record.value(DROPPED)
        if value is not None:
            self._before += self._now if value < self._now else 0
            self._now = int(value)
        if not SHOWING.isdisjoint(record.metrics):  # what is read later shows what the steps before it left
            self._unseen = ""
        for note in record.notes:
            if note.kind == DISABLED:
                self._disabled.setdefault(note.text, record.step)
            elif note.kind == UNSEEN:
                self._unseen = note.text

    @property
    def lost_steps(self) -> LostSteps:
        """What the records tell; why steps were lost is not stored."""
        return LostSteps({"": self._before + self._now}, disabled=self._disabled, unseen=self._unseen)
