"""Shows calls of functions of torch, whatever name they are called by, for as long as a module's forward pass lasts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradflow_export.hooks import torch_private

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
        self._own = True
        self._original: Any = None
        self._stand_in: Any = None
        self.always = False
        """Whether calls without gradients are shown too."""

    @property
    def live(self) -> bool:
        """Whether the function is being watched."""
        return self._stand_in is not None

    @property
    def original(self) -> Any:
        """What stood there before; what stood before that where another watcher has left in the meantime."""
        spy = getattr(self._original, "gradflow_spy", None)
        return self._original if spy is None or spy.live else spy.original

    def install(self) -> None:
        """Put the stand-in in place."""
        original, see, spy = getattr(self._owner, self._name), self._see, self
        below = getattr(original, "gradflow_spy", None)
        self._own = self._name in vars(self._owner) if below is None else below._own  # noqa: SLF001 - same class

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if spy._lists:
                args = tuple([list(arg) if isinstance(arg, Iterator) else arg for arg in args])
                kwargs = {name: list(arg) if isinstance(arg, Iterator) else arg for name, arg in kwargs.items()}
            result = original(*args, **kwargs)
            if spy.live and _is_seen(spy.always):
                see(args, {**kwargs, "result": result} if spy._result else kwargs)
            return result

        stand_in.__dict__["gradflow_spy"] = self
        self._original, self._stand_in = original, stand_in
        setattr(self._owner, self._name, stand_in)

    def remove(self) -> None:
        """Put the function back; where another stand-in lies on top, it stays as a mere detour until that one goes."""
        if vars(self._owner).get(self._name) is self._stand_in:
            original = self.original
            if self._own or hasattr(original, "gradflow_spy"):
                setattr(self._owner, self._name, original)
            else:
                delattr(self._owner, self._name)
        self._stand_in = None


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


def rectifier_spies(see: See) -> list[Spy]:
    """Return spies on ``torch.relu``, ``Tensor.relu`` and their in-place forms, which ``F.relu`` calls too."""
    methods = [Spy(Tensor, name, see) for name in ("relu", "relu_")]
    return [*methods, *spies_on({torch.relu: see, torch.relu_: see})]


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
