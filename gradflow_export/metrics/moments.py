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


def moments_of_many(
    gradients: Sequence[Tensor], second_moments: Sequence[Tensor], corrections: Sequence[Tensor], epsilons: Floats
) -> tuple[Floats, Floats]:
    """Return :func:`second_moment_ratio` and :func:`epsilon_share` of many parameters on the host at once.

    Args:
        gradients: Shape of each: ``[n]``, not empty.
        second_moments: Not bias-corrected yet, of the same shapes.
        corrections: ``1 - beta2^t`` of each parameter, scalars.
        epsilons: Shape: ``[parameters]``.

    Returns:
        Shape of both: ``[parameters]``.
    """
    sizes = np.array([len(entries) for entries in gradients])
    used, second = (torch.cat(list(entries)).double().numpy() for entries in (gradients, second_moments))
    begins = np.cumsum(sizes) - sizes
    floors = np.maximum(epsilons * epsilons, np.finfo(np.float32).tiny)
    corrected = second / np.repeat(torch.stack(list(corrections)).numpy(), sizes)
    ratios = used * used / np.maximum(corrected, np.repeat(floors, sizes))
    touched = corrected > 0
    small = touched & (np.sqrt(corrected) < np.repeat(epsilons, sizes))
    counts = np.maximum(np.add.reduceat(touched.astype(np.int64), begins), 1)
    shares: Floats = np.add.reduceat(small.astype(np.int64), begins) / counts
    return np.sqrt(np.add.reduceat(ratios, begins) / sizes), shares
