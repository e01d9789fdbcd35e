"""Stands inside a process between a training script and torch: counts its steps, reads its losses, applies changes.

Only names that are public are replaced, in a process that ends with the run: ``nn.Module.__call__``,
``torch.autograd.backward``, ``functional.dropout``, ``DataLoader.__iter__``, ``torch.compile`` and those of
:mod:`~gradflow_export.experiments.replaced_functions`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from gradflow_export.experiments.facts import Facts
from gradflow_export.experiments.interventions import FrozenWeights, Intervention
from gradflow_export.experiments.mending.penalties import Penalties, without
from gradflow_export.experiments.replaced_functions import OWN, ReplacedFunctions

MEASURED = 8
"""Steps over which the effect is measured."""


class Course:
    """The losses of one run, step by step.

    Attributes:
        losses: One number for each step: over the places of the script that call backward, the sum of each one's mean.
        places: Those places.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.places: set[tuple[str, int]] = set()
        self._current: dict[tuple[str, int], list[float]] = {}

    def add(self, place: tuple[str, int], loss: float) -> None:
        """Take in the loss of a backward pass."""
        self.places.add(place)
        self._current.setdefault(place, []).append(loss)

    def step(self) -> None:
        """A step has ended."""
        if self._current:
            self.losses.append(sum(sum(each) / len(each) for each in self._current.values()))
            self._current = {}

    @property
    def finite(self) -> bool:
        """Whether every loss is a number."""
        return all(map(math.isfinite, self.losses))


class Patient:
    """A training script as its process sees it.

    Args:
        begin: Called once, when a model is called with gradients or a loss is differentiated for the first time after
            ``skipped`` steps; returns the changes of this run. A process that runs others returns from it in each.
        end: Called with this object when the run is over; must not return.
        skipped: Optimizer steps that belong to models which the script trains before.
        measure: Read after each step, where the user named a yardstick.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[Sequence[Intervention], int]],
        end: Callable[[Patient], None],
        skipped: int = 0,
        measure: Callable[[], float] | None = None,
    ) -> None:
        self._begin, self._end, self._skipped = begin, end, skipped
        self.course = Course()
        self._extra = Course()
        self._penalties = Penalties()
        self.changes: Sequence[Intervention] = ()
        self.steps = self._wanted = self._endless = 0
        self.measured: list[float] = []
        self._measure = measure
        self._lead: Optimizer | None = None
        self._begun = self._inside_own = False
        self._depth = 0
        self._roots: set[int] = set()
        self._freeze = FrozenWeights()
        self._call = nn.Module.__call__
        self._backward = torch.autograd.backward
        self._dropout = functional.dropout
        self._batches = DataLoader.__iter__
        self._functions = ReplacedFunctions(lambda: [*self._active(), self._penalties], lambda: self._opened)
        self._opened = self._steady = False

    def attach(self) -> None:
        """Begin to listen; there is no end, but that of the process."""
        patient, plain = self, self._call

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if patient._depth or patient._inside_own:
                if patient._steady and module.training:
                    # What is made in forward() begins in training mode.
                    module.training = False
                    for each in patient.changes:
                        each.acted |= each.steady
                for each in patient._active() if patient._opened else ():
                    module = each.inner(module)
                return plain(module, *args, **kwargs)
            return patient._outermost(module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.backward = self._backwards
        functional.dropout = self._drop
        torch.compile = _not_compiled
        DataLoader.__iter__ = self._iterated  # type: ignore[method-assign, assignment]
        self._functions.attach()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def measuring(self) -> bool:
        """Whether the effect of the changes is measured now."""
        return self._begun and self.steps >= self._wanted

    @property
    def effect(self) -> float:
        """Mean loss while it is measured; infinite where a loss was no number."""
        window = self.losses[self._wanted :]
        if not self.course.finite or not window:
            return math.inf
        return sum(window) / len(window)

    @property
    def losses(self) -> list[float]:
        """The losses without what they contain of penalties on the weights."""
        return without(self.course.losses, self._extra.losses, self._wanted)

    @property
    def penalized(self) -> bool:
        """Whether there are such."""
        return self.losses != self.course.losses

    def _active(self) -> list[Intervention]:
        return [each for each in self.changes if each.stays or not self.measuring]

    def _start(self) -> bool:
        """Return whether the run has begun, and begin it where that is due."""
        if not self._begun and not self._skipped:
            changes, wanted = self._begin()
            self.changes, self._wanted, self._begun = changes, wanted, True
        return self._begun

    def _outermost(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        owns = next(module.parameters(), None) is not None
        if owns and (self._begun or (torch.is_grad_enabled() and module.training)) and self._start():
            if torch.is_grad_enabled() and id(module) not in self._roots:
                self._roots.add(id(module))
                for each in self._active():
                    each.root(module)
            for each in self._active():
                args, kwargs = each.called(module, args, kwargs)
        self._depth += 1
        held = owns and not torch.is_grad_enabled() and any(each.cut(module) for each in self._active())
        self._opened = owns and (torch.is_grad_enabled() or held)
        self._steady = owns and not self._opened and any(each.steady for each in self._active())
        try:
            with torch.set_grad_enabled(self._opened or torch.is_grad_enabled()):
                output = self._call(module, *args, **kwargs)
        finally:
            self._depth -= 1
            self._opened = self._steady = False
        if owns and self._begun:
            for each in self._active():
                output = each.left(module, output)
            self._penalties.left(module, output)
        return output

    def _backwards(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._inside_own or not self._start():
            self._backward(tensors, *args, **kwargs)
            return
        first = next(iter(tensors), None) if isinstance(tensors, Sequence) else tensors
        if isinstance(first, Tensor):
            place = _place()
            self.course.add(place, float(first.detach().double().sum()))
            self._extra.add(place, self._penalties.of(first))
            for each in self._active():
                each.before_backward(first)
        self._backward(tensors, *args, **kwargs)
        for each in self._active():
            each.after_backward()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._inside_own or not self._start():
            return
        if self._lead is None:
            self._lead = optimizer
        for each in self._active():
            each.before_step(optimizer)
        if self.measuring:
            self._freeze.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._inside_own:
            return
        if not self._begun:
            self._skipped -= 1
            return
        self._inside_own = True
        try:
            if self.measuring:
                self._freeze.after_step(optimizer)
            for each in reversed(self._active()):
                each.after_step(optimizer)
        finally:
            self._inside_own = False
        if optimizer is self._lead:
            self._penalties.after_step(optimizer)
            self._extra.step()
            self.course.step()
            self.steps += 1
            if self._measure is not None:
                self.measured.append(self._measure())
            if self.steps == self._wanted:
                for each in self.changes:
                    each.measure()
            self._endless += not self.course.finite
            patience = max((each.patience for each in self.changes), default=0)
            if self.steps >= self._wanted + MEASURED or self._endless > patience:
                self._end(self)

    @property
    def _iterated(self) -> Callable[[DataLoader[Any]], Iterator[Any]]:
        patient, plain = self, self._batches

        def batches(loader: DataLoader[Any]) -> Iterator[Any]:
            return _Batches(plain(loader), lambda given: patient._batch(loader, given))

        return batches

    def _batch(self, loader: object, given: Any) -> Any:
        for each in self._active():
            given = each.batch(loader, given)
        return given

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        if not self._begun or not training or not p:
            return self._dropout(input, p, training, inplace)
        for each in self.changes:
            if isinstance(each, Facts):
                each.dropout = max(each.dropout, p)
        steady = not torch.is_grad_enabled() and any(each.steady for each in self.changes)
        for each in self.changes:
            each.acted |= each.steady and steady
        if not steady and not self.measuring and not any(each.without_dropout for each in self.changes):
            return self._dropout(input, p, training, inplace)
        with torch.no_grad():
            # The script's random numbers go on as they would have.
            self._dropout(input.detach(), p, training, inplace=False)
        return input


class _Batches:
    """A loader's iterator, of which each batch goes through a function."""

    def __init__(self, plain: Iterator[Any], change: Callable[[Any], Any]) -> None:
        self._plain, self._change = plain, change

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._change(next(self._plain))

    def __len__(self) -> int:
        return len(self._plain)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _not_compiled(model: Any = None, **_options: Any) -> Any:
    """Return what ``torch.compile`` is given: sixty steps do not repay compiling it in every run."""
    return (lambda given: given) if model is None else model


def _place() -> tuple[str, int]:
    """Return the file and line that want a backward pass: the innermost outside torch and this package."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - no public form
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
