"""How noisy the gradient is, from norms at two batch sizes."""

from __future__ import annotations


def noise_moments(small: float, big: float, ratio: int) -> tuple[float, float]:
    """Return unbiased estimates of the squared norm of the true gradient and of the trace of its covariance.

    Args:
        small: Squared norm of the mean gradient over one unit of data, such as a micro-batch.
        big: Squared norm of the mean gradient over ``ratio`` units.
        ratio: At least 2.

    Returns:
        ``|G|^2 = (ratio big - small) / (ratio - 1)`` and ``tr S = (small - big) / (1 - 1 / ratio)`` per unit of data.
        Single estimates scatter and may be negative; average each over steps before dividing.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    >>> noise_moments(small=5.0, big=2.0, ratio=4)
    (1.0, 4.0)
    """
    return (ratio * big - small) / (ratio - 1), (small - big) / (1 - 1 / ratio)


class NoiseScale:
    """Averages both estimates over steps and divides: the gradient noise scale in units of data.

    Attributes:
        memory: How much of the average is kept at each new estimate.
        least: Estimates before the first value.
    """

    memory: float = 0.95
    least: int = 10

    def __init__(self) -> None:
        self._signal = self._noise = self._weight = 0.0
        self._count = 0

    def add(self, small: float, big: float, ratio: int) -> float | None:
        """Take in one step; return the noise scale, ``None`` while it is not known.

        It is not known before ``least`` steps, nor while the average squared gradient is not above 0.
        """
        signal, noise = noise_moments(small, big, ratio)
        keep = self.memory
        self._signal = keep * self._signal + (1 - keep) * signal
        self._noise = keep * self._noise + (1 - keep) * noise
        self._count += 1
        if self._count < self.least or self._signal <= 0:
            return None
        return max(self._noise, 0.0) / self._signal
