"""What the optimizer really did: weights before and after its step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned, owned_by_hand
from gradflow_export.hooks.readings import Clue, Drained, Pending
from gradflow_export.instruments.base import Cost, Instrument, Setting
from gradflow_export.instruments.change_check import Checksums
from gradflow_export.metrics.arrays.change import KeptAll, Values, joined
from gradflow_export.metrics.arrays.local import PLAIN, all_local, local
from gradflow_export.metrics.arrays.norms import dense_entries, l2_norms
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.metrics.arrays.sketch import touched_rows
from gradflow_export.native.changes import ChangeReader
from gradflow_export.records.catalog import MetricSpec, spec

ENTRIES = 2**20
"""Entries copied in one step: of parameters up to the size that fits in; then of rows that a gradient touches."""

MOSTLY = 4
"""A gradient follows rows where at most one in so many is not all 0."""

_REQUIRES_GRAD = attrgetter("requires_grad")
_HALF = (torch.float16, torch.bfloat16)


class _Plan:
    """What is kept of one optimizer's parameters, looked up once.

    Args:
        owned: Its parameters.
        entries: Entries that may be copied.
    """

    def __init__(self, owned: Owned, entries: int) -> None:
        self._owned, self._ids = weakref.ref(owned), tuple(map(id, owned.parameters))
        sizes = np.array([local(p).numel() for p in owned.parameters], dtype=np.int64)
        ordered = np.sort(sizes)
        fits = np.cumsum(ordered) <= entries
        # Those of one size are all copied or none of them.
        beyond = int(ordered[~fits][0]) if not fits.all() else None
        whole = sizes < beyond if beyond is not None else np.ones(len(sizes), dtype=np.bool_)
        self.whole, self.long = np.flatnonzero(whole), np.flatnonzero(~whole)
        self.room = entries - int(sizes[whole].sum())
        self.sizes = np.array([p.numel() for p in owned.parameters], dtype=np.float64)
        self.order = np.argsort(np.concatenate([self.whole, self.long]), kind="stable")
        self.readings = 0
        self.copies: list[Tensor] | None = None
        self.kept: KeptAll | None = None
        self._flags, self.trained = b"", np.zeros(0)
        interface = usable_interface()
        self._reader: ChangeReader | None = None
        chosen = self.of(owned, self.whole)
        if interface is not None and chosen and {type(p) for p in chosen} <= PLAIN:
            room = max(p.element_size() for p in chosen)
            self._reader = ChangeReader(interface, [p.numel() for p in chosen], room)

    def fits(self, owned: Owned) -> bool:
        """Whether these are the parameters that were looked up; a loop by hand lists them anew at each step."""
        return self._owned() is owned or self._ids == tuple(map(id, owned.parameters))

    def of(self, owned: Owned, places: npt.NDArray[np.int64]) -> Sequence[Tensor]:
        """Return the parameters at some places, which rise."""
        parameters = owned.parameters
        if len(places) == len(parameters):
            return parameters
        return [parameters[place] for place in places.data]  # a number of NumPy's takes four times as long

    def look(self, owned: Owned) -> None:
        """See which parameters are trained: 1, else 0; the same array while nothing changes."""
        flags = bytes(map(_REQUIRES_GRAD, owned.parameters))
        if flags != self._flags:
            self._flags, self.trained = flags, np.frombuffer(flags, dtype=np.uint8).astype(np.float64)

    def keep(self, step: OptimizerStep) -> None:
        """Copy what is copied, and sum up the rest."""
        chosen = self.of(step.owned, self.whole)
        self.copies = None
        if self._reader is None or not self._reader.keep(chosen):
            self.copies = [dense_entries(p).reshape(-1).clone() for p in chosen]
        self.readings += 1
        room, long = self.room, self.of(step.owned, self.long)
        every: list[tuple[Tensor, bool]] = []
        for parameter in long:
            rows, sparse = _rows(step.optimizer, parameter, room)
            room -= len(rows) * (parameter.numel() // max(parameter.shape[0], 1))
            every.append((rows, sparse))
        self.kept = KeptAll(all_local(long), every, self.readings)

    def compare(self, owned: Owned) -> tuple[Values, Values] | None:
        """Return norms before and of the changes of what was copied, ``None`` where that cannot be had."""
        chosen = self.of(owned, self.whole)
        if not chosen:
            return np.zeros(0), np.zeros(0)
        if self.copies is None:
            norms = None if self._reader is None else self._reader.compare(chosen)
            return None if norms is None else (norms[0], norms[1])
        after = [dense_entries(p).reshape(-1) for p in chosen]
        if [v.shape for v in after] != [v.shape for v in self.copies]:
            return None
        # In half precision the difference itself would be rounded.
        wide = [v.float() if v.dtype in _HALF else v for v in self.copies]
        return l2_norms(wide), l2_norms([a.to(b) - b for a, b in zip(after, wide, strict=True)])


def _rows(optimizer: object, parameter: Tensor, room: int) -> tuple[Tensor, bool]:
    """Return the rows that are likely to move, where they are few and the host knows; and whether no others do."""
    gradient, none = parameter.grad, torch.zeros(0, dtype=torch.int64)
    if gradient is None or type(parameter) not in PLAIN or not parameter.is_cpu or parameter.dim() < 2:
        return none, False
    width = max(parameter.numel() // max(parameter.shape[0], 1), 1)
    if gradient.layout is torch.sparse_coo:
        # Momentum of sparse gradients is sparse too, and moves rows of earlier steps.
        state = optimizer.state.get(parameter, {}) if isinstance(optimizer, Optimizer) else {}
        held = [v for v in state.values() if isinstance(v, Tensor) and v.layout is torch.sparse_coo]
        rows = torch.cat([torch_private.sparse_indices(entry)[0] for entry in (gradient, *held)])
        rows = torch.from_numpy(np.unique(rows))
        return (rows, True) if len(rows) * width <= room else (none, False)
    if gradient.layout is not torch.strided or gradient.is_complex() or gradient.shape != parameter.shape:
        return none, False
    found = touched_rows(gradient, min(room // width, parameter.shape[0] // MOSTLY))
    return (none, False) if found is None else (found, False)


def _weight_norms(owned: Owned) -> Drained:
    """Return the norms of parameters as they are now, of all but whole numbers."""
    held = [local(p) for p in owned.parameters]
    places = [place for place, p in enumerate(held) if p.is_floating_point() or p.is_complex()]
    if not places:
        return []
    norms = l2_norms([dense_entries(held[place]).reshape(-1) for place in places])
    return [Pending("parameter.weight_norm", owned.sites, norms, owned.where[places])]


class UpdateInstrument(Instrument):
    """Weight norms, update norms and what each parameter's learning rate is.

    Args:
        model: Returns the model, ``None`` where it is gone.
        entries: Entries that may be copied in one step.
    """

    instrument: ClassVar[str] = "updates"
    interval: ClassVar[int] = 50
    cost: ClassVar[Cost] = "P"
    by_hand: ClassVar[bool] = True

    def __init__(self, model: Callable[[], nn.Module | None], entries: int = ENTRIES) -> None:
        self._model = model
        self._entries = entries
        self._plans: weakref.WeakKeyDictionary[object, _Plan] = weakref.WeakKeyDictionary()
        self._checksums = Checksums(model)
        self._moved: set[str] = set()
        self._whole: Pending | None = None  # that every parameter has changed
        self._out: Drained = []

    @classmethod
    def make(cls, setting: Setting) -> UpdateInstrument:
        """Make one for a model."""
        return cls(weakref.ref(setting.model))

    @property
    def modules(self) -> int:
        """Parameters are read by few calls for all of them."""
        model = self._model()
        return max(0 if model is None else sum(1 for _ in model.parameters()) // 2, 1)

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = (
            "weight_norm",
            "update_norm",
            "update_ratio",
            "learning_rate",
            "trainable",
            "numel",
            "changed",
        )
        errors = ("weight_norm_error", "update_norm_error")
        return tuple(spec(f"parameter.{name}") for name in (*names, *errors))

    def before(self, step: OptimizerStep) -> None:
        """Keep the weights, or what identifies them, before the step."""
        if not self.armed:
            return
        with torch.no_grad():
            self._checksums.begin()
            plan = self._plan(step)
            # Asked for now, because the gradients were just read and what tells it lies beside them.
            plan.look(step.owned)
            plan.keep(step)

    def after(self, step: OptimizerStep) -> None:
        """Compare with the weights after the step."""
        plan = self._plans.get(step.optimizer)
        if plan is None or plan.kept is None or not plan.fits(step.owned):
            return
        with torch.no_grad():
            self._give(step.owned, plan)
        plan.copies = plan.kept = None
        self._tell_rates(step)

    def complete(self) -> Drained:
        """Give out which parameters have changed since the last record with updates; all optimizers have stepped."""
        (moved, whole), (self._moved, self._whole) = (self._moved, self._whole), (set(), None)
        return self._checksums.compare(moved, whole)

    def forget(self) -> None:
        """Forget what was measured: the step makes no record."""
        self._out = []

    def drain(self) -> Drained:
        """Give out what was measured since the last call."""
        out, self._out = self._out, []
        return out

    def last(self, owned: Sequence[Owned]) -> Drained:
        """Give out the norms of the weights as they are now, of all parameters: the state in which training ended.

        Args:
            owned: The parameters of optimizers, which are read where the model is gone.
        """
        model = self._model()
        with torch.no_grad():
            every = owned if model is None else [owned_by_hand(model, frozen=True)]
            return [norms for each in every for norms in _weight_norms(each)]

    def _plan(self, step: OptimizerStep) -> _Plan:
        known = self._plans.get(step.optimizer)
        if known is None or not known.fits(step.owned):
            known = self._plans[step.optimizer] = _Plan(step.owned, self._entries)
        return known

    def _give(self, owned: Owned, plan: _Plan) -> None:
        norms = plan.compare(owned)
        long = None if plan.kept is None else plan.kept.compare(all_local(plan.of(owned, plan.long)))
        if norms is None or long is None:
            return
        order, where = plan.order, owned.where
        weights, updates = (joined(norms[half], long[half])[order] for half in (0, 1))
        self._out.append(Pending("parameter.weight_norm", owned.sites, weights, where))
        self._out.append(Pending("parameter.update_norm", owned.sites, updates, where))
        if len(plan.long):
            for name, errors in zip(("weight_norm_error", "update_norm_error"), long[2:], strict=True):
                self._out.append(Pending(f"parameter.{name}", owned.sites, errors, where[plan.long]))
        every = len(where) == len(owned.sites)
        if isinstance(updates, np.ndarray):
            moved = updates > 0
            if every and moved.all() and plan.trained.all():
                self._whole = Pending("parameter.changed", owned.sites, plan.trained, where)
            else:
                names = owned.sites if every else [owned.sites[place] for place in where.data]
                self._moved.update(compress(names, moved.data))
        if every:
            self._out.append(Pending("parameter.trainable", owned.sites, plan.trained, where))
            self._out.append(Pending("parameter.numel", owned.sites, plan.sizes, where))
        else:
            self._describe(owned.sites)

    def _tell_rates(self, step: OptimizerStep) -> None:
        if not isinstance(step.optimizer, Optimizer):
            return
        owned = step.owned
        # An optimizer of somebody's own may have no learning rate.
        known = [g.get("lr", math.nan) for g in step.optimizer.param_groups]
        values: Tensor | npt.NDArray[np.float64]
        if all(isinstance(rate, (int, float)) for rate in known):
            values = np.array(known, dtype=np.float64)[owned.groups]
        else:
            rates = torch.stack([torch.as_tensor(rate, dtype=torch.float64) for rate in known])
            values = rates[torch.from_numpy(owned.groups).to(rates.device)]
        self._out.append(Pending("parameter.learning_rate", owned.sites, values, owned.where, nan_is_missing=True))
        added = [not g.get("decoupled_weight_decay") and g.get("weight_decay") for g in step.optimizer.param_groups]
        if any(isinstance(decay, (int, float)) and decay > 0 for decay in added):
            decays = np.array([decay if isinstance(decay, (int, float)) else 0.0 for decay in added], dtype=np.float64)
            self._out.append(Clue("parameter.added_decay", owned.sites, decays[owned.groups], owned.where))

    def _describe(self, sites: tuple[str, ...]) -> None:
        model = self._model()
        parameters = [] if model is None else list(model.parameters())
        if len(parameters) != len(sites):
            return
        trainable = torch.tensor([float(p.requires_grad) for p in parameters])
        sizes = torch.tensor([float(p.numel()) for p in parameters], dtype=torch.float64)
        self._out.append(Pending("parameter.trainable", sites, trainable))
        self._out.append(Pending("parameter.numel", sites, sizes))
