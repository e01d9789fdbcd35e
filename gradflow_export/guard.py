"""Keeps every error of ours out of the user's training loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

_log = logging.getLogger("gradflow_export")


class Guard:
    """Wraps hooks so that an error is logged once with the way out, counted, and the part concerned is set aside.

    Attributes:
        failures: How often each part failed.
        strict: Let errors raise instead; for tests.
        spent: Seconds inside guarded hooks since the start.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: dict[str, int] = {}
        self.spent = 0.0
        self._depth = 0
        self._suspended = 0

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Let no guarded hook run for a while, as when passes are made that are no part of training."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def part(self, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator for the hooks of one part."""

        def decorate(hook: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(hook, assigned=())
            def guarded(*args: Any, **kwargs: Any) -> None:
                if torch.compiler.is_compiling():  # first, so that a trace holds nothing of what follows
                    return
                if self._suspended or name in self.failures:
                    return
                began, outermost = time.perf_counter(), self._depth == 0
                self._depth += 1
                try:
                    hook(*args, **kwargs)
                except Exception as error:
                    if self.strict:
                        raise
                    self._failed(name, error)
                finally:
                    self._depth -= 1
                    if outermost:
                        self.spent += time.perf_counter() - began

            return guarded

        return decorate

    def _failed(self, name: str, error: Exception) -> None:
        self.failures[name] = self.failures.get(name, 0) + 1
        _log.warning(
            "gradflow: reading %s failed and is set aside; training and all else goes on. Exporter(..., strict=True) "
            "raises instead. %s: %s",
            name,
            type(error).__name__,
            error,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )
