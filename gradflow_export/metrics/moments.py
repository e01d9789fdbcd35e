"""What the moments of an Adam-like optimizer say about its next steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]


def second_moment_ratio(gradient: Tensor, second_moment: Tensor, epsilon: float) -> Tensor:
    """Return the root mean square of the gradient relative to the optimizer's running estimate of it.

    About 1 while gradients are like those before; well above 1 the second moment is out of date, the steps are too
    large, and spikes of the loss have been seen to follow one to eight steps later.

    Args:
        gradient: As the optimizer used it. Shape: ``[n]``.
        second_moment: Bias-corrected ``v / (1 - beta2^t)``, after the step. Shape: ``[n]``.
        epsilon: The optimizer's ``eps``.

    Returns:
        ``(mean_i g_i^2 / max(v_i, eps^2))^(1/2)``. Shape: scalar.

    Source: Wortsman et al. 2023, arXiv:2304.13013, equation of RMS_t in section 3.4.
    """
    floor = max(epsilon * epsilon, torch.finfo(second_moment.dtype).tiny)
    return torch.sqrt((gradient.square() / second_moment.clamp_min(floor)).mean())


def epsilon_share(second_moment: Tensor, epsilon: float) -> Tensor:
    """Return the share of entries whose step ``eps`` decides rather than the gradients.

    Args:
        second_moment: Bias-corrected. Shape: ``[n]``.
        epsilon: The optimizer's ``eps``.

    Returns:
        ``#{v_i > 0 and v_i^(1/2) < eps} / #{v_i > 0}``, 0 where no entry ever had a gradient. Shape: scalar.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    touched = second_moment > 0
    small = touched & (second_moment.sqrt() < epsilon)
    return small.sum() / touched.sum().clamp_min(1)


def ratio_error(gradient: Tensor, second_moment: Tensor, epsilon: float, whole: int, most: float) -> Tensor:
    """Return the standard error of :func:`second_moment_ratio` where its entries are some of all.

    Entries that were left out may be unlike those drawn, as the rows of an embedding that a batch looks up: a square
    ``most`` times the second moment in one of as many entries as were drawn is counted in.

    Args:
        gradient: Entries drawn. Shape: ``[n]``.
        second_moment: As there. Shape: ``[n]``.
        epsilon: The optimizer's ``eps``.
        whole: How many entries there are.
        most: Greatest possible ``g_i^2 / v_i``: ``(1 - beta2^t) / (1 - beta2)``.

    Returns:
        ``(mean + d)^(1/2) - mean^(1/2)``, d the standard error of the mean square; 0 where ``n`` is ``whole``. Shape:
        scalar.

    Source: Cochran 1977, Sampling Techniques, section 2.7.
    """
    n = gradient.numel()
    if n >= whole:
        return torch.zeros((), device=gradient.device)
    floor = max(epsilon * epsilon, torch.finfo(second_moment.dtype).tiny)
    ratios = gradient.square() / second_moment.clamp_min(floor)
    off = torch.sqrt(ratios.var() * (1.0 - n / whole) / n) + most / n
    return torch.sqrt(ratios.mean() + off) - torch.sqrt(ratios.mean())


def share_error(second_moment: Tensor, epsilon: float, whole: int) -> Tensor:
    """Return the standard error of :func:`epsilon_share` where its entries are some of all.

    Args:
        second_moment: Entries drawn. Shape: ``[n]``.
        epsilon: The optimizer's ``eps``.
        whole: How many entries there are.

    Returns:
        ``(p (1 - p) / k)^(1/2) + 1 / k`` of ``k`` entries drawn that ever had a gradient; 1 without any, 0 where ``n``
        is ``whole``. Shape: scalar.

    Source: Cochran 1977, Sampling Techniques, section 3.2.
    """
    n = second_moment.numel()
    if n >= whole:
        return torch.zeros((), device=second_moment.device)
    share, touched = epsilon_share(second_moment, epsilon), (second_moment > 0).sum().clamp_min(1)
    off = torch.sqrt(share * (1.0 - share) / touched * (1.0 - n / whole)) + 1.0 / touched
    return off.clamp_max(1.0)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # gradients may be Inf or NaN, and so are the results
def moments_of_many(
    gradients: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    corrections: Sequence[Tensor],
    epsilons: Floats,
    wholes: Floats,
    decays: Floats,
) -> Floats:
    """Return what the functions above do, of many parameters on the host at once.

    Args:
        gradients: Shape of each: ``[n]``, not empty.
        second_moments: Not bias-corrected yet, of the same shapes.
        corrections: ``1 - beta2^t`` of each parameter, scalars.
        epsilons: Shape: ``[parameters]``.
        wholes: How many entries there are of each. Shape: ``[parameters]``.
        decays: ``beta2`` of each. Shape: ``[parameters]``.

    Returns:
        Ratios and their errors, shares and their errors. Shape: ``[4, parameters]``.
    """
    sizes = np.array([len(entries) for entries in gradients])
    used, second = (torch.cat(list(entries)).double().numpy() for entries in (gradients, second_moments))
    begins = np.cumsum(sizes) - sizes
    floors = np.maximum(epsilons * epsilons, np.finfo(np.float32).tiny)
    warmed = torch.stack(list(corrections)).numpy()
    corrected = second / np.repeat(warmed, sizes)
    ratios = used * used / np.maximum(corrected, np.repeat(floors, sizes))
    touched = corrected > 0
    small = touched & (np.sqrt(corrected) < np.repeat(epsilons, sizes))
    counts = np.maximum(np.add.reduceat(touched.astype(np.int64), begins), 1)
    shares: Floats = np.add.reduceat(small.astype(np.int64), begins) / counts
    means = np.add.reduceat(ratios, begins) / sizes
    left = np.maximum(1.0 - sizes / wholes, 0.0)
    squares = np.add.reduceat(np.square(ratios - np.repeat(means, sizes)), begins) / np.maximum(sizes - 1, 1)
    some = left > 0
    off = np.sqrt(squares * left / sizes) + warmed / (1.0 - decays) / sizes
    doubt = np.minimum(np.sqrt(shares * (1.0 - shares) / counts * left) + 1.0 / counts, 1.0)
    roots = np.sqrt(means)
    errors = np.where(some, np.sqrt(means + off) - roots, 0.0)
    return np.stack([roots, errors, shares, np.where(some, doubt, 0.0)])
