"""Gradients before they are clipped: what torch's own clipping measures, and what backward passes leave."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.function_spy import Spy
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.members import held_parameters
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned
from gradflow_export.hooks.parameter_slots import Slot, slots
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

LOOKED_AT = 4
"""Gradients that are asked whether somebody wrote to them between the last backward pass and the step."""
WATCHED_STEPS = 32
"""Steps for which norms are read after one in which gradients were written to: a limit is not reached each time."""
CLIPPED = 0.999
"""Share of a norm below which gradients were clipped, and not only rounded."""
MANY_WRITES = 1000
MOST_CALLS = 64
MOST_SETS = 16
_EXACT = (torch.float32, torch.float64)
_METRIC = "gradient.norm_before_clip"

Places = npt.NDArray[np.int64]
See = Callable[[tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class ClipCall(Pending):
    """One call of ``torch.nn.utils.clip_grad_norm_``, whose total norm is on its way to the host.

    Attributes:
        places: Numbers of the model's parameters that were given. Shape: ``[n]``.
        limit: The greatest norm that was allowed.
        dtype: Of the total norm, in which the call computed the factor.
        inside: Whether the gradients were read before it: an optimizer's step made it, or a loop without an optimizer.
    """

    places: Places = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    limit: float = 0.0
    dtype: torch.dtype = torch.float64
    inside: bool = False

    def factor(self, total: float) -> float:
        """Return what the gradients were multiplied by."""
        if self.dtype in _EXACT:
            return min(self.limit / (total + 1e-6), 1.0)
        # Half precision rounds the factor more than the norms are.
        return float(torch.clamp(self.limit / (torch.tensor(total, dtype=self.dtype) + 1e-6), max=1.0))


class ClippingInstrument:
    """Reads gradient norms before clipping.

    Where ``torch.nn.utils.clip_grad_norm_`` or ``clip_grads_with_norm_`` is called, its total norm is taken at every
    step. On sampled steps the norms at the end of the first and of the last backward pass are read: compared with the
    gradients that the optimizer uses they show what any clipping did; compared with each other, where gradients are
    accumulated, how noisy a micro-batch's gradient is. Where version counters, or on the CPU the norms themselves, show
    that gradients were changed by anything but such a call, these norms are read at every step, until for
    ``WATCHED_STEPS`` steps nothing has changed them. Where that was before the first call, as when the number of
    micro-batches is divided by, the calls alone tell what was clipped.

    Args:
        model: Gives the model, or ``None`` when it is gone.
        guard: Wraps what runs after backward passes and after calls of others.

    Attributes:
        armed: Whether the step is sampled.
        recorded: Whether it makes a record.
        stepping: Whether gradients were read that a step is about to use.
    """

    def __init__(self, model: Callable[[], nn.Module | None], *, guard: Guard = unguarded) -> None:
        self._model = model
        self._take, self._see, self._see_values = guard(self._over), guard(self._clipped), guard(self._clips_values)
        self._owners: list[int] = []
        self._reached: list[int] = []
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._watched = self._writes = self._early = 0
        self._clipping = self._changed = False
        self._parts: list[tuple[Tensor, ...]] = []
        self._calls: list[tuple[Places, float, Tensor, bool]] = []
        self._owned: Owned | None = None
        self._marks: list[tuple[Slot, int, int]] = []
        self._sets: dict[tuple[int, int, int], tuple[list[tuple[int, Slot]], Places]] = {}
        self.armed = self._stepped = self.stepping = False
        self._used = 0
        self.recorded = True

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(f"gradient.{name}") for name in ("norm_before_clip", "clip_scale", "first_norm"))

    @property
    def waits(self) -> bool:
        """Whether norms were taken in this step that are still to be compared."""
        return self._last is not None

    @property
    def found(self) -> bool:
        """Whether there is anything to give out."""
        return bool(self._calls or self._parts)

    def attach(self) -> contextlib.ExitStack:
        """Begin to see calls of torch's clipping; closing the returned stack ends it."""
        stack = contextlib.ExitStack()
        stack.callback(self.forget)
        for spy in _clip_spies(self._see, self._see_values):
            spy.install()
            stack.callback(spy.remove)
        return stack

    def note_step(self) -> None:
        """Notice that an optimizer has stepped."""
        self._stepped, self._used, self.stepping = True, len(self._calls), False

    def over(self) -> None:
        """Notice that a backward pass is over."""
        self.stepping = False
        if self._calls:
            self._calls = []
        if self._stepped:
            self._stepped, self._first, self._last, self._marks = False, None, None, []
            self._watched = max(0, self._watched - 1)
        if self.armed or (self._watched and self.recorded):
            self._take()

    def compare(self, step: OptimizerStep, norms: Tensor) -> None:
        """Compare with the gradients an optimizer is about to use.

        Args:
            step: The optimizer. What backward passes left still has the factor of a ``GradScaler``.
            norms: Norms of its gradients. Shape: ``[n]``, without the parameters that have none.
        """
        if self._first is None or self._last is None:
            return
        if step.scaled and step.loss_scale is None:
            return
        # A scaler writes to gradients itself, once.
        written = self._writes + self._look(0) > int(step.scaled)
        if self._calls and self._early:
            self._changed = True
            return
        owned = {id(p) for p in step.owned.parameters}
        counted = {id(p) for p, here in zip(step.owned.parameters, step.owned.layout.counted, strict=True) if here}
        mine = [index for index, owner in enumerate(self._owners) if owner in owned]
        if len(mine) != len(norms):
            return
        with torch.no_grad():
            # Of a parameter that lies on several ranks each tells its own part, and of replicas the first rank.
            told, early = (
                [index for index, owner in enumerate(owners) if owner in owned and owner in counted]
                for owners in (self._owners, self._reached)
            )
            parts = _chosen(self._last, mine), _chosen(self._last, told), _chosen(self._first, early)
            whole, before, first = (_total(values) for values in parts)
            if step.loss_scale is not None:
                whole, before, first = (value / step.loss_scale.to(value) for value in (whole, before, first))
            used = _total(norms)
            self._parts.append((before, first, used, whole))
            if written or (used.is_cpu and not self._calls and min(used, whole) < CLIPPED * max(used, whole)):
                self._watched = WATCHED_STEPS

    def take_back(self) -> None:
        """Forget what was compared for this step: its gradients are read again, as calls so far have left them."""
        self._parts, self._changed = [], False
        self._calls = [(*call[:3], False) for call in self._calls]

    def restrict(self, owned: Owned) -> None:
        """Give out next what concerns the parameters of one optimizer alone."""
        self._owned = owned

    def drain(self) -> Drained:
        """Give out what was found; with several optimizers, for all of the record so far, until it ends."""
        out: Drained = []
        owned, self._owned = self._owned, None
        if self._parts and not self._changed:
            with torch.no_grad():
                before, first, used, whole = (_total(torch.stack(column)) for column in zip(*self._parts, strict=True))
            values = {"norm_before_clip": before, "clip_scale": used / whole, "first_norm": first}
            out.extend(Pending(f"gradient.{name}", (RUN_SITE,), value.reshape(1)) for name, value in values.items())
        for places, limit, total, inside in self._calls:
            mine = places if owned is None else np.intersect1d(places, owned.where)
            if len(mine):
                values_of = np.array([float(total)]) if total.is_cpu else total.reshape(1)
                out.append(ClipCall(_METRIC, (RUN_SITE,), values_of, None, False, mine, limit, total.dtype, inside))
        if owned is None:
            self._calls, self._parts, self._changed = [], [], False
        return out

    def finish(self) -> None:
        """Begin a new record; what no optimizer has used yet belongs to it."""
        if self._parts or self._changed:
            self._parts, self._changed = [], False
        if self._stepped:
            self._first = self._last = None
            self._calls, self._used = self._calls[self._used :], 0

    def forget(self) -> None:
        """Forget what was read: the step makes no record."""
        self.stepping = False
        self.start_over()
        self._parts, self._changed = [], False

    def start_over(self) -> None:
        """Forget the backward passes so far: their gradients were cleared, in a step those that it has used."""
        self._first = self._last = None
        self._marks = []
        if not self.stepping:
            self._calls, self._used = [], 0

    def _clipped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the total norm of a call that has just been made."""
        parameters, limit, total = _bound(*args, **kwargs)
        # Of a tensor that is spread over ranks nobody knows the whole without a word to the others.
        if not self.recorded or type(total) is not Tensor or total.numel() != 1 or len(self._calls) >= MOST_CALLS:
            return
        places = self._places([parameters] if isinstance(parameters, Tensor) else list(parameters))
        if len(places):
            self._calls.append((places, float(limit), total.detach(), self.stepping))
            self._begin(1)
            if self._marks:
                self._writes += self._look(1)  # such a call writes once to each gradient
                self._mark([slot for slot, _, _ in self._marks])

    def _clips_values(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Notice that ``clip_grad_value_`` is about to write to gradients."""
        if self._marks and _values_are_clipped():
            self._begin()

    def _begin(self, known: int = 0) -> None:
        """Count what was written to gradients before the first call of torch's clipping, which writes itself."""
        if not self._clipping:
            self._clipping, self._early = True, self._look(known)

    def _places(self, parameters: Sequence[Tensor]) -> Places:
        """Return the numbers of these parameters in the model; looked up once for each set of them."""
        if not parameters:
            return np.zeros(0, dtype=np.int64)
        key = len(parameters), id(parameters[0]), id(parameters[-1])
        known = self._sets.get(key)
        if known is None or any(slot() is not parameters[index] for index, slot in known[0]):
            if len(self._sets) >= MOST_SETS:
                self._sets.clear()
            model, given = self._model(), {id(p): index for index, p in enumerate(parameters)}
            every = enumerate(slots(model)) if model is not None else ()
            found = [(place, given[id(p)], slot) for place, (slot, p) in every if id(p) in given]
            # Numbers of objects are used again: the first and the last are looked at each time.
            ends = [(index, slot) for _, index, slot in (*found[:1], *found[-1:])]
            known = self._sets[key] = ends, np.array([place for place, _, _ in found], dtype=np.int64)
        return known[1]

    def _over(self) -> None:
        model = self._model()
        every = [] if model is None else [(place, place[2].grad) for place in held_parameters(model)]
        held = [(place, gradient) for place, gradient in every if gradient is not None]
        if not held:
            return
        owners = [id(p) for (_, _, p), _ in held]
        with torch.no_grad():
            norms = l2_norms([gradient for _, gradient in held])
        # Later passes may reach more parameters than the first; where they find fewer, some were cleared.
        if self._first is None or not (owners == self._reached or set(self._reached) <= set(owners)):
            self._first, self._reached = norms, owners
        self._last, self._owners = norms, owners
        self._writes = self._early = 0
        self._clipping = False
        self._mark([Slot(module, key) for (module, key, _), _ in held[:: -(-len(held) // LOOKED_AT)]])

    def _mark(self, places: Sequence[Slot]) -> None:
        """Remember which gradients these parameters have now, and how often they were written to."""
        pairs = [(slot, None if (p := slot()) is None else p.grad) for slot in places]
        self._marks = [(slot, id(g), torch_private.version(g)) for slot, g in pairs if g is not None]

    def _look(self, known: int) -> int:
        """Return how often a marked gradient was written to beyond so many times; often where it is another one."""
        most = 0
        for slot, number, version in self._marks:
            p = slot()
            gradient = None if p is None else p.grad
            if gradient is None or id(gradient) != number:
                return MANY_WRITES
            most = max(most, torch_private.version(gradient) - version - known)
        return most


def _bound(parameters: Any, max_norm: float, total_norm: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, float, Any]:
    """Return the arguments of ``clip_grads_with_norm_`` that matter, however they were given."""
    return parameters, max_norm, total_norm


def _clip_spies(norm: See, values: See) -> list[Spy]:
    """Return spies on what torch's clipping looks up, and on the public name of ``clip_grads_with_norm_``.

    So each call of ``clip_grad_norm_`` and ``clip_grad_value_`` is seen, whatever name the caller knows it by.
    """
    wanted, grouping = map(inspect.unwrap, (torch.nn.utils.clip_grads_with_norm_, torch_private.grouping))
    home = sys.modules[inspect.unwrap(torch.nn.utils.clip_grad_norm_).__module__]
    inner = [(name, inspect.unwrap(value)) for name, value in vars(home).items() if callable(value)]
    spies = [Spy(home, name, norm, lists=True) for name, value in inner if value is wanted]
    spies += [Spy(home, name, values) for name, value in inner if value is grouping]
    spies.append(Spy(torch.nn.utils, "clip_grads_with_norm_", norm, lists=True))
    for spy in spies:
        spy.always = True
    return spies


def _values_are_clipped() -> bool:
    """Return whether what calls this was called by ``clip_grad_value_``."""
    wanted, frame = inspect.unwrap(torch.nn.utils.clip_grad_value_).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame is not None


def _chosen(norms: Tensor, places: list[int]) -> Tensor:
    return norms if len(places) == len(norms) else norms[places]


def _total(norms: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms.double())
    return total
