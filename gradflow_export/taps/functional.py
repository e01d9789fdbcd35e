"""Rectifiers that are called as functions, such as ``F.relu``, and the layer that feeds each."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradflow_export.taps.base import Guard, unguarded
from gradflow_export.taps.discover import is_compiled, site_name
from gradflow_export.taps.patches import Spy, rectifier_spies
from gradflow_export.taps.provenance import is_plain, nearest_parameter

UNSEEN_STEPS = 5
"""Sampled steps without any such call after which a model is taken to have none."""
NEAREST = 16
"""Nodes of the graph that are looked at for the layer that feeds a rectifier."""

_RECTIFIERS = (nn.ReLU, nn.ReLU6)


class _Calls(threading.local):
    """The calls under way in this thread: checkpoints are computed again in the threads of autograd."""

    def __init__(self) -> None:
        self.stack: list[int] = []


class FunctionalRectifiers:
    """Shows what enters ``torch.relu``, ``Tensor.relu`` and ``F.relu`` while the model's own forward pass runs.

    The functions are replaced for that long only, and only on sampled steps. Calls from within ``nn.ReLU`` are not
    shown: the module is known. Not seen: functions bound to an attribute or by ``functools.partial`` other than
    ``F.relu`` itself, what runs without gradients, and models of which any part is compiled.

    Args:
        model: The unwrapped model; only weak references to its modules are kept.
        see: Called with the tensor that is, or was, rectified.
        guard: Keeps errors out of the user's loop.
    """

    def __init__(self, model: nn.Module, see: Callable[[Tensor], bool], *, guard: Guard = unguarded) -> None:
        modules = list(model.modules())
        self.may_be = any(map(_may_call, modules)) and not any(map(is_compiled, modules))
        self._members = {id(m): weakref.ref(m) for m in model.modules()} if self.may_be else {}
        self._see, self._show = see, guard(self._called)
        self._spies: list[Spy] = []
        self._armed: contextlib.ExitStack | None = None
        self._calls, self._lock, self._running = _Calls(), threading.Lock(), 0
        self._unseen, self._ran, self._seen = 0, False, False

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack puts every function back."""
        self._spies = rectifier_spies(self._show) if self.may_be else []
        stack = contextlib.ExitStack()
        stack.callback(self._members.clear)
        stack.callback(self.arm, on=False)
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more."""
        if on and self._armed is None and self._spies and self._unseen < UNSEEN_STEPS:
            with contextlib.ExitStack() as stack:
                stack.callback(self._stop)
                stack.callback(register_module_forward_pre_hook(self._enter).remove)
                stack.callback(register_module_forward_hook(self._exit, always_call=True).remove)
                self._armed = stack.pop_all()
        elif not on and self._armed is not None:
            self._armed.close()
            self._armed = None
            self._unseen = 0 if self._seen else self._unseen + self._ran
            self._seen = self._ran = False

    def _enter(self, module: nn.Module, _given: Any) -> None:
        if torch.compiler.is_compiling():  # first, so that a trace holds nothing of what follows
            return
        known, stack = self._members.get(id(module)), self._calls.stack
        if known is None or not torch.is_grad_enabled() or known() is not module:
            return
        stack.append(0 if isinstance(module, _RECTIFIERS) else id(module))
        if len(stack) == 1:
            with self._lock:
                self._running += 1
                if self._running == 1:
                    self._ran = True
                    for spy in self._spies:
                        spy.install()

    def _exit(self, module: nn.Module, _given: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack, mark = self._calls.stack, 0 if isinstance(module, _RECTIFIERS) else id(module)
        if mark not in stack or id(module) not in self._members:
            return
        while stack.pop() != mark:  # calls above it ended by an exception that no hook was told of
            pass
        if not stack:
            with self._lock:
                self._running -= 1
                if self._running == 0:
                    self._stop()

    def _stop(self) -> None:
        """Put every function back."""
        self._running = 0
        self._calls.stack.clear()
        for spy in self._spies:
            if spy.live:
                spy.remove()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0] if args else kwargs.get("input")
        stack = self._calls.stack
        if stack and stack[-1] and is_plain(tensor) and tensor.dim() >= 2 and tensor.numel():
            self._seen |= self._see(tensor)


def _may_call(module: nn.Module) -> bool:
    """Whether a module may call functions: those of the user's own classes, and PyTorch's transformer layers."""
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)


def feeding_layer(model: nn.Module, tensor: Tensor, units: int) -> str | None:
    """Return the name of the nearest layer before a tensor whose parameter has an entry or a row for each unit.

    Args:
        model: Whose parameters are looked for.
        tensor: An activation with a graph.
        units: How many units it has.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.dim() and p.shape[0] == units}
    name = nearest_parameter(tensor, names, NEAREST)
    return None if name is None else site_name(name.rpartition(".")[0])
