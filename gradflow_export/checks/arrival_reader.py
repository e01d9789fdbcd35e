"""What lies in ``.grad`` when a gradient arrives, and whether it is still there when the optimizer steps."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import unserializable_hook

from gradflow_export.autograd_graph.loss_shape import factor_of
from gradflow_export.autograd_graph.nodes import Op, kind_of, sources
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.optimizer_steps import OptimizerStep
from gradflow_export.hooks.parameter_slots import Slot, slots
from gradflow_export.hooks.readings import Clue, stack_scalars
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.metrics.arrays.checksum import checksum
from gradflow_export.metrics.arrays.samples import even_sample

FOLLOWED = 4
"""Parameters with a hook while the instrument is armed, besides one of each optimizer that has none among them."""
BARE = 64
"""Of the parameters that had no gradient at the last step, how many are followed besides, in turns."""
PLAYERS = 4
"""Optimizers of which one more parameter is followed, at most."""
ENTRIES = 256
"""Evenly spaced entries of each that are looked at."""
MOST_PASSES = 64
"""Passes that are kept of a parameter that no update by hand moves."""
NEAR = 4
"""Operations at the end of a loss among which it may be divided by the number of micro-batches."""


class _Pass(NamedTuple):
    """A backward pass that reached a parameter: which one, when, what it brought, what it found, and what it left."""

    task: int
    order: int
    came: Tensor
    found: Tensor | None
    left: Tensor | None = None


class _Taken(NamedTuple):
    """A step of another optimizer: how many passes there were before it, what it holds, and when it got which pass."""

    passes: int
    holds: frozenset[int]
    orders: dict[int, int]


class _Arrivals:
    """What came to one parameter since its optimizer stepped last."""

    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.taken: list[_Taken] = []
        self.coming: tuple[Tensor, Tensor | None] | None = None
        self.version: int | None = None
        self.bits: Tensor | None = None
        self.later: list[_Pass] = []


class ArrivalInstrument(Reader):
    """Follows a few parameters through the backward passes between two steps of their optimizer, while armed.

    A gradient that no pass since the last step found cleared is a sum over steps. One that came and is not there at
    the step was cleared in between. Both are known by the entries, so that clearing by ``None`` and by zeros are alike.
    Parameters that have no gradient at a step are followed next time: one may have come, and been taken away.

    A pass of another player is known by its optimizer, which steps before the next pass, by that player's parameters,
    which the pass reaches after this one, and by the next pass, which does not reach them: a critic that an actor's
    loss went through. What two losses leave in a layer below both is their sum, and meant.

    Micro-batches that were to be added up are known by losses that are divided by their number; where each pass found
    nothing to add to, and what the last one brought is what the optimizer uses, those before it were thrown away.

    Where no optimizer steps, an update may have been followed by a clearing when it is found: what the last pass left
    is what it used.

    Within a step that calls a closure several times, what a pass finds is of earlier weights where these have changed
    since the pass before it; micro-batches of one call are passes at the same weights. Of a closure that is called once
    it is of earlier steps.
    """

    by_hand: ClassVar[bool] = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._updates_by_hand = False
        self._take, self._keep = self._guard(self._arrives), self._guard(self._accumulated)
        self._seen: dict[int, _Arrivals] = {}
        self._order = 0
        self._last = 0
        self._whole: set[int] | None = None
        self._one_of: dict[int, Slot] = {}
        self._bare: set[int] = set()
        self._turn = 0
        self._parts: list[float] = []

    def listen(self, until: contextlib.ExitStack) -> None:
        """Put hooks on a few parameters."""
        model = self._model()
        found = [] if model is None else [(slot, p) for slot, p in slots(model) if _can_follow(p)]
        chosen = found[:: -(-len(found) // FOLLOWED) or 1]
        known = {id(p) for _, p in chosen}
        bare = [(slot, p) for slot, p in found if id(p) in self._bare - known]
        stride, self._turn = -(-len(bare) // BARE) or 1, self._turn + 1
        chosen += bare[self._turn % stride :: stride]
        others = [(one, one()) for key, one in list(self._one_of.items())[:PLAYERS] if key not in known]
        chosen += [(slot, p) for slot, p in others if p is not None and _can_follow(p)]
        if self._last:  # of the others it is not known what came since their last step
            self._whole = {self._last}
        self._parts = []
        until.callback(self._seen.clear)
        for slot, parameter in chosen:
            hook = unserializable_hook(partial(self._take, slot))  # type: ignore[no-untyped-call]
            until.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            until.callback(parameter.register_post_accumulate_grad_hook(self._keep).remove)  # type: ignore[no-untyped-call]

    def see(self, root: Tensor) -> None:
        """Note by what a loss is divided."""
        if self.armed:
            self._parts.append(_divided_by(root))

    def before(self, step: OptimizerStep) -> None:
        """Compare what arrived with what is there when an optimizer steps; with a closure nothing has arrived yet."""
        self._last = id(step.optimizer)
        whole = self._whole is None or self._last in self._whole
        if self._whole is not None:
            self._whole.add(self._last)
        if not self._seen:
            return
        if step.closure:  # what came before it is no part of the step
            self._forget(step)
            return
        self._take_notice(step)
        self._bare.difference_update(map(id, step.owned.parameters))
        self._bare.update(id(p) for p in step.owned.parameters if p.grad is None)
        where, stale, kept, foreign, dropped = [], [], [], [], []
        parts, self._parts = self._parts, []
        with torch.no_grad():
            for place, parameter in zip(step.owned.where, step.owned.parameters, strict=True):
                seen = self._seen.pop(id(parameter), None)
                if seen is None or not seen.passes or not whole:
                    continue
                came = _brought(seen.passes).sum()
                there = came.new_zeros(()) if parameter.grad is None else _size(parameter.grad)
                where.append(place)
                stale.append(_found(seen.passes).amin() / there)
                kept.append(there / came)
                others = self._left_by_others(seen)
                foreign.append(came.new_zeros(()) if others is None else others / there)
                dropped.append(_dropped(seen, there, parts))
        self._give(step, where, stale=stale, kept=kept, foreign=foreign, dropped=dropped)

    def after(self, step: OptimizerStep) -> None:
        """Compare what the passes of a closure, or of a step without an optimizer, found with what they left."""
        self._updates_by_hand = by_hand = not isinstance(step.optimizer, Optimizer)
        if not self._seen:
            return
        where, stale, kept, waiting = [], [], [], dict[int, _Arrivals]()
        with torch.no_grad():
            for place, parameter in zip(step.owned.where, step.owned.parameters, strict=True):
                seen = self._seen.get(id(parameter)) if step.closure or by_hand else None
                if seen is None or not seen.passes:
                    continue
                if by_hand and _rests(parameter, seen):  # its turn is still to come
                    del seen.passes[:-MOST_PASSES]
                    waiting[id(parameter)] = seen
                    continue
                there = seen.passes[-1].left
                if not by_hand:
                    there = None if parameter.grad is None else _size(parameter.grad)
                if there is None:
                    continue
                where.append(place)
                stale.append(_found(seen.later or seen.passes).amin() / there)
                kept.append(there / _brought(seen.passes).sum())
        self._forget(step)
        self._seen.update(waiting)
        self._give(step, where, stale=stale, kept=kept)

    def skip(self, step: OptimizerStep) -> None:
        """Forget the gradients of a step that a gradient scaler skipped."""
        self._forget(step)
        self._out = []

    def _forget(self, step: OptimizerStep) -> None:
        self._parts = []
        for parameter in step.owned.parameters:
            self._seen.pop(id(parameter), None)

    def _take_notice(self, step: OptimizerStep) -> None:
        """Let the parameters that this optimizer does not hold know that it steps, and with which passes."""
        held = {id(p): p for p in step.owned.parameters}
        if held and not self._one_of.keys() & held.keys():
            first, model = step.owned.parameters[0], self._model()
            place = None if model is None else next((slot for slot, p in slots(model) if p is first), None)
            if place is not None:
                self._one_of[id(first)] = place
        mine = frozenset(held).intersection(self._seen)
        orders: dict[int, int] = {}
        for key in mine:
            for one in self._seen[key].passes:
                orders[one.task] = min(one.order, orders.get(one.task, one.order))
        for key, seen in self._seen.items():
            if key not in mine and seen.passes and orders:
                seen.taken.append(_Taken(len(seen.passes), mine, orders))

    def _left_by_others(self, seen: _Arrivals) -> Tensor | None:
        """Return the size of what a pass of another player left there, ``None`` where none did or it was cleared."""
        for turn, (passes, holds, orders) in enumerate(seen.taken):
            through = any(one.task in orders and one.order < orders[one.task] for one in seen.passes[:passes])
            again = {task for taken in seen.taken[turn + 1 :] for task in taken.orders}
            own = [one for one in seen.passes[passes:] if one.task not in again]
            theirs = {one.task for key in holds if key in self._seen for one in self._seen[key].passes}
            shared = any(one.task in theirs or one.task in orders for one in own)
            if through and own and not shared and own[0].found is not None:
                return own[0].found
        return None

    def _give(self, step: OptimizerStep, where: list[np.int64], **told_of: list[Tensor]) -> None:
        for name, values in told_of.items() if where else ():
            fact, places = f"parameter.{name}_gradient", np.asarray(where)
            self._out.append(Clue(fact, step.owned.sites, stack_scalars(values), places, nan_is_missing=True))

    def _arrives(self, slot: Slot, gradient: Tensor | None) -> None:
        parameter = slot()
        if (
            parameter is None
            or gradient is None
            or gradient.layout is not torch.strided
            or torch_private.is_batched(gradient)
            or torch.compiler.is_compiling()
        ):
            return
        with torch.no_grad():
            found = None if parameter.grad is None else _size(parameter.grad)
            self._seen.setdefault(id(parameter), _Arrivals()).coming = _size(gradient), found

    def _accumulated(self, parameter: Tensor) -> None:
        """Count what arrived; what ``torch.autograd.grad`` was asked for arrives and is not accumulated."""
        seen = self._seen.get(id(parameter))
        if seen is None or seen.coming is None:
            return
        self._order += 1
        left = None
        if self._updates_by_hand and parameter.grad is not None:
            with torch.no_grad():
                left, seen.bits = _size(parameter.grad), checksum(parameter)
        seen.passes.append(_Pass(torch_private.backward_number(), self._order, *seen.coming, left))
        if seen.version not in {None, torch_private.version(parameter)}:
            seen.later.append(seen.passes[-1])
        seen.coming, seen.version = None, torch_private.version(parameter)


def _can_follow(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.numel() > 0 and not hasattr(parameter, "placements")


def _rests(parameter: Tensor, seen: _Arrivals) -> bool:
    """Whether a parameter is as it was at its last pass."""
    now = checksum(parameter)
    return seen.bits is None or now is None or torch.equal(now, seen.bits)


def _divided_by(root: Tensor) -> float:
    """Return the number that a loss is divided by, 1 where it is not."""
    node = root.grad_fn
    for _ in range(NEAR):
        known = sources(node)
        if kind_of(node) not in {Op.DIV, Op.MUL} or len(known) != 1:
            break
        factor = factor_of(node)
        if 0 < factor < 1 / 1.5:  # more is what a gradient scaler multiplies by
            return 1.0 / factor
        node = known[0]
    return 1.0


def _dropped(seen: _Arrivals, there: Tensor, parts: list[float]) -> Tensor:
    """Return how many passes of micro-batches brought what is not there at the step; 0 where none was to be added.

    NaN where they brought nothing, as to units that are dead.
    """
    count = len(seen.passes)
    if count < 2 or seen.later or len(parts) != count or any(round(part) != count for part in parts):
        return there.new_zeros(())
    same, came = torch.isclose(there, seen.passes[-1].came, rtol=1e-4, atol=0.0), _brought(seen.passes[:-1]).sum()
    return torch.where(came > 0, (same & (_found(seen.passes[1:]) == 0).all()) * (count - 1.0), torch.nan)


def _brought(passes: list[_Pass]) -> Tensor:
    """Return the sizes of what passes brought. Shape: ``[passes]``."""
    return torch.stack([one.came for one in passes])


def _found(passes: list[_Pass]) -> Tensor:
    """Return the sizes of what passes found, 0 where it was cleared. Shape: ``[passes]``."""
    return torch.stack([one.came.new_zeros(()) if one.found is None else one.found for one in passes])


def _size(gradient: Tensor) -> Tensor:
    """Return the mean size of evenly spaced entries, in float64. Shape: scalar."""
    return even_sample(gradient, ENTRIES).abs().double().mean()
