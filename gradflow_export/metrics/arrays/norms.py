"""Norms of many tensors at once that neither overflow nor underflow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks import torch_private
from gradflow_export.metrics.arrays.local import all_local, local
from gradflow_export.metrics.arrays.one_pass import native_statistics

_HALF = (torch.float16, torch.bfloat16)
_PLAIN = frozenset((torch.strided, dtype) for dtype in (torch.float32, torch.float64, *_HALF))
_LEAST_LIKE, _SMALL = 4, 2**15


def dense_entries(tensor: Tensor) -> Tensor:
    """Return the stored entries of a tensor as a real tensor, without a copy where that is possible.

    Args:
        tensor: Dense or sparse, real or complex. Shape: any.

    Returns:
        The values of touched rows for a sparse tensor, real and imaginary parts for a complex one. Shape: any.
    """
    entries = stored(tensor)
    return torch.view_as_real(entries.resolve_conj()) if entries.is_complex() else entries


def stored(tensor: Tensor) -> Tensor:
    """Return the stored entries of a tensor: the touched rows of a sparse, the shard of a spread one. Shape: any."""
    entries = local(tensor).detach()
    if entries.layout is torch.strided:
        return entries
    return entries.coalesce().values() if entries.layout is torch.sparse_coo else entries.values()


def l2_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, exact where a plain float32 sum of squares is not.

    Contiguous tensors on the CPU are read by the C library where it was built. Otherwise small tensors of one shape are
    joined and squared by one batched product, and the rest go through one ``_foreach_norm`` call. Norms whose
    squares come near the ends of the float32 range are computed again, scaled by the greatest entry, in float64. On
    other devices the sum is taken in float64 instead, because looking at the result would wait for the device.

    Args:
        tensors: Gradients or weights, not empty; of a ``DTensor`` the shard in this process. Shape of each: any.

    Returns:
        ``(sum_i |x_i|^2)^(1/2)`` per tensor, float32 or float64. Shape: ``[len(tensors)]``.

    Unit: that of the entries.
    Source: definition; scaling as in LAPACK dnrm2 (Blue 1978, ACM TOMS 4).
    """
    tensors = all_local(tensors)
    known = native_statistics(tensors)
    if known is not None:
        return torch.from_numpy(known[0])
    entries = list(tensors)
    kinds = {(e.layout, e.dtype, e.device) for e in entries}
    if any((layout, dtype) not in _PLAIN for layout, dtype, _ in kinds):
        entries = [dense_entries(e) for e in entries]
        kinds = {(e.layout, e.dtype, e.device) for e in entries}
    if len(kinds) == 1:
        with torch.no_grad():
            return _same_kind(entries)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, e in enumerate(entries):
        groups.setdefault((e.device, e.dtype), []).append(index)
    out = torch.empty(len(entries), dtype=torch.float64, device=entries[0].device)
    with torch.no_grad():
        for members in groups.values():
            out[members] = _same_kind([entries[index] for index in members]).to(out)
    return out


def l2_norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of one tensor as :func:`l2_norms` does, without what many tensors need. Shape: scalar."""
    entries = dense_entries(tensor)
    if entries.device.type != "cpu":
        wide: Tensor = torch.linalg.vector_norm(entries, dtype=torch.float64)
        return wide
    quick: Tensor = torch.linalg.vector_norm(entries, dtype=torch.float32 if entries.dtype in _HALF else None)
    return quick if _is_safe(float(quick), quick.dtype) else scaled_l2(entries)


def _is_safe(norm: float, dtype: torch.dtype) -> bool:
    # Squares below the least normal number keep few digits or none: 5e-23 in float32 would come out 6 % too large.
    return 1e3 * math.sqrt(torch.finfo(dtype).tiny) < norm < math.inf


def _same_kind(entries: list[Tensor]) -> Tensor:
    if entries[0].device.type != "cpu":
        return torch.stack(list(torch_private.norms(entries, 2, torch.float64)))
    known = np.empty(len(entries), dtype=np.float64 if entries[0].dtype is torch.float64 else np.float32)
    rest = _norms_of_like(entries, known)
    if rest:
        dtype = torch.float32 if entries[0].dtype in _HALF else None
        norms = list(torch_private.norms([entries[index] for index in rest], 2, dtype))
        known[rest] = torch.stack(norms).numpy()
    suspicious = ~((known > 1e3 * math.sqrt(np.finfo(known.dtype).tiny)) & (known < math.inf))
    if suspicious.any():
        known = known.astype(np.float64)
        for index in suspicious.nonzero()[0].tolist():
            known[index] = scaled_l2(entries[index])
    return torch.from_numpy(known)


def _norms_of_like(entries: list[Tensor], out: npt.NDArray[np.floating]) -> list[int]:
    """Fill in the norms of small tensors that share a shape, and return the indices of the others."""
    shapes: dict[torch.Size, list[int]] = {}
    for index, e in enumerate(entries):
        shapes.setdefault(e.shape, []).append(index)
    rest: list[int] = []
    for shape, members in shapes.items():
        if len(members) < _LEAST_LIKE or not 0 < shape.numel() <= _SMALL or not shape:
            rest += members
            continue
        joined = torch.cat([entries[index] for index in members]).reshape(len(members), 1, -1)
        if joined.dtype in _HALF:
            joined = joined.float()
        out[members] = torch.bmm(joined, joined.transpose(1, 2)).sqrt_().reshape(-1).numpy()
    return rest


def scaled_l2(entries: Tensor) -> Tensor:
    """Return the L2 norm of one tensor as ``m ||x / m||`` with ``m = max |x|``, in float64. Shape: scalar."""
    if entries.numel() == 0:
        return entries.new_zeros((), dtype=torch.float64)
    greatest = linf(entries).double()
    if not 0 < float(greatest) < float("inf"):
        return greatest
    return torch.mul(greatest, torch.linalg.vector_norm(entries.double() / greatest))


def linf(entries: Tensor) -> Tensor:
    """Return ``max |x|``, NaN if any entry is NaN, 0 when empty; 30 times cheaper on CPU than ``norm(inf)``."""
    if entries.numel() == 0:
        return entries.new_zeros(())
    low, high = torch.aminmax(entries)
    return torch.stack((low, high)).abs().amax()


def norm(tensor: Tensor, kind: str) -> Tensor:
    """Return one norm of one tensor.

    Args:
        tensor: Shape: any.
        kind: ``"l2"`` (sum x^2)^(1/2), ``"l1"`` sum |x|, ``"linf"`` max |x|, or ``"mean"`` sum |x| / numel, which
            does not change with size but does with scale.

    Returns:
        Shape: scalar, float32 or float64.

    Unit: that of the entries.
    """
    entries = local(tensor).detach()
    if kind == "l2":
        return l2_norm(entries)
    magnitudes = stored(entries).abs().double()
    if kind == "linf":
        return linf(magnitudes)
    total = magnitudes.sum()
    return total / max(entries.numel(), 1) if kind == "mean" else total
