"""What the entries of any tensor are like: mean, spread, extremes of those that are finite, and how many are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.norms import stored
from gradflow_export.metrics.arrays.one_pass import native_statistics

_HALF = (torch.float16, torch.bfloat16)
_PLAIN = (torch.float32, torch.float64, *_HALF)
_CPU_CHUNK, _DEVICE_CHUNK = 2**16, 2**22
_LEAST_VARIANCE = 1e-3
"""Share of the mean square below which a variance taken from sums has lost its digits."""


class EntryStatistics(NamedTuple):
    """Statistics of the entries of one tensor.

    Attributes:
        finite: Entries that are neither NaN nor Inf; the following five are over these.
        mean: Mean; NaN where no entry is finite, as are ``std``, ``low`` and ``high``.
        std: Standard deviation with ddof=1, 0 for a single entry.
        low: Least.
        high: Greatest.
        norm: L2 norm; 0 where no entry is finite.
        zeros: Entries that are exactly 0.
        nan: NaN entries.
        inf: Entries that are plus or minus Inf.
    """

    finite: int
    mean: float
    std: float
    low: float
    high: float
    norm: float
    zeros: int
    nan: int
    inf: int


def entries_of_each(tensors: Sequence[Tensor]) -> list[EntryStatistics]:
    """Return statistics of the entries of each tensor.

    Tensors that the C library can read, that are finite, and whose spread is not lost beside their mean are read by it
    and by one sum, with errors of some 1e-6 of the mean magnitude. All others are read once, in chunks that stay in the
    cache, in float64, so that no copy of a large tensor is made.

    Args:
        tensors: Real, complex (of which magnitudes are taken), whole numbers, booleans, half or quarter precision,
            sparse (of which stored entries are taken) or spread over processes (of which the part in this one is
            taken); none on the meta device. Shape of each: any, empty too.

    Returns:
        One for each tensor.

    Unit: that of the entries.
    Source: definition; chunks are joined as in Chan, Golub and LeVeque 1983, The American Statistician 37(3).
    """
    out = quick_entries_of_each(tensors)
    left = [index for index, found in enumerate(out) if found is None]
    with torch.no_grad():
        for index, read in zip(left, _read_in_chunks([flat_entries(tensors[index]) for index in left]), strict=True):
            out[index] = read
    return [found for found in out if found is not None]


def quick_entries_of_each(tensors: Sequence[Tensor]) -> list[EntryStatistics | None]:
    """Return statistics of the entries of each tensor that can be read faster than it can be copied, else ``None``.

    Args:
        tensors: As in :func:`entries_of_each`.
    """
    out: list[EntryStatistics | None] = [None] * len(tensors)
    plain = [index for index, tensor in enumerate(tensors) if _is_plain(tensor)]
    known = native_statistics([tensors[index] for index in plain]) if plain else None
    if known is not None:
        with torch.no_grad():
            for index, (norm, _, high, low, zeros, nonfinite) in zip(plain, known.T.tolist(), strict=True):
                if not nonfinite:
                    out[index] = _from_sums(tensors[index], norm, high, low, int(zeros))
    return out


def flat_entries(tensor: Tensor) -> Tensor:
    """Return the entries that a tensor holds in this process, in a row. Shape: ``[entries]``.

    Args:
        tensor: As in :func:`entries_of_each`; of complex entries the magnitudes are returned.
    """
    held = local(tensor).detach()
    if held.is_quantized:
        held = held.dequantize()
    if held.is_nested:
        return torch.cat([part.reshape(-1) for part in held.unbind()] or [held.new_zeros(0)])
    entries = stored(held)
    if entries.is_complex():
        entries = entries.abs()
    return entries.reshape(-1)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.dtype in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def _from_sums(entries: Tensor, norm: float, high: float, low: float, zeros: int) -> EntryStatistics | None:
    count = entries.numel()
    total = float(entries.sum(dtype=torch.float32 if entries.dtype in _HALF else None))
    mean, square = total / count, norm / count * norm
    variance = square - mean * mean
    if not (math.isfinite(total) and math.isfinite(square)) or (variance < _LEAST_VARIANCE * square and square > 0):
        return None
    std = math.sqrt(variance * count / (count - 1)) if count > 1 else 0.0
    return EntryStatistics(count, mean, std, low, high, norm, zeros, 0, 0)


def _read_in_chunks(tensors: Sequence[Tensor]) -> list[EntryStatistics]:
    rows: list[Tensor] = []
    owners: list[int] = []
    for index, entries in enumerate(tensors):
        for chunk in torch.split(entries, _CPU_CHUNK if entries.is_cpu else _DEVICE_CHUNK):
            if chunk.numel():
                rows.append(_chunk(chunk))
                owners.append(index)
    joined = [_Joined() for _ in tensors]
    # One transfer for each device: what a chunk holds is looked at only when all of them are under way.
    for device in {row.device for row in rows}:
        members = [index for index, row in enumerate(rows) if row.device == device]
        for index, row in zip(members, torch.stack([rows[index] for index in members]).tolist(), strict=True):
            joined[owners[index]].add(*row)
    return [each.result() for each in joined]


def _chunk(entries: Tensor) -> Tensor:
    """Return count, NaN, Inf, zeros, least, greatest, mean and root of the sum of squared deviations. Shape: [8]."""
    wide = entries.double() if entries.device.type != "mps" else entries.float()
    finite, nan = torch.isfinite(wide), torch.isnan(wide)
    if entries.is_cpu and bool(finite.all()):
        variance, mean = torch.var_mean(wide, correction=0)
        if bool(torch.isfinite(variance)):
            n = wide.new_tensor(wide.numel())
            none, zeros = torch.zeros_like(n), (wide == 0).sum().to(wide)
            return torch.stack([n, none, none, zeros, *torch.aminmax(wide), mean, (variance * n).sqrt()])
    count = finite.sum().to(wide)
    clean = torch.where(finite, wide, 0.0)
    # Squares of entries above 1e154 would overflow.
    scale = clean.abs().amax()
    scale = torch.where(scale > 0, scale, 1.0)
    mean = (clean / scale).sum() / count.clamp_min(1)
    apart = torch.where(finite, clean / scale - mean, 0.0)
    low = torch.where(finite, wide, torch.inf).amin()
    high = torch.where(finite, wide, -torch.inf).amax()
    zeros, nans = (wide == 0).sum().to(wide), nan.sum().to(wide)
    infs = entries.numel() - count - nans
    return torch.stack([count, nans, infs, zeros, low, high, mean * scale, torch.linalg.vector_norm(apart) * scale])


class _Joined:
    """Joins the statistics of chunks."""

    def __init__(self) -> None:
        self._count = self._nan = self._inf = self._zeros = 0
        self._low, self._high = math.inf, -math.inf
        self._mean = self._apart = 0.0

    def add(
        self, count: float, nan: float, inf: float, zeros: float, low: float, high: float, mean: float, apart: float
    ) -> None:
        """Take in one chunk."""
        self._nan, self._inf, self._zeros = self._nan + int(nan), self._inf + int(inf), self._zeros + int(zeros)
        if not count:
            return
        both, gap = self._count + int(count), mean - self._mean
        between = gap * math.sqrt(self._count / both * count) if self._count else 0.0
        self._mean = self._mean + gap * (count / both) if self._count else mean
        self._apart = math.hypot(self._apart, apart, between)
        self._count, self._low, self._high = both, min(self._low, low), max(self._high, high)

    def result(self) -> EntryStatistics:
        """Return the statistics of all of them."""
        n, some = self._count, self._count > 0
        return EntryStatistics(
            finite=n,
            mean=self._mean if some else math.nan,
            std=(self._apart / math.sqrt(n - 1) if n > 1 else 0.0) if some else math.nan,
            low=self._low if some else math.nan,
            high=self._high if some else math.nan,
            norm=math.hypot(self._apart, self._mean * math.sqrt(n)),
            zeros=self._zeros,
            nan=self._nan,
            inf=self._inf,
        )
