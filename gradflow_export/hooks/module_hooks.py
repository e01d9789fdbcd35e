"""Hooks in a module that its copies, its files and TorchScript know nothing of."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import TURNS
from gradflow_export.hooks.instances import instances

_is_compiling = torch.compiler.is_compiling


class ModuleHook:
    """A hook of a module that leaves no trace in a graph that is being compiled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Hand over to the instrument, but leave no trace in a graph that is being compiled."""
        if not _is_compiling():
            self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a stand-in that does nothing, where somebody takes single hooks out of a module to store them."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_plain_call() -> bool:
    """Whether a hook is given tensors that may outlive the call: no graph is traced, nothing is transformed."""
    traced = torch_private.traces() or (torch_private.dispatch_modes() > 0 and torch_private.is_tracing())
    return not traced and torch_private.transform() is None


class _Hooks(OrderedDict[int, Any]):
    """The hooks of one kind in one module: the user's under numbers from 0 on, ours under negative ones.

    It stands in the place of the module's own dictionary. Where it is copied or pickled, a plain one with the user's
    hooks alone is.
    """

    def plain(self) -> OrderedDict[int, Any]:
        """Return the user's alone."""
        return OrderedDict((key, hook) for key, hook in self.items() if not _is_ours(key))

    def free(self) -> int:
        """Return a number for one more of ours; not from torch's count, by which pickles number the user's."""
        return next(key for key in range(-1, -len(self) - 2, -1) if key not in self)

    def copy(self) -> OrderedDict[int, Any]:  # type: ignore[override]  # a copy is a plain one on purpose
        """Return the user's alone."""
        return self.plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def _is_ours(key: object) -> bool:
    return isinstance(key, int) and key < 0


class _CalledHooks(_Hooks):
    """The same for hooks that calls of the module run.

    ``nn.Module`` runs them by ``items()``; ``values()`` is what TorchScript compiles.
    """

    def values(self) -> Any:
        """Return the user's alone."""
        return self.plain().values()


_LOADED = "_load_state_dict_post_hooks"


def hook_calls(
    hooks: Iterable[tuple[nn.Module, Any]],
    *,
    before: bool = False,
    with_kwargs: bool = False,
    always: bool = False,
) -> Placed:
    """Have calls of modules run hooks, as ``register_forward_hook`` does.

    Args:
        hooks: Modules, each with what is called: ``hook(module, arguments, output)``.
        before: Call ``hook(module, arguments)`` before the module's own ``forward`` instead.
        with_kwargs: Give the keyword arguments too, as another argument.
        always: Call also when ``forward`` raises.

    Returns:
        What takes them away when it is called; calling it again does nothing.
    """
    kind = "_forward_pre_hooks" if before else "_forward_hooks"
    marks = [f"{kind}_with_kwargs"] * with_kwargs + ["_forward_hooks_always_called"] * always
    return Placed([(module, kind, hook, marks) for module, hook in hooks])


def hook_loading(module: nn.Module, hook: Any) -> Placed:
    """Call ``hook(module, keys)`` after ``load_state_dict``; return what ends that when it is called."""
    return Placed([(module, _LOADED, hook, [])])


class Placed:
    """Hooks of ours in modules; a call takes them away for good."""

    def __init__(self, entries: Iterable[tuple[nn.Module, str, Any, list[str]]]) -> None:
        entries = list(entries)
        self.places: list[tuple[weakref.ref[nn.Module], str, int]] = []
        with TURNS:  # models of several threads may share a module
            self._put(entries)

    def _put(self, entries: list[tuple[nn.Module, str, Any, list[str]]]) -> None:
        _exchange((module, name) for module, kind, _, marks in entries for name in (kind, *marks))
        for module, kind, hook, marks in entries:
            key = module.__dict__[kind].free()
            for name, value in ((kind, hook), *((mark, True) for mark in marks)):
                module.__dict__[name][key] = value
                self.places.append((weakref.ref(module), name, key))

    def __call__(self) -> None:
        """Take them away; calling it again does nothing."""
        TURNS.last(self._take_out)

    def _take_out(self) -> None:
        removed, emptied = self.places.copy(), []
        self.places.clear()
        for reference, name, key in removed:
            found = reference()
            if found is None or not isinstance(found.__dict__.get(name), _Hooks):
                continue
            _wake(found, name)
            hooks = found.__dict__[name]
            hooks.pop(key, None)
            if not any(map(_is_ours, hooks)):
                emptied.append((found, name))
        _exchange(emptied, back=True)


class _Resting(_CalledHooks):
    """Stands in a module in the place of hooks that are all ours, so that its calls run none and cost nothing more.

    Attributes:
        held: Those hooks.
    """

    held: _CalledHooks


def lay_aside(placed: Iterable[Placed]) -> Callable[[], None]:
    """Have calls of modules run none of these hooks for a while, where no others stand beside them.

    A module without hooks takes a shorter way to its ``forward``.

    Returns:
        A function that puts them back.
    """
    mine: dict[tuple[int, str], tuple[weakref.ref[nn.Module], set[int]]] = {}
    for reference, name, key in (place for each in placed for place in each.places):
        if not name.endswith(("_with_kwargs", "_always_called")):  # read only where there are hooks
            mine.setdefault((id(reference()), name), (reference, set()))[1].add(key)
    aside: list[tuple[weakref.ref[nn.Module], str]] = []
    with TURNS:
        for (_, name), (reference, keys) in mine.items():
            module = reference()
            held = None if module is None else module.__dict__.get(name)
            if module is not None and type(held) is _CalledHooks and held.keys() == keys:
                resting = _Resting()
                resting.held = held
                module.__dict__[name] = resting
                aside.append((reference, name))

    def put_back() -> None:
        for reference, name in aside:
            module = reference()
            if module is not None:
                _wake(module, name)

    return partial(TURNS.last, put_back)


def _wake(module: nn.Module, name: str) -> None:
    """Put hooks back that rest, beside those that the user has registered since."""
    resting = module.__dict__[name]
    if isinstance(resting, _Resting):
        module.__dict__[name] = held = resting.held
        held.update(resting)
        if resting:
            _lead({id(resting): (resting, held)})


def _exchange(places: Iterable[tuple[nn.Module, str]], *, back: bool = False) -> None:
    """Put dictionaries of ours in the place of the modules' own, or with ``back`` plain ones again."""
    moved: dict[int, tuple[Mapping[int, Any], OrderedDict[int, Any]]] = {}
    for module, name in places:
        _wake(module, name)
        old = module.__dict__[name]
        if isinstance(old, _Hooks) is not back:
            continue
        new = old.plain() if back else (_Hooks if name == _LOADED else _CalledHooks)(old)
        module.__dict__[name] = new
        if old:
            moved[id(old)] = old, new
    if moved:
        _lead(moved)


def _lead(moved: Mapping[int, tuple[Mapping[int, Any], OrderedDict[int, Any]]]) -> None:
    """Lead the handles of the user's hooks to the dictionary that holds these now, so that they still remove them.

    A handle knows its dictionary by a weak reference, and nobody knows the handles.
    """

    def led(reference: Any) -> Any:
        old = reference() if isinstance(reference, weakref.ref) else None
        return weakref.ref(moved[id(old)][1]) if id(old) in moved else reference

    for handle in instances(RemovableHandle):
        now, beside = led(handle.hooks_dict_ref), tuple(map(led, handle.extra_dict_ref))
        if now is not handle.hooks_dict_ref:
            handle.hooks_dict_ref = now
        if any(new is not old for new, old in zip(beside, handle.extra_dict_ref, strict=True)):
            handle.extra_dict_ref = beside
