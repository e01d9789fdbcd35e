"""The update that an optimizer means: closed forms of SGD, Adam and AdamW, without the rounding of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def sgd_update(weight: Tensor, gradient: Tensor, state: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    """Return what one step of SGD adds to the weights.

    Args:
        weight: Weights before the step, float64. Shape: any.
        gradient: Their gradient. Shape: that of ``weight``.
        state: ``momentum_buffer`` before the step, or nothing.
        options: The parameter group: ``lr`` and, where they are not 0 or false, ``momentum``, ``dampening``,
            ``weight_decay``, ``nesterov``, ``maximize``.

    Returns:
        Shape: that of ``weight``. Unit: weight.

    Source: Sutskever et al. 2013, in the form of the documentation of ``torch.optim.SGD``.
    """
    direction = _descent(weight, gradient, options, options.get("weight_decay", 0.0))
    momentum = options.get("momentum", 0.0)
    if not isinstance(momentum, Tensor) and momentum == 0.0:
        return torch.mul(direction, -options["lr"])
    buffer = state.get("momentum_buffer")
    buffer = direction if buffer is None else momentum * buffer + (1 - options.get("dampening", 0.0)) * direction
    return torch.mul(direction + momentum * buffer if options.get("nesterov") else buffer, -options["lr"])


def adam_update(weight: Tensor, gradient: Tensor, state: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    """Return what one step of Adam or AdamW adds to the weights.

    Args:
        weight: Weights before the step, float64. Shape: any.
        gradient: Their gradient. Shape: that of ``weight``.
        state: ``step``, ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq`` before the step; empty before the first.
        options: The parameter group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``decoupled_weight_decay`` (AdamW),
            ``amsgrad``, ``maximize``.

    Returns:
        Shape: that of ``weight``. Unit: weight.

    Source: Kingma and Ba 2015, arXiv:1412.6980; decoupled decay: Loshchilov and Hutter 2019, arXiv:1711.05101; Reddi
        et al. 2018 for AMSGrad.
    """
    decay, decoupled = options.get("weight_decay", 0.0), bool(options.get("decoupled_weight_decay"))
    g = _descent(weight, gradient, options, 0.0 if decoupled else decay)
    first, second = options["betas"]
    zero = torch.zeros_like(weight)
    m = first * state.get("exp_avg", zero) + (1 - first) * g
    v = second * state.get("exp_avg_sq", zero) + (1 - second) * g.square()
    step = torch.as_tensor(state.get("step", 0.0), dtype=weight.dtype, device=weight.device) + 1
    if options.get("amsgrad"):
        v = torch.maximum(state.get("max_exp_avg_sq", zero), v)
    size = (v / (1 - second**step)).sqrt() + options["eps"]
    update = torch.mul(m / (1 - first**step) / size, -options["lr"])
    return update - options["lr"] * decay * weight if decoupled else update


def _descent(weight: Tensor, gradient: Tensor, options: Mapping[str, Any], decay: Any) -> Tensor:
    g = -gradient if options.get("maximize") else gradient
    return torch.add(g, decay * weight)
