"""What a loss wants of each answer, read off the gradient that comes back to it: no loss need be known by its form.

The gradient of a cross-entropy is what was said less what was meant, in whatever form it is written, with whatever
factor for each sample. That is an identity between numbers, and is checked as one: where it does not hold nothing is
derived.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.constants import Kind
from gradflow_export.records.statistics import distinct, median

Floats = npt.NDArray[np.float64]
CLOSE = 0.02
"""Share by which what must be equal may differ: numbers of a coarse format have two digits."""
LEAST = 8
"""Fewest answers of which anything is derived."""
MOST = 0.98
"""Share of the answers that must fit."""
MANY, SWEEPS = 16, 2.5
"""Factors that go up and down at random cover their range a third as often as there are of them."""


class Meant(NamedTuple):
    """What some answers were to be.

    Attributes:
        kind: ``"classes"`` or ``"binary"``.
        predictions: As :func:`~gradflow_export.metrics.constants.losses` takes them.
        targets: The same.
        rows: Which answers count.
    """

    kind: Kind
    predictions: Floats
    targets: Floats
    rows: npt.NDArray[np.bool_]


def meant(answers: Floats, gradients: Floats) -> Meant | None:
    """Return what the answers were to be, ``None`` where their gradient is not that of a cross-entropy.

    Args:
        answers: Logits, probabilities or their logarithms. Shape: ``[n, k]``.
        gradients: Of the loss with respect to them. Shape: ``[n, k]``.
    """
    rows = np.isfinite(answers).all(axis=1) & np.isfinite(gradients).all(axis=1) & (gradients != 0).any(axis=1)
    if int(rows.sum()) < LEAST:
        return None
    said, pull = answers[rows], gradients[rows]
    found = (_classes(said, pull) if said.shape[1] > 1 else None) or _binary(said, pull)
    return None if found is None else Meant(*found, rows)


def _classes(said: Floats, pull: Floats) -> tuple[Kind, Floats, Floats] | None:
    """Each answer is pulled towards one class and pushed from the others, by as much in all: no score counts alone.

    A factor of each sample may follow from its class or from its loss. What a policy's returns multiply does not.
    """
    target, every = pull.argmin(axis=1), np.arange(len(said))
    towards, total = -pull[every, target], np.abs(pull).sum(axis=1)
    top = said.max(axis=1, keepdims=True)
    scores = said - top - np.log(np.exp(said - top).sum(axis=1, keepdims=True))
    if (towards >= (1.0 - CLOSE) * total).mean() >= MOST:  # of probabilities, or their logarithms, one alone is pulled
        if (said >= 0).all() and (np.abs(said.sum(axis=1) - 1.0) <= CLOSE).all():
            scores = np.log(np.maximum(said, 1e-12))
            factor = towards * said[every, target]
        else:
            factor = towards if (np.abs(said - scores) <= CLOSE).all() else np.zeros(0)
    elif (np.abs(towards - 0.5 * total) <= CLOSE * total).mean() >= MOST:
        factor = towards / np.maximum(-np.expm1(scores[every, target]), 1e-12)
    else:
        return None
    likely = scores[every, target]
    if not factor.size or not _follows(factor, likely, target):
        return None
    return "classes", likely[:, None], target[:, None].astype(np.float64)


def _follows(factor: Floats, likely: Floats, target: npt.NDArray[np.intp]) -> bool:
    """Whether factors are all the same, or the same in each class, or go with the probability in one or two sweeps."""
    classes = [factor[target == each] for each in distinct(target.astype(np.float64))]
    if _equal(factor) or (2 * len(classes) <= len(target) and all(map(_equal, classes))):
        return True
    ordered = factor[np.argsort(likely)]
    return len(factor) >= MANY and bool(np.abs(np.diff(ordered)).sum() <= SWEEPS * np.ptp(ordered))


def _binary(said: Floats, pull: Floats) -> tuple[Kind, Floats, Floats] | None:
    """Each entry is pulled to one side by its distance from there, with one factor for each side."""
    here, up = pull != 0, pull < 0
    for chance, slope in ((1.0 / (1.0 + np.exp(-np.clip(said, -60.0, 60.0))), 1.0), (said, 0.0)):
        if not ((chance >= 0) & (chance <= 1)).all():
            continue
        # Of probabilities themselves the gradient is greater by what a logit moves them.
        distance = np.where(up, 1.0 - chance, chance) / (1.0 if slope else np.maximum(chance * (1.0 - chance), 1e-12))
        factor = np.abs(pull) / np.maximum(distance, 1e-12)
        both, spread = factor[here], distance[here]
        varied = median(np.abs(spread - median(spread))) > 5 * CLOSE * median(spread)
        sides = [factor[here & side] for side in (up, ~up)]
        if (varied and all(_equal(side) for side in sides)) or (
            all(side.size for side in sides) and _equal(both) and abs(median(chance[here]) - 0.5) > CLOSE
        ):
            return "binary", chance, up.astype(np.float64)
    return None


def _equal(values: Floats) -> bool:
    """Whether nearly all values are the same."""
    return not values.size or float((np.abs(values - median(values)) <= CLOSE * median(values)).mean()) >= MOST
