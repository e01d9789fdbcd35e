"""Finds parameters again by the place where a module holds them.

No weak reference stands on a parameter: PyTorch refuses to convert one that has any, as ``model.to()`` does for tensor
subclasses and where ``torch.__future__.set_swap_module_params_on_conversion(True)`` was called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.members import held_parameters


class Slot:
    """The place of a parameter or buffer in a module, which is held weakly.

    Args:
        module: The module that holds it directly.
        key: Its name there.
    """

    __slots__ = ("key", "reference")

    def __init__(self, module: nn.Module, key: str) -> None:
        self.reference, self.key = weakref.ref(module), key

    def __call__(self) -> Tensor | None:
        """Return what stands there now; ``None`` where nothing does, or the module is gone."""
        module = self.reference()
        return None if module is None else torch_private.own_tensor(module, self.key)


def tensors_at(places: Iterable[Slot]) -> list[Tensor | None]:
    """Return what stands at each place now; one walk, for what is asked at every step."""
    return torch_private.own_parameters([(place.reference(), place.key) for place in places])


def slots(model: nn.Module) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each parameter once with its place, in the order of ``model.parameters()``."""
    for module, key, parameter in held_parameters(model):
        yield Slot(module, key), parameter


def briefly(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Return what gives a tensor back as long as somebody else keeps it, which a parameter is taken to be for a step.

    Args:
        tensor: One that a forward pass takes or gives; what holds the result is cleared when the step ends.
    """
    keep = tensor.is_leaf and tensor.requires_grad and isinstance(tensor, nn.Parameter)
    return (lambda: tensor) if keep else weakref.ref(tensor)
