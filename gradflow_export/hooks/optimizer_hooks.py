"""What happens before and after every optimizer step of the process, for as many listeners as there are.

``Optimizer.step`` walks through the process-wide hooks while they run, and raises into the training loop when one is
added or removed meanwhile: by another thread, or by a finalizer that a hook's garbage collection calls. So listeners
share one pair of hooks, which is taken away only where nobody can be walking, or where there are no others: then a walk
that has come to a hook of ours has nothing left to look up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import TURNS, Part, hook_process

_log = logging.getLogger("gradflow_export")

StepHook = Callable[[Optimizer, Any, Any], None]
"""Called with an optimizer, and the positional and named arguments of its step."""


class PassedSteps:
    """Steps of one optimizer that are counted and otherwise passed by, which is what most steps of a small model are.

    Anything but such a step, one after the other, ends it before time: a step within a step, an optimizer that is not
    known to be another model's and steps in this thread, an overflow that a gradient scaler left to a fused optimizer,
    or an error in a step.

    Attributes:
        left: Steps that are still to be passed by.
        passed: Steps that were, since it began.
        inside: Whether one of them is under way.
    """

    __slots__ = ("_ended", "_glance", "_look", "_optimizer", "_strangers", "_thread", "inside", "left", "passed")

    def __init__(self) -> None:
        self.left = self._look = self._thread = 0
        self._glance: Callable[[Optimizer], int] | None = None
        self.passed, self.inside = 0, False
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._ended: Callable[[int], None] | None = None

    def begin(
        self,
        steps: int,
        optimizer: Optimizer,
        strangers: weakref.WeakSet[Optimizer],
        ended: Callable[[int], None],
        *,
        glance: Callable[[Optimizer], int],
        first: int,
    ) -> None:
        """Pass by so many steps.

        Args:
            steps: How many.
            optimizer: Whose steps.
            strangers: Optimizers whose steps are neither counted nor an end.
            ended: Called once with the number of steps that were passed by, before anything else is reported.
            glance: Called before some of the steps, and returns how many steps later it is to be called again; 0 makes
                that step the last one that is passed by.
            first: After how many steps it is called at first.
        """
        self._glance, self._look = glance, steps - first
        self._optimizer, self._strangers, self._ended = weakref.ref(optimizer), strangers, ended
        self.passed, self.inside, self._thread = 0, False, threading.get_ident()
        self.left = steps

    def end(self) -> None:
        """End it, whatever is left."""
        passed, ended, self._ended = self.passed, self._ended, None
        self.left = self.passed = 0
        if ended is not None:
            ended(passed)

    def before(self, optimizer: Optimizer) -> bool:
        """Return whether a step that begins is passed by."""
        if self._optimizer is not None and self._optimizer() is optimizer and not self.inside:
            self.inside = True
            if self.left == self._look and self._glance is not None:
                later = self._glance(optimizer)
                self._look -= later
                self.left = self.left if later else 1
            return True
        if optimizer in self._strangers or threading.get_ident() != self._thread:
            return True
        self.end()
        return False

    def after(self, optimizer: Optimizer) -> bool:
        """Return whether a step that has ended was passed by."""
        if self._optimizer is not None and self._optimizer() is optimizer:
            if not self.inside or getattr(optimizer, "found_inf", None) is not None:
                self.end()
                return False
            self.inside = False
            self.passed += 1
            self.left -= 1
            if not self.left:
                self.end()
            return True
        if optimizer in self._strangers or threading.get_ident() != self._thread:
            return True
        self.end()
        return False


class _Listener:
    """A pair of hooks, distinguished by identity, and the steps that they want to hear nothing of."""

    def __init__(self, before: StepHook | None, after: StepHook | None, passed: PassedSteps) -> None:
        self.before, self.after, self.passed = before, after, passed


class _Shared:
    """The one pair of hooks that PyTorch knows.

    Attributes:
        listeners: Who is notified; replaced as a whole, so that a walk through it is never disturbed.
        whole: Whether it was reported that steps in a compiled graph are not seen.
    """

    def __init__(self) -> None:
        self.listeners: tuple[_Listener, ...] = ()
        self.eagerly_before: StepHook = self.tell_before
        self.eagerly_after: StepHook = self.tell_after
        self.whole = False
        self._stepped: frozenset[int] = frozenset()
        self._before, self._after = self.before, self.after
        self._removers = (
            hook_process(register_optimizer_step_pre_hook, self._before),
            hook_process(register_optimizer_step_post_hook, self._after),
        )

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Tell that a step begins."""
        if not torch.compiler.is_compiling():
            self.tell_before(optimizer, args, kwargs)
        elif _breaks():
            self.eagerly_before(optimizer, args, kwargs)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Tell that a step has ended."""
        if not torch.compiler.is_compiling():
            self.tell_after(optimizer, args, kwargs)
        elif _breaks():
            self.eagerly_after(optimizer, args, kwargs)

    def prepare(self) -> None:
        """Make the forms for a step that ``torch.compile`` traces: they break the graph and run outside of it."""
        if self.eagerly_before == self.tell_before:
            self.eagerly_before = torch.compiler.disable(self.tell_before)  # type: ignore[no-untyped-call]
            self.eagerly_after = torch.compiler.disable(self.tell_after)  # type: ignore[no-untyped-call]

    def tell_before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Tell each listener that a step begins."""
        thread = threading.get_ident()
        if thread not in self._stepped:
            self._stepped |= {thread}
        for listener in self.listeners:
            if listener.passed.left and listener.passed.before(optimizer):
                continue
            if listener.before is not None:
                listener.before(optimizer, args, kwargs)

    def tell_after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Tell each listener that a step has ended."""
        for listener in self.listeners:
            if listener.passed.left and listener.passed.after(optimizer):
                continue
            if listener.after is not None:
                listener.after(optimizer, args, kwargs)

    def end_if_idle(self) -> None:
        """Take the hooks away when nobody listens and no thread can be among them; else they stay and do nothing."""
        if not self.listeners and (self._are_alone() or not self._may_walk()):
            for remove in self._removers:
                remove()

    def _are_alone(self) -> bool:
        """Whether PyTorch knows no others."""
        there = torch_private.step_hooks(), torch_private.step_hooks("post")
        return all(
            len(hooks) == 1 and hooks[0] is mine for hooks, mine in zip(there, (self._before, self._after), strict=True)
        )

    def _may_walk(self) -> bool:
        """Whether a thread that steps may be among the hooks."""
        others = self._stepped - {threading.get_ident()}
        return bool(others & sys._current_frames().keys()) or _is_stepping()  # noqa: SLF001 - takes no lock


def listen(
    before: StepHook | None = None, after: StepHook | None = None, passed: PassedSteps | None = None
) -> Callable[[], None]:
    """Be notified of every optimizer step of the process.

    Args:
        before: Called when a step begins, after hooks that were there earlier.
        after: Called when it has ended.
        passed: Steps of which neither is notified.

    Returns:
        What ends it; may be called from any thread, at any time, and again.
    """
    listener = _Listener(before, after, PassedSteps() if passed is None else passed)
    with TURNS:
        shared = _known() or _Shared()
        shared.listeners = (*shared.listeners, listener)

    def stop() -> None:
        shared.listeners = tuple(each for each in shared.listeners if each is not listener)
        shared.end_if_idle()

    return partial(TURNS.last, stop)


def always(hook: Callable[[Optimizer], None], part: Part) -> StepHook:
    """Return a hook that is called at steps, too, at which guarded ones rest; never again after an error.

    Args:
        hook: Called with the optimizer.
        part: An error is reported to it, and the time that the hook takes.
    """
    failed = False

    def called(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal failed
        if failed or torch_private.dispatch_modes():
            return
        began = time.perf_counter()
        try:
            with torch_private.no_functions():
                hook(optimizer)
        except Exception as error:
            failed = True
            part.failed(error)
        part.took(time.perf_counter() - began)

    return called


@torch_private.constant_when_traced
def _breaks() -> bool:
    """Return whether the graph that is traced may break for a step to be seen; ``torch.compile`` calls this itself."""
    shared = _known()
    if shared is None:
        return False
    if not torch_private.traces_one_graph():
        shared.prepare()
        return True
    if shared.listeners and not shared.whole:
        shared.whole = True
        _log.warning(
            "gradflow: an optimizer steps inside one compiled graph (fullgraph=True), where nothing is called back. "
            "Leave optimizer.step() out of the compiled function, compile with fullgraph=False, or call "
            "exporter.step() after each call of it."
        )
    return False


def _known() -> _Shared | None:
    """Return the hooks that are there already."""
    owners = [getattr(hook, "__self__", None) for hook in torch_private.step_hooks()]
    return next((owner for owner in owners if isinstance(owner, _Shared)), None)


def _is_stepping() -> bool:
    """Return whether this thread is inside an optimizer step."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - no public form
    while frame is not None:
        if frame.f_code.co_filename == torch_optimizer.__file__:
            return True
        frame = frame.f_back
    return False
