"""Names of a model's parameters, found by identity without listing them again for each question."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.parameter_slots import Slot, slots


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
        self._places: dict[int, tuple[Slot, str]] = {}
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
        slot, name = self._places.get(id(tensor), (None, None))
        return name if slot is not None and slot() is tensor else None

    def _list(self) -> None:
        self._listed = True
        model = self._model()
        if model is None:
            self._places = {}
            return
        names = [site_name(name) for name, _ in model.named_parameters()]
        self._places = {id(p): (slot, name) for name, (slot, p) in zip(names, slots(model), strict=True)}
