"""Takes down what a script makes of its model's output until it calls backward, so that a batch can be used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradflow_export.experiments.model_edits import mapped
from gradflow_export.hooks.torch_private import version

MOST_CALLS = 10_000
"""Calls of torch between a model's output and backward beyond which a batch is not taken down."""


class _Slot(Tensor):
    """Stands for the tensor that an earlier call gives."""

    number: int


def seen(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: in sequences and mappings of any class, and in dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from seen(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from seen(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from seen(getattr(value, each.name, None))


@dataclass(frozen=True)
class Call:
    """One call, with slots in the place of tensors that earlier calls gave.

    Attributes:
        function: A function of torch, ``None`` for the model itself.
        args: Its arguments.
        kwargs: Its named arguments.
        given: Slots of the tensors that it gives, in order.
    """

    function: Callable[..., Any] | None
    args: Any
    kwargs: Any
    given: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """What makes a loss of the model, once more whenever it is asked.

    Attributes:
        calls: In order.
        loss: Slot of the loss.
        inputs: Tensors that come from outside, each with the version that it had.
    """

    calls: tuple[Call, ...]
    loss: int
    inputs: tuple[tuple[Tensor, int], ...]

    @property
    def whole(self) -> bool:
        """Whether nothing has been written to the tensors since."""
        return all(version(tensor) == known for tensor, known in self.inputs)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that come from outside."""
        return sum(tensor.numel() * tensor.element_size() for tensor, _ in self.inputs)

    def again(self, model: nn.Module) -> Tensor:
        """Return the loss of a model."""
        known: dict[int, Tensor] = {}

        def filled(given: Tensor) -> Tensor:
            return known[given.number] if isinstance(given, _Slot) else given

        for call in self.calls:
            args, kwargs = mapped(call.args, filled), mapped(call.kwargs, filled)
            found = model(*args, **kwargs) if call.function is None else call.function(*args, **kwargs)
            known.update(zip(call.given, seen(found), strict=False))
        return known[self.loss]


class Tape(TorchFunctionMode):
    """Takes down calls from the model's output on; ends by itself at backward, and never raises anything of its own.

    Attributes:
        loss: What backward was called on; ``None`` as long as it was not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss: Tensor | None = None
        self._calls: list[tuple[Callable[..., Any] | None, Any, Any, list[Tensor]]] = []
        self._versions: dict[int, int] = {}
        self._torn = False

    def saw(self, args: Any, kwargs: Any) -> None:
        """Note what a call is about to get."""
        try:
            for tensor in seen([args, kwargs]):
                self._versions.setdefault(id(tensor), version(tensor))
        except Exception:
            self._torn = True

    def add(self, function: Callable[..., Any] | None, args: Any, kwargs: Any, output: Any) -> None:
        """Take down a call, of the model where there is no function."""
        given = list(seen(output))
        if given:
            self._calls.append((function, args, kwargs, given))
            self._torn |= len(self._calls) > MOST_CALLS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and take it down."""
        del types
        kwargs = kwargs or {}
        if func is Tensor.backward and self.loss is None:
            self.loss = args[0]
        if self.loss is not None or self._torn:
            return func(*args, **kwargs)
        self.saw(args, kwargs)
        output = func(*args, **kwargs)
        self.add(func, args, kwargs, output)
        return output

    def batch(self) -> Batch | None:
        """Return what the loss was made of; ``None`` where it is not known, or not made by the model."""
        if self.loss is None or self._torn:
            return None
        needed, kept = {id(self.loss)}, []
        for function, args, kwargs, given in reversed(self._calls):
            if needed.intersection(map(id, given)):
                needed.update(id(tensor) for tensor in seen([args, kwargs]))
                kept.append((function, args, kwargs, given))
        kept.reverse()
        slots: dict[int, int] = {}
        inputs: dict[int, tuple[Tensor, int]] = {}

        def slotted(tensor: Tensor) -> Tensor:
            number = slots.get(id(tensor))
            if number is None:
                if not isinstance(tensor, nn.Parameter):
                    inputs[id(tensor)] = tensor, self._versions.get(id(tensor), 0)
                return tensor
            stand_in = torch.empty(0).as_subclass(_Slot)
            stand_in.number = number
            return stand_in

        calls = []
        for function, args, kwargs, given in kept:
            taken = mapped(args, slotted), mapped(kwargs, slotted)
            for tensor in given:
                slots.setdefault(id(tensor), len(slots))
            calls.append(Call(function, *taken, tuple(slots[id(tensor)] for tensor in given)))
        known = any(call.function is None for call in calls) and id(self.loss) in slots
        return Batch(tuple(calls), slots[id(self.loss)], tuple(inputs.values())) if known else None
