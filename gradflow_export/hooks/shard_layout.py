"""Which rank speaks for which part of which parameter, when a model is spread over several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.metrics.arrays.local import local, shards, splits


@dataclass(frozen=True)
class Layout:
    """How the parameters of one optimizer lie on the ranks, as seen from the record that rank 0 writes.

    Attributes:
        sites: Names of all parameters of the model.
        where: Indices into ``sites`` of those described here. Shape: ``[n]``.
        counted: Whether this rank's part is one of those that together make the parameter, each once. Shape: ``[n]``.
        parts: How many such parts there are; 1 for a plain or replicated parameter. Shape: ``[n]``.
        sizes: Entries that lie here. Shape: ``[n]``.
        batches: How many different batches the ranks see.
    """

    sites: tuple[str, ...]
    where: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    parts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    batches: int = 1


def layout_of(
    sites: tuple[str, ...], where: npt.NDArray[np.int64], parameters: Sequence[Tensor], batches: int
) -> Layout:
    """Return how the parameters lie; looks at their descriptions only."""
    rank = this_rank()
    return Layout(
        sites,
        where,
        np.array([_counted(p, rank) for p in parameters], dtype=np.bool_),
        np.array([shards(p) for p in parameters], dtype=np.int64),
        np.array([local(p).numel() for p in parameters], dtype=np.int64),
        batches,
    )


def is_spread() -> bool:
    """Return whether this process is one of several that train together."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return known and torch.distributed.get_world_size() > 1


def this_rank() -> int:
    """Return the rank of this process, 0 where there is only one."""
    return torch.distributed.get_rank() if is_spread() else 0


def _counted(parameter: Tensor, rank: int) -> bool:
    """Whether rank 0 adds this rank's part to its own: it lies in rank 0's mesh, and is no replica."""
    if rank == 0 or not hasattr(parameter, "placements"):
        return rank == 0
    mesh: Any = getattr(parameter, "device_mesh", None)
    first, mine = (np.argwhere(np.asarray(mesh.mesh) == number) for number in (0, rank))
    if len(first) != 1 or len(mine) != 1:
        return False
    pairs = zip(parameter.placements, first[0], mine[0], strict=True)
    return all(splits(placement) or a == b for placement, a, b in pairs)


def batches_of(model: nn.Module) -> int:
    """Return how many different batches the ranks of the job see: all of them, less those that share one.

    Tensor parallelism gives the ranks of one mesh the same batch; ``fully_shard`` and ``DistributedDataParallel`` give
    each rank its own. Where both are used, the last dimension of the mesh is taken to be the tensor-parallel one, as
    PyTorch builds it.
    """
    if not is_spread():
        return 1
    world = torch.distributed.get_world_size()
    spread: list[Any] = [p for p in model.parameters() if hasattr(p, "placements")]
    meshes = [(tuple(p.device_mesh.shape), p.placements) for p in spread]
    if not meshes:
        return world
    deepest = max(len(shape) for shape, _ in meshes)
    shape = next(shape for shape, _ in meshes if len(shape) == deepest)
    if not any(issubclass(type(module), fsdp_class("FSDPModule")) for module in model.modules()):
        same = int(np.prod(shape))
    elif deepest == 1 or (deepest == 2 and all(placements[0].is_replicate() for _, placements in meshes)):
        same = 1
    else:
        same = shape[-1]
    return max(world // same, 1)


def fsdp_class(name: str) -> tuple[type, ...]:
    """Return a class of ``torch.distributed.fsdp``; empty while nobody has imported that, so that nothing is one.

    Args:
        name: ``"FSDPModule"`` or ``"FullyShardedDataParallel"``.
    """
    found = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return () if found is None else (found,)
