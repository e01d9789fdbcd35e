"""Which alerts are worth sending: one per incident, its consequences folded in, none twice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import final

from gradflow_export.records.causes import with_causes
from gradflow_export.records.step_record import Issue, Severity

TITLE = 64
LEVELS = ("INFO", "INFO", "WARN", "ERROR", "ERROR")
"""W&B's alert level by severity."""

TOGETHER_RECORDS, HOLD_SECONDS = 10, 60.0
"""An issue that opens within so many records of another belongs to its incident; its alert waits so long at most."""

_MOST_OPEN = 100


@dataclass(frozen=True)
class Alert:
    """What is reported.

    Attributes:
        title: At most 64 characters.
        text: What, where, since when, and what to do.
        level: ``"INFO"``, ``"WARN"`` or ``"ERROR"``.
        step: Since when.
    """

    title: str
    text: str
    level: str
    step: int


@dataclass
class Incident:
    """Issues that opened soon after each other; the first counts as their cause.

    Attributes:
        issues: In the order they opened.
        began: When, by the records' clock.
        newest: Number of the record in which the last one opened.
        told: Whether it was reported.
        allowed: Whether it may be reported.
        healed: Keys of issues that healed.
    """

    issues: list[Issue]
    began: float
    newest: int
    told: bool = False
    allowed: bool = True
    healed: set[tuple[str, str, int]] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Whether all of its issues have healed."""
        return self.healed >= {issue.key for issue in self.issues}


@final
class Incidents:
    """Turns issues into alerts, by the records' own clock.

    Args:
        cooldown: Seconds before the same type in the same layer is reported again.
        most: Alerts in a run.
        healed: Whether to tell that an incident is over too.

    Attributes:
        known: Causes reported so far, in this session or an earlier one of the same run.
        sent: Alerts so far.
    """

    def __init__(self, cooldown: float, most: int, *, healed: bool = False) -> None:
        self._cooldown, self._most, self._healed = cooldown, most, healed
        self._told: dict[str, float] = {}
        self._earlier: frozenset[str] = frozenset()
        self._open: list[Incident] = []
        self._records = 0
        self.sent = 0

    @property
    def known(self) -> list[str]:
        """Causes reported so far."""
        return sorted({*self._told, *self._earlier})

    @property
    def spent(self) -> bool:
        """Whether no further alert will be allowed."""
        return self.sent >= self._most

    def remember(self, causes: Collection[str]) -> None:
        """Have causes not reported that an earlier session of the run reported."""
        self._earlier = self._earlier.union(causes)

    def add(self, issues: Collection[Issue], now: float) -> list[Alert]:
        """Take in what opened and healed in one record, and return what is to be reported.

        Args:
            issues: May be empty: an alert that waited may be due.
            now: Time of the record.
        """
        self._records += 1
        for issue in issues:
            if issue.open:
                told = self._explaining(issue)
                if told is None:
                    self._join(issue, now)
                else:  # a consequence raises no alert, and keeps none waiting
                    told.issues.append(issue)
                    self._told.setdefault(cause(issue), now)
            else:
                for incident in self._open:
                    incident.healed.add(issue.key)
        out = [
            self._tell(incident)
            for incident in self._open
            if self._waits(incident) and (self._cold(incident) or not 0 <= now - incident.began < HOLD_SECONDS)
        ]
        gone = [incident for incident in self._open if self._cold(incident) and incident.over]
        out += [_heal(incident) for incident in gone if self._healed and incident.told and incident.allowed]
        self._open = [incident for incident in self._open if incident not in gone]
        return out

    def rest(self) -> list[Alert]:
        """Return what still waits to be reported."""
        return [self._tell(incident) for incident in self._open if self._waits(incident)]

    def _explaining(self, issue: Issue) -> Incident | None:
        """Return the incident that holds what explains an issue."""
        known = [other for i in self._open for other in i.issues if other.key not in i.healed]
        why = next(found.explained_by for found in with_causes([*known, issue]) if found.key == issue.key)
        return next((i for i in self._open if any(other.key == why for other in i.issues)), None)

    def _join(self, issue: Issue, now: float) -> None:
        hot = [incident for incident in self._open if not self._cold(incident)]
        if hot:
            incident = hot[-1]
            incident.newest = self._records
            if not incident.allowed and self._allows(issue, now):
                incident.allowed = True
                incident.issues.insert(0, issue)  # what was before it is known already
            else:
                incident.issues.append(issue)
        else:
            self._open = self._open[-_MOST_OPEN:]
            self._open.append(Incident([issue], now, self._records, allowed=self._allows(issue, now)))
        self._told.setdefault(cause(issue), now)

    def _allows(self, issue: Issue, now: float) -> bool:
        last = self._told.get(cause(issue))
        if self.spent or cause(issue) in self._earlier or (last is not None and 0 <= now - last < self._cooldown):
            return False
        self._told[cause(issue)] = now
        return True

    def _waits(self, incident: Incident) -> bool:
        return incident.allowed and not incident.told and not self.spent

    def _cold(self, incident: Incident) -> bool:
        return self._records - incident.newest >= TOGETHER_RECORDS

    def _tell(self, incident: Incident) -> Alert:
        incident.told = True
        self.sent += 1
        first, *others = _cause_first(incident.issues)
        text = alert_text(first)
        if others:
            also = [f"{issue.issue_type} in {issue.layer or 'the model'} since step {issue.step}" for issue in others]
            more = f" and {len(also) - 5} more" if len(also) > 5 else ""
            text += f"\nFollowed by: {', '.join(also[:5])}{more}"
        worst = max(issue.severity for issue in incident.issues)
        return Alert(alert_title(first), text, level(worst), first.step)


def cause(issue: Issue) -> str:
    """Return what an issue is about, whenever it opened."""
    return f"{issue.issue_type.value} {issue.layer}".rstrip()


def level(severity: Severity) -> str:
    """Return the W&B alert level of a severity."""
    return LEVELS[severity]


def alert_title(issue: Issue, prefix: str = "gradflow", what: str = "") -> str:
    """Return at most 64 characters; a long layer name keeps its end, which is what tells layers apart."""
    head = f"{prefix}: {what}{issue.issue_type.value} in "
    where, room = issue.layer or "the whole model", TITLE - len(head)
    if room < 8:
        return f"{head}{where}"[:TITLE]
    return head + (where if len(where) <= room else f"...{where[-(room - 3) :]}")


def alert_text(issue: Issue) -> str:
    """Return where, what, since when and what to do."""
    others = f" and {len(issue.layers) - 1} more" if len(issue.layers) > 1 else ""
    return "\n".join(
        (
            f"{issue.message}",
            f"Layer: {issue.layer or 'the whole model'}{others}",
            f"Value: {issue.value:.6g} (threshold {issue.threshold:.6g})",
            f"Since step: {issue.step}",
            f"Severity: {issue.severity.name}",
            f"Fix: {issue.advice}",
        )
    )


def _cause_first(issues: list[Issue]) -> list[Issue]:
    """Return issues in their order, but what explains the first one, and opened after it, before it."""
    why = with_causes(issues)[0].explained_by
    head = [issue for issue in issues if issue.key == why]
    return head + [issue for issue in issues if issue.key != why]


def _heal(incident: Incident) -> Alert:
    first = _cause_first(incident.issues)[0]
    others = f", and {len(incident.issues) - 1} that followed" if len(incident.issues) > 1 else ""
    text = f"{first.issue_type} in {first.layer or 'the whole model'} (since step {first.step}){others}: healed."
    return Alert(alert_title(first, what="healed: "), text, "INFO", first.step)
