"""What tells whether a gradient is another one, was written to, or is gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradflow_export.hooks import torch_private

Stamp = tuple[int, int] | None
"""Number and version of a gradient, ``None`` without one."""


def stamp(gradient: Tensor | None) -> Stamp:
    """Return what changes when this gradient is written to."""
    return None if gradient is None else (id(gradient), torch_private.version(gradient))


def is_zeroed(gradient: Tensor | None, known: Stamp) -> bool:
    """Whether a gradient was set to zeros since it had a stamp; only known where looking at it waits for no device."""
    if gradient is None or known is None or id(gradient) != known[0] or torch_private.version(gradient) == known[1]:
        return False
    return is_blank(gradient)


def is_blank(gradient: Tensor) -> bool:
    """Whether all entries are 0, where no device has to be waited for; behind a first one that is not, none is read."""
    if type(gradient) is not Tensor or not gradient.is_cpu:
        return False
    told = gradient.layout is torch.strided and gradient.numel() and bool(gradient[(0,) * gradient.dim()])
    return not told and not bool(gradient.any())


class GradientStamps:
    """Stamps of the gradients of all parameters of a model, in order, each once.

    Args:
        model: Returns the model, ``None`` when it is gone.

    Attributes:
        size: How many parameters there are, once they were listed.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._places: list[tuple[weakref.ref[nn.Module], tuple[str, ...]]] = []
        self.size = 0

    def read(self) -> list[Stamp]:
        """Return the stamps of all gradients as they are now."""
        held = self._parameters()
        if not held or any(p is None for p in held):
            self.list_parameters()
            held = self._parameters()
        return [None if p is None else stamp(p.grad) for p in held]

    def zeroed(self, places: Iterable[int]) -> list[int]:
        """Return which of these parameters hold a gradient of zeros, where no device has to be waited for.

        What is written through ``.data`` changes no stamp.
        """
        held = self._parameters()
        grads = [(place, None if (p := held[place]) is None else p.grad) for place in places]
        return [place for place, g in grads if g is not None and is_blank(g)]

    def _parameters(self) -> list[Tensor | None]:
        """Return the model's parameters in order, each once, ``None`` where one is gone."""
        out: list[Tensor | None] = []
        for reference, keys in self._places:
            module = reference()
            held = {} if module is None else dict(torch_private.parameters(module))
            out.extend([held.get(key) for key in keys])
        return out

    def list_parameters(self) -> None:
        """Note where the parameters are; no weak reference stands on one, see ``hooks/parameter_slots.py``."""
        model, seen = self._model(), set[int]()
        self._places, self.size = [], 0
        for module in () if model is None else model.modules():
            named = [(key, p) for key, p in torch_private.parameters(module) if id(p) not in seen]
            named = list({id(p): (key, p) for key, p in reversed(named)}.values())[::-1]
            seen.update(id(p) for _, p in named)
            if named:
                self._places.append((weakref.ref(module), tuple(key for key, _ in named)))
                self.size += len(named)
