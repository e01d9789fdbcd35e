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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from gradflow_export.autograd_graph.nodes import Op, kind_of
from gradflow_export.hooks.guards import Guard, hook_all_calls, unguarded
from gradflow_export.hooks.members import held_parameters, members
from gradflow_export.hooks.parameter_slots import Slot, briefly, slots
from gradflow_export.metrics.arrays.local import is_ragged
from gradflow_export.records.evidence import Wiring
from gradflow_export.records.sites import pattern

_CHOSEN = frozenset((Op.INDEX, Op.INDEX_SELECT, Op.MASKED_SELECT))
"""What makes a tensor of some of the samples of another."""
BESIDE = 64
"""Calls of the members of one list that are remembered of a pass."""
STRANGE = 1024
"""Weights of modules that are no part of the model that are remembered of a step."""
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


def _is_weight(tensor: Tensor) -> bool:
    """Whether this is a parameter of its own, and none that a call is given for one."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor.is_leaf and not is_lazy(tensor)


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Return what tells tensors apart that live at different times: an ``id`` or address is given again."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


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
        self._strange: dict[StorageWeakRef, tuple[str, weakref.ref[nn.Module]]] = {}
        self._earlier: set[StorageWeakRef] = set()  # of such weights, in the looks before
        self._own: frozenset[int] | None = None
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
        """Return where weights were used that no pass before had, by modules that are gone: made for that call."""
        strange, self._strange, earlier = self._strange, {}, self._earlier
        self._earlier = {each for each in earlier if not each.expired()} | strange.keys()  # type: ignore[no-untyped-call]
        if not earlier:  # the first look tells what there is, not what is new
            return set()
        return {path for each, (path, holder) in strange.items() if holder() is None and each not in earlier}

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
            self._own = None
        if not self._depth or threading.get_ident() != self._thread:
            return  # nothing is called by this model, or by another thread, whose gradients must not be looked at
        _put(self._seen, module)
        here, first = self._names.get(id(module)), given[0] if given else None
        self._stack.append(id(module))
        if here is not None:
            if isinstance(first, Tensor) and not is_ragged(first):
                self._take(here[0], module, first)
                self._compare(*here, first)
            if isinstance(module, nn.RNNCellBase):
                self._cells[here[0]] += 1

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
        if id(module) in self._stack:  # not where it was called without gradients
            while self._stack.pop() != id(module):
                pass
            if id(module) not in self._names:
                self._meet(module)  # now that it has weights, where the first call makes them
        if module is self._model():
            self._depth = 0
            self._given.clear()

    def _meet(self, module: nn.Module) -> None:
        """Take notice of weights that a module uses and the model does not hold; what holds those of the model may."""
        model = self._model()
        if self._own is None:
            self._own = frozenset(id(p) for _, _, p in held_parameters(model)) if model is not None else frozenset()
        above = next((self._names[key][0] for key in reversed(self._stack) if key in self._names), "")
        path = f"{above}.{type(module).__name__}".lstrip(".")
        for holder, _, parameter in held_parameters(module):
            if id(parameter) not in self._own and _is_weight(parameter) and len(self._strange) < STRANGE:
                self._strange.setdefault(_storage(parameter), (path, weakref.ref(holder)))
