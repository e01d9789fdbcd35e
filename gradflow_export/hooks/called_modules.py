"""Which modules are called in a forward pass, with what, and which of them are no part of the model."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.parameter_slots import Slot, briefly, slots
from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern

_CHOSEN = frozenset(("Index", "IndexSelect", "MaskedSelect"))
"""What makes a tensor of some of the samples of another."""
BESIDE = 64
"""Calls of the members of one list that are remembered of a pass."""


class Calls:
    """Sees which modules are called while the model's own forward pass runs, while armed.

    Args:
        model: Returns the model.
        guard: Wraps the hooks.
    """

    def __init__(self, model: Callable[[], nn.Module | None], *, guard: Guard = unguarded) -> None:
        self._model = model
        self._enter, self._leave = guard(self._entered), guard(self._left)
        self._armed: contextlib.ExitStack | None = None
        self._depth = self._thread = 0
        self._seen = WeakIdKeyDictionary()  # by identity: a module's own == may return a tensor
        self._looked_at = WeakIdKeyDictionary()  # called while gradients are off
        self._given: dict[str, list[tuple[str, Callable[[], Tensor | None], int]]] = {}
        self._beside: dict[str, Wiring] = {}
        self._names: dict[int, str] = {}
        self._codes: dict[str, int] = {}
        self._stack: list[int] = []
        self._strange: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._looked = False
        self._taken: dict[str, tuple[int, int]] = {}
        self._cells: Counter[str] = Counter()

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        if on and self._armed is None:
            with contextlib.ExitStack() as stack:
                stack.callback(register_module_forward_pre_hook(self._enter).remove)
                stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
                self._armed = stack.pop_all()
        elif not on and self._armed is not None:
            self._armed.close()
            self._armed = None

    def codes(self) -> dict[str, int]:
        """Return by name of module whether it was called; as far as it was seen, where the model itself never was."""
        model = self._model()
        if model is None:
            return {}
        if not self._looked:
            return {site_name(name): Wiring.LOOKED for name, m in model.named_modules() if m in self._looked_at}
        if self._armed is None and self._codes:  # nothing more is looked at
            return self._codes
        for name, module in model.named_modules():
            site = site_name(name)
            code = Wiring.CALLED if module in self._seen else Wiring.UNCALLED
            code |= Wiring.LOOKED * (module in self._looked_at) | self._beside.get(pattern(site), 0)
            self._codes[site] = int(code)
        return self._codes

    def strangers(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """Yield the parameters of modules that were called and are no part of the model: a name, the place, itself."""
        model = self._model()
        members = set() if model is None else {id(m) for m in model.modules()}
        for module in list(self._seen.keys()):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if id(module) not in members:
                names = {id(p): f"{type(module).__name__} (called).{name}" for name, p in module.named_parameters()}
                yield from ((names[id(p)], slot, p) for slot, p in slots(module))

    def made(self) -> set[str]:
        """Return where modules with weights were called that are gone already; they were made for that call."""
        strange, self._strange = self._strange, []
        return {path for path, reference in strange if reference() is None}

    def taken(self) -> dict[str, tuple[int, int]]:
        """Return the steps and sequences that each layer with ``batch_first`` took its latest input for."""
        taken, self._taken = self._taken, {}
        return taken

    def cells(self) -> dict[str, int]:
        """Return how often each recurrent cell was called since this was asked last."""
        cells, self._cells = dict(self._cells), Counter()
        return cells

    def _entered(self, module: nn.Module, given: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled():
            self._looked_at[module] = True
            return
        model = self._model()
        if module is model:
            self._depth, self._looked, self._thread = 1, True, threading.get_ident()
            self._stack.clear()
            self._given.clear()
            self._names = {id(member): site_name(name) for name, member in model.named_modules()}
        if not self._depth or threading.get_ident() != self._thread:
            return  # nothing is called by this model, or by another thread, whose gradients must not be looked at
        self._seen[module] = True
        ordered, first = getattr(module, "batch_first", None), given[0] if given else None
        if isinstance(ordered, bool) and isinstance(first, Tensor) and first.dim() == 3 and id(module) in self._names:
            sizes = (first.shape[0], first.shape[1])
            self._taken[self._names[id(module)]] = sizes[::-1] if ordered else sizes
        if isinstance(module, nn.RNNCellBase) and id(module) in self._names:
            self._cells[self._names[id(module)]] += 1
        if isinstance(first, Tensor) and id(module) in self._names:
            self._compare(self._names[id(module)], first)
        self._stack.append(id(module))
        if id(module) not in self._names and any(p.requires_grad for p in module.parameters()):
            holder = next((self._names[key] for key in reversed(self._stack) if key in self._names), "")
            path = f"{holder}.{type(module).__name__}".lstrip(".")
            self._strange.append((path, weakref.ref(module)))

    def _compare(self, name: str, given: Tensor) -> None:
        """Notice where members of one list are given the same tensor, different numbers of samples, or chosen ones."""
        kin = pattern(name)
        before = self._given.setdefault(kin, [])
        known = self._beside.get(kin, Wiring(0))
        if kin == name or Wiring.ROUTED in known or len(before) >= BESIDE:
            return
        rows = given.shape[0] if given.dim() else 1
        others = [(count != rows, tensor) for other, tensor, count in before if other != name]
        if type(given.grad_fn).__name__.split("Back")[0] in _CHOSEN or any(apart for apart, _ in others):
            self._beside[kin] = Wiring.BESIDE | Wiring.ROUTED
        elif not known and any(tensor() is given for _, tensor in others):
            self._beside[kin] = Wiring.BESIDE
        before.append((name, briefly(given), rows))

    def _left(self, module: nn.Module, _given: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or not self._depth or threading.get_ident() != self._thread:
            return
        while self._stack and self._stack.pop() != id(module):
            pass
        if module is self._model():
            self._depth = 0
            self._given.clear()
