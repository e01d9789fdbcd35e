"""What was seen of one micro-batch, and of all of a step together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks.readings import Pending
from gradflow_export.metrics.logits import (
    LOGIT_ERRORS,
    LOGIT_METRICS,
    TARGET_ERRORS,
    TARGET_METRICS,
    join_logits,
    join_variances,
    logit_statistics,
    logit_variances,
    target_means,
    target_sums,
    target_variances,
)
from gradflow_export.metrics.upstream import UPSTREAM_METRICS, join_upstream
from gradflow_export.records.step_record import RUN_SITE

FOLD_AT = 256
"""Losses without a backward pass that are kept one by one."""


@dataclass(frozen=True)
class Part:
    """Statistics of one micro-batch, or of several together.

    Attributes:
        metrics: What they are of: ``LOGIT_METRICS``, ``TARGET_METRICS``, ``UPSTREAM_METRICS`` or their errors.
        values: As the function that reads them returns them.
        samples: How many samples they are of.
        entries: How many entries.
    """

    metrics: tuple[str, ...]
    values: Tensor
    samples: float
    entries: float


def parts_of(rows: Tensor, targets: Tensor | None, entries: int) -> Iterator[Part]:
    """Yield the statistics of predictions; of very many samples some are looked at, and speak for the others.

    Args:
        rows: Logits of the samples that are looked at. Shape: ``[n, classes]``.
        targets: Their class numbers, where they are known. Shape: ``[n]``.
        entries: Logits of all samples.
    """
    samples = entries / rows.shape[1]
    some = len(rows) < samples
    yield Part(LOGIT_METRICS, logit_statistics(rows), samples, entries)
    if some:
        yield Part(LOGIT_ERRORS, logit_variances(rows, samples), samples, samples)
    if targets is None:
        return
    yield Part(TARGET_METRICS, target_sums(rows, targets) * (samples / len(rows)), samples, samples)
    if some:
        yield Part(TARGET_ERRORS, target_variances(rows, targets, samples), samples, samples)


class Pass:
    """One backward pass, and what was seen since the one before it.

    Attributes:
        losses: Losses that the user reported, and of how many each is the mean.
        roots: What ``backward`` was called on: value, what may be a gradient scaler's scale, and weight. Where that is
            no scalar, or nobody saw it, what the criterion gave.
        rooted: Whether it was a scalar.
        parts: Statistics of logits, targets and the loss's gradient.
        touched: Which parameters' gradients it changed, ``None`` where that was not looked at. Shape: ``[parameters]``.
        consumed: Those of its users. Shape: ``[parameters]``.
        users: Numbers of the optimizers that stepped with its gradients.
    """

    __slots__ = ("consumed", "losses", "parts", "rooted", "roots", "touched", "users")

    def __init__(self) -> None:
        self.losses: list[tuple[Tensor, float]] = []
        self.roots: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        self.rooted = False
        self.parts: list[Part] = []
        self.touched: npt.NDArray[np.bool_] | None = None
        self.consumed: npt.NDArray[np.bool_] | None = None
        self.users: set[int] = set()

    def __bool__(self) -> bool:
        """Whether anything was seen."""
        return bool(self.losses or self.roots or self.parts)

    def add_loss(self, loss: Tensor) -> None:
        """Take a loss that the user reports; of one with several entries the mean."""
        self.losses.append((loss if loss.numel() == 1 else loss.mean(), 1.0))
        if len(self.losses) > FOLD_AT:
            self.losses = _fold_losses(self.losses)

    def add_root(self, loss: Tensor) -> None:
        """Take a loss that the criterion gave; of one with several entries the mean."""
        self.roots.append((loss if loss.numel() == 1 else loss.mean(), None, None))
        if len(self.roots) > FOLD_AT:
            self.roots = [(_sum_roots(self.roots), None, None)]

    def add_part(self, part: Part) -> None:
        """Take statistics."""
        self.parts.append(part)
        if len(self.parts) > FOLD_AT:
            self.parts = _fold_parts(self.parts)


def fold(passes: Sequence[Pass]) -> Pass:
    """Return several passes as one, so that any number takes the same memory."""
    out = Pass()
    out.losses = _fold_losses([entry for one in passes for entry in one.losses])
    roots = [root for one in passes for root in one.roots]
    out.roots = [(_sum_roots(roots), None, None)] if roots else []
    out.parts = _fold_parts([part for one in passes for part in one.parts])
    out.users = set.intersection(*(one.users for one in passes))
    masks = [one.touched for one in passes if one.touched is not None]
    if len(masks) == len(passes) and len({len(mask) for mask in masks}) == 1:
        out.touched = np.logical_or.reduce(masks)
    return out


def loss_of(passes: Iterable[Pass], scale: Tensor | None = None) -> Tensor | npt.NDArray[np.float64] | None:
    """Return the mean of the losses that the user reported, else the sum of the roots. Shape: ``[1]``.

    Args:
        passes: What was seen.
        scale: What a gradient scaler multiplied losses by, where that is known.
    """
    every = list(passes)
    losses = list(chain.from_iterable(map(attrgetter("losses"), every)))
    if len(losses) == 1 and losses[0][0].is_cpu:
        return np.array([float(losses[0][0])])
    if losses:
        return _mean(losses)
    roots = list(chain.from_iterable(map(attrgetter("roots"), every)))
    if len(roots) == 1 and roots[0][1] is None and roots[0][2] is None and roots[0][0].is_cpu:
        return np.array([float(roots[0][0])])
    return _sum_roots(roots, scale).reshape(1) if roots else None


def statistics_of(passes: Iterable[Pass]) -> list[Pending]:
    """Return statistics of logits, targets and the loss's gradient over all passes together."""
    parts = [part for one in passes for part in one.parts]
    if not parts:
        return []
    return [
        Pending(metric, (RUN_SITE,), value.reshape(1))
        for part in _fold_parts(parts)
        for metric, value in zip(part.metrics, _means(part), strict=True)
    ]


def _means(part: Part) -> Tensor:
    if part.metrics in (LOGIT_ERRORS, TARGET_ERRORS):
        return part.values.sqrt()
    return target_means(part.values) if part.metrics == TARGET_METRICS else part.values


def _fold_parts(parts: Sequence[Part]) -> list[Part]:
    out = []
    for metrics in (LOGIT_METRICS, LOGIT_ERRORS, TARGET_METRICS, TARGET_ERRORS, UPSTREAM_METRICS):
        alike = [part for part in parts if part.metrics == metrics]
        if len(alike) > 1:
            out.append(_join(alike))
        else:
            out.extend(alike)
    return out


def _join(parts: Sequence[Part]) -> Part:
    first = parts[0]
    with torch.no_grad():
        values = torch.stack([part.values.to(first.values.device, torch.float64) for part in parts])
        samples, entries = [float(part.samples) for part in parts], [float(part.entries) for part in parts]
        if first.metrics == TARGET_METRICS:
            joined = values.sum(dim=0)
        elif first.metrics in (LOGIT_ERRORS, TARGET_ERRORS):
            joined = join_variances(values, _numbers(samples, values))
        else:
            join = join_logits if first.metrics == LOGIT_METRICS else join_upstream
            joined = join(values, _numbers(samples, values), _numbers(entries, values))
    return Part(first.metrics, joined, sum(samples), sum(entries))


def _numbers(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as a tensor, filled in on the device: a copy to it would wait. Shape: ``[len(numbers)]``."""
    if len(set(numbers)) == 1:
        return like.new_full((len(numbers),), numbers[0])
    if like.is_cpu:
        return like.new_tensor(numbers)
    return torch.stack([like.new_full((), number) for number in numbers])


def _fold_losses(losses: Sequence[tuple[Tensor, float]]) -> list[tuple[Tensor, float]]:
    if not losses:
        return []
    return [(torch.as_tensor(_mean(losses)).reshape(()), sum(count for _, count in losses))]


def _mean(losses: Sequence[tuple[Tensor, float]]) -> Tensor | npt.NDArray[np.float64]:
    """Return the mean over all calls, on the host where the losses are there already. Shape: ``[1]``."""
    numbers = [count for _, count in losses]
    if len(set(numbers)) == 1:
        numbers = [1.0] * len(losses)
    if False not in [loss.is_cpu for loss, _ in losses]:
        weighed = [float(loss) * n for (loss, _), n in zip(losses, numbers, strict=True)]
        return np.array([sum(weighed) / sum(numbers)])
    values = torch.stack([loss.reshape(()).to(losses[0][0].device, torch.float64) for loss, _ in losses])
    return ((values * _numbers(numbers, values)).sum() / sum(numbers)).reshape(1)


def _sum_roots(roots: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], known: Tensor | None = None) -> Tensor:
    """Return the sum of the roots in double precision. Shape: scalar."""
    device = roots[0][0].device
    values = [_unscaled(*root, known).to(device) for root in roots]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _unscaled(value: Tensor, scale: Tensor | None, weight: Tensor | None, known: Tensor | None) -> Tensor:
    wide = value.to(torch.float64).reshape(())
    if weight is not None:
        wide = wide * weight.to(wide).reshape(())
    if scale is None:
        return wide
    # Scalers multiply by powers of two, of which the mantissa is 1/2, unless the step says by what.
    scaled = (torch.frexp(scale).mantissa == 0.5) & (scale > 1.0)
    if known is not None:
        scaled = scaled | (scale == known.to(scale, non_blocking=True))
    return torch.where(scaled, wide / scale, wide)
