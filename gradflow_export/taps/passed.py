"""Tells which tensors a forward pass has just used, at the latest moment at which they are surely what it used."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from gradflow_export.taps.base import Guard, unguarded
from gradflow_export.taps.calls import ModuleCalls
from gradflow_export.taps.compiled import CompiledCode


class ForwardUse:
    """Calls back when the call of a module ends that holds some of the tensors asked for.

    That is later than any hook and any line of ``forward`` that lays the weights on a grid before it uses them. A
    tensor whose own module is not called, because its parent reaches for it, is told of when the parent's call ends.
    Calls without gradients (validation) are passed over, and so is compiled code, which runs no hooks.

    Args:
        model: Where the tensors are; nothing of it is kept.
        wanted: Place of each tensor by its name in the model.
        used: Called with the places that a call used, as they were registered; of one tensor more than once.
        code: Knows whether the model is compiled.
        guard: Wraps the hook.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Mapping[str, int],
        used: Callable[[tuple[int, ...]], None],
        *,
        code: CompiledCode | None = None,
        guard: Guard = unguarded,
    ) -> None:
        self._used, self._code, self._guard = used, code, guard
        self._holders: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._calls = ModuleCalls()
        below: dict[str, list[int]] = {}
        for name, place in wanted.items():
            path, _, own = name.rpartition(".")
            self._holders[place] = weakref.ref(model.get_submodule(path)), own
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                below.setdefault(".".join(parts[:depth]), []).append(place)
        self._modules = [(weakref.ref(model.get_submodule(path)), tuple(places)) for path, places in below.items()]

    def attach(self) -> contextlib.ExitStack:
        """Begin to know the modules; closing the returned stack forgets them."""
        for reference, places in self._modules:
            module = reference()
            if module is not None:
                self._calls.add(module, self._guard(partial(self._called, places)))
        return self._calls.attach()

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""
        self._calls.arm(on=on and not (self._code is not None and self._code.found))

    def tensor(self, place: int) -> Tensor | None:
        """Return a tensor as it is now, ``None`` when it is gone."""
        reference, name = self._holders[place]
        module = reference()
        if module is None:
            return None
        # As an attribute it might be computed anew, where it is parametrized.
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        return next((tensor for found, tensor in own if found == name), None)

    def _called(self, places: tuple[int, ...], _module: nn.Module, _args: Any, _output: Any) -> None:
        self._used(places)
