"""Tensors of one process that should stay equal: copies named by hand, and copies whose gradients say so."""

from __future__ import annotations

import contextlib
import reprlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot, slots
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.instruments.base import Cost, Instrument, Setting
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.records.catalog import MetricSpec, spec

Copies = Iterable[Sequence[str]] | None
"""Groups of names of parameters, buffers or modules that should hold the same."""

ENTRIES = 256
FOUND = 64
"""Pairs that are followed at most without being named."""
LEAST = 8
"""Entries without which parallel gradients are chance."""
PARALLEL = 1 - 1e-9

_Held = tuple[str, Slot, Slot]


class CopyInstrument(Instrument):
    """Reads, while armed, how far copies are apart.

    Copies that nobody named are parameters that begin with the same entries and get parallel gradients: those of one
    tensor that is kept twice are, and those of layers that merely began alike are not. One reading in which they are
    not parallel is enough: what lies between two layers may later fade, as under weight decay, until one gradient
    reaches both. A head that begins with the weights of an embedding was meant to share them.

    Args:
        model: The unwrapped model; only weak references to its tensors are kept.
        copies: What should stay equal by the user's word.

    Raises:
        ArgumentError: A name is unknown, or what is named has another shape.
        ArgumentTypeError: A group is no sequence of at least two names.
    """

    instrument: ClassVar[str] = "replicas"
    interval: ClassVar[int] = 50
    cost: ClassVar[Cost] = "P"

    def __init__(self, model: nn.Module, copies: Copies = None) -> None:
        self._model = weakref.ref(model)
        self._named = named_copies(model, copies)
        self._found: list[_Held] | None = None
        self._parted: dict[str, Tensor] = {}
        self._armed = False
        self._out: Drained = []

    @classmethod
    def make(cls, setting: Setting) -> CopyInstrument:
        """Make one for a model."""
        return cls(setting.model, setting.given.get("copies"))

    @property
    def modules(self) -> int:
        """How many pairs are read in one step."""
        return max(len(self._named), 1)

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return (spec("parameter.copy_gap"),)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = contextlib.ExitStack()
        stack.callback(self._named.clear)
        stack.callback(self._parted.clear)
        stack.callback(self.forget)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to read, or with ``on=False`` read no more."""
        self._armed = on

    def before(self, step: OptimizerStep) -> None:
        """Read the copies before an optimizer changes them."""
        if not self._armed:
            return
        with torch.no_grad():
            if self._found is None:
                self._found = self._alike()
                self._named += self._untied()
            told = {name: _gap(a, b) for name, a, b in _held(self._named)}
            owned = {id(p) for p in step.owned.parameters} if self._found else set()
            for name, a, b in _held(self._found):
                if id(a) in owned and name not in told and (cosine := _cosine(a, b)) is not None:
                    # A device tensor, so that nothing waits; gradients of 0 have no direction, and tell nothing.
                    parted = self._parted.get(name, torch.zeros_like(cosine)).to(cosine.device) + (cosine < PARALLEL)
                    self._parted[name] = parted
                    told[name] = torch.where((cosine >= PARALLEL) & (parted == 0), _gap(a, b), torch.nan)
        if told:
            device = next(iter(told.values())).device
            values = torch.stack([value.to(device) for value in told.values()])
            self._out.append(Pending("parameter.copy_gap", tuple(told), values, nan_is_missing=True))

    def after(self, step: OptimizerStep) -> None:
        """Read nothing: a step may leave copies apart for a moment."""

    def skip(self, step: OptimizerStep) -> None:
        """Keep what was read: copies are equal whether the step was taken or not."""

    def drain(self) -> Drained:
        """Give out what was read since the last call."""
        out, self._out = self._out, []
        return out

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self._out = []

    def _alike(self) -> list[_Held]:
        """Find parameters with the same entries, once at the start.

        Where the entries are all one number, as of normalisations, only parameters of one place in one kind of layer
        are taken for copies of each other.
        """
        model = self._model()
        groups: dict[tuple[object, ...], list[tuple[str, Slot, Tensor]]] = defaultdict(list)
        places = {} if model is None else {id(p): slot for slot, p in slots(model)}
        roles = {} if model is None else _roles(model)
        for name, parameter in () if model is None else model.named_parameters():
            if parameter.numel() >= LEAST and parameter.requires_grad and not hasattr(parameter, "placements"):
                groups[tuple(parameter.shape), parameter.dtype, parameter.device].append(
                    (site_name(name), places[id(parameter)], parameter)
                )
        pairs: list[_Held] = []
        for members in groups.values():
            alike = _same([(p, roles[id(p)]) for _, _, p in members]) if len(members) > 1 else ()
            for same in alike:
                first, here, _ = members[same[0]]
                pairs += [(f"{members[i][0]} = {first}", here, members[i][1]) for i in same[1:]]
        return pairs[:FOUND]

    def _untied(self) -> list[_Held]:
        """Find heads that begin with the entries of an embedding: two kinds of layers do so by intention only."""
        model = self._model()
        modules = [] if model is None else list(model.named_modules())
        tables = [(name, m, weight) for name, m in modules for weight in _weight_of(m, nn.Embedding)]
        heads = [(name, m, weight) for name, m in modules for weight in _weight_of(m, nn.Linear)]
        found: list[_Held] = []
        for (table, left, one), (head, right, other) in product(tables, heads):
            if other is one or one.shape != other.shape or one.device != other.device:
                continue
            here = even_sample(one, ENTRIES)
            if torch.equal(here, even_sample(other, ENTRIES)) and not torch.equal(here, here[:1].expand_as(here)):
                both = f"{site_name(head)}.weight = {site_name(table)}.weight"
                found.append((both, Slot(left, "weight"), Slot(right, "weight")))
        return found[:FOUND]


def _roles(model: nn.Module) -> dict[int, tuple[type, int]]:
    """Return by ``id`` of each parameter the kind of its module, and which parameter of that it is."""
    own = ((type(m), list(torch_private.parameters(m))) for m in model.modules())
    return {id(p): (kind, place) for kind, held in own for place, (_, p) in enumerate(held)}


def _same(tensors: Sequence[tuple[Tensor, object]]) -> Iterable[list[int]]:
    """Return the places of tensors of one shape with the same entries; those of one number must have one role."""
    rows = [even_sample(t, ENTRIES) for t, _ in tensors]
    some = torch.stack([torch.view_as_real(row).reshape(-1) if row.is_complex() else row for row in rows]).double()
    groups = torch.unique(some, dim=0, return_inverse=True)[1]
    flat = (some == some[:, :1]).all(dim=1)
    places: dict[tuple[int, object], list[int]] = defaultdict(list)
    told = np.asarray(torch.stack([groups, flat.to(groups)]).to("cpu"))  # one wait for all of them, once in a run
    for place, (group, one) in enumerate(told.T):
        places[int(group), tensors[place][1] if one else None].append(place)
    return (same for same in places.values() if len(same) > 1)


def _weight_of(module: nn.Module, kind: type[nn.Module]) -> list[Tensor]:
    """Return the weight that a module learns, when it is of this kind and has one.

    A parametrized weight is none of its own: to look at it is to compute it, and may change it (``spectral_norm``).
    """
    own = module.named_parameters(recurse=False) if isinstance(module, kind) else ()
    held = [p for name, p in own if name == "weight"]
    return [p for p in held if p.requires_grad and p.numel() >= LEAST and not hasattr(p, "placements")]


def named_copies(model: nn.Module, copies: Copies) -> list[_Held]:
    """Return the pairs of tensors that groups of names stand for, each with the first of its group.

    Args:
        model: Where the names are looked up.
        copies: Groups of names of parameters, buffers or modules; of modules all tensors are compared by name.

    Raises:
        ArgumentError: A name is unknown, or what is named has another shape.
        ArgumentTypeError: A group is no sequence of at least two names.
    """
    tensors = {site_name(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    places = {id(b): Slot(m, key) for m in model.modules() for key, b in m.named_buffers(recurse=False)}
    places |= {id(p): slot for slot, p in slots(model)}
    pairs: list[_Held] = []
    groups: Any = () if copies is None else copies
    for group in groups if isinstance(groups, Iterable) else (groups,):
        named = isinstance(group, Sequence) and not isinstance(group, str)
        if not named or len(group) < 2 or not all(isinstance(name, str) for name in group):
            raise ArgumentTypeError(
                f"copies must hold groups of at least two names, got {reprlib.repr(group)}; for example "
                "copies=[('left.weight', 'right.weight')] or copies=[('left', 'right')]."
            )
        parts = [_below(tensors, name) for name in group]
        for name, part in zip(group[1:], parts[1:], strict=True):
            if {k: t.shape for k, t in part.items()} != {k: t.shape for k, t in parts[0].items()}:
                raise ArgumentError(
                    f"copies names {group[0]!r} and {name!r}, which do not hold tensors of the same names and shapes; "
                    "name tensors that should be equal."
                )
            for key, tensor in part.items():
                both = f"{name}{key} = {group[0]}{key}"
                pairs.append((both, places[id(parts[0][key])], places[id(tensor)]))
    return pairs


def _below(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    found = {key.removeprefix(name): t for key, t in tensors.items() if key == name or key.startswith(f"{name}.")}
    if not found:
        raise ArgumentError(
            f"copies names {name!r}, which is no tensor and no module of the model{nearest(name, tensors)}"
        )
    return found


def _held(pairs: list[_Held]) -> list[tuple[str, Tensor, Tensor]]:
    there = [(name, a(), b()) for name, a, b in pairs]
    return [(name, a, b) for name, a, b in there if a is not None and b is not None]


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Return the greatest difference of evenly spaced entries, as a share of the greatest entry. Shape: scalar."""
    one, other = (even_sample(local(t), ENTRIES).double() for t in (a, b))
    other = other.to(one.device)
    return (one - other).abs().amax() / torch.maximum(one.abs().amax(), other.abs().amax()).clamp_min(1e-300)


def _cosine(a: Tensor, b: Tensor) -> Tensor | None:
    """Return how parallel the gradients of two parameters are, 0 to 1; NaN where one is 0, ``None`` without any.

    What is the same in all entries of a gradient, as that of a penalty, tensors share that have nothing in common.
    """
    if a.grad is None or b.grad is None or a.grad.is_sparse or b.grad.is_sparse:
        return None
    one, other = (even_sample(local(g), ENTRIES).double() for g in (a.grad, b.grad))
    one, other = one - one.mean(), other - other.mean()
    cosine: Tensor = torch.dot(one, other).abs() / (one.norm() * other.norm())
    return cosine
