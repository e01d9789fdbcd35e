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
ENTRIES = 2**20


def as_samples(logits: Tensor, targets: Tensor | None, class_dim: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Bring logits and targets to one row per sample, evenly spaced when there are more than ``ENTRIES`` entries.

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
    stride = max(-(-flat.numel() // ENTRIES), 1)
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
    # Each function of torch that is called for the first time brings in a quarter of a megabyte of its code: these are
    # as few as may be, and such that training or target_sums() calls too.
    top = logits.amax(dim=1)
    second = _but(logits, logits.argmax(dim=1)).amax(dim=1)
    log_p, p = logits.log_softmax(dim=1), logits.softmax(dim=1)
    entropy = -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=1)
    low, high = torch.aminmax(logits)
    return torch.stack(
        [
            high,
            low,
            logits.mean(),
            logits.std(correction=0),
            (top - second).mean(),
            (top - log_p.amax(dim=1)).mean(),
            p.amax(dim=1).mean(),
            entropy.mean() / math.log(logits.shape[1]),
        ]
    )


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
    y = targets.clamp(0, logits.shape[1] - 1)
    kept = (targets == y).to(logits.dtype)
    p = logits.softmax(dim=1)
    p_y = -functional.nll_loss(p, y, reduction="none")
    others = _but(p, y).amax(dim=1)
    hit = (logits.argmax(dim=1) == y).to(logits.dtype)
    return torch.stack([(p_y * kept).sum(), (hit * kept).sum(), ((p_y - others) * kept).sum(), kept.sum()])


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
