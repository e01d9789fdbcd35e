"""Statistics of many tensors on a GPU in one read and without waiting for it, where triton is installed."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export import native

_LOG = logging.getLogger(__name__)

Upload = Callable[[npt.NDArray[np.int64]], Tensor]


def device_statistics(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the rows that the C library computes on the host, computed where the tensors lie.

    Nothing here waits for the device: the addresses go there from pinned memory, and the result stays there. Triton
    comes with torch for CUDA; ``GRADFLOW_TRITON=0`` asks for the slower way, which is also taken where the first launch
    fails.

    Args:
        tensors: Not empty. Shape of each: any.

    Returns:
        The rows named in ``native.triton_statistics.ROWS``, float64, on the tensors' device; squares of float64 entries
        beyond 1e154 or below 1e-154 leave the range. ``None`` when a tensor is not a plain real floating one, they are
        not all on one CUDA device, or there is no triton. Shape: ``[7, len(tensors)]``.
    """
    device = tensors[0].device
    if device.type != "cuda" or not available():
        return None
    if not set(map(type, tensors)) <= {Tensor, nn.Parameter} or any(t.device != device for t in tensors):
        return None
    kinds = frozenset(_name(t.dtype) for t in tensors)
    if not kinds <= set(native.KINDS) or any(t.layout is not torch.strided for t in tensors):
        return None
    with torch.no_grad(), torch.cuda.device(device):
        return launch(tensors, _upload_to(device)) if _works(device, kinds) else None


def available() -> bool:
    """Return whether triton is installed and may be used."""
    return os.environ.get("GRADFLOW_TRITON") != "0" and _installed()


def launch(tensors: Sequence[Tensor], upload: Upload) -> Tensor:
    """Compute the statistics of plain tensors on one device; :func:`device_statistics` checks that they are.

    Args:
        tensors: Of the types named in ``native.KINDS``. Shape of each: any.
        upload: Takes whole numbers to the device of the tensors.

    Returns:
        As :func:`device_statistics`. Shape: ``[7, len(tensors)]``.
    """
    kernels = _kernels()
    # Of a copy only the address is kept: its memory is reused no earlier than what is launched on this stream ends.
    dense = [t if _is_dense(t) else t.contiguous() for t in tensors]
    plan = _plan(tuple(map(Tensor.numel, dense)), tuple(_name(t.dtype) for t in dense), kernels.PIECE, upload)
    addresses = np.fromiter(map(Tensor.data_ptr, dense), dtype=np.int64, count=len(dense))
    pointers, count = upload(addresses), plan.pieces.shape[1]
    partials = torch.empty((6, count), dtype=torch.float64, device=pointers.device)
    out = torch.empty((len(kernels.ROWS), len(dense)), dtype=torch.float64, device=pointers.device)
    for group in plan.groups:
        aligned = not bool((addresses[group.members] & 15).any())
        types = {"ENTRY": getattr(kernels.tl, group.kind), "ALIGNED": aligned, "BLOCK": kernels.BLOCK}
        kernels.read_pieces[(group.pieces,)](pointers, plan.pieces, partials, group.first, count, **types)
    kernels.join_pieces[(len(dense),)](partials, plan.bounds, out, count, len(dense), JOINED=kernels.JOINED)
    return out


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one type, and which pieces are theirs."""

    kind: str
    members: npt.NDArray[np.int64]
    first: int
    pieces: int


@dataclass(frozen=True, eq=False)
class _Plan:
    """How tensors of given sizes are cut; kept, because sizes stay the same from step to step."""

    pieces: Tensor
    bounds: Tensor
    groups: tuple[_Group, ...]


@functools.lru_cache(maxsize=8)
def _plan(counts: tuple[int, ...], kinds: tuple[str, ...], size: int, upload: Upload) -> _Plan:
    sizes, names = np.array(counts, dtype=np.int64), np.array(kinds)
    cut = -(-sizes // size)
    groups: list[_Group] = []
    bounds = np.zeros((3, len(sizes)), dtype=np.int64)
    owners: list[npt.NDArray[np.int64]] = []
    done = 0
    for kind in native.KINDS:
        members = np.flatnonzero((names == kind) & (sizes > 0))
        if not members.size:
            continue
        ends = done + np.cumsum(cut[members])
        bounds[0, members], bounds[1, members] = ends - cut[members], ends
        owners.append(np.repeat(members, cut[members]))
        groups.append(_Group(kind, members, done, int(ends[-1]) - done))
        done = int(ends[-1])
    bounds[2] = sizes
    owner = np.concatenate(owners) if owners else np.zeros(0, dtype=np.int64)
    start = (np.arange(done) - bounds[0, owner]) * size
    pieces = np.stack([owner, start, np.minimum(size, sizes[owner] - start)])
    return _Plan(upload(pieces), upload(bounds), tuple(groups))


@functools.lru_cache(maxsize=16)
def _upload_to(device: torch.device) -> Upload:
    def upload(numbers: npt.NDArray[np.int64]) -> Tensor:
        host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
        host.numpy()[...] = numbers
        return host.to(device, non_blocking=True)

    return upload


@functools.lru_cache(maxsize=64)
def _works(device: torch.device, kinds: frozenset[str]) -> bool:
    """Compile for some types, which fails where triton finds no compiler or does not fit the driver."""
    try:
        launch([torch.zeros(1, dtype=getattr(torch, kind), device=device) for kind in kinds], _upload_to(device))
    except Exception as error:
        _LOG.warning("triton is there but does not run (%s): statistics of gradients take the slower way.", error)
        return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    # The order of entries does not matter, so that images with channels last need no copy either.
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from gradflow_export.native import triton_statistics  # noqa: PLC0415 - imports triton, which few have

    return triton_statistics
