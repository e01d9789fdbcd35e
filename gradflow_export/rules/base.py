"""What a rule is: thresholds, and a pure function from a record and its history to what is wrong now."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.history import History


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in one record, before hysteresis.

    Attributes:
        issue_type: What is wrong.
        severity: How much it matters.
        layers: Every site concerned; the first is where to look first. ``("",)`` for the whole model.
        value: The number that was judged.
        threshold: What it was judged against.
        message: One sentence with the numbers in words.
        advice: What to do, concretely.
        since: The first step at which it held, where the rule knows better than the judge; 1 is the first that it saw.
        before: Number of steps directly before it in which nothing was read that would show it, where these are not
            those in which nothing was read that the rule judges.
        cause: Distinguishes two reasons for the same type; findings of one cause share one issue.
        urgent: Opens at once, without the rule's patience: the evidence is beyond noise.
        follows_from: Types, or causes, whose issue, while open or just healed, explains this finding; it is then not
            reported.
        origin: What brought it about, in a few words, for :attr:`Issue.cause`.
        sure: Whether it is reported. What holds but may be harmless is not; later on it tells since when it has held.
        about: Returns the finding of some of its layers, where each of them has words of its own.
    """

    issue_type: IssueType
    severity: Severity
    layers: tuple[str, ...]
    value: float
    threshold: float
    message: str
    advice: str
    since: int | None = None
    before: int | None = None
    cause: str = ""
    urgent: bool = False
    follows_from: tuple[str, ...] = ()
    origin: str = ""
    sure: bool = True
    about: Callable[[tuple[str, ...]], Finding] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Rule(abc.ABC):
    """A detector. Subclasses are frozen dataclasses whose fields are their thresholds.

    A rule is evaluated on the records that carry at least one of ``needs`` or ``evidence``: these arrive at different
    intervals, and ``patience`` counts evaluations, not steps. A record that lacks some of what all those carried in
    which it found something is no evaluation without the finding: it neither heals an issue nor ends the patience. What
    was never read without a finding does not count.

    Attributes:
        patience: Consecutive evaluations with a finding before an issue opens.
        heal: Consecutive evaluations without it before the issue closes.
        cooldown: Steps after healing during which it does not open again.
    """

    patience: int = 3
    heal: int = 3
    cooldown: int = 20

    name: ClassVar[str]
    """That of its class in lower case, ``fixed-dead`` of ``FixedDead``, unless it has one of its own."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Metrics it judges."""
    evidence: ClassVar[tuple[str, ...]] = ()
    """Facts of the evidence it judges, ``kind.name``."""
    alongside: ClassVar[tuple[str, ...]] = ()
    """What is read with it also where it shows nothing, and so tells when that was looked for last."""
    remembers: ClassVar[tuple[str, ...]] = ()
    """Metrics and facts whose past the rule reads in the history."""
    by_layer: ClassVar[bool] = False
    """Whether each layer has a hysteresis of its own, so that a layer that falls ill later opens a new issue."""
    quiet: ClassVar[bool] = True
    """Whether the rule is suppressed while the run is non-finite, when all it sees would be a consequence."""
    final: ClassVar[bool] = False
    """Whether it is asked about its last record again when the run is over, because it spares what may still come."""
    fixed: ClassVar[bool] = False
    """Whether it is one of the fixed thresholds a user asked for by name, reported beside the scale-free rules."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    @property
    def judged(self) -> frozenset[str]:
        """Metrics and facts it judges."""
        return frozenset((*self.needs, *self.evidence))

    @property
    def shown(self) -> frozenset[str]:
        """What is read where it finds something, and some of it also where there is nothing to find."""
        return self.judged.union(self.alongside)

    @abc.abstractmethod
    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Return what is wrong in this record.

        Args:
            record: The newest record; it carries at least one of ``needs`` or ``evidence``.
            history: What came before, this record included.

        Returns:
            Findings, most important first; empty when nothing is wrong or the evidence does not suffice.
        """

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether an issue is still there although it has not been found for ``heal`` evaluations."""
        return False

    def refuted(self, issue: Issue, history: History) -> bool:
        """Return whether what has happened since shows that an issue is over; asked at every record while it is open.

        For what is judged by readings that may be hundreds of steps apart, and shows in one that is not.
        """
        return False


@dataclass(frozen=True, kw_only=True)
class Check(Rule):
    """A rule about a silent mistake, whose docstring is the page that ``gradflow rule`` prints.

    After what it does come the sections ``Why it is bad``, ``Example``, ``Use instead`` and ``Not reported``.
    """

    raises: ClassVar[tuple[IssueType, ...]]
    """Types of the issues that it opens."""
    order: ClassVar[int] = 50
    """Checks are asked in this order, and by name: of two that find one type in one record the first is reported."""
    late: ClassVar[bool] = False
    """Whether it is asked after all rules, because what they find explains what it finds."""


def surest(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the first finding that is sure, and after it those that are not."""
    every = tuple(found)
    return (*[each for each in every if each.sure][:1], *[each for each in every if not each.sure])


def number(value: float) -> str:
    """Return a number as messages print it: three digits, or the word for a non-finite one.

    >>> number(0.0123456), number(float("inf"))
    ('0.0123', 'infinite')
    """
    return "NaN" if math.isnan(value) else "infinite" if math.isinf(value) else f"{value:.3g}"


def some(names: tuple[str, ...], limit: int = 3) -> str:
    """Return some names in words, ``"the whole model"`` for the run site.

    >>> some(("a", "b", "c", "d", "e"))
    'a, b, c and 2 more'
    """
    shown = [name or "the whole model" for name in names[:limit]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
