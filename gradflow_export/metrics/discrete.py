"""How much of the update that an optimizer meant arrives in weights whose number format is coarse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCORES = ("lost_share", "intended_share", "changed_share", "error", "cosine", "effectiveness")


def update_scores(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Compare the updates that happened with those that were meant, one pair of tensors per parameter.

    Args:
        actual: Weights after minus weights before, in float64. Shape of each: any, real.
        expected: The same update without rounding. Shape of each: that of its partner.

    Returns:
        Six rows in the order of ``SCORES``, float64. With d the actual and e the expected update:

        - lost share ``#{e != 0, d == 0} / #{e != 0}``,
        - intended share ``#{e != 0} / numel``,
        - changed share ``#{d != 0} / numel``,
        - error ``||d - e||^2 / ||e||^2``: the quantisation noise over the signal,
        - cosine ``<d, e> / (||d|| ||e||)``,
        - effectiveness ``max(0, cosine) min(r, 1 / r)`` with ``r = ||d|| / ||e||``: 1 exact, 0 lost.

        NaN where nothing was meant, and a cosine also where nothing happened. Shape: ``[6, len(actual)]``.

    Source: rounding of updates as in Zamirai et al. 2020, arXiv:2010.06192; quantisation noise as in Bennett 1948.
    """
    sums = torch.stack([_sums(d, e) for d, e in zip(actual, expected, strict=True)], dim=1)
    intended, changed, both, d_square, e_square, product, error = sums
    entries = torch.tensor([float(max(e.numel(), 1)) for e in expected], dtype=sums.dtype, device=sums.device)
    error = torch.where(e_square > 0, error, torch.full_like(error, torch.nan))
    cosine = product / (d_square.sqrt() * e_square.sqrt())
    ratio = (d_square / e_square).sqrt()
    # A lost update has no direction, yet its score is known: nothing of it arrived.
    score = torch.where(d_square == 0, ratio, cosine.clamp(0, 1) * torch.minimum(ratio, 1 / ratio))
    return torch.stack(
        [
            (intended - both) / intended,
            intended / entries,
            changed / entries,
            error / e_square,
            cosine.clamp(-1, 1),
            score,
        ]
    )


def update_errors(actual: Sequence[Tensor], expected: Sequence[Tensor], looked: Sequence[float]) -> Tensor:
    """Return the standard errors of the lost share and of the effectiveness, where only some rows were looked at.

    Args:
        actual: As for :func:`update_scores`, rows first. Shape of each: ``[rows, ...]``.
        expected: Shape of each: that of its partner.
        looked: Share of the rows that these are.

    Returns:
        Absolute, float64; 0 where all rows were looked at. Shape: ``[2, len(actual)]``.

    Source: Cochran 1977, Sampling Techniques, section 6.3: ratios of sums over rows.
    """
    out = []
    for change, meant, share in zip(actual, expected, looked, strict=True):
        # Of a single row nothing shows how far others are from it, but how far its entries are from each other.
        d, e = (each.flatten(1) if len(each) > 1 else each.reshape(-1, 1) for each in (change, meant))
        lost = ((e != 0) & (d == 0)).sum(dim=1), (e != 0).sum(dim=1)
        squares = torch.stack([d.square().sum(dim=1), e.square().sum(dim=1)])
        arrived = (d * e).sum(dim=1), squares[squares.sum(dim=1).argmax()]
        factor = (1.0 - share) * len(d) / max(len(d) - 1, 1)
        for above, below in (lost, arrived):
            off = above - below * (above.sum() / below.sum())
            out.append((off.double().square().sum() * factor).sqrt() / below.sum())
    return torch.stack(out).reshape(-1, 2).T


def _sums(actual: Tensor, expected: Tensor) -> Tensor:
    d, e = actual.reshape(-1), expected.reshape(-1)
    meant, moved = e != 0, d != 0
    counts = torch.stack([torch.count_nonzero(flags) for flags in (meant, moved, meant & moved)])
    off = d - e
    return torch.cat(
        [counts.to(d.dtype), torch.stack([torch.dot(a, b) for a, b in ((d, d), (e, e), (d, e), (off, off))])]
    )


def signal_to_noise(error: float) -> float:
    """Return ``-10 log10(error)`` in dB: what :func:`update_scores` calls error, as an audio engineer writes it.

    Args:
        error: Quantisation noise over signal, at least 0.

    Returns:
        Infinite for an exact update, 0 for a lost one.

    >>> signal_to_noise(0.01), signal_to_noise(0.0)
    (20.0, inf)
    """
    return float(-10.0 * torch.tensor(error, dtype=torch.float64).log10())
