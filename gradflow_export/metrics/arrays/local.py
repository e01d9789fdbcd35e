"""What one process holds of a tensor that is spread over several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types whose entries lie where they say; a subclass may hold them elsewhere."""


def is_ragged(tensor: Tensor) -> bool:
    """Whether this is a nested tensor of the older kind, which has no shape and hardly any operation."""
    return tensor.is_nested and tensor.layout is torch.strided


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies in this process, without a word to any other.

    Args:
        tensor: A ``DTensor``, of which the local shard is returned, or any other tensor, which is returned as it is.
            Shape: any.
    """
    if type(tensor) in PLAIN:
        return tensor
    take = getattr(tensor, "to_local", None)
    if take is None:
        return tensor
    with torch.no_grad():
        held = take()
        # What an asynchronous collective of the model itself will deliver: every rank has begun it already.
        wait = getattr(held, "wait", None)
        held = held if wait is None else wait()
    return held if isinstance(held, Tensor) else tensor


def all_local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return :func:`local` of each tensor; where all are plain, which is quickly seen, the sequence itself."""
    return tensors if set(map(type, tensors)) <= PLAIN else [local(tensor) for tensor in tensors]


def splits(placement: Any) -> bool:
    """Return whether a ``DTensor`` placement gives each rank another part; there are kinds that are no ``Shard``."""
    return not (placement.is_replicate() or placement.is_partial())


def shards(tensor: Tensor) -> int:
    """Return into how many different parts a tensor is split, 1 for a plain or replicated one."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return 1
    sizes = tuple(tensor.device_mesh.shape)  # type: ignore[attr-defined]  # only a DTensor has placements
    return math.prod(size for size, placement in zip(sizes, placements, strict=True) if splits(placement))
