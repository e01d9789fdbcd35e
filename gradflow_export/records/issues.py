"""What is wrong, where, since when and what to do: the issues that rules raise (floor 0, no dependencies)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


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
        return _MEANINGS[self.value]


_MEANINGS: Mapping[str, str] = MappingProxyType({
    "VANISHING": (
        "the gradient shrinks from the last block to the first, or the first layers get a thousandth of the "
        "gradient of the last"
    ),
    "EXPLODING": ("the gradient or the activations grow from block to block, or the loss and the gradient norm "
                  "jump together"),
    "DEAD": "most units of an activation module output 0 for every sample",
    "SATURATION": "most outputs of an activation lie in its flat region, and the loss is still high",
    "NUMERICAL": (
        "NaN or Inf, with the place where it began: input, weights, layer of the forward or backward pass, or "
        "loss; with micro-batch and rank"
    ),
    "UNSTABLE": "gradient norms or directions oscillate from step to step",
    "BOTTLENECK": "one block passes on far less gradient or information than its neighbors",
    "STAGNATION": "trainable parameters do not change",
    "LOSS_SPIKE": "the loss jumps far above its recent range",
    "DIVERGING": "the loss rose far above its initial values and stays there",
    "MEMORY_USAGE": "memory is nearly used up",
    "MEMORY_LEAK": "memory use grows with every step",
    "ATTENTION_COLLAPSE": "every head of a layer attends almost entirely to one key, before anything was learned",
    "HEAD_REDUNDANCY": "the heads of a layer have nearly the same attention weights",
    "RANK_COLLAPSE": "after a stack of attention all tokens of a sequence are nearly the same",
    "POLICY_COLLAPSE": "a policy takes one action almost always although training has not converged",
    "EXCESS_EXPLORATION": "the actions of a policy stay random",
    "RECURRENT_SUBCRITICAL": (
        "the state of a recurrent layer decays within a few time steps, and the loss has not halved"
    ),
    "RECURRENT_SUPERCRITICAL": (
        "the state of a recurrent layer multiplies a gradient by more than ten over the sequence"
    ),
    "ROTATION": "limit cycle: parameters orbit instead of converging, as with adversarial losses (GAN)",
    "OPTIMIZER_STATE": "`eps` dominates the denominator of Adam, or the second moment is far out of date",
    "DESYNC": (
        "the ranks of a distributed run no longer hold the same weights, or copies within the model that "
        "should be equal are not"
    ),
    "NOT_TRAINING": (
        "trainable parameters get no update, with the mistake: a detached graph, parameters missing from the "
        "optimizer, a plain list, a learning rate of 0"
    ),
    "WRONG_LOSS": (
        "the loss does not fit its inputs: softmax before cross-entropy, broadcast shapes, targets out of range of "
        "the output activation, softmax over one class or the batch"
    ),
    "DATA_SCALE": "inputs or targets are not normalized, and the model is no better than a constant prediction",
    "BAD_TARGETS": "targets are all the same, are unrelated to the inputs, or are copies of them",
    "LEARNING_RATE": (
        "updates are far too large or too small, or the schedule has decayed to nothing, and the loss does not fall"
    ),
    "BAD_INIT": ("identical units, layers that stay at zero, or initial weights of a far too large or small scale"),
    "CAPACITY": (
        "layers that add no capacity: stacked linear layers without an activation, one layer listed several times, "
        "or a normalization over a single value"
    ),
    "STALE_GRAD": "gradients of earlier steps are still in `.grad` when new ones are accumulated",
    "EVAL_RANDOM": "dropout or other noise is active in evaluation, or dropout is inactive in training",
    "NOT_LEARNING": "no other issue is detected, but the loss stays at that of the best constant prediction",
    "LEAKAGE": "target leakage: a column of the inputs equals the target",
    "UNDERFLOW": "float16 gradients underflow to 0 because the loss is not scaled",
    "COLLAPSE": "the outputs of a layer, and of all layers after it, are nearly the same for every sample",
    "OVERFITTING": "the evaluation loss rises while the training loss falls",
})  # fmt: skip


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
    )
