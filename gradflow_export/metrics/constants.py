"""What the best prediction that ignores the input would cost: the level that learning has to get below."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import median

Floats = npt.NDArray[np.float64]
Kind = Literal["classes", "margin", "soft", "binary", "squared", "absolute", "huber"]
PICKED: frozenset[Kind] = frozenset(("classes", "margin"))
"""Losses of which targets are numbers of classes."""
LEAST_SHARE = 0.02
"""Least probability that a fit by least squares is taken to mean."""
MOST_COLUMNS = 32
"""Columns of targets that are judged separately, at most; of more a column is a pixel, or one of many."""
MOST_FALLS = 8
"""Places at which the scores of the best constant prediction to a margin loss may fall."""


def constant_loss(kind: Kind, targets: Floats, weights: Floats | None = None) -> float:
    """Return the least mean loss of one prediction for all samples.

    Args:
        kind: ``"classes"``: cross-entropy, one column of class numbers. ``"margin"``: what other classes come nearer
            than 1 to the right one, summed up, one column of class numbers.
            ``"soft"``: cross-entropy with class
            probabilities. ``"binary"``: binary cross-entropy. ``"squared"``, ``"absolute"``: distances. ``"huber"``:
            with a width of 1; the loss at the median, which is above the least by less than a tenth.
        targets: Shape: ``[n, outputs]``.
        weights: What each entry counts in a loss of ``"classes"`` or a ``"binary"`` one. Shape: that of ``targets``.

    Returns:
        The mean over samples and, but for classes, over outputs. Unit: that of the loss function.
    """
    if kind == "classes":
        _, place = np.unique(targets[:, 0], return_inverse=True)
        counts = np.bincount(place.reshape(-1), None if weights is None else weights[:, 0])
        return _entropy(counts / counts.sum())
    if weights is not None:
        shares = np.average(targets, axis=0, weights=weights)
        return float(np.average([_entropy(np.array([p, 1.0 - p])) for p in shares], weights=weights.sum(axis=0)))
    if kind == "margin":
        return _margin(np.sort(np.unique(targets[:, 0], return_counts=True)[1] / len(targets))[::-1])
    return _entropy(targets.mean(axis=0)) if kind == "soft" else float(constant_losses(kind, targets).mean())


def constant_losses(kind: Kind, targets: Floats) -> Floats:
    """Return the least mean loss of one prediction for all samples, by column: :func:`constant_loss` is their mean.

    Args:
        kind: One of those whose columns are predicted apart: ``"binary"``, ``"squared"``, ``"absolute"``, ``"huber"``.
        targets: Shape: ``[n, outputs]``.

    Returns:
        Shape: ``[outputs]``. Unit: that of the loss function.
    """
    if kind == "binary":
        return np.array([_entropy(np.array([p, 1.0 - p])) for p in np.clip(targets.mean(axis=0), 0.0, 1.0)])
    if kind == "squared":
        return np.asarray(targets.var(axis=0))
    typical = np.broadcast_to([median(column) for column in targets.T], targets.shape)
    return np.asarray(entries(kind, typical, targets).mean(axis=0))


def losses(kind: Kind, predictions: Floats, targets: Floats) -> Floats:
    """Return the loss of each sample.

    Args:
        kind: As above. Of ``"classes"`` the one column of predictions is the logarithm of the target's probability, of
            ``"margin"`` the loss with a minus; of ``"soft"`` predictions are logarithms of probabilities, of
            ``"binary"`` probabilities.
        predictions: Shape: ``[n, outputs]``.
        targets: Shape: ``[n, outputs]``.

    Returns:
        Shape: ``[n]``. Unit: that of the loss function.
    """
    if kind in PICKED:
        return -predictions[:, 0]
    if kind == "soft":
        return np.asarray(-(targets * predictions).sum(axis=1))
    return np.asarray(entries(kind, predictions, targets).mean(axis=1))


def mean_loss(kind: Kind, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
    """Return the mean loss.

    Args:
        kind: As above.
        predictions: As for :func:`losses`.
        targets: The same.
        weights: As for :func:`constant_loss`.
    """
    binary = kind == "binary" and weights is not None
    every = entries(kind, predictions, targets) if binary else losses(kind, predictions, targets)[:, None]
    return float(np.average(every, weights=weights))


def entries(kind: Kind, predictions: Floats, targets: Floats) -> Floats:
    """Return the loss of each sample and column.

    Args:
        kind: As for :func:`constant_losses`.
        predictions: As for :func:`losses`.
        targets: The same.

    Returns:
        Shape: ``[n, outputs]``. Unit: that of the loss function.
    """
    if kind == "binary":
        sure = np.clip(predictions, 1e-12, 1.0 - 1e-12)
        return np.asarray(-(targets * np.log(sure) + (1.0 - targets) * np.log1p(-sure)))
    distance = np.abs(predictions - targets)
    if kind == "squared":
        return np.asarray(distance**2)
    return np.asarray(distance if kind == "absolute" else np.where(distance < 1.0, 0.5 * distance**2, distance - 0.5))


def column_losses(kind: Kind, predictions: Floats, targets: Floats) -> Floats:
    """Return the mean loss of each column; of classes, and of many columns, that of all.

    Args:
        kind: As above, but for ``"margin"`` and ``"soft"``, whose least loss is not 0.
        predictions: As for :func:`losses`.
        targets: The same.
    """
    apart = kind not in PICKED and targets.shape[1] <= MOST_COLUMNS
    every = entries(kind, predictions, targets) if apart else losses(kind, predictions, targets)[:, None]
    return np.asarray(every.mean(axis=0))


def column_levels(kind: Kind, targets: Floats) -> Floats:
    """Return the least of what :func:`column_losses` returns for one prediction; NaN where that is 0."""
    apart = kind not in PICKED and targets.shape[1] <= MOST_COLUMNS
    levels = constant_losses(kind, targets) if apart else np.array([constant_loss(kind, targets)])
    return np.where(levels > 0, levels, np.nan)


def column_fits(kind: Kind, fit: Floats, targets: Floats) -> dict[str, Floats]:
    """Return what a fit leaves of each column's loss against its best constant, and of the variance of its square.

    Args:
        kind: As for :func:`column_losses`.
        fit: Of :func:`with_squares` of the targets.
        targets: As for :func:`attained`.
    """
    k, every = targets.shape[1], with_squares(targets)
    left = (every - fit)[:, k:].var(axis=0) / np.maximum(every[:, k:].var(axis=0), 1e-300)
    if kind in PICKED or k > MOST_COLUMNS:
        shares = np.argmax(targets, axis=1)[:, None].astype(np.float64) if kind == "classes" else targets
        return {"attained": np.array([attained(kind, fit[:, :k], targets)]) / column_levels(kind, shares)}
    return {"attained": attained_losses(kind, fit[:, :k], targets) / column_levels(kind, targets), "square": left}


def with_squares(targets: Floats) -> Floats:
    """Return targets, and beside them the squares of their distances from the mean.

    What makes a sign random, as mirrored pictures beside targets that are not, leaves these squares as they were.

    Args:
        targets: Shape: ``[n, outputs]``.

    Returns:
        Shape: ``[n, 2 * outputs]``.
    """
    return np.hstack([targets, np.square(targets - targets.mean(axis=0))])


def attained(kind: Kind, fit: Floats, targets: Floats) -> float:
    """Return the mean loss of a fit to targets, or to a column for each class; NaN where that is not known.

    Not known: answers that are no scores, and classes without a column.

    Args:
        kind: As above.
        fit: What it says. Shape: ``[n, outputs]``, of classes ``[n, classes]``.
        targets: Of classes one column for each, 0 or 1. Shape: that of ``fit``.
    """
    if kind in {"margin", "soft"}:
        return float("nan")
    if kind == "classes":
        fit = np.clip(fit, LEAST_SHARE, 1.0 - LEAST_SHARE)
        picked = (fit * targets).sum(axis=1)  # 0 of a class that has no column
        return float(-np.log(picked / fit.sum(axis=1)).mean()) if picked.all() else float("nan")
    return float(attained_losses(kind, fit, targets).mean())


def attained_losses(kind: Kind, fit: Floats, targets: Floats) -> Floats:
    """Return the mean loss of a fit to targets by column: :func:`attained` is their mean.

    Args:
        kind: As for :func:`constant_losses`.
        fit: As for :func:`attained`.
        targets: The same.
    """
    # Shares, none of which is certain.
    fit = np.clip(fit, LEAST_SHARE, 1.0 - LEAST_SHARE) if kind == "binary" else fit
    return np.asarray(entries(kind, fit, targets).mean(axis=0))


def sense(kind: Kind, predictions: Floats, targets: Floats, known: Floats, weights: Floats | None = None) -> float:
    """Return how surely predictions go with their targets, in standard deviations of chance; NaN where nobody can tell.

    Sample by sample, so that what the targets scatter by is no noise of the comparison as it is of the loss.

    Args:
        kind: As above. Classes by what each is likelier than its share, others by the correlation.
        predictions: Shape: ``[n, outputs]``.
        targets: Shape: ``[n, outputs]``.
        known: All targets read so far. Shape: ``[m, outputs]``.
        weights: What each of these counts in the loss. Shape: that of ``known``.
    """
    n = len(targets)
    if n < 4 or kind in {"margin", "soft"}:
        return float("nan")
    if kind == "classes":
        classes, place = np.unique(known[:, 0], return_inverse=True)
        counts = np.bincount(place.reshape(-1), None if weights is None else weights[:, 0])
        gain = predictions[:, 0] - np.log(counts / counts.sum())[np.searchsorted(classes, targets[:, 0])]
        spread = float(gain.std())
        return float(gain.mean() / spread * n**0.5) if spread > 1e-6 else 0.0
    p, y = predictions - predictions.mean(axis=0), targets - targets.mean(axis=0)
    size = np.sqrt(np.square(p).mean(axis=0) * np.square(y).mean(axis=0))
    some = size > 1e-12
    return float(((p * y).mean(axis=0)[some] / size[some]).mean() * n**0.5) if some.any() else 0.0


def _entropy(shares: Floats) -> float:
    positive = shares[shares > 0]
    return float(-(positive * np.log(positive)).sum())


def _margin(shares: Floats) -> float:
    """Return the least margin loss of one score for each class, the most frequent first.

    The best scores are whole numbers that fall by 0 or 1 from a class to the next. Of many classes they may fall at
    ``MOST_FALLS`` places only, so that what is returned may lie a little above the least.
    """
    count = len(shares)
    places = np.unique(np.geomspace(1.0, max(count - 1.0, 1.0), MOST_FALLS).round()) if count > 1 else np.zeros(0)
    before = np.arange(count)[None, :] < places[:, None]
    falls = np.array(list(itertools.product((0.0, 1.0), repeat=len(places))))
    scores = falls @ before
    return min(float(shares @ np.maximum(1.0 - s[:, None] + s[None, :], 0.0).sum(axis=1)) for s in scores) - 1.0
