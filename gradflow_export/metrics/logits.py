"""What logits and targets say about confidence and alignment."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

LOGIT_METRICS = (
    "logits.max",
    "logits.min",
    "logits.mean",
    "logits.std",
    "logits.margin",
    "logits.log_z",
    "confidence.max",
    "confidence.entropy",
)
TARGET_METRICS = ("confidence.target", "alignment.accuracy", "alignment.margin")
LOGIT_ERRORS = (
    "logits.mean_error",
    "logits.std_error",
    "logits.margin_error",
    "logits.log_z_error",
    "confidence.max_error",
    "confidence.entropy_error",
)
TARGET_ERRORS = tuple(f"{name}_error" for name in TARGET_METRICS)
ENTRIES, LEAST = 2**20, 32
"""Entries that are looked at, and samples that are whatever the number of classes."""


def fits(logits: Tensor, targets: Tensor) -> bool:
    """Return whether targets are class numbers, one per sample, or probabilities with the shape of the logits."""
    classes = {logits.shape[place] for place in (1, -1) if -logits.dim() <= place < logits.dim()}
    numbers = not targets.is_floating_point() and targets.numel() in {logits.numel() // max(n, 1) for n in classes}
    return numbers or targets.shape == logits.shape


def as_samples(logits: Tensor, targets: Tensor | None, class_dim: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Bring logits and targets to one row per sample, evenly spaced when there are more than ``ENTRIES`` entries.

    At least ``LEAST`` rows are taken, where there are so many.

    Args:
        logits: ``[*samples, classes]`` or, as cross-entropy takes them, ``[batch, classes, *positions]``.
        targets: Class numbers, one per sample, or class probabilities of the shape of ``logits``; or ``None``.
        class_dim: 1 or -1 where it is known; otherwise found from the shapes.

    Returns:
        Logits ``[samples, classes]`` in float32 or float64, and class numbers ``[samples]`` or ``None`` when the
        targets do not fit.
    """
    logits = logits.detach()
    if class_dim is None:
        last = targets is None or targets.shape in (logits.shape[:-1], logits.shape)
        class_dim = -1 if last else 1
    flat = logits.movedim(class_dim, -1)
    flat = flat.reshape(-1, flat.shape[-1])
    numbers: Tensor | None = None
    if targets is not None:
        targets = targets.detach()
        if targets.is_floating_point() and targets.shape == logits.shape:
            numbers = targets.movedim(class_dim, -1).reshape(flat.shape).argmax(dim=1)
        elif not targets.is_floating_point() and targets.numel() == flat.shape[0]:
            numbers = targets.reshape(-1)
    stride = max(min(-(-flat.numel() // ENTRIES), len(flat) // LEAST), 1)
    flat = flat[::stride]
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return flat, None if numbers is None else numbers[::stride]


def logit_statistics(logits: Tensor) -> Tensor:
    """Return the eight statistics named in ``LOGIT_METRICS``.

    Args:
        logits: Shape: ``[samples, classes]``, at least two classes.

    Returns:
        Shape: ``[8]``. Units: logit (first five), nats, share, share of ln(classes).

    Source: definitions; ln Z as Chowdhery et al. 2022, arXiv:2204.02311; entropy as Shannon 1948, divided by its
        greatest value.
    """
    low, high = torch.aminmax(logits)
    means = [column.mean() for column in _by_sample(logits)]
    return torch.stack([high, low, logits.mean(), logits.std(correction=0), *means])


def _by_sample(logits: Tensor) -> list[Tensor]:
    """Return margin, ln Z, confidence and entropy of each sample. Shape of each: ``[samples]``."""
    # Each function of torch that is called for the first time brings in a quarter of a megabyte of its code: these are
    # as few as may be, and such that training or target_sums() calls too.
    top = logits.amax(dim=1)
    second = _but(logits, logits.argmax(dim=1)).amax(dim=1)
    log_p, p = logits.log_softmax(dim=1), logits.softmax(dim=1)
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=1)
    return [top - second, top - log_p.amax(dim=1), p.amax(dim=1), entropy / math.log(logits.shape[1])]


def logit_variances(logits: Tensor, samples: float) -> Tensor:
    """Return the squares of the standard errors named in ``LOGIT_ERRORS``, of rows that speak for more.

    Args:
        logits: The rows that were taken. Shape: ``[n, classes]``.
        samples: Of how many.

    Returns:
        Shape: ``[6]``.

    Source: Cochran 1977, Sampling Techniques, sections 2.4 and 6.4, with the correction for a finite population; the
        rows are taken as clusters of their entries.
    """
    spread = (logits - logits.mean()).square().mean(dim=1)
    columns = torch.stack([logits.mean(dim=1), spread, *_by_sample(logits)])
    found = _of_mean(columns, samples)
    # The standard deviation is the root of the mean of the second.
    factor = torch.ones_like(found)
    factor[1] = 0.25 / spread.mean().clamp_min(torch.finfo(spread.dtype).tiny)
    return found * factor


def target_variances(logits: Tensor, targets: Tensor, samples: float) -> Tensor:
    """Return the squares of the standard errors named in ``TARGET_ERRORS``, of rows that speak for more.

    Args:
        logits: The rows that were taken. Shape: ``[n, classes]``.
        targets: Class numbers; samples with others are left out. Shape: ``[n]``.
        samples: Of how many.

    Returns:
        Shape: ``[3]``.
    """
    kept, columns = _against(logits, targets)
    counts = kept > 0
    part = columns[:, counts]
    n, whole = part.shape[1], samples * part.shape[1] / max(len(logits), 1)
    found = _of_mean(part, whole)
    # Of samples that are all right, or all wrong, others may not be.
    found[1] += max(1.0 - n / max(whole, 1.0), 0.0) / max(n, 1) ** 2
    return found


def _of_mean(columns: Tensor, whole: float) -> Tensor:
    """Return the variance of the mean of each row of values that are some of ``whole``. Shape: ``[rows]``."""
    n = columns.shape[1]
    return columns.var(dim=1, correction=1) * (max(1.0 - n / max(whole, 1.0), 0.0) / max(n, 1))


def join_variances(variances: Tensor, samples: Tensor) -> Tensor:
    """Return the variance of a mean over several batches, each of its own.

    Args:
        variances: Those of the means of each batch. Shape: ``[batches, k]``.
        samples: Samples of each. Shape: ``[batches]``.

    Returns:
        Shape: ``[k]``.
    """
    share = samples / samples.sum()
    return (variances * share[:, None].square()).sum(dim=0)


def join_logits(statistics: Tensor, samples: Tensor, entries: Tensor) -> Tensor:
    """Return what :func:`logit_statistics` would be of several batches together.

    Args:
        statistics: Those of each batch. Shape: ``[batches, 8]``.
        samples: Samples of each. Shape: ``[batches]``.
        entries: Entries of each. Shape: ``[batches]``.

    Returns:
        Greatest of the greatest, least of the least, the pooled mean and standard deviation over all entries, and means
        over all samples. Shape: ``[8]``.
    """
    mean, spread = statistics[:, 2], statistics[:, 3]
    share = entries / entries.sum()
    middle = (share * mean).sum()
    variance = (share * (spread.square() + (mean - middle).square())).sum()
    by_sample = (statistics[:, 4:] * (samples / samples.sum())[:, None]).sum(dim=0)
    whole = torch.stack([statistics[:, 0].amax(), statistics[:, 1].amin(), middle, variance.sqrt()])
    return torch.cat([whole, by_sample])


def target_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Return sums over samples from which the statistics named in ``TARGET_METRICS`` follow, also of several batches.

    Args:
        logits: Shape: ``[samples, classes]``.
        targets: Class numbers; those outside ``[0, classes)`` (an ignore index) are left out. Shape: ``[samples]``.

    Returns:
        Sums of the probability of the target, of hits, and of ``p_y - max_{k != y} p_k``, and the number of samples.
        Shape: ``[4]``.
    """
    kept, columns = _against(logits, targets)
    return torch.cat([(columns * kept).sum(dim=1), kept.sum()[None]])


def _against(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which samples have a target, and probability, hit and margin of each. Shapes: ``[n]`` and ``[3, n]``."""
    y = targets.clamp(0, logits.shape[1] - 1)
    kept = (targets == y).to(logits.dtype)
    p = logits.softmax(dim=1)
    p_y = -functional.nll_loss(p, y, reduction="none")
    others = _but(p, y).amax(dim=1)
    hit = (logits.argmax(dim=1) == y).to(logits.dtype)
    return kept, torch.stack([p_y, hit, p_y - others])


def target_means(sums: Tensor) -> Tensor:
    """Return mean probability of the target, accuracy and mean margin; NaN when every target is left out.

    Args:
        sums: What :func:`target_sums` returned, or a sum of such. Shape: ``[4]``.

    Returns:
        Shape: ``[3]``.
    """
    return sums[:3] / sums[3]


def _but(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the rows with -inf in one column of each."""
    return torch.where(torch.arange(rows.shape[1], device=rows.device) == columns[:, None], -math.inf, rows)
