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

from gradflow_export.autograd_graph.nodes import Op, kind_of
from gradflow_export.hooks.guards import Guard, hook_all_calls, unguarded
from gradflow_export.hooks.members import members
from gradflow_export.hooks.parameter_slots import Slot, briefly, slots
from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern

_CHOSEN = frozenset((Op.INDEX, Op.INDEX_SELECT, Op.MASKED_SELECT))
"""What makes a tensor of some of the samples of another."""
BESIDE = 64
"""Calls of the members of one list that are remembered of a pass."""
_CALLED, _UNCALLED, _LOOKED = int(Wiring.CALLED), int(Wiring.UNCALLED), int(Wiring.LOOKED)
_BESIDE, _ROUTED = int(Wiring.BESIDE), int(Wiring.ROUTED)
"""Plain numbers: flags are joined by a function of Python's."""
_Modules = dict[int, "weakref.ref[nn.Module]"]
"""By ``id``: a module's own == may return a tensor."""


def _has(modules: _Modules, module: nn.Module) -> bool:
    reference = modules.get(id(module))
    return reference is not None and reference() is module


def _put(modules: _Modules, module: nn.Module) -> None:
    if not _has(modules, module):
        modules[id(module)] = weakref.ref(module)


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
        self._seen: _Modules = {}
        self._looked_at: _Modules = {}  # called while gradients are off
        self._within: _Modules = {}  # so called within a forward pass that has gradients
        self._given: dict[str, list[tuple[str, Callable[[], Tensor | None], int]]] = {}
        self._beside: dict[str, int] = {}
        self._names: dict[int, tuple[str, str]] = {}  # with its pattern
        self._kinds: dict[str, str] = {}
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
                stack.callback(hook_all_calls(self._enter, before=True))
                stack.callback(hook_all_calls(self._leave, always=True))
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
            return {site: _LOOKED for site, module in members(model) if _has(self._looked_at, module)}
        if self._armed is None and self._codes:  # nothing more is looked at
            return self._codes
        beside, looked_at = self._beside, self._looked_at
        cut = set[str]()  # with gradients off no graph shows what a module uses, as attention its out_proj
        for site, module in members(model):
            called = _has(self._seen, module)
            if not called and (_has(self._within, module) or site.rpartition(".")[0] in cut):
                called = True
                cut.add(site)
            code = _CALLED if called else _UNCALLED
            if beside or looked_at:
                code |= _LOOKED * _has(looked_at, module) | beside.get(self._kind(site), 0)
            self._codes[site] = code
        return self._codes

    def strangers(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """Yield the parameters of modules that were called and are no part of the model: a name, the place, itself."""
        model = self._model()
        own = set() if model is None else {id(m) for _, m in members(model)}
        for key, reference in list(self._seen.items()):
            module = reference()
            if module is None:
                del self._seen[key]
            elif key not in own:
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
            _put(self._looked_at, module)
            if self._depth and threading.get_ident() == self._thread:
                _put(self._within, module)
            return
        model = self._model()
        if module is model:
            self._depth, self._looked, self._thread = 1, True, threading.get_ident()
            self._stack.clear()
            self._given.clear()
            self._names = {id(member): (site, self._kind(site)) for site, member in members(model)}
        if not self._depth or threading.get_ident() != self._thread:
            return  # nothing is called by this model, or by another thread, whose gradients must not be looked at
        _put(self._seen, module)
        here, first = self._names.get(id(module)), given[0] if given else None
        self._stack.append(id(module))
        if here is not None:
            if isinstance(first, Tensor):
                self._take(here[0], module, first)
                self._compare(*here, first)
            if isinstance(module, nn.RNNCellBase):
                self._cells[here[0]] += 1
        elif any(p.requires_grad for p in module.parameters()):
            holder = next((self._names[key][0] for key in reversed(self._stack) if key in self._names), "")
            path = f"{holder}.{type(module).__name__}".lstrip(".")
            self._strange.append((path, weakref.ref(module)))

    def _kind(self, site: str) -> str:
        """Return what the members of one list have in common, looked up once for each of them."""
        kind = self._kinds.get(site)
        if kind is None:
            kind = self._kinds[site] = pattern(site)
        return kind

    def _take(self, name: str, module: nn.Module, given: Tensor) -> None:
        """Notice how many steps and sequences a layer with ``batch_first`` is given."""
        ordered = getattr(module, "batch_first", None) if given.dim() == 3 else None
        if isinstance(ordered, bool):
            sizes = (given.shape[0], given.shape[1])
            self._taken[name] = sizes[::-1] if ordered else sizes

    def _compare(self, name: str, kin: str, given: Tensor) -> None:
        """Notice where members of one list are given the same tensor, different numbers of samples, or chosen ones."""
        known = self._beside.get(kin, 0)
        if kin == name or known & _ROUTED:
            return
        before = self._given.setdefault(kin, [])
        if len(before) >= BESIDE:
            return
        rows = given.shape[0] if given.dim() else 1
        others = [(count != rows, tensor) for other, tensor, count in before if other != name]
        if (given.grad_fn is not None and kind_of(given.grad_fn) in _CHOSEN) or any(apart for apart, _ in others):
            self._beside[kin] = _BESIDE | _ROUTED
        elif not known and any(tensor() is given for _, tensor in others):
            self._beside[kin] = _BESIDE
        before.append((name, briefly(given), rows))

    def _left(self, module: nn.Module, _given: Any, _output: Any) -> None:
        if torch.compiler.is_compiling() or not self._depth or threading.get_ident() != self._thread:
            return
        while self._stack and self._stack.pop() != id(module):
            pass
        if module is self._model():
            self._depth = 0
            self._given.clear()
