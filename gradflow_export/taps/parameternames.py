"""Names of a model's parameters, found by identity without listing them again for each question."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from gradflow_export.taps.discover import site_name


class _Place(NamedTuple):
    """Where a parameter was when the model was listed."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str


class ParameterNames:
    """Names the parameters of one model.

    All of them are listed once. A name is given only if its module still holds this very tensor, so that a parameter
    that was replaced, or the memory of one that was freed, never goes by the name of another. A tensor that is not
    known has the model listed anew, at most once after each :meth:`begin`.

    Args:
        model: Returns the model, ``None`` when it is gone.
    """

    def __init__(self, model: Callable[[], nn.Module | None]) -> None:
        self._model = model
        self._places: dict[int, _Place] = {}
        self._listed = False

    def begin(self) -> None:
        """Allow the model to be listed anew, as at the beginning of a sampled step."""
        self._listed = False

    def name_of(self, tensor: object) -> str | None:
        """Return the dotted name of a parameter without the prefixes of wrappers, ``None`` when it is not one."""
        name = self._known(tensor)
        if name is None and not self._listed and isinstance(tensor, Tensor):
            self._list()
            name = self._known(tensor)
        return name

    def _known(self, tensor: object) -> str | None:
        place = self._places.get(id(tensor))
        owner = None if place is None else place.owner()
        if (
            place is None
            or owner is None
            or dict(owner.named_parameters(recurse=False)).get(place.attribute) is not tensor
        ):
            return None
        return place.name

    def _list(self) -> None:
        self._listed = True
        self._places = {}
        model = self._model()
        for prefix, module in () if model is None else model.named_modules():
            owner = weakref.ref(module)
            for attribute, parameter in module.named_parameters(recurse=False):
                name = site_name(f"{prefix}.{attribute}" if prefix else attribute)
                self._places.setdefault(id(parameter), _Place(owner, attribute, name))
