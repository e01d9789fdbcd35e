"""Shows calls of functions of torch, whatever name they are called by, for as long as a module's forward pass lasts."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import TURNS

See = Callable[[tuple[Any, ...], dict[str, Any]], None]


class Spy:
    """Stands in for one function: calls it, returns what it returned, and then shows the arguments.

    Calls without gradients and calls traced by ``torch.compile`` or ``torch.jit`` are not shown.

    Args:
        owner: Module or class that holds the function.
        name: The attribute.
        see: Called with positional and keyword arguments after each call.
        result: Whether what was returned is shown as one more keyword argument, ``result``.
        lists: Whether iterators among the arguments are made lists, which can be looked at after the call.
    """

    def __init__(self, owner: Any, name: str, see: See, *, result: bool = False, lists: bool = False) -> None:
        self._owner, self._name, self._see, self._result, self._lists = owner, name, see, result, lists
        self._shared: _Shared | None = None
        self.always = False
        """Whether calls without gradients are shown too."""

    @property
    def live(self) -> bool:
        """Whether the function is being watched."""
        return self._shared is not None

    def install(self) -> None:
        """Put a stand-in in place, or join those who share the one that is there."""
        with TURNS:
            self._shared = _shared(self._owner, self._name)
            self._shared.spies.append(self)

    def remove(self) -> None:
        """Leave; the last one puts the function back, unless somebody else has put another one on top meanwhile."""
        TURNS.last(self._leave)

    def _leave(self) -> None:
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.spies.remove(self)
        if shared.spies or vars(self._owner).get(self._name) is not shared.stand_in():
            return
        if shared.own:
            setattr(self._owner, self._name, shared.original)
        else:
            delattr(self._owner, self._name)

    def prepared(self, given: Any) -> Any:
        """Return an argument as the function is given it: an iterator that is to be looked at is a list."""
        return list(given) if self._lists and isinstance(given, Iterator) else given

    def show(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Show a call that has ended."""
        if self.live and _is_seen(self.always):
            self._see(args, {**kwargs, "result": result} if self._result else kwargs)


class _Shared:
    """What watchers of one function share: the stand-in in its place, which knows them all.

    Args:
        original: The function.
        own: Whether its owner holds it itself, not a class above.
    """

    def __init__(self, original: Any, *, own: bool) -> None:
        self.original, self.own = original, own
        self.spies: list[Spy] = []
        self.stand_in: Callable[[], Any] = lambda: None


def _shared(owner: Any, name: str) -> _Shared:
    """Return what stands at a place, or put it there."""
    there, own = getattr(owner, name), name in vars(owner)
    known: _Shared | None = getattr(there, "gradflow_shared", None)
    # Who wraps a stand-in may have copied its attributes.
    if own and known is not None and known.stand_in() is there:
        return known
    shared = _Shared(there, own=own)

    @functools.wraps(there)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        watching = tuple(shared.spies)
        for spy in watching:
            args = tuple([spy.prepared(arg) for arg in args])
            kwargs = {name: spy.prepared(arg) for name, arg in kwargs.items()}
        result = there(*args, **kwargs)
        for spy in watching:
            spy.show(args, kwargs, result)
        return result

    stand_in.__dict__["gradflow_shared"] = shared
    shared.stand_in = weakref.ref(stand_in)
    setattr(owner, name, stand_in)
    return shared


def _is_seen(always: bool) -> bool:
    """Whether a call has gradients, unless that does not matter, and is neither compiled nor traced."""
    if torch.compiler.is_compiling() or not (always or torch.is_grad_enabled()):
        return False
    return not torch_private.is_tracing()


def attention_spies(see_attention: See, see_softmax: See) -> list[Spy]:
    """Return spies on the functions that attention is made of, under every name a module of Python knows them by.

    ``F.softmax`` and ``nn.Softmax`` call ``Tensor.softmax``. A name that was bound by ``from torch.nn.functional import
    scaled_dot_product_attention`` is found among the globals of all modules imported so far.
    """
    shown = {torch.nn.functional.scaled_dot_product_attention: see_attention, torch.softmax: see_softmax}
    return [Spy(Tensor, "softmax", see_softmax), *spies_on(shown)]


def spies_on(shown: Mapping[Any, See]) -> list[Spy]:
    """Return spies on functions under every name that a module of Python imported so far knows them by.

    Args:
        shown: What sees the calls of each function; all are searched for at once, which takes as long as one.
    """
    wanted = {id(function): see for function, see in shown.items()}
    spies = []
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.") and module_name != "torch.nn.functional":
            continue
        known = getattr(module, "__dict__", {})
        # Of most modules this is all, without a step of Python for each name.
        if wanted.keys().isdisjoint(map(id, list(known.values()))):
            continue
        spies += [Spy(module, name, wanted[id(value)]) for name, value in list(known.items()) if id(value) in wanted]
    return spies
