"""Whether a bit of a tensor has changed: a checksum of all of it."""

from __future__ import annotations

import ctypes
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from gradflow_export import native
from gradflow_export.metrics.arrays.local import PLAIN, local
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.native.changes import address_of

_WHOLE = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32})
_PASS = 2**20
_ODD = -7046029288634856825


def checksum(tensor: Tensor) -> Tensor | None:
    """Return a number that is another one when any one word of a tensor is, and nearly surely when several are.

    Args:
        tensor: On any device; of a ``DTensor`` the shard in this process. Shape: any.

    Returns:
        On the tensor's device, so that nobody waits for it; ``None`` where the entries cannot be read as bits. Numbers
        are comparable only between tensors of one shape, type, layout and device. Shape: scalar, int64.
    """
    held = local(tensor).detach()
    if held.layout is not torch.strided or held.is_meta or held.is_quantized:
        return None
    interface = usable_interface()
    if interface is not None and type(held) in PLAIN and held.is_cpu:
        out = np.zeros(1, dtype=np.int64)
        call = native.function("gradflow_checksum", release=held.numel() > _PASS)
        if not call(interface, ctypes.c_void_p(address_of(held)), ctypes.c_void_p(out.ctypes.data)):
            return torch.from_numpy(out)[0]
    return _by_torch(held)


def _by_torch(held: Tensor) -> Tensor | None:
    if held.is_complex():
        held = torch.view_as_real(held.resolve_conj())
    kind = _WHOLE.get(held.element_size())
    if kind is None:
        return None
    words = held.resolve_neg().reshape(-1).view(kind)
    total = torch.zeros((), dtype=torch.int64, device=held.device)
    for start in range(0, len(words), _PASS):
        part = words[start : start + _PASS].to(torch.int64)
        # Words of at most half the width, so that nothing is lost at the top. Odd factors: a word times one of them is
        # 0 only where the word is. Sums go round at 2^64, in any order.
        places = torch.arange(start, start + len(part), device=held.device)
        total += (part * ((places * _ODD) ^ (places >> 7)).mul_(2).add_(1)).sum()
    return total
