"""Leaves a model, its optimizers and every random generator as they were."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks import torch_private


@contextlib.contextmanager
def preserved(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
    """Put everything back at the end that passes through the model may change.

    Parameters (copied only when an optimizer may move them), gradients, buffers, training flags, the state and settings
    of the optimizers, and the generators of torch, NumPy and Python. What a module keeps in plain attributes is its own
    affair.

    Args:
        model: Its gradients are ``None`` when the block is entered.
        optimizers: They work on copies of their state.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_generators())
        stack.enter_context(_module(model))
        stack.enter_context(_parameters(model, copied=bool(optimizers)))
        for optimizer in optimizers:
            stack.enter_context(_optimizer(optimizer))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        yield


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global one
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - the global one is what must not move
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


@contextlib.contextmanager
def _module(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    flags = [module.training for module in modules]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
        for name, buffer in torch_private.buffers(module)  # a forward pass may put another tensor there
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                torch_private.put_buffer(module, name, buffer)
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


@contextlib.contextmanager
def _parameters(model: nn.Module, *, copied: bool) -> Iterator[None]:
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    values = [p.detach().clone() for p in parameters] if copied else []
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=False):
                parameter.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextlib.contextmanager
def _optimizer(optimizer: Optimizer) -> Iterator[None]:
    attributes = dict(vars(optimizer))
    groups = [{key: _value(value) for key, value in group.items()} for group in optimizer.param_groups]
    optimizer.state = defaultdict(dict, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)


def _value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
