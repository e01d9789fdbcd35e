"""Sees chosen modules being called, at no cost while it is not armed and without touching the modules."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode, Reading
from gradflow_export.hooks.guards import hook_all_calls
from gradflow_export.metrics.arrays.local import is_ragged
from gradflow_export.metrics.outputs import is_floating

_log = logging.getLogger("gradflow_export")

_PREFERRED_KEYS = ("last_hidden_state", "hidden_states", "logits", "sample")
UNSEEN_STEPS = 5
"""Sampled steps without any call after which that is reported."""

Handler = Callable[[nn.Module, tuple[Any, ...], Any], None]
_is_compiling = torch.compiler.is_compiling
_traces, _dispatch_modes, _is_tracing = torch_private.traces, torch_private.dispatch_modes, torch_private.is_tracing
_is_grad_enabled = torch.is_grad_enabled
_transform, _no_functions = torch_private.transform, torch_private.no_functions


class ModuleCalls:
    """One process-wide forward hook that serves all modules of one instrument.

    A hook on each of 400 modules costs a small model several per cent of every step, and would travel along when the
    model is pickled. PyTorch's global forward hook is registered only while a step is sampled, and nothing of ours is
    stored on a module, unless part of the model is compiled: compiled code sees hooks on modules only. Calls without
    gradients (validation) are passed over.

    Args:
        enabled: False never sees a call.
        code: Knows whether the model is compiled.

    Attributes:
        armed: Whether calls are looked at.
        seen: Whether any was seen.
        on_passed_over: Called for a call without gradients, or under ``torch.func.grad`` or ``vmap``, of which no
            handler is notified.
    """

    def __init__(self, *, enabled: bool = True, code: CompiledCode | None = None) -> None:
        self.enabled = enabled and (code is None or not code.found or code.read)
        self.code = code
        self._handlers: dict[int, tuple[weakref.ref[nn.Module], list[Handler]]] = {}
        self._inside: dict[int, list[Reading]] = {}
        self._unhook: Callable[[], None] | None = None
        self.armed = False
        self._unseen = 0
        self.on_passed_over: Callable[[nn.Module], None] | None = None
        self.seen = False

    def add(self, module: nn.Module, handler: Handler, inside: Reading | None = None) -> None:
        """Call ``handler(module, arguments, output)`` after each call of ``module`` while armed.

        Arguments given by keyword are not among them: PyTorch never forgets a global hook that asks for those.

        Args:
            module: Only a weak reference is kept.
            handler: Takes calls outside compiled code.
            inside: Takes those inside.
        """
        reference, handlers = self._handlers.get(id(module), (weakref.ref(module), []))
        if reference() is not module:
            reference, handlers = weakref.ref(module), []
        handlers.append(handler)
        self._handlers[id(module)] = (reference, handlers)
        if inside is not None:
            self._inside.setdefault(id(module), []).append(inside)

    def arm(self, *, on: bool = True) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""
        if on and self.code is not None:
            self.code.begin()
        self.armed = on and self.enabled
        hooked = self.armed and not (self.code is not None and self.code.found)
        if hooked and self._unhook is None:
            self._unhook = hook_all_calls(self._called)
        elif not hooked and self._unhook is not None:
            self._unhook()
            self._unhook = None

    def attach(self) -> contextlib.ExitStack:
        """Return a stack whose closing disarms and forgets every handler."""
        stack = contextlib.ExitStack() if self.code is None else self.code.attach(self)
        stack.callback(self._handlers.clear)
        stack.callback(self._inside.clear)
        stack.callback(self.arm, on=False)
        return stack

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules whose calls are seen."""
        for reference, _ in self._handlers.values():
            module = reference()
            if module is not None:
                yield module

    def readings(self, module: int) -> list[Reading]:
        """Return what a module, known by its ``id``, is read for inside compiled code."""
        return self._inside.get(module, [])

    def notice_silence(self) -> None:
        """Look after a sampled step whether any call was seen, and say once that steps come and none is.

        Silence is how it shows that a model was compiled after it was watched.
        """
        if not self.enabled or self.seen or not self._handlers or self._unseen == UNSEEN_STEPS:
            return
        if self.code is not None:
            self.code.notice()
        self._unseen += 1
        if self._unseen == UNSEEN_STEPS:
            _log.warning(
                "gradflow: no call of a watched block was seen in %d steps; block gains and activations are not read. "
                "Gradients, updates, loss and memory are.%s",
                UNSEEN_STEPS,
                "" if self.code is None else self.code.way_out(),
            )

    def called_inside(self, module: int, tensor: Tensor, *, backward: bool) -> None:
        """Take what compiled code shows of a module while armed: its output, or the gradient that arrived there."""
        takers = [take for r in self.readings(module) if (take := r.backward if backward else r.forward) is not None]
        if takers:
            self.seen = True
            own = tensor.clone()  # compiled code writes over its buffers and counts no versions; some read later
            for take in takers:
                take(own)

    def called_eagerly(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take a call of a module that has a hook of its own."""
        if self.armed:
            self._called(module, args, output)

    def _called(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_compiling():  # first, so that a trace holds nothing of what follows
            return
        entry = self._handlers.get(id(module))
        if entry is None or _traces() or entry[0]() is not module or (_dispatch_modes() and _is_tracing()):
            return
        # Under torch.func.vmap or grad tensors are wrapped: they must not outlive the call, and no hook reports them.
        if _is_grad_enabled() and _transform() is None:
            self.seen = True
            with torch_private.no_modes() if _dispatch_modes() else _no_functions():
                for handler in entry[1]:
                    handler(module, args, output)
        elif self.on_passed_over is not None:
            self.on_passed_over(module)


def output_tensor(output: Any, *, learns: bool = True) -> Tensor | None:
    """Choose the tensor of a block's output whose gradient is measured.

    Args:
        output: A tensor, or a tuple, list, mapping or Hugging Face output that holds one, nested or not.
        learns: Whether it must require a gradient; nothing does in an evaluation.

    Returns:
        The first floating tensor, that requires a gradient if it has to; in mappings the keys ``last_hidden_state``,
        ``hidden_states``, ``logits`` and ``sample`` come first. ``None`` when there is none.
    """
    if isinstance(output, Tensor):
        wanted = (output.requires_grad or not learns) and is_floating(output)
        # A fake one has a shape alone.
        return output if wanted and not isinstance(output, torch_private.FakeTensor) and not is_ragged(output) else None
    for part in _parts(output):
        chosen = output_tensor(part, learns=learns)
        if chosen is not None:
            return chosen
    return None


def _parts(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        first = [output[key] for key in _PREFERRED_KEYS if key in output]
        return [*first, *(value for key, value in output.items() if key not in _PREFERRED_KEYS)]
    return output if isinstance(output, (tuple, list)) else ()
