"""The last finite value of each buffer of a model, put back where NaN or Inf has come."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gradflow_export.debugging.nan.faults import Fault
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.rules.base import some

_log = logging.getLogger("gradflow_export")

_TOLD = frozenset({1, 10, 100})
_LEAST_BYTES = 2
"""Entries of a single byte have no NaN that could be looked for."""


@dataclass(frozen=True)
class Kept:
    """What a look at the buffers found.

    Attributes:
        repaired: How many entries of which buffer were put back.
        broken: Buffers that hold NaN of which no finite value is known, and how many entries of each.
    """

    repaired: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)

    def faults(self) -> list[Fault]:
        """Return what was found, in words."""
        told = (
            ("repaired_buffers", self.repaired, "held NaN or Inf and are their last finite values again"),
            ("broken_buffers", self.broken, "hold NaN, and no finite value of theirs is known"),
        )
        return [
            Fault(kind, f"the buffers {some(tuple(names))} {what}", tuple(names), tuple(names.values()))
            for kind, names, what in told
            if names
        ]


class BufferKeeper:
    """Keeps a copy of the finite entries of each floating-point or complex buffer.

    A forward pass on NaN leaves it in running statistics and averages, which no policy about gradients reaches. Entries
    that were Inf from the beginning, as those of a mask, are what they are meant to be.

    Args:
        model: Whose buffers are kept; held weakly. They are copied at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._held: MutableMapping[nn.Module, dict[str, Tensor]] = WeakIdKeyDictionary()
        self._repairs = 0
        self.look()

    def look(self) -> Kept:
        """Put back what has become NaN or Inf since the last look, and copy the rest."""
        found = Kept()
        model = self._model()
        buffers = [] if model is None else list(_buffers(model))
        if not buffers:
            return found
        finite = l2_norms([_real(buffer) for _, _, _, buffer in buffers]).isfinite().tolist()
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for (path, module, name, buffer), well in zip(buffers, finite, strict=True):
            held = self._held.setdefault(module, {})
            before = held.get(name)
            known = before if before is not None and _alike(before, buffer) else None
            if not well:
                _repair(path, buffer, known, found)
            if known is None:
                held[name] = buffer.clone()
            else:
                into.append(known)
                out_of.append(buffer)
        if into:
            torch_private.copy_all(into, out_of)
        self._tell(found)
        return found

    def _tell(self, found: Kept) -> None:
        if found.repaired:
            self._repairs += 1
            _log.log(
                logging.WARNING if self._repairs in _TOLD else logging.INFO,
                "gradflow: the buffers %s held NaN or Inf and are their last finite values again, %d time(s) so far.",
                some(tuple(found.repaired)),
                self._repairs,
            )


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield path, module, name and entries of each buffer that can hold NaN."""
    for path, module in model.named_modules():
        for name, buffer in torch_private.buffers(module):
            if buffer is None or is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
                continue
            holds_nan = (buffer.is_floating_point() or buffer.is_complex()) and buffer.element_size() >= _LEAST_BYTES
            if holds_nan and buffer.numel():
                yield site_name(f"{path}.{name}" if path else name), module, name, buffer.detach()


def _repair(path: str, buffer: Tensor, known: Tensor | None, found: Kept) -> None:
    bad = ~torch.isfinite(buffer)
    if known is not None:
        again = bad & torch.isfinite(known)
        count = int(again.sum())
        if count:
            with torch.no_grad():
                buffer.copy_(torch.where(again, known, buffer))
            found.repaired[path] = count
    left = int(torch.isnan(buffer).sum())
    if left:
        found.broken[path] = left


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
