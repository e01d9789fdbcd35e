"""Tells which tensors a forward pass has just used, at the latest moment at which they are surely what it used."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls


class ForwardUse:
    """Calls back when the call of a module ends that holds some of the tensors asked for.

    That is later than any hook and any line of ``forward`` that lays the weights on a grid before it uses them. A
    tensor whose own module is not called, because its parent reaches for it, is reported when the parent's call ends.
    Calls without gradients (validation) are passed over, and so is compiled code, which runs no hooks.

    Args:
        model: Where the tensors are; nothing of it is kept.
        wanted: Place of each tensor by its name in the model.
        used: Called with the places that a call used; once for each call of the module that holds the tensor.
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
        self._teller: dict[int, str] = {}
        below: dict[str, list[int]] = {}
        for name, place in wanted.items():
            path, _, own = name.rpartition(".")
            self._holders[place] = weakref.ref(model.get_submodule(path)), own
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                below.setdefault(".".join(parts[:depth]), []).append(place)
        owner = {place: name.rpartition(".")[0] for name, place in wanted.items()}
        self._modules = [
            (
                weakref.ref(model.get_submodule(path)),
                path,
                tuple(places),
                frozenset(p for p in places if owner[p] == path),
            )
            for path, places in below.items()
        ]

    def attach(self) -> contextlib.ExitStack:
        """Begin to know the modules; closing the returned stack forgets them."""
        for reference, path, places, own in self._modules:
            module = reference()
            if module is not None:
                self._calls.add(module, self._guard(partial(self._called, path, places, own)))
        return self._calls.attach()

    def arm(self, *, on: bool) -> None:
        """Begin to see calls, or with ``on=False`` see no more; calling it again does nothing."""
        self._calls.arm(on=on and not (self._code is not None and self._code.found))

    def tensor(self, place: int) -> Tensor | None:
        """Return a tensor as it is now, ``None`` when it is gone."""
        reference, name = self._holders[place]
        module = reference()
        return None if module is None else torch_private.own_tensor(module, name)

    def _called(
        self, path: str, places: tuple[int, ...], own: frozenset[int], _module: nn.Module, _args: Any, _output: Any
    ) -> None:
        # What its own module has reported, or the innermost that is called, the modules around it need not repeat.
        self._teller.update(dict.fromkeys(own, path))
        self._used(tuple(place for place in places if self._teller.setdefault(place, path) == path))
