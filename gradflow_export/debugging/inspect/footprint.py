"""Bytes that a model holds; memory that several tensors share is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.metrics.arrays.local import local


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of the entries that a tensor stores in this process; 0 on the meta device.

    Args:
        tensor: Dense or sparse; of a view only what it shows. Shape: any.
    """
    if tensor.is_meta:
        return 0
    return sum(part.numel() * part.element_size() for part in _parts(local(tensor).detach()))


def model_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Return the bytes of a model's tensors by what they are; shared memory counts where it is met first.

    Args:
        model: Its parameters, gradients and buffers are counted.
        optimizer: Its state is counted too.

    Returns:
        ``parameters``, ``gradients``, ``buffers``, ``optimizer`` and ``total``.
    """
    seen: set[tuple[str, int]] = set()
    parameters = list(model.parameters())
    state = [] if optimizer is None else list(_tensors_in(optimizer.state.values()))
    out = {
        "parameters": _unseen(parameters, seen),
        "gradients": _unseen([p.grad for p in parameters if p.grad is not None], seen),
        "buffers": _unseen(model.buffers(), seen),
        "optimizer": _unseen(state, seen),
    }
    return {**out, "total": sum(out.values())}


def _unseen(tensors: Iterable[Tensor], seen: set[tuple[str, int]]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.is_meta:
            continue
        for part in _parts(local(tensor).detach()):
            storage = part.untyped_storage()
            key = str(part.device), storage.data_ptr()
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor is made of."""
    if tensor.is_nested:
        return list(tensor.unbind()) if tensor.layout is torch.strided else [tensor.values()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [torch_private.sparse_indices(tensor), torch_private.sparse_values(tensor)]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _tensors_in(held: object) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        yield from _tensors_in(held.values())
    elif isinstance(held, (list, tuple, ValuesView)):
        for part in held:
            yield from _tensors_in(part)
