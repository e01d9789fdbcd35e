"""NoiseSchedule: how much data and how much noise latents hold at each noise level of a diffusion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.validation import check_number

_AT_ONCE = 2**20
_FACTOR, _ODD = 6364136223846793005, 1442695040888963407
_WHOLE: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
)

UNKNOWN_DATA = (0.01, 100.0)
"""Root mean squares that data may have where none was declared."""


@dataclass(frozen=True)
class NoiseSchedule:
    """What latents are made of at each noise level: ``x = signal * data + noise * standard normal noise``.

    It is made by one of the class methods. A noise level is named by its *timestep*: an index into ``betas`` or
    ``alphas_cumprod``, or the sigma itself.

    Attributes:
        kind: ``"preserving"`` (``signal^2 + noise^2 = 1``), ``"exploding"`` (``signal = 1``, ``noise = sigma``) or
            ``"flow"`` (``signal = 1 - sigma``, ``noise = sigma``).
        sampling: Timesteps in the order in which a sampler goes through them, the first before its first step. After
            the last one there is no noise left.
        data_rms: Root mean square of the entries of clean data, ``None`` where it is not known.
        table: Of the kind ``"preserving"`` the share of the data's variance at each timestep.

    Source: Ho et al. 2020, arXiv:2006.11239, equation 4; Karras et al. 2022, arXiv:2206.00364, table 1; Lipman et al.
    2023, arXiv:2210.02747.
    """

    kind: str
    sampling: tuple[float, ...]
    data_rms: float | None = None
    table: tuple[float, ...] = ()

    @classmethod
    def from_betas(cls, betas: Any, *, timesteps: Any = None, data_rms: float | None = None) -> NoiseSchedule:
        """Return the schedule of a diffusion that keeps the variance, as of DDPM and DDIM.

        Args:
            betas: Variance that each timestep adds, in the order of training. Shape: ``[T]``.
            timesteps: Those that the sampler goes through, in its order; by default all, from the last one on.
            data_rms: Root mean square of the entries of clean data, if it is known.

        Raises:
            ArgumentError: A number is out of range.
            ArgumentTypeError: An argument is no sequence of numbers.
        """
        rates = _numbers("betas", betas, 0.0, 1.0)
        logs = [math.log1p(-min(rate, 1 - 1e-12)) for rate in rates]
        table = tuple(math.exp(math.fsum(logs[: place + 1])) for place in range(len(logs)))
        return cls._preserving(table, timesteps, data_rms)

    @classmethod
    def from_alphas_cumprod(cls, alphas: Any, *, timesteps: Any = None, data_rms: float | None = None) -> NoiseSchedule:
        """Return the same, from the products of ``1 - beta``.

        Args:
            alphas: Share of the data's variance at each timestep, in the order of training. Shape: ``[T]``.
            timesteps: As for :meth:`from_betas`.
            data_rms: As there.

        Raises:
            ArgumentError: A number is out of range.
            ArgumentTypeError: An argument is no sequence of numbers.
        """
        return cls._preserving(_numbers("alphas_cumprod", alphas, 0.0, 1.0), timesteps, data_rms)

    @classmethod
    def from_sigmas(cls, sigmas: Any, *, flow: bool = False, data_rms: float | None = None) -> NoiseSchedule:
        """Return the schedule of a diffusion that adds noise to data, as of Karras et al., or of a flow.

        Args:
            sigmas: In the order of sampling, the greatest first; a 0 at the end may be left out. Shape: ``[steps]``.
            flow: Whether latents are ``(1 - sigma) * data + sigma * noise``, as in flow matching, instead of ``data +
                sigma * noise``.
            data_rms: Root mean square of the entries of clean data, if it is known.

        Raises:
            ArgumentError: A number is out of range.
            ArgumentTypeError: An argument is no sequence of numbers.
        """
        read = _numbers("sigmas", sigmas, 0.0, 1.0 if flow else math.inf)
        return cls("flow" if flow else "exploding", read, _data_rms(data_rms))

    @classmethod
    def _preserving(cls, table: tuple[float, ...], timesteps: Any, data_rms: float | None) -> NoiseSchedule:
        last = len(table) - 1
        order = range(last, -1, -1) if timesteps is None else _numbers("timesteps", timesteps, 0.0, float(last))
        return cls("preserving", tuple(map(float, order)), _data_rms(data_rms), table)

    def level(self, timestep: float | None) -> tuple[float, float]:
        """Return signal and noise at a timestep; of ``None`` those of clean data.

        Args:
            timestep: Between two entries of a table the value between them is taken.
        """
        if timestep is None:
            return 1.0, 0.0
        if self.kind == "exploding":
            return 1.0, float(timestep)
        if self.kind == "flow":
            return 1.0 - float(timestep), float(timestep)
        place = min(max(float(timestep), 0.0), len(self.table) - 1.0)
        below = int(place)
        above = min(below + 1, len(self.table) - 1)
        share = self.table[below] + (place - below) * (self.table[above] - self.table[below])
        return math.sqrt(share), math.sqrt(1 - share)

    def after(self, step: int) -> float | None:
        """Return the timestep that latents are at after a step of the sampler, ``None`` where they are clean."""
        return self.sampling[step + 1] if 0 <= step + 1 < len(self.sampling) else None

    def expected_rms(self, timestep: float | None) -> tuple[float, float]:
        """Return the least and the greatest root mean square that latents of very many entries should have."""
        signal, noise = self.level(timestep)
        data = UNKNOWN_DATA if self.data_rms is None else (self.data_rms, self.data_rms)
        least, most = (math.hypot(signal * each, noise) for each in data)
        return least, most

    def share(self, timestep: float) -> float:
        """Return where a timestep lies between no noise, 0, and the most there is, 1; of sigmas by their logarithm."""
        if self.kind == "preserving":
            return float(timestep) / max(len(self.table) - 1, 1)
        if self.kind == "flow":
            return float(timestep)
        positive = [sigma for sigma in self.sampling if sigma > 0] or [1.0]
        low, high = math.log(min(positive)), math.log(max(positive))
        return (math.log(max(float(timestep), min(positive))) - low) / max(high - low, 1e-12)


def _numbers(name: str, values: Any, least: float, most: float) -> tuple[float, ...]:
    """Return numbers of a range as floats."""
    try:
        listed = values.detach().double().flatten().tolist() if isinstance(values, Tensor) else list(_each(values))
        read = tuple(map(float, listed))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} must be a sequence of numbers, got {values!r:.80}; such as a tensor."
        ) from error
    if not read:
        raise ArgumentError(f"{name} must hold a number for each noise level, got none.")
    for number in read:
        if not least <= number <= most or math.isinf(number):
            raise ArgumentError(
                f"{name} must lie from {least:g} to {most:g}, got {number:g}; pass those of the sampler."
            )
    return read


def _each(values: Iterable[Any]) -> Iterable[Any]:
    if isinstance(values, (str, bytes)):
        raise TypeError
    return values


def _data_rms(value: float | None) -> float | None:
    if value is not None:
        check_number("data_rms", value, example=1.0)
        if value <= 0:
            raise ArgumentError(f"data_rms must be above 0, got {value:g}; leave it out where it is not known.")
    return value


def as_timestep(timestep: Any) -> float | None:
    """Return a timestep, of a tensor its greatest entry, as a number.

    Raises:
        ArgumentTypeError: It is no number.
    """
    if timestep is None:
        return None
    if isinstance(timestep, Tensor) and timestep.numel() and not timestep.is_complex():
        return float(timestep.detach().double().max())
    if isinstance(timestep, bool) or not isinstance(timestep, (int, float)):
        raise ArgumentTypeError(
            f"timestep must be a number, got {timestep!r:.80}; pass the noise level of the latents."
        )
    return float(timestep)


def fingerprint(tensor: Tensor) -> int | None:
    """Return a number that is the same for the same entries and hardly for others; ``None`` where none can be read."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    entries = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    bits = (torch.view_as_real(entries).view(-1) if entries.is_complex() else entries).view(
        _WHOLE[entries.dtype.itemsize]
    )
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(torch.split(bits, _AT_ONCE)):
        places = torch.arange(part.numel(), device=bits.device) + number * _AT_ONCE
        total += (part.long() * (places * _FACTOR + _ODD)).sum()  # whole numbers wrap round, alike everywhere
    return int(total)
