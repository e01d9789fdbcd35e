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
TINY, FAR = 1e-300, 600.0
"""Probability that counts as none, and a logit beyond which one does not differ from the next."""
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

    An answer without a gradient may be masked, or so sure that rounding left nothing to learn. Where many of them are
    that sure, those that are left are no sample of all: the batch tells nothing.

    Args:
        answers: Logits, probabilities or their logarithms. Shape: ``[n, k]``.
        gradients: Of the loss with respect to them. Shape: ``[n, k]``.
    """
    rows = np.isfinite(answers).all(axis=1) & np.isfinite(gradients).all(axis=1) & (gradients != 0).any(axis=1)
    if int(rows.sum()) < LEAST:
        return None
    said, pull = answers[rows], gradients[rows]
    found = (_classes(said, pull) if said.shape[1] > 1 else None) or _binary(said, pull)
    if found is None:
        return None
    mute = answers[~rows & np.isfinite(answers).all(axis=1)]
    sure = _likely(mute).max(axis=1) if found[0] == "classes" else np.abs(2.0 * _chance(mute) - 1.0).min(axis=1)
    unread = int((sure >= 1.0 - CLOSE).sum()) if not _alone(pull) else 0
    return None if unread > (1.0 - MOST) * len(said) else Meant(*found, rows)


def _alone(pull: Floats) -> bool:
    """Whether of several scores one alone is pulled: probabilities or their logarithms, whose pull never vanishes."""
    towards, total = -pull.min(axis=1), np.abs(pull).sum(axis=1)
    return pull.shape[1] > 1 and float((towards >= (1.0 - CLOSE) * total).mean()) >= MOST


def _likely(scores: Floats) -> Floats:
    """Return the probabilities of classes. Shape: that of ``scores``."""
    powers: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def _chance(scores: Floats) -> Floats:
    """Return the probability of each entry by itself. Shape: that of ``scores``."""
    return 1.0 / (1.0 + np.exp(-np.clip(scores, -FAR, FAR)))


def _classes(said: Floats, pull: Floats) -> tuple[Kind, Floats, Floats] | None:
    """Each answer is pulled towards one class and pushed from each other by its probability: no score counts alone.

    A factor of each sample may follow from its class or from its loss. What a policy's returns multiply does not.
    """
    target, every = pull.argmin(axis=1), np.arange(len(said))
    towards, total = -pull[every, target], np.abs(pull).sum(axis=1)
    others = _likely(said)
    scores = said - said.max(axis=1, keepdims=True) + np.log(others.max(axis=1, keepdims=True))
    others[every, target] = 0.0
    pushed = others * (towards / np.maximum(others.sum(axis=1), TINY))[:, None]
    pushed[every, target] = -towards
    if _alone(pull):
        if (said >= 0).all() and (np.abs(said.sum(axis=1) - 1.0) <= CLOSE).all():
            scores = np.log(np.maximum(said, 1e-12))
            factor = towards * said[every, target]
        else:
            factor = towards if (np.abs(said - scores) <= CLOSE).all() else np.zeros(0)
    elif (np.abs(pull - pushed).sum(axis=1) <= 2 * CLOSE * total).mean() >= MOST:
        factor = towards / np.maximum(others.sum(axis=1), TINY)
    else:
        return None
    likely = scores[every, target]
    if not factor.size or not _follows(factor, likely, target, towards):
        return None
    return "classes", likely[:, None], target[:, None].astype(np.float64)


def _follows(factor: Floats, likely: Floats, target: npt.NDArray[np.intp], towards: Floats) -> bool:
    """Whether factors are all the same, or the same in each class, or go with the probability in one or two sweeps.

    The surer an answer is of its target, the less is it pulled there. One of two classes that is pulled no less is what
    remains where the loss drives the answer from the other one, as with a sign that is missing.
    """
    classes = [factor[target == each] for each in distinct(target.astype(np.float64))]
    if _equal(factor) or (2 * len(classes) <= len(target) and all(map(_equal, classes))):
        return True
    order = np.argsort(likely)
    ordered, upper = factor[order], towards[order][np.sort(likely) > np.log(0.5)]
    if len(factor) < MANY or (len(upper) > 1 and upper[-1] >= (1.0 - CLOSE) * upper[0]):
        return False
    return bool(np.abs(np.diff(ordered)).sum() <= SWEEPS * np.ptp(ordered))


def _binary(said: Floats, pull: Floats) -> tuple[Kind, Floats, Floats] | None:
    """Each entry is pulled to one side by its distance from there, with one factor for each side."""
    here, up = pull != 0, pull < 0
    for chance, other, slope in ((_chance(said), _chance(-said), 1.0), (said, 1.0 - said, 0.0)):
        if not ((chance >= 0) & (chance <= 1)).all() or median(np.abs(said[here])) >= FAR:
            continue
        # Of probabilities themselves the gradient is greater by what a logit moves them.
        distance = np.where(up, other, chance) / (1.0 if slope else np.maximum(chance * other, 1e-12))
        factor = np.abs(pull) / np.maximum(distance, TINY)
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
