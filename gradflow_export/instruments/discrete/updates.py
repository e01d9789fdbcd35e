"""What arrives of an update in the weights that forward passes use: on grids, in coarse formats, by phase and size."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.forward_inputs import ForwardUse
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Cost, Instrument, Setting
from gradflow_export.instruments.discrete.declared_grids import Grids, check_grids, check_intended, is_store
from gradflow_export.instruments.discrete.expected_update import Meant, master_of, meant_update
from gradflow_export.instruments.discrete.nodes import ROWS, Moved, Pairs, check_pairs
from gradflow_export.instruments.discrete.used_updates import METRICS, SeenUpdate, SeenUpdates, real
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.samples import row_sample
from gradflow_export.metrics.grids import on_grid
from gradflow_export.records.catalog import MetricSpec, spec

if TYPE_CHECKING:
    from typing import TypeGuard

ENTRIES = 2**19
"""Entries looked at in one step, shared out evenly among the tensors; whole rows of each."""

AT_ONCE = 100
"""Parameters scored in one step, so that its cost is bounded; the others have their turn at the next ones."""


def is_coarse(parameter: Tensor) -> bool:
    """Return whether a number format is coarser than float32: bfloat16, float16, float8, complex32."""
    return parameter.dtype is torch.complex32 or (parameter.is_floating_point() and parameter.element_size() < 4)


@dataclass(frozen=True)
class _Entry:
    """One tensor whose update is not complete: the next forward pass has not used it yet.

    ``meant`` takes the gradient that was used, once the step has ended, and turns into ``expected``.
    """

    place: int
    before: Tensor
    gradient: Tensor | None = None
    meant: Meant | None = None
    has_master: bool = False
    expected: Tensor | None = None


class DiscreteInstrument(Instrument):
    """Compares the weights that consecutive forward passes use, while it is armed.

    What a step meant is known when it ends; what came of it only when the next forward pass has used the weights,
    because a grid may be laid over them inside the step, after it, or in the forward pass. Until then the step's record
    waits: see :attr:`waits` and :meth:`settle`.

    Args:
        model: Where the tensors are; nothing of it is kept.
        pairs: Names of tensors that belong together, phase first, magnitude second; ``"rows"`` takes the direction and
            the length of each row of every real weight, and scores every parameter's update. ``None`` takes complex
            parameters alone, and scores those in formats coarser than float32.
        grids: Width of the grid that weights are rounded to when they are used, for all of them or by name. A tensor of
            whole numbers, which may be a buffer, holds places on its grid. Without one, the grid is the number format.
        entries: How many entries to look at in one step.
        code: Knows whether the model is compiled.
        guard: Wraps the hook.

    Raises:
        ArgumentError: A pair or a grid names no tensor, a pair two of different shapes, or a width is not above 0.
        ArgumentTypeError: ``pairs`` holds something other than two names, or a width is no number.
    """

    instrument: ClassVar[str] = "discrete"
    interval: ClassVar[int] = 100
    cost: ClassVar[Cost] = "P"
    takes: ClassVar[str] = "intended"

    def __init__(
        self,
        model: nn.Module,
        *,
        pairs: Pairs = None,
        grids: Grids = None,
        entries: int = ENTRIES,
        code: CompiledCode | None = None,
        guard: Guard = unguarded,
    ) -> None:
        named = {site_name(name): (name, parameter) for name, parameter in model.named_parameters()}
        stores = {site_name(name): (name, b) for name, b in model.named_buffers() if is_store(b)}
        known = {site: tensor for site, (_, tensor) in {**stores, **named}.items()}
        self._all_rows = isinstance(pairs, str) and pairs == ROWS
        magnitude_of = dict(check_pairs(known, pairs))
        paired = {*magnitude_of, *magnitude_of.values()}
        steps = check_grids(model, grids, tuple(paired))
        self._sites = tuple(named)
        every = (*self._sites, *stores)
        self._whole = {place: n for place, n in enumerate(every) if is_store(known[n])}
        rows = {n for n in self._sites if self._all_rows and known[n].is_floating_point() and known[n].dim() > 1}
        complexes = {n for n in self._sites if known[n].is_complex()}
        nodes = ({*rows, *complexes, *steps} - paired) | set(magnitude_of)
        scored = {n for n in self._sites if self._all_rows or n in steps or is_coarse(known[n])}
        self._scored = {every.index(n) for n in scored} - self._whole.keys()
        self._wanted = {every.index(n) for n in {*scored, *nodes, *paired}}
        # Nodes belong together, and rows were asked for: only parameters that are scored alone can wait.
        self._turns = max(-(-len(self._wanted) // AT_ONCE), 1) if not (self._all_rows or nodes) else 1
        self._turn: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._share = max(entries // max(len(self._wanted), 1), 1)
        self._steps = {every.index(n): step for n, step in steps.items()}
        self._rounding = {p: torch.finfo(known[every[p]].dtype).eps for p in self._steps.keys() - self._whole.keys()}
        self._updates = SeenUpdates(every, len(self._sites), known, magnitude_of, nodes)
        raw = {**stores, **named}
        self._use = ForwardUse(
            model, {raw[every[place]][0]: place for place in sorted(self._wanted)}, self._used, code=code, guard=guard
        )
        self._armed = False
        self._open: weakref.WeakKeyDictionary[object, list[_Entry]] = weakref.WeakKeyDictionary()
        self._seen: dict[int, Tensor] = {}
        self._intended: dict[int, Tensor] = {}
        self._waiting: dict[int, _Entry] = {}
        self._done: dict[int, SeenUpdate] = {}
        self._out: Drained = []

    @classmethod
    def make(cls, setting: Setting) -> DiscreteInstrument:
        """Make one for a model."""
        pairs, grids, guard = setting.given.get("pairs"), setting.given.get("grids"), setting.part(cls.instrument)
        return cls(setting.model, pairs=pairs, grids=grids, code=setting.code, guard=guard)

    @property
    def modules(self) -> int:
        """How many tensors are looked at in one step; 0 when none is coarse, complex or on a grid, nor asked for."""
        return -(-len(self._wanted) // self._turns)

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(name) for name in METRICS)

    @property
    def waits(self) -> bool:
        """Whether there are updates whose step's record must not be handed over before :meth:`settle`."""
        return bool(self._waiting or self._done)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack forgets everything."""
        stack = self._use.attach()
        stack.callback(self._close)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to look at steps, or with ``on=False`` at no more; updates that wait are still followed."""
        self._armed = on
        if not on:
            self._seen.clear()
            self._intended.clear()
        self._use.arm(on=on or bool(self._waiting))

    def settle(self) -> None:
        """Complete the updates that wait by the weights as they are now; :meth:`drain` then gives all of them out."""
        with torch.no_grad():
            for place in list(self._waiting):
                tensor = self._use.tensor(place)
                if _is_readable(tensor):
                    self._complete(place, self._copied(tensor))
            self._waiting.clear()
            done, self._done = self._done, {}
            self._out.extend(self._updates.give(done))
        if not self._armed:
            self._use.arm(on=False)

    def drain(self) -> Drained:
        """Give out what was settled since the last call."""
        out, self._out = self._out, []
        return out

    def forget(self) -> None:
        """Forget what was settled, and weights that were seen: the step makes no record."""
        self._out = []
        self._seen.clear()
        self._intended.clear()

    def take(self, updates: Mapping[str, Tensor]) -> None:
        """Take the updates that a rule of the user's own means for tensors of whole numbers, before the step ends.

        Args:
            updates: By name, in the unit of the grid's width. Shape of each: that of the tensor.

        Raises:
            ArgumentError: A name is no tensor of whole numbers that is looked at, or a shape is another one.
        """
        places = {self._whole[place]: place for place in self._wanted & self._whole.keys()}
        check_intended(updates, {name: self._use.tensor(place) for name, place in places.items()})
        if self._armed:
            with torch.no_grad():
                self._intended.update((places[name], self._copied(update)) for name, update in updates.items())

    def _close(self) -> None:
        self._armed = False
        self._open.clear()
        self._waiting.clear()
        self._done.clear()
        self.forget()

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of some rows in double precision, complex where the tensor is."""
        rows = row_sample(tensor, self._share)
        wide: Tensor = rows.to(torch.complex128 if rows.is_complex() else torch.float64, copy=True)
        return wide.resolve_conj()

    def _take_real(self, tensor: Tensor) -> Tensor:
        return real(self._copied(tensor))

    def _used(self, places: tuple[int, ...]) -> None:
        """Take the weights that a forward pass has just used, for the step before and for the one to come."""
        # Where parameters take turns nobody knows yet whose turn the next step is.
        look = self._armed and self._turns == 1
        with torch.no_grad():
            for place in places:
                tensor = self._use.tensor(place) if look or place in self._waiting else None
                if _is_readable(tensor):
                    taken = self._copied(tensor)
                    self._complete(place, taken)
                    if look:  # the last pass before a step counts: what came before it may have been another start
                        self._seen[place] = taken

    def _complete(self, place: int, after: Tensor) -> None:
        """Close the update of a tensor that waits for the weights of the next forward pass."""
        entry = self._waiting.pop(place, None)
        if entry is None or entry.before.shape != after.shape:
            return
        before, between, step = entry.before, None, self._steps.get(place)
        if step is not None and place in self._whole:
            before, after = before * step, after * step
        elif step is not None:
            before, after, between = on_grid(before, after, step, self._rounding[place])
        moved = Moved(before, after, entry.gradient)
        self._done[place] = SeenUpdate(moved, entry.expected, entry.has_master, step, between)

    def before(self, step: OptimizerStep) -> None:
        """Copy some rows of weights and gradients before an optimizer steps."""
        if not isinstance(step.optimizer, Optimizer):
            return
        with torch.no_grad():
            for parameter, place in zip(step.owned.parameters, step.owned.where, strict=True):
                if int(place) in self._waiting:  # no hook reported a forward pass: it used them as they are
                    self._complete(int(place), self._copied(parameter))
            if self._armed:
                self._open[step.optimizer] = list(self._look(step, step.optimizer))

    def skip(self, step: OptimizerStep) -> None:
        """Forget them: the step was skipped."""
        self._open.pop(step.optimizer, None)

    def _look(self, step: OptimizerStep, optimizer: Optimizer) -> Iterator[_Entry]:
        owned, turn = step.owned, self._turn.get(optimizer, 0)
        self._turn[optimizer] = turn + 1
        for parameter, at, number in zip(owned.parameters, owned.where, owned.groups, strict=True):
            place = int(at)
            if (place + turn) % self._turns or place not in self._wanted or not _is_readable(parameter):
                continue
            gradient = None if step.closure else _dense(parameter.grad)
            if gradient is None and not step.closure:
                continue
            used = None if gradient is None else self._copied(gradient)
            if used is not None and step.scale is not None:
                used = used / step.scale.to(used.device, torch.float64)
            group, scored = optimizer.param_groups[number], place in self._scored
            meant = meant_update(optimizer, parameter, group, self._take_real) if scored else None
            seen = self._seen.get(place)
            before = self._copied(parameter) if seen is None else seen
            yield _Entry(place, before, used, meant, master_of(optimizer, parameter) is not None)

    def after(self, step: OptimizerStep) -> None:
        """Learn what the step meant; what came of it the next forward pass shows."""
        by_place = dict(zip(map(int, step.owned.where), step.owned.parameters, strict=True))
        with torch.no_grad():
            if isinstance(step.optimizer, Optimizer):
                entries = self._open.pop(step.optimizer, [])
            else:  # a step by hand was reported when it was over
                entries = [_Entry(place, seen) for place, seen in self._seen.items() if place in by_place]
            for entry in entries:
                self._wait(entry, by_place[entry.place])
            for place in self._whole.keys() & self._seen.keys():
                seen, expected = self._seen[place], self._intended.pop(place, None)
                self._waiting.setdefault(place, _Entry(place, seen, expected=expected))
            self._intended.clear()
            for place in (*by_place, *self._whole):
                self._seen.pop(place, None)

    def _wait(self, entry: _Entry, parameter: Tensor) -> None:
        gradient = entry.gradient
        if gradient is None:  # the closure has filled it in since
            arrived = _dense(parameter.grad)
            if arrived is None:
                return
            gradient = self._copied(arrived)
        if gradient.shape == entry.before.shape:
            expected = None if entry.meant is None else entry.meant(real(gradient))
            self._waiting[entry.place] = replace(entry, gradient=gradient, meant=None, expected=expected)


def _is_readable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.layout is torch.strided and local(tensor).numel() > 0


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is not None and gradient.layout is torch.strided else None
