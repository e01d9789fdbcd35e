"""What is wrong, where, since when and what to do: the issues that rules raise (floor 0, no dependencies)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
        return _MEANINGS[self.value]


_MEANINGS: Mapping[str, str] = MappingProxyType({
    "VANISHING": (
        "the gradient shrinks along the chain of blocks, or the earliest parameters get a thousandth of the "
        "last ones'"
    ),
    "EXPLODING": "the gradient or the signal grows along the chain, or the loss jumps and takes the gradient with it",
    "DEAD": "most units of an activation module are never on",
    "SATURATION": "most outputs lie where the activation is flat, and the loss is not solved",
    "NUMERICAL": (
        "NaN or Inf, and where it began: input, layer of the forward or backward pass, weights or loss, with "
        "micro-batch and rank"
    ),
    "UNSTABLE": "gradient norms or directions swing from step to step",
    "BOTTLENECK": "one block lets far less through than its neighbours",
    "STAGNATION": "parameters that should learn do not move",
    "LOSS_SPIKE": "the loss leaves its own recent range",
    "DIVERGING": "the loss rose far above its first values and stays there",
    "MEMORY_USAGE": "little memory is left",
    "MEMORY_LEAK": "the process grows with every step",
    "ATTENTION_COLLAPSE": "every head of a layer looks at nearly one key only, and that was not learned",
    "HEAD_REDUNDANCY": "the heads of a layer attend alike",
    "RANK_COLLAPSE": "after a stack of attention all tokens of a sequence are nearly the same",
    "POLICY_COLLAPSE": "a policy takes one action almost surely although training has not come to rest",
    "EXCESS_EXPLORATION": "the actions of a policy stay random",
    "RECURRENT_SUBCRITICAL": (
        "the state of a recurrent layer forgets within a few steps of its sequence, and the loss has not "
        "halved"
    ),
    "RECURRENT_SUPERCRITICAL": (
        "the state of a recurrent layer multiplies a gradient by more than ten over the sequence"
    ),
    "ROTATION": "limit cycle: parameters orbit instead of converging, as of several losses (GAN)",
    "OPTIMIZER_STATE": "`eps` decides the size of Adam's steps, or its second moment is far out of date",
    "DESYNC": (
        "the ranks of a distributed run no longer hold the same weights, or copies within the model that "
        "should be equal are not"
    ),
    "NOT_TRAINING": (
        "parameters that should learn get no update, and which mistake it is: a cut graph, an optimizer that "
        "misses them, a plain list, a learning rate of 0"
    ),
    "WRONG_LOSS": (
        "the loss does not suit what it is given: softmax before cross-entropy, shapes that are broadcast, "
        "targets its last activation cannot reach, a softmax over one class or over the batch"
    ),
    "DATA_SCALE": "inputs or targets of a size that no network starts from, and the model is no better than a constant",
    "BAD_TARGETS": "targets are all the same, have nothing to do with the inputs, or stand among them",
    "LEARNING_RATE": (
        "steps replace the weights, change next to nothing, or the schedule has run out, and the loss does "
        "not fall"
    ),
    "BAD_INIT": "units that are copies of each other, layers that stay at zero, first weights far too large or small",
    "CAPACITY": (
        "layers that do less than they seem to: several that are one, because nothing stands between them or they are "
        "the same, or one that lets nothing through"
    ),
    "STALE_GRAD": "gradients of earlier steps are in `.grad` when the next are added",
    "EVAL_RANDOM": "dropout or other noise acts in evaluation, or dropout no longer acts in training",
    "NOT_LEARNING": "nothing else is seen, and yet the loss stays at the level of the best constant prediction",
    "LEAKAGE": "the target stands among the inputs as a number",
    "UNDERFLOW": "gradients in float16 lie below its smallest number and are 0, without a scaled loss",
    "COLLAPSE": "what a layer gives out, and all layers after it, is nearly the same for every sample",
    "OVERFITTING": "the loss of evaluation rises while that of training falls",
})  # fmt: skip


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
        explained_by: ``key`` of the issue of the same run whose consequence this one is, ``None`` where there is none
            or nobody looked; :func:`gradflow_export.records.causes.with_causes` looks.
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
        "explained_by": None if issue.explained_by is None else list(issue.explained_by),
    }


def issue_from_json(data: Mapping[str, Any]) -> Issue:
    """Undo :func:`issue_to_json`."""
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
    )
