"""Tells when an optimizer that owns parameters of the model steps, and which parameters it owns."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.members import member_parameters
from gradflow_export.hooks.optimizer_hooks import PassedSteps, listen
from gradflow_export.hooks.shard_layout import Layout, batches_of, layout_of


@dataclass(frozen=True)
class Owned:
    """The watched parameters that one optimizer updates.

    Attributes:
        sites: Names of all parameters of the model, trainable or not, in registration order.
        where: Indices into ``sites`` of those this optimizer owns, rising. Shape: ``[n]``.
        parameters: The parameters themselves, in the same order.
        groups: The optimizer's group number of each. Shape: ``[n]``.
        batches: How many different batches the ranks of a distributed run see.
        outside: Whether the optimizer owns parameters that are not the model's too.
    """

    sites: tuple[str, ...]
    where: npt.NDArray[np.int64]
    parameters: tuple[Tensor, ...]
    groups: npt.NDArray[np.int64]
    batches: int = 1
    outside: bool = False

    @functools.cached_property
    def places(self) -> frozenset[int]:
        """The indices as a set."""
        return frozenset(map(int, self.where))

    @functools.cached_property
    def layout(self) -> Layout:
        """How these parameters lie on the ranks of a distributed run."""
        return layout_of(self.sites, self.where, self.parameters, self.batches)


@dataclass(frozen=True)
class OptimizerStep:
    """One call of ``optimizer.step``.

    Attributes:
        optimizer: The optimizer that steps, or what stands for it in a loop without one.
        owned: The watched parameters it owns.
        closure: Whether the backward pass runs inside the step, so that gradients are known only afterwards.
        scale: What gradients must be divided by (a fused optimizer under ``GradScaler``), else ``None``.
        scaled: Whether a ``GradScaler`` called the step, so that backward passes before it may have been thrown away.
        loss_scale: What that scaler multiplied losses by, ``None`` without one.
    """

    optimizer: object
    owned: Owned
    closure: bool
    scale: Tensor | None
    scaled: bool = False
    loss_scale: Tensor | None = None


@dataclass
class _Known:
    """What is known of one optimizer, and the step that has begun and not ended.

    An optimizer whose ``step`` calls ``super().step()``, or that of another one which it wraps, runs the hooks of both;
    only the outer ones count.
    """

    signature: tuple[tuple[int, int], ...]
    owned: Owned | None
    step: OptimizerStep | None = None
    depth: int = 1


Listener = Callable[[OptimizerStep], None]


def names_of(model: nn.Module) -> dict[int, tuple[int, str]]:
    """Return ``{id(parameter): (place, name)}`` in registration order; shared parameters have one name."""
    return {id(p): (place, name) for place, (name, p) in enumerate(member_parameters(model))}


def owned_by_hand(model: nn.Module, *, frozen: bool = False) -> Owned:
    """Return all trainable parameters, or frozen ones too, for a loop that has no optimizer object."""
    named = [(site_name(name), p) for name, p in model.named_parameters()]
    where = np.array([place for place, (_, p) in enumerate(named) if frozen or p.requires_grad], dtype=np.int64)
    return Owned(
        tuple(n for n, _ in named), where, tuple(named[i][1] for i in where), np.zeros_like(where), batches_of(model)
    )


_ONLY_READ = frozenset((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))


def only_reads(optimizer: object) -> bool:
    """Return whether a step is known to leave gradients as they are, and nobody hooks into it."""
    if type(optimizer) not in _ONLY_READ or not isinstance(optimizer, Optimizer):
        return False
    if torch_private.has_step_hooks(optimizer):
        return False
    # Those for many tensors at once write to gradients: momentum by Nesterov, the scale of a gradient scaler.
    several = (group.get(way) for group in optimizer.param_groups for way in ("foreach", "fused", "differentiable"))
    return not any(several)


_CALLS_BETWEEN = 13


def calling_scaler() -> Any:
    """Return the ``GradScaler`` that is calling, else ``None``; a default optimizer hears nothing of steps it skips."""
    code = torch.amp.GradScaler.step.__code__
    frame = sys._getframe(1)  # noqa: SLF001 - no public form
    for _ in range(_CALLS_BETWEEN):
        if frame.f_code is code:
            return frame.f_locals.get("self")
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _none() -> None:
    """Stand for a reference to nothing."""


def _running(optimizer: Optimizer) -> int:
    """Return how many steps of an optimizer are on the stack; asked only when one has begun and not ended."""
    home, steps = sys.modules[Optimizer.__module__].__file__, 0
    frame = sys._getframe(1).f_back  # noqa: SLF001 - no public form
    while frame is not None:
        steps += frame.f_code.co_filename == home and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps


class OptimizerSteps:
    """Process-wide optimizer hooks, narrowed to optimizers that own a parameter of one model.

    Parameters are known by identity, so optimizers made before or after watching, wrapped, or with several groups all
    count, and those of other models do not.

    Args:
        model: Returns the model, ``None`` where it is gone.
        before: Called as a step begins.
        after: Called once it has ended.
        only: The optimizers that count; all where it is ``None``.
        skipped: Called instead of ``after`` for a step that a gradient scaler skipped.
        foreign: Called with an optimizer that steps and owns no parameter of the model.
        gone: Called with its parameters once an optimizer is gone, in whatever thread lets go of it.
        guard: Wraps the hooks.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        before: Listener,
        after: Listener,
        only: Sequence[Optimizer] | None = None,
        *,
        skipped: Listener,
        foreign: Callable[[Optimizer], None] = lambda _optimizer: None,
        gone: Callable[[Owned], None] = lambda _owned: None,
        guard: Guard = unguarded,
    ) -> None:
        self._model = model
        self._foreign, self._gone = foreign, gone
        self._before, self._after, self._skipped = before, after, skipped
        self._guard = guard
        self._only = None if only is None else weakref.WeakSet(only)
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._owned: dict[weakref.ref[Optimizer], Owned] = {}
        self.strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stateless: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._outer: Callable[[], Optimizer | None] = _none
        self.skipped = 0

    def attach(self, passed: PassedSteps | None = None) -> contextlib.ExitStack:
        """Begin to listen; closing the returned stack ends it.

        Args:
            passed: Steps that are only counted.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._owned.clear)
            stack.callback(listen(self._guard(self._pre), self._guard(self._post), passed))
            return stack.pop_all()

    def _know(self, optimizer: Optimizer) -> _Known:
        groups = optimizer.param_groups
        signature = tuple([(len(g["params"]), id(g["params"][-1]) if g["params"] else 0) for g in groups])
        known = self._known.get(optimizer)
        if known is None and not optimizer.state:
            self._stateless.add(optimizer)
        if known is None or known.signature != signature:
            model = self._model()
            known = _Known(signature, None if model is None else self._match(model, groups))
            self._known[optimizer] = known
            (self.strangers.add if known.owned is None else self.strangers.discard)(optimizer)
            if known.owned is not None:
                self._owned[weakref.ref(optimizer, self._forget)] = known.owned
        return known

    @property
    def owned(self) -> tuple[Owned, ...]:
        """The parameters of each optimizer that has stepped and is still there."""
        return tuple(self._owned.copy().values())  # one may go meanwhile

    def _forget(self, optimizer: weakref.ref[Optimizer]) -> None:
        owned = self._owned.pop(optimizer, None)
        if owned is not None:
            self._gone(owned)

    def began_stateless(self) -> bool:
        """Return whether an optimizer of the model that keeps a state, as of now, had none at its first step."""
        mine = [each for each in list(self._stateless) if each not in self.strangers]
        return any(any(each.state.values()) for each in mine)

    def layouts(self) -> list[Layout]:
        """Return how all parameters of the model lie on the ranks of a distributed run, now."""
        model = self._model()
        return [] if model is None else [owned_by_hand(model, frozen=True).layout]

    @staticmethod
    def _match(model: nn.Module, groups: list[dict[str, Any]]) -> Owned | None:
        names = names_of(model)
        mine = [(names[id(p)][0], number, p) for number, g in enumerate(groups) for p in g["params"] if id(p) in names]
        found = sorted(mine, key=lambda entry: entry[0])
        if not found:
            return None
        return Owned(
            tuple(name for _, name in names.values()),
            np.array([place for place, _, _ in found], dtype=np.int64),
            tuple(p for _, _, p in found),
            np.array([number for _, number, _ in found], dtype=np.int64),
            batches_of(model),
            any(id(p) not in names and p.requires_grad for g in groups for p in g["params"]),
        )

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._only is not None and optimizer not in self._only:
            self.strangers.add(optimizer)
            self._foreign(optimizer)
            return
        known = self._know(optimizer)
        if known.owned is None:
            self._foreign(optimizer)
            return
        if known.step is not None and _running(optimizer) > 1:
            known.depth += 1
            return
        outer = self._outer()
        if outer is not None and outer is not optimizer and self._takes_part(known.owned, outer):
            return
        # The hook's args begin with the optimizer itself.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        scale = getattr(optimizer, "grad_scale", None)
        scale = scale if isinstance(scale, Tensor) else None
        known.depth = 1
        scaler = calling_scaler()
        # A scaler calls fused optimizers itself, with this; without a scale, it has divided the gradients already.
        scaled = scaler is not None or isinstance(getattr(optimizer, "found_inf", None), Tensor)
        factor = scale if scaler is None else torch_private.loss_scale(scaler)
        known.step = step = OptimizerStep(optimizer, known.owned, closure, scale, scaled=scaled, loss_scale=factor)
        self._outer = weakref.ref(optimizer)
        self._before(step)

    def _takes_part(self, owned: Owned, outer: Optimizer) -> bool:
        """Whether a step is made inside that of another optimizer of the same parameters, which wraps this one."""
        whole = self._known[outer]
        return whole.step is not None and owned.places <= whole.step.owned.places and _running(outer) > 0

    def _post(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        known = self._known.get(optimizer)
        if known is None or known.step is None:
            return
        known.depth -= 1
        if known.depth:
            return
        step, known.step = known.step, None
        # A fused optimizer under GradScaler runs its hooks on skipped steps too, and says so here. Looking at it waits
        # for the device, which the fused kernel on CPU has already done; on an accelerator the scaler itself reads it.
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(torch.any(found_inf)):
            self.skipped += 1
            self._skipped(step)
            return
        self._after(step)
