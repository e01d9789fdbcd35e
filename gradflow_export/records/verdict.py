"""The verdict on a run: one sentence, the same on the terminal, in the panel, in notebooks and in W&B (floor 0)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gradflow_export.records.statistics import ENDS, Ends
from gradflow_export.records.step_record import Issue, Reading, Severity, StepRecord, passes_alone

HARDLY = 0.97
"""Fraction of the first loss at or above which a loss hardly fell."""
FAR = 0.25
"""Fraction of the run beyond which the readings that make the last loss are said to lie apart."""
REGAINED = 0.25
"""Fraction of the fall of the loss that one far higher reading has to take back for it to be said."""
NAMED = 3
"""Open problems that the verdict names."""
JUDGED = ("loss", "gradient.total_norm", "update.total_norm")
"""Metrics without any of which nothing can be said of a run."""

Tone = Literal["good", "warn", "bad", "none"]


@dataclass(frozen=True)
class Verdict:
    """What is said of a run.

    Attributes:
        tone: How good it is: ``"none"`` where nothing can be said.
        headline: A few words, ``"healthy"``, ``"2 problems"``, ``"1 possible problem"``.
        detail: The reasons.

    >>> str(Verdict("bad", "1 problem", "DEAD in a since step 3"))
    '1 problem: DEAD in a since step 3'
    """

    tone: Tone
    headline: str
    detail: str = ""

    def __str__(self) -> str:
        """Return both on one line."""
        return ": ".join(filter(None, (self.headline, self.detail)))


@dataclass
class Course:
    """How far a run came and how its loss went.

    Attributes:
        steps: Number of records of steps; before the first of them, of backward passes that led to none.
        before: Number of records of earlier sessions, where these are not among them.
        last: Last recorded step.
        ends: The first and the last loss.
        loss_read: Last step whose loss was read, 0 when there is none.
        last_loss: The loss at that step, also if it is not finite.
        judged: Whether a loss, gradients or updates were read.
        stepped: Whether there is a record of more than backward passes that led to no optimizer step.
        players: Optimizers that have losses of their own: the sum of these says nothing of any.
    """

    steps: int = 0
    before: int = 0
    last: int = 0
    ends: Ends = field(default_factory=Ends)
    loss_read: int = 0
    last_loss: float = math.nan
    judged: bool = False
    stepped: bool = False
    players: set[str] = field(default_factory=set)

    def add(self, record: StepRecord) -> None:
        """Take in one record."""
        alone = passes_alone(record)
        if alone and self.stepped:  # no step
            return
        # What came before the first step was none.
        self.steps, self.last = (self.steps if alone or self.stepped else 0) + 1, record.step
        self.judged = self.judged or any(record.value(name) is not None for name in JUDGED)
        self.stepped = self.stepped or not alone
        self.players |= own_losses(record.metrics.get("optimizer.loss"))
        loss = record.value("loss")
        if loss is not None:
            self.ends.add(loss, record.step)
            self.loss_read, self.last_loss = record.step, loss

    @property
    def loss(self) -> tuple[float, float] | None:
        """The first and the last loss, as :class:`~gradflow_export.records.statistics.Ends` defines them."""
        return self.ends.values

    @property
    def way(self) -> tuple[str, str]:
        """What the loss did, ``"fell"`` where it fell, and from where to where; empty where nothing can be said."""
        if self.loss is None or not self.loss_read or len(self.players) > 1:
            return "", ""
        first, last = self.loss
        fell = last < first * (HARDLY if first > 0 else 1.0)
        since, until = self.ends.span
        late = f", read up to step {self.loss_read}" if self.loss_read < self.last else ""
        read = f" (medians of {ENDS}){late}"
        if until - since > max(FAR * self.last, ENDS**2):
            read = f" (medians of {ENDS}, the last read at steps {since} to {until})"
        what = "fell" if fell else "hardly fell" if last < first else "has not fallen"
        now = self.ends.leap
        # Where readings lie apart one alone stands for many steps, and the median for steps of long ago.
        if fell and now is not None and until - since > ENDS**2 and now > last + REGAINED * (first - last):
            what, read = (
                "fell, but was far higher when last read",
                f" (medians of {ENDS}), then {now:.4g} at step {until}",
            )
        return what, f"from {first:.4g} to {last:.4g}{read}"


def own_losses(seen: Reading | None) -> set[str]:
    """Return the optimizers that show that they have losses of their own: each alone, or with another one's beside.

    Args:
        seen: The losses of the optimizers in one step.
    """
    if seen is None:
        return set()
    sites = [site for site, there in zip(seen.sites, seen.present, strict=True) if there]
    return set(sites) if len(sites) == 1 or len(np.unique(seen.values[seen.present])) > 1 else set()


def problem(issue: Issue, *, stepped: bool = True) -> str:
    """Name one open problem.

    Args:
        issue: The problem.
        stepped: Whether an optimizer has stepped, so that it is known since when.
    """
    return f"{issue.issue_type} in {issue.layer or 'the whole model'}{f' {issue.since}' if stepped else ''}"


def verdict(
    course: Course,
    problems: Sequence[str],
    *,
    worst: Severity = Severity.HIGH,
    earlier: Sequence[str] = (),
    healed: int = 0,
    lost: str = "",
) -> Verdict:
    """Judge a run. It is healthy only where no problem is open, every step is known, and the loss is not stuck.

    Args:
        course: How far it came.
        problems: Names of the open problems that no other explains, the worst first.
        worst: The highest severity among them. Where it is LOW they are possible problems.
        earlier: Names of those that an earlier session of the run left open and this one does not report.
        healed: How many healed.
        lost: What was lost, in words.
    """
    after = f"; {lost}" if lost else ""
    if not course.steps:
        return Verdict("none", "no step recorded yet", lost)
    if problems:
        more = f"; {len(earlier)} more left open by an earlier session" if earlier else ""
        said = _count(problems, "possible problem" if worst <= Severity.LOW else "problem")
        return Verdict("bad" if worst >= Severity.HIGH else "warn", said, _listed(problems) + more + after)
    return _calm(course, earlier, f" ({healed} healed)" if healed else "", lost)


def _calm(course: Course, earlier: Sequence[str], healed: str, lost: str) -> Verdict:
    """Judge a run of whose latest session no problem is open."""
    count = course.before + course.steps
    steps = f"in {'the ' if lost else ''}{count} record{'s' * (count > 1)}"
    after = f"; {lost}" if lost else ""
    said = f"no open problem {steps}{after}{healed}"
    what, span = course.way
    few = "; too few losses to tell whether it falls" if course.loss is None and not lost else ""
    went = f"; the loss {what} {span}" if what else few if course.loss_read else "; no loss was recorded"
    if earlier:
        headline = f"{_count(earlier)} left open by an earlier session"
        return Verdict("warn", headline, f"{_listed(earlier)}; no other {said.removeprefix('no ')}{went}")
    if not course.judged:
        return Verdict("none", "no verdict", f"neither loss nor gradients nor updates were read {steps}{after}")
    if course.loss_read and not math.isfinite(course.last_loss):
        name = "NaN" if math.isnan(course.last_loss) else "Inf" if course.last_loss > 0 else "-Inf"
        return Verdict("bad", f"the loss is {name}", said)
    if what and what != "fell":
        return Verdict("warn", f"the loss {what}", f"{span}; {said}")
    headline = "healthy as far as recorded" if lost else "healthy"
    return Verdict("warn" if lost else "good", headline, said + went)


def _count(names: Sequence[str], what: str = "problem") -> str:
    return f"{len(names):,} {what}{'s' * (len(names) > 1)}"


def _listed(names: Sequence[str]) -> str:
    more = f"; and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more
