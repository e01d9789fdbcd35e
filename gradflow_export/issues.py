"""What is wrong, where, since when and what to do: the issues that rules raise (floor 0, no dependencies)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Severity(enum.IntEnum):
    """How much an issue matters; ordered, so that ``max`` finds the worst."""

    INFO = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3
    CRITICAL = 4


class IssueType(str, enum.Enum):
    """What is wrong. The value is the name that appears in reports, tags and alerts."""

    VANISHING = "VANISHING"
    EXPLODING = "EXPLODING"
    DEAD = "DEAD"
    SATURATION = "SATURATION"
    NUMERICAL = "NUMERICAL"
    UNSTABLE = "UNSTABLE"
    BOTTLENECK = "BOTTLENECK"
    STAGNATION = "STAGNATION"
    LOSS_SPIKE = "LOSS_SPIKE"
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

    def __str__(self) -> str:
        """Return the bare name, as it is printed."""
        return self.value


@dataclass(frozen=True)
class Issue:
    """One thing that is wrong, where, since when, how badly, and what to do about it.

    Attributes:
        issue_type: What is wrong.
        severity: How much it matters.
        layer: The first site concerned, ``""`` for the whole model.
        step: The first step at which the condition held.
        value: The number that was judged, in the unit of the metric named in ``message``.
        threshold: What it was judged against.
        message: One sentence saying what was seen.
        advice: What to do, concretely.
        layers: Every site concerned, ``layer`` first.
        healed_step: The step at which the condition was seen to have gone, ``None`` while it is open.
        cause: What brought it about, in a few words, where that is known: of a NaN its origin, of which the other
            layers that show it are consequences.
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

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", (self.layer,))

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells one issue of a run from another: type, layer, first step."""
        return self.issue_type.value, self.layer, self.step

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
            f"[{self.severity.name}] {self.issue_type} in {where}{more} since step {self.step}{until}: "
            f"{self.message} Do: {self.advice}"
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
    """Undo :func:`number_to_json`."""
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
    }


def issue_from_json(data: Mapping[str, Any]) -> Issue:
    """Undo :func:`issue_to_json`."""
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
    )
