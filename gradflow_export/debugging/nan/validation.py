"""Whether parameters and outputs are what a model needs them to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradflow_export.debugging.inspect.gradients import parameters_of
from gradflow_export.debugging.inspect.tensor_info import TensorInfo, describe_tensors
from gradflow_export.rules.base import some

_DEPTH = 6
_Seen = dict[str, tuple[int, tuple[int, ...]]]


class ParameterBook:
    """Remembers which tensors stood where in a model, without keeping either."""

    def __init__(self) -> None:
        self._models: MutableMapping[nn.Module, _Seen] = WeakIdKeyDictionary()

    def changes(self, model: nn.Module) -> dict[str, list[str]]:
        """Return what is different from the last call, by name, and remember what is there now."""
        now = parameters_of(model)
        before = self._models.get(model, {name: (id(p), tuple(p.shape)) for name, p in now.items()})
        self._models[model] = {name: (id(p), tuple(p.shape)) for name, p in now.items()}
        both = [name for name in now if name in before]
        return {
            "added": [name for name in now if name not in before],
            "removed": [name for name in before if name not in now],
            "replaced": [name for name in both if before[name][0] != id(now[name])],
            "reshaped": [name for name in both if before[name][1] != tuple(now[name].shape)],
        }


def check_parameters(infos: Mapping[str, TensorInfo], changes: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return what is wrong with parameters.

    Args:
        infos: Of each parameter.
        changes: As :meth:`ParameterBook.changes` returns them.
    """
    nonfinite = [name for name, info in infos.items() if not info.is_finite]
    constant = [
        name
        for name, info in infos.items()
        if len(info.shape) > 1 and info.numel > 1 and info.is_finite and info.min_value == info.max_value is not None
    ]
    sentences = {
        "nonfinite": "NaN or Inf in {}; restart from the last checkpoint with finite weights",
        "constant": "all entries of {} are equal, so that its units cannot become different; initialise it at random",
        "added": "{} came since the last check; hand new parameters to the optimizer",
        "removed": "{} went since the last check",
        "replaced": "{} is another tensor than before; make the optimizer after the model is complete",
        "reshaped": "{} has another shape than before",
    }
    found = {"nonfinite": nonfinite, "constant": constant, **changes}
    problems = [sentences[what].format(some(tuple(names))) for what, names in found.items() if names]
    return {"valid": not problems, "problems": problems, **found}


def check_output(output: Any, expected_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Return what is wrong with the tensors in an output."""
    tensors = dict(tensors_in(output))
    infos = describe_tensors(tensors)
    problems = [] if tensors else ["the output holds no tensor"]
    for path, info in infos.items():
        problems += info.wrong(path)
    if expected_shape is not None and infos:
        path, info = next(iter(infos.items()))
        same = len(info.shape) == len(expected_shape)
        if not same or any(want not in {-1, got} for want, got in zip(expected_shape, info.shape, strict=False)):
            problems.append(f"{path} has shape {info.shape}, expected {tuple(expected_shape)}")
    return {"valid": not problems, "problems": problems, "tensors": infos}


def tensors_in(held: Any, path: str = "output", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield path and tensor of each tensor in a nesting of mappings, sequences and objects that hold tensors."""
    if isinstance(held, Tensor):
        yield path, held
    elif depth and isinstance(held, Mapping):
        for key, part in held.items():
            yield from tensors_in(part, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(held, (list, tuple)):
        for index, part in enumerate(held):
            yield from tensors_in(part, f"{path}[{index}]", depth - 1)
    elif depth and dataclasses.is_dataclass(held) and not isinstance(held, type):
        for field in dataclasses.fields(held):
            yield from tensors_in(getattr(held, field.name), f"{path}.{field.name}", depth - 1)
    elif depth and hasattr(held, "__dict__") and not isinstance(held, (nn.Module, type)) and not callable(held):
        for name, part in vars(held).items():
            yield from tensors_in(part, f"{path}.{name}", depth - 1)
