"""Sees a layer that stands several times in one container: ``nn.ModuleList([layer] * n)``."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import reaches
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import hook_all_calls
from gradflow_export.hooks.parameter_slots import briefly
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import layers_of, seen
from gradflow_export.rules.history import History

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class RepeatedInstrument(Reader):
    """Reports a layer that one container holds several times, where its calls follow each other or are all the same.

    Calls follow each other where what enters one was computed by the one before, as in a stack of blocks; they are the
    same where the same tensor enters each. A layer that is registered a second time outside of the container, and one
    whose calls are given different data (two views, heads of a detector), is shared on purpose.
    """

    looks: ClassVar[float] = 4

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        found = list(_repeated(setting.model))
        self._places = {id(layer): (name, count) for name, layer, count in found}
        self._layers = [weakref.ref(layer) for _, layer, _ in found]
        self._inputs: dict[int, list[Callable[[], Tensor | None]]] = {}

    @property
    def modules(self) -> int:
        """How many layers are looked at."""
        return len(self._places)

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see calls."""
        until.callback(hook_all_calls(self._guard(self._entered), before=True))

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        super().forget()
        self._inputs = {}

    def _entered(self, module: nn.Module, given: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or id(module) not in self._places:
            return
        first = given[0] if given else None
        if not any(layer() is module for layer in self._layers) or not isinstance(first, Tensor):
            return
        name, count = self._places[id(module)]
        before = self._inputs.setdefault(id(module), [])
        if before:
            again = before[-1]() is first and not _draws(module)
            follows = first.grad_fn is not None and reaches(first, {id(p) for p in module.parameters()})
            if again or follows:
                self._facts["layer.repeated"][name] = float(count)
        before.append(briefly(first))


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the name, module and number of places of each layer that one container, and nothing else, holds often."""
    holders = Counter[int](id(child) for module in model.modules() for child in torch_private.children(module))
    for name, module in model.named_modules():
        if not isinstance(module, _CONTAINERS):
            continue
        names = {id(child): key for key, child in reversed(list(module.named_children()))}
        members = {id(child): child for child in torch_private.children(module)}
        for identity, count in Counter(id(child) for child in torch_private.children(module)).items():
            child = members[identity]
            path = f"{name}.{names[identity]}".lstrip(".")
            if count == 1 or holders[identity] != count:
                continue
            if any(parameter.dim() > 1 for parameter in child.parameters()):
                yield site_name(path), child, count


def _draws(module: nn.Module) -> bool:
    """Whether two calls with the same input differ, as of a head behind dropout that is averaged."""
    return any(isinstance(part, torch_private.Dropout) and part.p > 0 for part in module.modules())


@dataclass(frozen=True, kw_only=True)
class RepeatedLayer(Check):
    """Report a layer that is in one container several times, as after ``[layer] * n``, with one set of weights.

    Reported if each call gets the output of the previous one, or all calls get the same tensor.

    Why it is bad:
        All entries of the list are the same layer. The model has the parameters of one layer, and every call trains the
        same weights.

    Example:
        self.blocks = nn.ModuleList([nn.Linear(64, 64)] * 6)

    Use instead:
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    Not reported:
        A layer that is registered once and called several times, or that is also registered elsewhere; it is shared
        intentionally.
    """

    patience: int = 2
    heal: int = 100

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("layer.repeated",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the calls of this record."""
        layers = layers_of(record, "layer.repeated")
        if not layers:
            return ()
        count = max(seen(record, "layer.repeated", site) or 0.0 for site in layers)
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.MEDIUM,
                layers,
                count,
                1.0,
                f"{some(layers)} is in its container {number(count)} times: all entries are one layer with one set "
                "of weights.",
                "create each layer separately, nn.ModuleList([Block() for _ in range(n)]) instead of [Block()] * "
                "n; if sharing is intended, register the layer once and call it n times, or suppress this: "
                f"watch(ignore=[('CAPACITY', {layers[0]!r})]).",
                cause="repeated layer",
                origin="repeated layer",
            ),
        )
