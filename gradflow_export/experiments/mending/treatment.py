"""What a treatment is: one change to a training script, made from outside, and the patch that makes it for good."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gradflow_export.experiments import interventions as do
from gradflow_export.records.issues import IssueType

EXACT, TUNING, MENDING, PLACEBO, LOOK = "exact", "tuning", "mending", "placebo", "look"
TRIED = (EXACT, MENDING, TUNING)
"""Kinds that are changes to a script; the others only look."""


@dataclass(frozen=True)
class Treatment:
    """One change that can be tried.

    Attributes:
        name: What is changed, in the words of a report.
        kind: ``"exact"``, ``"tuning"``, ``"mending"`` for what is tried only where a finding asks for it,
            ``"placebo"``, or ``"look"`` for what only observes.
        make: Makes the intervention for one run.
        separates: The cause that it tells from others.
        patch: What makes the change for good: code to be typed as it stands, or a comment that says in words what to
            write; or what returns it, given the facts of the first run.
        fixes: Issue types whose fix it is, the one that a report names first.
        worth: Whether it could change a script of which these facts are known.
        mistake: Whether what it removes is a mistake wherever it is found, and not a choice: then it counts for a
            program that learns as well.
        evident: Whether these facts accuse what it mends, as a symptom would.
        of_loop: Whether what it mends lies in the script's own loop, so that it shows only where that is run.
        chosen: Whether these facts say that the script chose what it removes; then any other cure goes before it.
        stands_in: Whether it puts something in the place of what only the author has: it confirms a cause where the
            script then learns from its inputs, and is no fix.
        choice: Whether what it removes is often meant, so that a program that learns needs something that accuses it.
        causes: Causes of findings of which it mends one; empty where it mends all that its issue types name.
    """

    name: str
    kind: str
    make: Callable[[], do.Intervention]
    separates: str
    patch: str | Callable[[Mapping[str, Any]], str]
    fixes: tuple[IssueType, ...] = ()
    worth: Callable[[Mapping[str, Any]], bool] = lambda _facts: True
    mistake: bool = False
    evident: Callable[[Mapping[str, Any]], bool] = lambda _facts: False
    of_loop: bool = False
    stands_in: bool = False
    choice: bool = False
    causes: frozenset[str] = frozenset()
    chosen: Callable[[Mapping[str, Any]], bool] = lambda _facts: False

    def patch_for(self, facts: Mapping[str, Any]) -> str:
        """Return what makes the change for good in a script of which these facts are known."""
        return self.patch if isinstance(self.patch, str) else self.patch(facts)

    @property
    def hastens(self) -> bool:
        """Whether it makes larger steps, so that what it does may be done by more of them."""
        return self.kind == TUNING and IssueType.LEARNING_RATE in self.fixes

    def answers(self, kind: IssueType, found: Collection[tuple[str, str]]) -> bool:
        """Whether it may mend what is accused of a type: not where all that was found of it has other causes."""
        causes = {cause for each, cause in found if each == kind and cause}
        return kind in self.fixes and not (causes and self.causes and causes.isdisjoint(self.causes))

    def meant(self, found: Collection[tuple[str, str]]) -> bool:
        """Whether it mends something of what was found, given by type and cause."""
        return any(kind in self.fixes and (not self.causes or cause in self.causes) for kind, cause in found)
