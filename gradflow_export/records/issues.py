"""What is wrong, where, since when and what to do: the issues that rules raise (floor 0, no dependencies)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradflow_export.records.meanings import HARMS, MEANINGS, REMEDIES


class Severity(enum.IntEnum):
    """Severity of an issue; ordered, so that ``max`` returns the highest."""

    INFO = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


class IssueType(str, enum.Enum):
    """Type of an issue. The value is the name in reports, tags and alerts."""

    VANISHING = "VANISHING"
    EXPLODING = "EXPLODING"
    DEAD = "DEAD"
    SATURATION = "SATURATION"
    NUMERICAL = "NUMERICAL"
    UNSTABLE = "UNSTABLE"
    BOTTLENECK = "BOTTLENECK"
    STAGNATION = "STAGNATION"
    LOSS_SPIKE = "LOSS_SPIKE"
    DIVERGING = "DIVERGING"
    MEMORY_USAGE = "MEMORY_USAGE"
    MEMORY_LEAK = "MEMORY_LEAK"
    ATTENTION_COLLAPSE = "ATTENTION_COLLAPSE"
    HEAD_REDUNDANCY = "HEAD_REDUNDANCY"
    RANK_COLLAPSE = "RANK_COLLAPSE"
    POLICY_COLLAPSE = "POLICY_COLLAPSE"
    EXCESS_EXPLORATION = "EXCESS_EXPLORATION"
    RECURRENT_SUBCRITICAL = "RECURRENT_SUBCRITICAL"
    RECURRENT_SUPERCRITICAL = "RECURRENT_SUPERCRITICAL"
    ROTATION = "ROTATION"
    OPTIMIZER_STATE = "OPTIMIZER_STATE"
    DESYNC = "DESYNC"
    NOT_TRAINING = "NOT_TRAINING"
    WRONG_LOSS = "WRONG_LOSS"
    DATA_SCALE = "DATA_SCALE"
    BAD_TARGETS = "BAD_TARGETS"
    LEARNING_RATE = "LEARNING_RATE"
    BAD_INIT = "BAD_INIT"
    CAPACITY = "CAPACITY"
    STALE_GRAD = "STALE_GRAD"
    EVAL_RANDOM = "EVAL_RANDOM"
    NOT_LEARNING = "NOT_LEARNING"
    LEAKAGE = "LEAKAGE"
    UNDERFLOW = "UNDERFLOW"
    COLLAPSE = "COLLAPSE"
    OVERFITTING = "OVERFITTING"

    def __str__(self) -> str:
        """Return the bare name, as it is printed."""
        return self.value

    @property
    def meaning(self) -> str:
        """What is wrong, in the words of docs/issues."""
        return MEANINGS[self.value]

    @property
    def harm(self) -> str:
        """Why it is bad, in one sentence."""
        return HARMS[self.value]

    @property
    def remedy(self) -> str:
        """What to do about it; the advice of an issue is about its own case."""
        return REMEDIES[self.value]


@dataclass(frozen=True)
class Issue:
    """A training problem: its type, severity, layer, first step, and fix.

    Attributes:
        issue_type: Type of the problem.
        severity: How serious it is.
        layer: Name of the first layer concerned, ``""`` for the whole model.
        step: First step at which the condition held.
        value: The value that was compared, in the unit of the metric named in ``message``.
        threshold: The threshold it was compared with.
        message: One sentence with the observation.
        advice: The fix.
        layers: Names of all layers concerned, ``layer`` first.
        healed_step: Step at which the condition no longer held, ``None`` while the issue is open.
        cause: The cause in a few words, if known. For a NaN it is the origin; other layers with NaN are consequences.
        explained_by: ``key`` of the issue of the same run that explains this one. ``None`` if there is none or it was
            not determined; :func:`gradflow_export.records.causes.with_causes` determines it.
        before: Number of steps directly before ``step`` in which the condition may have held already: none was read.
    """

    issue_type: IssueType
    severity: Severity
    layer: str
    step: int
    value: float
    threshold: float
    message: str
    advice: str
    layers: tuple[str, ...] = ()
    healed_step: int | None = None
    cause: str = ""
    explained_by: tuple[str, str, int] | None = None
    before: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", (self.layer,))

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells one issue of a run from another: type, layer, first step."""
        return self.issue_type.value, self.layer, self.step

    @property
    def since(self) -> str:
        """When it began, in words.

        >>> Issue(IssueType.DEAD, Severity.HIGH, "a", 325, 1.0, 0.9, "", "", before=13).since
        'since step 325, or up to 13 steps before'
        """
        unread = f", or up to {self.before} step{'s' * (self.before > 1)} before" if self.before else ""
        return f"since step {self.step}{unread}"

    @property
    def open(self) -> bool:
        """Whether the condition still held when it was last looked at."""
        return self.healed_step is None

    def __str__(self) -> str:
        """Return the one-line form used by reports and the console."""
        where = self.layer or "whole model"
        more = f" (+{len(self.layers) - 1} more)" if len(self.layers) > 1 else ""
        until = "" if self.healed_step is None else f" until step {self.healed_step}"
        return (
            f"[{self.severity.name}] {self.issue_type} in {where}{more} {self.since}{until}: "
            f"{self.message} Fix: {self.advice}"
        )

    def __eq__(self, other: object) -> bool:
        """Compare field by field, NaN equal to NaN."""
        if not isinstance(other, Issue):
            return NotImplemented
        return issue_to_json(self) == issue_to_json(other)

    def __hash__(self) -> int:
        return hash((self.key, self.healed_step))


def number_to_json(value: float | None) -> float | str | None:
    """Return a JSON-safe form: ``null`` is missing; NaN and the infinities are strings."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def number_from_json(value: float | str | None) -> float | None:
    """Return the number of a :func:`number_to_json` value."""
    return None if value is None else float(value)


def issue_to_json(issue: Issue) -> dict[str, Any]:
    """Return the issue with every field, ready for ``json.dumps``."""
    return {
        "issue_type": issue.issue_type.value,
        "severity": issue.severity.name,
        "layer": issue.layer,
        "step": issue.step,
        "value": number_to_json(issue.value),
        "threshold": number_to_json(issue.threshold),
        "message": issue.message,
        "advice": issue.advice,
        "layers": list(issue.layers),
        "healed_step": issue.healed_step,
        "cause": issue.cause,
        "explained_by": None if issue.explained_by is None else list(issue.explained_by),
        "before": issue.before,
    }


def issue_from_json(data: Mapping[str, Any]) -> Issue:
    """Return the issue of an :func:`issue_to_json` value."""
    explained = data.get("explained_by")
    return Issue(
        issue_type=IssueType(data["issue_type"]),
        severity=Severity[data["severity"]],
        layer=data["layer"],
        step=int(data["step"]),
        value=float(data["value"]),
        threshold=float(data["threshold"]),
        message=data["message"],
        advice=data["advice"],
        layers=tuple(data["layers"]),
        healed_step=data["healed_step"],
        cause=data.get("cause", ""),
        explained_by=(str(explained[0]), str(explained[1]), int(explained[2])) if explained else None,
        before=data.get("before", 0),
    )
