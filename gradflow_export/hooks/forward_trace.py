"""Watches functions of torch only while a model's own forward pass runs, and knows which of its modules is running."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.function_spy import Spy
from gradflow_export.hooks.guards import hook_all_calls


class Member(Protocol):
    """What is known of one module of the model before it is called."""

    @property
    def module(self) -> weakref.ref[nn.Module]:
        """The module."""


KnownT = TypeVar("KnownT", bound=Member)


@dataclass
class Call(Generic[KnownT]):
    """A call of a module under way.

    Attributes:
        known: What is known of the module.
        given: Its positional arguments.
        marked: For the reader of the calls; a marked call is shown once more when it has ended.
    """

    known: KnownT
    given: Any
    marked: bool = False


class _Stack(threading.local):
    """The calls under way in this thread: checkpoints are computed again in the threads of autograd."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def _nothing(*_args: Any) -> None:
    """No-op callback."""


class ForwardPasses(Generic[KnownT]):
    """Puts spies on functions from the moment a forward pass of the model begins until it ends.

    It begins with the outermost call of one of the members, and ends with it, also by an exception. Passes without
    gradients are passed over, and so is a model that runs inside compiled code.

    Args:
        members: What is known of each module, by its ``id``.
        code: Knows whether the model is compiled.
        left: Called with a marked call and its output when it has ended.
        outermost: Whether the outermost calls are marked.

    Attributes:
        ran: Whether a forward pass began since this was last set to False.
    """

    def __init__(
        self,
        members: Mapping[int, KnownT],
        *,
        code: CompiledCode | None = None,
        left: Callable[[Call[KnownT], Any], None] = _nothing,
        outermost: bool = False,
    ) -> None:
        self._members, self._code, self._left, self._outermost = dict(members), code, left, outermost
        self._spies: Sequence[Spy] = ()
        self._armed: contextlib.ExitStack | None = None
        self._stack, self._lock, self._running = _Stack(), threading.Lock(), 0
        self.ran = False

    @property
    def calls(self) -> list[Call[KnownT]]:
        """The calls under way in this thread, the innermost last."""
        return self._stack.calls

    @property
    def armed(self) -> bool:
        """Whether forward passes are seen."""
        return self._armed is not None

    def attach(self, spies: Sequence[Spy] = ()) -> contextlib.ExitStack:
        """Take the spies to install; closing the returned stack puts every function back."""
        self._spies = spies
        stack = contextlib.ExitStack()
        stack.callback(self._members.clear)
        stack.callback(self.arm, on=False)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see forward passes, or with ``on=False`` see no more."""
        on = on and bool(self._spies or self._outermost) and not (self._code is not None and self._code.found)
        if on and self._armed is None:
            with contextlib.ExitStack() as stack:
                stack.callback(self._stop)
                stack.callback(hook_all_calls(self._enter, before=True))
                stack.callback(hook_all_calls(self._exit, always=True))
                self._armed = stack.pop_all()
        elif not on and self._armed is not None:
            self._armed.close()
            self._armed = None

    def _enter(self, module: nn.Module, given: Any) -> None:
        if torch.compiler.is_compiling():  # first, so that a trace holds nothing of what follows
            return
        known = self._members.get(id(module))
        if known is None or not torch.is_grad_enabled() or known.module() is not module:
            return
        if torch_private.is_tracing():
            return
        self.calls.append(Call(known, given, marked=self._outermost and not self.calls))
        if len(self.calls) == 1:
            with self._lock:
                self._running += 1
                if self._running == 1:
                    self.ran = True
                    for spy in self._spies:
                        spy.install()

    def _exit(self, module: nn.Module, _given: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self.calls
        if not calls:
            return
        if calls[-1].known.module() is not module and not any(call.known.module() is module for call in calls):
            return
        while True:  # calls above it ended by an exception that no hook was notified of
            call = calls.pop()
            if call.known.module() is module:
                break
        if not calls:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._stop()
        if call.marked:
            self._left(call, output)

    def _stop(self) -> None:
        """Put every function back."""
        self._running = 0
        self.calls.clear()
        for spy in self._spies:
            if spy.live:
                spy.remove()
