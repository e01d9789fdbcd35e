"""Sees chosen modules being called, at no cost while it is not armed and without touching the modules."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

Handler = Callable[[nn.Module, Any], None]
CallHandler = Callable[[nn.Module, tuple[Any, ...], Any], None]


class ModuleCalls:
    """One process-wide forward hook that serves all modules of one tap.

    A hook on each of 400 modules costs a small model several per cent of every step, and would travel along when the
    model is pickled. PyTorch's global forward hook is registered only while a step is sampled, and nothing of ours is
    ever stored on a module. Calls without gradients (validation) and calls traced by ``torch.compile`` are passed over.

    Args:
        enabled: False never sees a call.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._handlers: dict[int, tuple[weakref.ref[nn.Module], list[CallHandler]]] = {}
        self._handle: RemovableHandle | None = None
        self.seen = False

    def add(self, module: nn.Module, handler: Handler) -> None:
        """Call ``handler(module, output)`` after each call of ``module`` while armed."""
        self.add_call(module, lambda called, _args, output: handler(called, output))

    def add_call(self, module: nn.Module, handler: CallHandler) -> None:
        """Call ``handler(module, arguments, output)`` after each call of ``module`` while armed.

        Arguments given by keyword are not among them: PyTorch never forgets a global hook that asks for those.
        """
        reference, handlers = self._handlers.get(id(module), (weakref.ref(module), []))
        if reference() is not module:
            reference, handlers = weakref.ref(module), []
        handlers.append(handler)
        self._handlers[id(module)] = (reference, handlers)

    def arm(self, *, on: bool = True) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""
        if on and self._handle is None and self.enabled:
            self._handle = register_module_forward_hook(self._called)
        elif not on and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def attach(self) -> contextlib.ExitStack:
        """Return a stack whose closing disarms and forgets every handler."""
        stack = contextlib.ExitStack()
        stack.callback(self._handlers.clear)
        stack.callback(self.arm, on=False)
        return stack

    def _called(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # first, so that a trace holds nothing of what follows
            return
        entry = self._handlers.get(id(module))
        if entry is None or not torch.is_grad_enabled():
            return
        reference, handlers = entry
        if reference() is module:
            self.seen = True
            for handler in handlers:
                handler(module, args, output)
