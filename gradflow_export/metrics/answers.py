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
PAIRS, CHANCE = 16, 3.0
"""Fewest pairs of answers of which it is said which way numbers pull them, and least z-score of their signs."""
SURELY = 0.9
"""Share of what these pairs weigh that must agree."""
RANDOM = 4.0
"""Standard deviations of chance below which a factor follows from something."""
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
        weights: What each class counts beside the others, 0 for one that none was to be; nothing where that depends on
            more than the class. Shape: ``[classes]`` or ``[0]``.
    """

    kind: Kind
    predictions: Floats
    targets: Floats
    rows: npt.NDArray[np.bool_]
    weights: Floats


def meant(answers: Floats, gradients: Floats, *, turned: bool = False) -> Meant | None:
    """Return what the answers were to be, ``None`` where their gradient is not that of a cross-entropy.

    What is drawn to one of two classes is driven from the other. With any factor for each sample it may be taken for
    either, so that a gradient with another sign than it has is read only where factors are equal.

    An answer without a gradient may be masked, or so sure that rounding left nothing to learn. Where many of them are
    that sure, those that are left are no sample of all: the batch tells nothing.

    Args:
        answers: Logits, probabilities or their logarithms. Shape: ``[n, k]``.
        gradients: Of the loss with respect to them. Shape: ``[n, k]``.
        turned: Whether they are given with another sign than they have.
    """
    rows = np.isfinite(answers).all(axis=1) & np.isfinite(gradients).all(axis=1) & (gradients != 0).any(axis=1)
    if int(rows.sum()) < LEAST:
        return None
    said, pull = answers[rows], gradients[rows]
    equal = turned and said.shape[1] == 2
    found = (_classes(said, pull, equal=equal) if said.shape[1] > 1 else None) or _binary(said, pull)
    if found is None:
        return None
    mute = answers[~rows & np.isfinite(answers).all(axis=1)]
    sure = _likely(mute).max(axis=1) if found[0] == "classes" else np.abs(2.0 * _chance(mute) - 1.0).min(axis=1)
    unread = int((sure >= 1.0 - CLOSE).sum()) if not _alone(pull) else 0
    kind, predictions, targets, weights = found
    return None if unread > (1.0 - MOST) * len(said) else Meant(kind, predictions, targets, rows, weights)


def pulled(said: Floats, pull: Floats, numbers: Floats, every: Floats | None = None) -> float:
    """Return how surely numbers pull answers: up to 1 towards them, -1 away from them, 0 where neither is sure.

    Whatever a loss is, its targets are what answers are drawn to. Where both are in one unit, the gradient of nearly
    every answer points from it to its target, and how hard it pulls follows from these two, or from another answer such
    as a variance; what a policy's returns multiply does not. Where they are not, of two answers that are much alike the
    one with the greater target is drawn up more; a weight of each sample draws some up and others down.

    Args:
        said: Answers, or what the loss made of them. Shape: ``[n, k]``.
        pull: Gradient of the loss with respect to the answers. Shape: ``[n, k]``.
        numbers: What may be their targets. Shape: ``[n, k]``.
        every: All answers, where both are in one unit. Shape: ``[n, m]``.
    """
    here = np.isfinite(said) & np.isfinite(pull) & np.isfinite(numbers) & (pull != 0)
    # Of a difference alone one number for all is known up to rounding.
    if not here.any() or np.ptp(numbers[here]) <= 1e-5 * np.abs(numbers[here]).max():
        return 0.0
    if every is not None:
        towards = np.sign((said - numbers) * pull)[here]
        share = float(towards.sum() / max(np.abs(towards).sum(), LEAST))
        return share if abs(share) >= 2.0 * MOST - 1.0 and _depends(said, pull, numbers, every) else 0.0
    order = np.argsort(said, axis=0, kind="stable")
    ups, wants = (
        np.diff(np.take_along_axis(np.where(here, each, np.nan), order, axis=0), axis=0) for each in (-pull, numbers)
    )
    moved = (ups * wants)[np.isfinite(ups * wants) & (ups * wants != 0)]
    if len(moved) < PAIRS:
        return 0.0
    weight, signs = float(moved.sum() / np.abs(moved).sum()), float(np.sign(moved).sum())
    return weight if abs(weight) >= SURELY and signs * np.sign(weight) >= CHANCE * len(moved) ** 0.5 else 0.0


def _depends(said: Floats, pull: Floats, numbers: Floats, every: Floats) -> bool:
    """Whether the factor of each pull follows from a target, its answer or their difference, or from another answer.

    Neighbours in the order of what it follows from have nearly the same one: von Neumann's ratio is 1 for chance.
    """
    away = said - numbers
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.log(np.abs(pull / away))
    whole = np.isfinite(factor).all(axis=1)
    factor, count = factor[whole], int(whole.sum())
    spread = np.var(factor, axis=0)
    if count < PAIRS or spread.max() <= CLOSE**2:
        return count >= PAIRS
    others = every[:, :MANY].T[:, :, None]
    keys = [away, said, numbers, *np.broadcast_to(others, (len(others), *away.shape))]
    orders = (np.argsort(key[whole], axis=0, kind="stable") for key in keys)
    steps = (np.diff(np.take_along_axis(factor, order, axis=0), axis=0) for order in orders)
    ratio = min(float(np.mean(np.square(step)) / (2.0 * spread.mean())) for step in steps)
    return bool(ratio <= 1.0 - RANDOM / count**0.5)


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


def _classes(said: Floats, pull: Floats, *, equal: bool) -> tuple[Kind, Floats, Floats, Floats] | None:
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
    if not factor.size or not _follows(factor, likely, target, None if equal else towards):
        return None
    groups = [factor[target == each] for each in range(said.shape[1])]
    weights = np.array([median(group) if group.size else 0.0 for group in groups])
    apart = all(map(_equal, groups)) and not _equal(factor)
    return "classes", likely[:, None], target[:, None].astype(np.float64), weights[: len(weights) * apart]


def _follows(factor: Floats, likely: Floats, target: npt.NDArray[np.intp], towards: Floats | None) -> bool:
    """Whether factors are all the same, or the same in each class, or go with the probability in one or two sweeps.

    The surer an answer is of its target, the less is it pulled there. One of two classes that is pulled no less is what
    remains where the loss drives the answer from the other one, as with a sign that is missing. A loss that gives up
    what is unlikely, as where labels are noisy, is no cross-entropy at all: its factors rise with the probability.
    Without ``towards``, the pull of each answer, only equal factors count.
    """
    classes = [factor[target == each] for each in distinct(target.astype(np.float64))]
    if _equal(factor) or (2 * len(classes) <= len(target) and all(map(_equal, classes))):
        return True
    if towards is None:
        return False
    order = np.argsort(likely)
    ordered, upper = factor[order], towards[order][np.sort(likely) > np.log(0.5)]
    if len(factor) < MANY or (len(upper) > 1 and upper[-1] >= (1.0 - CLOSE) * upper[0]):
        return False
    quarter = len(factor) // 4
    if median(ordered[-quarter:]) > (1.0 + CLOSE) * median(ordered[:quarter]):
        return False
    return bool(np.abs(np.diff(ordered)).sum() <= SWEEPS * np.ptp(ordered))


def _binary(said: Floats, pull: Floats) -> tuple[Kind, Floats, Floats, Floats] | None:
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
            apart = said.shape[1] == 1 and all(side.size for side in sides) and not _equal(both)
            return "binary", chance, up.astype(np.float64), np.array([*map(median, sides[::-1])] if apart else [])
    return None


def _equal(values: Floats) -> bool:
    """Whether nearly all values are the same."""
    return not values.size or float((np.abs(values - median(values)) <= CLOSE * median(values)).mean()) >= MOST
