"""TensorInfo: what there is to know of one tensor at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.debugging.inspect.footprint import held_bytes
from gradflow_export.metrics.arrays.tensors import EntryStatistics, entries_of_each, quick_entries_of_each
from gradflow_export.records.step_record import number_to_json

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor at one moment; the tensor itself is not kept.

    Statistics are over the entries that are neither NaN nor Inf: of complex entries over their magnitudes, of booleans
    over 0 and 1, of sparse tensors over the stored entries, of a ``DTensor`` over the part in this process. They are
    ``None`` where there is no such entry: in empty tensors, and on the meta device, which holds none.

    Attributes:
        name: As it was given.
        shape: Of the whole tensor.
        dtype: Such as ``"torch.float32"``.
        device: Such as ``"cpu"``.
        requires_grad: As the tensor says.
        is_leaf: As the tensor says.
        numel: Number of entries.
        memory_usage: Bytes of the entries that are stored; 0 on the meta device.
        has_nan: Whether an entry is NaN.
        has_inf: Whether an entry is plus or minus Inf.
        nan_count: How many are NaN.
        inf_count: How many are Inf.
        zero_count: How many are exactly 0.
        mean_value: Mean.
        std_value: Standard deviation with ddof=1, 0 for a single entry.
        min_value: Least.
        max_value: Greatest.
        norm: L2 norm.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    is_leaf: bool
    numel: int
    memory_usage: int
    has_nan: bool = False
    has_inf: bool = False
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    mean_value: float | None = None
    std_value: float | None = None
    min_value: float | None = None
    max_value: float | None = None
    norm: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether no entry is NaN or Inf."""
        return not (self.has_nan or self.has_inf)

    def wrong(self, of: str = "") -> list[str]:
        """Return how many entries are NaN and how many Inf, in words; empty where none is.

        Args:
            of: What to call the tensor; by default it is not named.
        """
        what = f"entries of {of}" if of else "entries"
        counts = ((self.nan_count, "NaN"), (self.inf_count, "Inf"))
        return [f"{count} of {self.numel} {what} are {word}" for count, word in counts if count]

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes, ready for ``json.dumps(..., allow_nan=False)``."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        numbers = {key: number_to_json(value) for key, value in out.items() if isinstance(value, float)}
        return {**out, **numbers, "shape": list(self.shape)}


@dataclass(frozen=True)
class _Form:
    """What is known of a tensor without reading its entries."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    numel: int
    held: int


class TensorInfos(Mapping[str, TensorInfo]):
    """Descriptions of tensors by name, each made when it is asked for; no tensor is kept.

    Args:
        forms: Of every tensor.
        seen: Statistics of the entries of those that have any here.
    """

    def __init__(self, forms: Mapping[str, _Form], seen: Mapping[str, EntryStatistics]) -> None:
        self._forms, self.seen = forms, seen

    def __getitem__(self, name: str) -> TensorInfo:
        return _info(name, self._forms[name], self.seen.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    @property
    def broken(self) -> list[str]:
        """Names of those with a NaN or Inf entry."""
        return [name for name, seen in self.seen.items() if seen.nan or seen.inf]


class Captured:
    """Tensors as they are at one moment, to be described later and in another thread.

    What can be read faster than it can be copied is read at once, the rest is copied; on an accelerator the copy is
    only put into the queue of the device.

    Args:
        named: Tensors by name. Shape of each: any.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        held = [name for name, tensor in named.items() if not tensor.is_meta]
        quick = dict(zip(held, quick_entries_of_each([named[name] for name in held]), strict=True))
        self._forms = {name: _form(tensor) for name, tensor in named.items()}
        self._seen = {name: seen for name, seen in quick.items() if seen is not None}
        self._copies = {name: named[name].detach().clone() for name in held if quick[name] is None}
        self._queued = queued(self._copies.values())

    def infos(self) -> TensorInfos:
        """Return what there is to know of each tensor."""
        wait_for(self._queued)
        found = zip(self._copies, entries_of_each(list(self._copies.values())), strict=True)
        return TensorInfos(self._forms, {**self._seen, **dict(found)})


def describe_tensors(named: Mapping[str, Tensor]) -> TensorInfos:
    """Return what there is to know of each tensor; entries are read once, all tensors by few calls.

    Args:
        named: Tensors by name. Shape of each: any.
    """
    held = [name for name, tensor in named.items() if not tensor.is_meta]
    found = zip(held, entries_of_each([named[name] for name in held]), strict=True)
    return TensorInfos({name: _form(tensor) for name, tensor in named.items()}, dict(found))


def _form(tensor: Tensor) -> _Form:
    shape = () if tensor.is_nested else tuple(tensor.shape)
    numel = tensor.numel()
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)
    held = numel * tensor.element_size() if plain else held_bytes(tensor)
    return _Form(shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, numel, held)


def _info(name: str, form: _Form, seen: EntryStatistics | None) -> TensorInfo:
    nan, inf = (0, 0) if seen is None else (seen.nan, seen.inf)
    some = seen if seen is not None and seen.finite else None
    return TensorInfo(
        name=name,
        shape=form.shape,
        dtype=str(form.dtype),
        device=str(form.device),
        requires_grad=form.requires_grad,
        is_leaf=form.is_leaf,
        numel=form.numel,
        memory_usage=form.held,
        has_nan=nan > 0,
        has_inf=inf > 0,
        nan_count=nan,
        inf_count=inf,
        zero_count=0 if seen is None else seen.zeros,
        mean_value=None if some is None else some.mean,
        std_value=None if some is None else some.std,
        min_value=None if some is None else some.low,
        max_value=None if some is None else some.high,
        norm=None if some is None else some.norm,
    )


def queued(tensors: Iterable[Tensor]) -> list[torch.cuda.Event]:
    """Return events that come once what was put into the queues of CUDA devices so far is done."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def wait_for(events: Iterable[torch.cuda.Event]) -> None:
    """Wait for :func:`queued` events; other threads go on."""
    for event in events:
        event.synchronize()
