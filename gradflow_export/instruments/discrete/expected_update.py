"""What an optimizer is about to add to a parameter, had the weights no rounding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private
from gradflow_export.metrics.expected import adam_update, sgd_update

MASTERS = ("master_param", "master_params", "master_weight", "fp32_param")
"""Names under which optimizers keep float32 weights in their state (Apex, Megatron, DeepSpeed and their kin)."""

Take = Callable[[Tensor], Tensor]
Meant = Callable[[Tensor], Tensor | None]
"""Takes the gradient that was used and, right after the step, returns the update without rounding, if it is known."""

_CLOSED: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"SGD": sgd_update, "Adam": adam_update, "AdamW": adam_update}
)
# Entry by entry, without random numbers: a float64 copy of a few entries takes the step that all of them take.
_SHADOWED = frozenset({"RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"})


def meant_update(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any], take: Take) -> Meant | None:
    """Remember what is needed to tell the update that one step means; call it before the step.

    Args:
        optimizer: What steps. SGD, Adam and AdamW are computed in closed form, other optimizers of ``torch.optim`` that
            treat each entry alone by a float64 copy of the entries taken.
        parameter: The weights.
        group: Its parameter group.
        take: Copies entries of a tensor that has the parameter's shape, in float64.

    Returns:
        A function for after the step, ``None`` when the optimizer's rule is not known.
    """
    state, master = optimizer.state.get(parameter, {}), master_of(optimizer, parameter)
    if master is not None:
        before = take(master)
        return lambda _gradient: take(master) - before
    name, inherited = _rule(optimizer)
    if name not in _CLOSED and name not in _SHADOWED:
        return None
    meant = _by_rule(name, parameter, group, state, take)
    return _unless_changed(parameter, meant) if inherited else meant


def _by_rule(name: str, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], take: Take) -> Meant:
    kept = {key: _keep(value, parameter, take) for key, value in state.items()}
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    del options["params"]
    weight = take(parameter)
    if name in _SHADOWED:
        return lambda gradient: _shadow_step(name, weight, gradient, kept, options)
    options.setdefault("decoupled_weight_decay", name == "AdamW")
    return lambda gradient: _CLOSED[name](weight, gradient, kept, options)


def _unless_changed(parameter: Tensor, meant: Meant) -> Meant:
    """Return what tells nothing where a step of a subclass has changed the gradient before it was used."""
    gradient = parameter.grad
    if gradient is None or gradient.is_inference():  # a closure brings it yet; inference tensors count no changes
        return meant
    version = torch_private.version(gradient)

    def checked(used: Tensor) -> Tensor | None:
        now = parameter.grad
        changed = now is not None and (now is not gradient or torch_private.version(now) != version)
        return None if changed else meant(used)

    return checked


def master_of(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the float32 weights an optimizer keeps of a parameter, in which no update is lost but only late."""
    state = optimizer.state.get(parameter, {})
    return next((state[name] for name in MASTERS if _is_like(state.get(name), parameter)), None)


def _rule(optimizer: Optimizer) -> tuple[str, bool]:
    """Return the class of ``torch.optim`` whose ``step`` this is, and whether a subclass calls it in a step of its own.

    A step that calls that of its base class means what the base class means, and then does something to the weights,
    such as laying a grid over them. The name is empty for a rule of somebody's own.
    """
    steps = [vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    for place, step in enumerate(map(inspect.unwrap, steps)):
        home, _, method = step.__qualname__.partition(".")
        if method == "step" and step.__module__ == f"torch.optim.{home.lower()}":
            return home, place > 0
        if not _calls_base(step, type(optimizer)):
            break
    return "", False


def _calls_base(step: Any, kind: type) -> bool:
    """Return whether the code of a step asks a base class for its step."""
    names = getattr(getattr(step, "__code__", None), "co_names", ())
    return "step" in names and not {"super", *(base.__name__ for base in kind.__mro__[1:])}.isdisjoint(names)


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype is torch.float32


def _keep(value: Any, parameter: Tensor, take: Take) -> Any:
    if not isinstance(value, Tensor):
        return value
    return take(value) if value.shape == parameter.shape and parameter.dim() else value.detach().double()


def _shadow_step(
    name: str, weight: Tensor, gradient: Tensor, state: Mapping[str, Any], options: Mapping[str, Any]
) -> Tensor:
    twin = nn.Parameter(weight.clone())
    twin.grad = gradient.clone()
    rule = getattr(torch.optim, name)
    shadow = rule([{**options, "params": [twin], "foreach": False, "capturable": False, "fused": None}])
    if state:
        shadow.state[twin] = dict(state)
    with torch.no_grad():
        inspect.unwrap(rule.step)(shadow)  # below the wrapper that would call everybody's step hooks
    return twin.detach() - weight
