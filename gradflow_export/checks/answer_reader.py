"""What the columns of a sample of a loss are, and what is read off answers whose loss is not known (numpy alone)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.autograd_graph.layer_graph import Straight
from gradflow_export.checks.layers.redundant import Pair
from gradflow_export.metrics.answers import meant, pulled
from gradflow_export.metrics.constants import Kind
from gradflow_export.records.loss_mistakes import (
    LOGITS_IN_NLL,
    MANY_LABELS,
    MAXIMISED,
    ONE_NUMBER,
    OUT_OF_REACH,
    PROBABILITIES_IN_NLL,
    TARGETS_NO_SHARE,
)
from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]
IN_NLL = frozenset((LOGITS_IN_NLL, PROBABILITIES_IN_NLL))
ROUNDING = 1e-5
"""Difference of equal targets, as a share of the greatest: some are known from a difference alone."""
OUTPUTS = 64
"""Most columns of targets that are kept of an answer."""


class Aim(NamedTuple):
    """Numbers that a loss puts beside answers.

    Attributes:
        columns: Which of the answers.
        apart: Whether what was made of these answers, in the unit of the numbers, stands before the numbers.
    """

    columns: list[int]
    apart: bool


@dataclass(frozen=True)
class Found:
    """What the columns of one sample are, and what the graph shows beside them.

    Attributes:
        kind: The loss; ``None`` when there are no predictions and targets.
        logits: Whether predictions of a binary loss are logits.
        site: The last layer before the loss.
        inputs: Columns of inputs, first of all.
        every: Of how many features each column is one.
        steps: The two dimensions of a sample that were made one, time first where inputs were asked for; (0, 0) where
            there are more.
        outputs: Columns of predictions, then as many of targets.
        width: Targets of a sample, of which the columns may be some.
        input_site: The first layer.
        normalised: Whether inputs are normalised in the model.
        reach: What predictions cannot leave.
        run: The longest row of layers without a non-linearity.
        part: Whether the first layer was given more in this pass, which is judged as a whole elsewhere.
        bends: Whether there is any non-linearity.
        pairs: Layers directly behind each other that could be one.
        idle: Activation modules of a model in whose graph there is none.
        tokens: Whether inputs are numbers of words.
        own: Whether a layer of the model makes the predictions, and no other network is involved.
        whole: Whether all parts of the loss are known.
        shares: Whether what is said of the classes of a sample adds up to 1.
        even: Whether all samples count alike in this loss.
        turned: Whether it is one part of a loss, and a user wrote how its gradient passes: turned round, it is meant to
            be high.
        answers: Whether all parts of the loss are known, of this model alone, and targets are answers.
        count: Predictions of the whole batch.
        choices: Among how many each chooses; 1 where scores are no logarithms, 0 where none chooses.
        mistakes: What the structure showed.
        asked: Whether inputs are what the model was given, not what entered its first layer.
        graded: Whether the columns after the inputs are answers, and then their gradients, of a loss that is not known.
        aims: What that loss puts beside its answers, the columns of which follow.
        weights: What classes count, where that is read off the gradient.
    """

    kind: Kind | None = None
    logits: bool = False
    site: str = ""
    inputs: int = 0
    every: int = 1
    steps: tuple[int, int] = (0, 0)
    outputs: int = 0
    width: int = 0
    input_site: str = ""
    normalised: bool = False
    reach: tuple[float, float] = (-math.inf, math.inf)
    run: tuple[Straight, ...] = ()
    pairs: tuple[Pair, ...] = ()
    part: bool = False
    bends: bool = True
    idle: int = 0
    tokens: bool = False
    own: bool = False
    whole: bool = False
    shares: bool = False
    even: bool = True
    turned: bool = False
    answers: bool = False
    count: int = 0
    choices: int = 0
    mistakes: dict[str, float] = field(default_factory=dict)
    asked: bool = False
    graded: bool = False
    aims: tuple[Aim, ...] = ()
    weights: Floats | None = None


class Aims:
    """Reads what answers are to be off their gradients, and off the numbers that the loss puts beside them."""

    def __init__(self) -> None:
        self._meant = False
        self._known: tuple[tuple[Aim, ...], int, float] | None = None  # of which the targets are which, and their way

    def understood(self, found: Found, rows: Floats) -> tuple[Found, Floats]:
        """Return what the columns are once answers and their gradients are read, and predictions and targets.

        Args:
            found: What the columns are so far: inputs, answers, gradients, and what the loss puts beside answers.
            rows: Shape: ``[rows, columns]``.
        """
        ends = found.inputs + found.outputs * np.arange(3)
        x, answers, gradients, beside = np.split(rows, ends, axis=1)
        read, turned = meant(answers, gradients), None
        self._meant |= read is not None
        if read is None and not self._meant:
            read = turned = meant(answers, -gradients, turned=True)
        if read is None and found.aims and not self._meant:
            return self._aimed(found, x, answers, gradients, beside)
        if read is None:
            return replace(found, outputs=0, graded=False), x
        some = np.linspace(0, read.targets.shape[1] - 1, min(read.targets.shape[1], OUTPUTS)).astype(int)
        parts = np.full((2, len(rows), len(some)), np.nan)  # what has no gradient does not count
        parts[0, read.rows], parts[1, read.rows] = read.predictions[:, some], read.targets[:, some]
        mistakes = found.mistakes if turned is None else {**found.mistakes, MAXIMISED: 1.0}
        known = replace(
            found, kind=read.kind, outputs=len(some), choices=found.outputs, width=found.outputs, graded=False,
            mistakes=mistakes, weights=read.weights,
        )  # fmt: skip
        return known, np.concatenate([x, parts[0], parts[1]], axis=1)

    def _aimed(
        self, found: Found, x: Floats, answers: Floats, gradients: Floats, beside: Floats
    ) -> tuple[Found, Floats]:
        """Return answers and the numbers that draw them, brought to their unit: no constant of any unit is an error."""
        place, told = 0, list[tuple[float, bool, Floats, Floats]]()
        for aim in found.aims:
            columns = len(aim.columns)
            shown = beside[:, place : place + columns] if aim.apart else answers[:, aim.columns]
            place += columns * aim.apart
            numbers, place = beside[:, place : place + columns], place + columns
            sure = pulled(shown, gradients[:, aim.columns], numbers, answers if aim.apart else None)
            told.append((sure, aim.apart, shown, numbers))
        held = self._known if self._known is not None and self._known[0] == found.aims else None
        best = max(range(len(told)), key=lambda index: (told[index][1], abs(told[index][0])) if told[index][0] else ())
        if told[best][0] and (held is None or told[held[1]][0] * held[2] < 0):
            held = self._known = found.aims, best, told[best][0]
        if held is None:
            return replace(found, outputs=0, graded=False), x
        (_, apart, said, y), way = told[held[1]], held[2]
        mistakes = {**found.mistakes, **({MAXIMISED: 1.0} if apart and way < 0 else {})}
        kind: Kind = "absolute" if apart else "squared"
        known = replace(
            found, kind=kind, outputs=y.shape[1], width=found.outputs, graded=False, mistakes=mistakes,
            answers=found.answers and y.shape[1] == 1,
        )  # fmt: skip
        return known, np.concatenate([x, *_in_unit(said, y, 0.0 if apart else way)], axis=1)


def _in_unit(said: Floats, y: Floats, way: float) -> tuple[Floats, Floats]:
    """Return answers and targets in one unit.

    Answers less what all of them are off by; where they are in another unit than the targets, such as logarithms of
    counts, the ranks of both, and those of the answers scaled as fits the others if they go with them.

    Args:
        said: Answers. Shape: ``[n, k]``.
        y: Targets. Shape: ``[n, k]``.
        way: Whether answers are to rise or to fall with targets of another unit; 0 for targets of the same unit.
    """
    if not way:
        return said + np.array([median(off[np.isfinite(off)]) for off in (y - said).T]), y
    out = np.full((2, *y.shape), np.nan)
    for column in range(y.shape[1]):
        here = np.isfinite(said[:, column] + y[:, column])
        p, t = _ranks(said[here, column]), _ranks(y[here, column])
        out[0, here, column] = p * math.copysign(float((p * t).sum()) / max(float((p * p).sum()), 1e-300), way)
        out[1, here, column] = t
    return out[0], out[1]


def _ranks(values: Floats) -> Floats:
    """Return ranks from -1 to 1, equal ones of equal values. Shape: that of ``values``, ``[n]``."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = 2.0 * np.cumsum(counts) - counts
    return np.asarray(ranks[place] / max(len(values), 1) - 1.0)


def mistakes_of(found: Found, x: Floats, predictions: Floats, targets: Floats) -> dict[str, float]:
    """Return the mistakes that only the numbers show."""
    if found.kind == "classes" and found.mistakes.keys().isdisjoint(IN_NLL) and predictions.max() > ROUNDING:
        return {LOGITS_IN_NLL: 1.0}
    if found.shares and found.own:
        # One that says which words a text has, of these words themselves, counts each on purpose.
        labels = ((targets == 0) | (targets == 1)).all() and not (x.shape == targets.shape and (x == targets).all())
        several = float((targets.sum(axis=1) >= 2).mean())
        return {MANY_LABELS: several} if labels and several > 0 else {}
    if found.kind == "binary":
        outside = float(((targets < -1e-6) | (targets > 1.0 + 1e-6)).mean())
        return {TARGETS_NO_SHARE: outside} if outside > 0 else {}
    if found.kind not in {"squared", "absolute", "huber"}:
        return {}
    # Up to rounding: where only a difference is kept, targets were computed from it.
    alike = np.ptp(targets, axis=1).max() <= ROUNDING * np.abs(targets).max() < np.ptp(targets[:, 0])
    if targets.shape[1] > 1 and alike and found.own and found.whole and found.even:
        return {ONE_NUMBER: float(targets.shape[1])}
    beyond = np.maximum(found.reach[0] - targets, 0.0) + np.maximum(targets - found.reach[1], 0.0)
    size = float(targets.var()) or float(np.square(targets).mean())
    share = float(np.square(beyond).mean()) / size if size > 0 else 0.0
    return {OUT_OF_REACH: share} if share > 0 else {}
