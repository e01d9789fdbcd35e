"""How hooks are wrapped, so that an error of ours never reaches the user's loop, and put into the process in turn."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradflow_export.hooks.torch_private import ASKS_FOR_HOOKS, MODULES, global_hooks

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Wraps a hook so that an error in it never reaches the user's loop."""


class Part:
    """Wraps the hooks of one part; one that is called too often to be wrapped asks and tells it instead.

    This one lets errors through; an exporter's keeps them from the user's loop.

    Attributes:
        off: Whether hooks are to do nothing.
    """

    def __init__(self) -> None:
        self.off = False

    def __call__(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook, wrapped."""
        return hook

    def failed(self, error: Exception) -> None:
        """Take an error out of a hook that is not wrapped."""
        raise error

    def took(self, seconds: float) -> None:
        """Count the time of hooks that are not wrapped."""


def unguarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook as it is; for use outside an exporter."""
    return hook


class Turns:
    """Has changes of what the whole process shares made one after the other, whichever threads ask for them.

    What ends something may be asked for in the middle of another change of the same thread, by a finalizer that
    garbage collection calls; it is made at the end of that change.
    """

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):  # a child has no thread that could give the lock back
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock, self._depth = threading.RLock(), 0
        self._waiting: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Begin a change; wait for other threads."""
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _at: TracebackType | None) -> None:
        """End it, and make those that were asked for meanwhile."""
        try:
            while self._depth == 1 and self._waiting:
                self._waiting.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()

    def last(self, change: Callable[[], None]) -> None:
        """Make a change, at once unless this thread is in the middle of another one."""
        with self:
            self._waiting.append(change)


TURNS = Turns()
"""Models that train in several threads share torch's hooks and functions."""

_ATTEMPTS = 8


def hook_process(register: Callable[[Any], RemovableHandle], hook: Any) -> Callable[[], None]:
    """Register a process-wide hook.

    PyTorch numbers hooks without a lock: of two that threads register at once, one may take the other's place.

    Args:
        register: A function of torch that does it and returns a handle.
        hook: Is there afterwards, and is what is removed again, never somebody else's.

    Returns:
        What removes it; may be called from any thread, at any time, and again.
    """
    with TURNS:
        handle = register(hook)
        for _ in range(_ATTEMPTS):
            if _is_there(handle, hook):
                break
            handle = register(hook)

    def remove() -> None:
        if _is_there(handle, hook):
            handle.remove()

    return partial(TURNS.last, remove)


def _is_there(handle: RemovableHandle, hook: Any) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and hooks.get(handle.id) is hook


class _Asked:
    """Answers in torch's place, while hooks of ours are in, whether there are others that every call of a module runs.

    A compiled module asks at each call, and warns: a loop in which warnings are errors would end by our hooks.
    """

    def __init__(self) -> None:
        self._ours: list[Any] = []
        self._own: Any = None

    def join(self, hook: Any) -> None:
        """Take in a hook of ours."""
        if not self._ours:
            self._own = getattr(MODULES, ASKS_FOR_HOOKS, None)
            setattr(MODULES, ASKS_FOR_HOOKS, self._others)
        self._ours.append(hook)

    def leave(self, hook: Any) -> None:
        """Forget it, once; after the last one torch answers by itself again."""
        left = [each for each in self._ours if each is not hook]
        if self._ours and not left and getattr(MODULES, ASKS_FOR_HOOKS) == self._others:
            setattr(MODULES, ASKS_FOR_HOOKS, self._own)
        self._ours = left

    def _others(self) -> bool:
        mine = set(map(id, self._ours))
        return any(id(hook) not in mine for hooks in global_hooks() for hook in hooks.values())


_ASKED = _Asked()


def hook_all_calls(hook: Any, *, before: bool = False, always: bool = False) -> Callable[[], None]:
    """Have each call of any module run ``hook(module, arguments, output)``, see :func:`hook_process`.

    Args:
        hook: What is called.
        before: Call ``hook(module, arguments)`` before the module's own ``forward`` instead.
        always: Call also when ``forward`` raises.
    """
    register = register_module_forward_pre_hook if before else partial(register_module_forward_hook, always_call=always)
    with TURNS:
        _ASKED.join(hook)
        remove = hook_process(register, hook)

    def leave() -> None:
        remove()
        _ASKED.leave(hook)

    return partial(TURNS.last, leave)
