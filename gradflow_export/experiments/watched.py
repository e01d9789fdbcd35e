"""Watches the models of a run as the first stage of the doctor does, so that it shows whether a finding is gone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gradflow_export.checks.evaluation.sizes import DIFFERS
from gradflow_export.checks.not_learning import BATCH_FOR_TIME, ONE_ANSWER
from gradflow_export.checks.parameters.bad_init import OF_DEGREE
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.exporter import Exporter, watching
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.instances import instances
from gradflow_export.records.causes import with_causes
from gradflow_export.records.issues import Issue, IssueType, Severity
from gradflow_export.schedule import Instrument

OFTEN: tuple[Instrument, ...] = ("wiring", "inputs", "updates", "blocks", "activations", "logits")
"""Instruments that are read at every step of so short a run."""
AGAIN = 1.25
"""Multiple of the steps after which something was found within which it is to be found again."""
MODELS = 8
"""Models watched at most."""

PROVED = frozenset({
    IssueType.NOT_TRAINING, IssueType.STALE_GRAD, IssueType.WRONG_LOSS, IssueType.CAPACITY, IssueType.EVAL_RANDOM,
    IssueType.DESYNC, IssueType.BAD_TARGETS, IssueType.BAD_INIT, IssueType.LEAKAGE, IssueType.UNDERFLOW,
    IssueType.NUMERICAL,
})  # fmt: skip
"""Issues that structure or a number proves: what mends them shows by their absence. Others are for the loss to say."""
PROVED_CAUSES = frozenset((BATCH_FOR_TIME, ONE_ANSWER))
"""Causes that are proved so, of types that are not."""


class Watch(Intervention):
    """Changes nothing, and takes note of the issues that are found while the script trains."""

    stays = True
    patience = 3

    def __init__(self) -> None:
        super().__init__()
        self._exporters: list[Exporter] = []
        self._members: set[int] = set()
        self._done = False

    def root(self, module: nn.Module) -> None:
        """Watch the model that it belongs to."""
        if id(module) in self._members or len(self._exporters) >= MODELS or self._done:
            return
        model = outermost(module)
        self._members.update(id(member) for member in model.modules())
        known = watching(model)
        self._exporters.append(known[0] if known else watch(model))

    def measure(self) -> None:
        """Stop: weights that are held still are no finding."""
        self._done = True
        for exporter in self._exporters:
            exporter.close()

    def told(self) -> dict[str, Any]:
        """Return type and cause of each issue that no other explains."""
        self.measure()
        found = with_causes(issue for exporter in self._exporters for issue in exporter.issues)
        return {"found": [(str(issue.issue_type), issue.cause) for issue in unexplained(found)]}


def watch(model: nn.Module) -> Exporter:
    """Return an exporter that watches a model closely and writes nothing."""
    return Exporter(model, backends=[], intervals=dict.fromkeys(OFTEN, 1), budget=None, verbose=0).watch()


def outermost(module: nn.Module) -> nn.Module:
    """Return the module that holds this one and is held by none, such as the model whose layer is called alone.

    Args:
        module: Any module; wrappers that run several processes or compiled code are looked through.
    """
    holders = [(len(members), each) for each in instances(nn.Module) if module in (members := set(each.modules()))]
    return unwrap(max(holders, key=lambda pair: pair[0], default=(1, module))[1])


def unexplained(issues: Iterable[Issue]) -> list[Issue]:
    """Return the issues of at least MEDIUM that no other of them explains."""
    return [issue for issue in issues if issue.severity >= Severity.MEDIUM and issue.explained_by is None]


def needed(issues: Iterable[Issue], steps: int) -> int:
    """Return how many steps of training show again what structure proves: as many as it took, and some more.

    Args:
        issues: What was found at first.
        steps: Least number.
    """
    first: dict[IssueType, int] = {}
    for issue in issues:
        if _is_proved(issue.issue_type, issue.cause) and issue.severity >= Severity.MEDIUM:
            # What opens once more says nothing new.
            first[issue.issue_type] = min(first.get(issue.issue_type, issue.step), issue.step)
    return max(steps, *(int(AGAIN * step) for step in first.values())) if first else steps


def accused(told: Iterable[tuple[str, str]]) -> frozenset[IssueType]:
    """Return the types that :meth:`Watch.told` names and structure proves.

    First weights of an unusual size prove nothing: drawn anew, they have another size in any script. Nor do outputs of
    another size in evaluation, whose inputs no treatment changes.
    """
    found = [(IssueType(kind), cause) for kind, cause in told if cause not in {*OF_DEGREE, DIFFERS}]
    return frozenset(kind for kind, cause in found if _is_proved(kind, cause))


def _is_proved(kind: IssueType, cause: str) -> bool:
    return kind in PROVED or cause in PROVED_CAUSES
