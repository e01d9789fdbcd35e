"""Keeps every error of ours out of the user's training loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import Part

_log = logging.getLogger("gradflow_export")
_traces, _is_tracing = torch_private.traces, torch_private.is_tracing
_dispatch_modes, _no_functions = torch_private.dispatch_modes, torch_private.no_functions
_grad, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling


def _nothing(_name: str) -> None:
    """Do nothing."""


class Guard:
    """Wraps hooks so that an error is logged once with its fix, counted, and the failing component is disabled.

    Attributes:
        failures: How often each part failed.
        on_failure: Called with the name of a part that was disabled.
        strict: Let errors raise instead; for tests.
        spent: Seconds inside guarded hooks since the start.
        depth: 1 while a guarded hook runs.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: dict[str, int] = {}
        self.on_failure: Callable[[str], None] = _nothing
        self.spent = 0.0
        self.depth = 0
        self._suspended = 0
        self._parts: dict[str, _GuardedPart] = {}

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let no guarded hook run for a while, as when passes are made that are no part of training."""
        self._suspended += 1
        self._turn()
        try:
            yield
        finally:
            self._suspended -= 1
            self._turn()

    def part(self, name: str, *, rests: bool = True) -> Part:
        """Return a decorator for the hooks of one part.

        Args:
            name: Its name in messages.
            rests: Whether it does nothing while hooks are suspended.
        """
        if name not in self._parts:
            self._parts[name] = _GuardedPart(self, name, rests=rests)
            self._turn()
        return self._parts[name]

    def _turn(self) -> None:
        """Tell the parts whether they are to do nothing."""
        for part in self._parts.values():
            part.off = (part.rests and self._suspended > 0) or part.name in self.failures

    def failed(self, name: str, error: Exception) -> None:
        """Disable a part.

        Raises:
            Exception: The error, where errors are let through.
        """
        if self.strict:
            raise error
        self.failures[name] = self.failures.get(name, 0) + 1
        self._turn()
        self.on_failure(name)
        _log.warning(
            "gradflow: reading %s failed and is disabled; training and all else goes on. Exporter(..., strict=True) "
            "raises instead. %s: %s",
            name,
            type(error).__name__,
            str(error).partition("\n")[0],
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


class _GuardedPart(Part):
    """One part under a guard."""

    def __init__(self, guard: Guard, name: str, *, rests: bool) -> None:
        super().__init__()
        self._guard, self.name, self.rests = guard, name, rests

    def __call__(self, hook: Callable[..., None]) -> Callable[..., None]:
        guard = self._guard

        @functools.wraps(hook, assigned=())
        def guarded(*args: Any, **kwargs: Any) -> None:
            if _is_compiling() or self.off:  # in this order, so that a trace holds nothing of what follows
                return
            if guard.depth:  # the guard around this one has looked at what follows, times it, and puts back modes
                try:
                    hook(*args, **kwargs)
                except Exception as error:
                    self.failed(error)
                return
            # torch.jit.trace compares two passes, and a hook would show in them.
            if _traces() or (_dispatch_modes() and _is_tracing()):
                return
            grad, began = _grad(), time.perf_counter()
            try:
                guard.depth = 1
                with torch_private.no_modes() if _dispatch_modes() else _no_functions():
                    hook(*args, **kwargs)
            except Exception as error:
                self.failed(error)
            except BaseException:
                # Ctrl-C may come between the two halves of no_grad(): after it has switched, before it is in charge.
                torch.set_grad_enabled(grad)
                raise
            finally:
                guard.depth = 0
                guard.spent += time.perf_counter() - began

        return guarded

    def failed(self, error: Exception) -> None:
        self._guard.failed(self.name, error)

    def took(self, seconds: float) -> None:
        self._guard.spent += seconds
