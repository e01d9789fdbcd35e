"""Checks of what the user hands to an exporter: each error says what was expected, what came and what to do."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export import writers
from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.hooks.discover import site_name, unwrap
from gradflow_export.records.ignored import Ignored
from gradflow_export.writers import make_writer
from gradflow_export.writers.base import Writer
from gradflow_export.writers.preflight import PreflightWriter


def check_module(model: object) -> None:
    """Raise unless this is a module."""
    if isinstance(model, nn.Module):
        return
    came, fix = type(model).__name__, "pass the module itself"
    if isinstance(model, type):
        came, fix = f"the class {model.__name__}", f"pass a module that was made: {model.__name__}(...)"
    elif isinstance(model, (list, tuple, set)) and any(isinstance(part, nn.Module) for part in model):
        came, fix = f"a {came} of modules", "pass an nn.ModuleList of them, or each by itself"
    raise ArgumentTypeError(f"model must be a torch.nn.Module, got {came}; {fix}.")


def check_model(model: nn.Module) -> None:
    """Raise unless this is a module that takes hooks and has parameters, all of them with a shape."""
    check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            f"model must be a module that runs in Python, got {type(model).__name__}, which takes no hooks; watch the "
            "module that was given to torch.jit.script or torch.jit.trace, and train that one."
        )
    if not any(True for _ in model.parameters()):
        raise ArgumentError(
            f"model {type(model).__name__} has no parameters, so nothing can be learned or watched. If its layers are "
            "kept in a plain list, use nn.ModuleList so that they are registered."
        )
    blank = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if blank:
        raise ArgumentError(
            f"every parameter of the model must have a shape, got {blank[0]!r} of a lazy module, and {len(blank)} such "
            "in all; send one batch through the model first."
        )


def check_start(start_step: object) -> None:
    """Raise unless this is a number of steps."""
    if isinstance(start_step, bool) or not isinstance(start_step, int):
        raise ArgumentTypeError(
            f"start_step must be a whole number of steps, got {start_step!r}; pass the number of steps done before."
        )
    if start_step < 0:
        raise ArgumentError(f"start_step must be 0 or more, got {start_step}; it is the number of steps done before.")


def check_on_issue(on_issue: object) -> None:
    """Raise unless this is what can be done when an issue opens."""
    if on_issue not in {None, "try"}:
        raise ArgumentError(f'on_issue expects "try" or None, got {on_issue!r}; leave it out to try nothing.')


def check_optimizer(optimizer: object) -> None:
    """Raise unless this is one optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer itself."
        )


def check_logdir(logdir: object) -> None:
    """Raise unless this is a path or left out."""
    if logdir is not None and not isinstance(logdir, (str, os.PathLike)):
        raise ArgumentTypeError(f"logdir must be a path, got {logdir!r}; for example logdir='runs/first'.")


def check_watch(criterion: object, optimizer: object, model: nn.Module | None) -> None:
    """Raise unless criterion and optimizer can be watched beside the model."""
    if isinstance(criterion, nn.Module) and unwrap(criterion) is model:
        raise ArgumentError(
            f"criterion must be a loss module such as nn.CrossEntropyLoss(), got the watched {type(model).__name__} "
            "itself; call watch() without it, the model is known already."
        )
    if criterion is not None and not isinstance(criterion, nn.Module):
        raise ArgumentTypeError(
            f"criterion must be a loss module such as nn.CrossEntropyLoss(), got {type(criterion).__name__}; for a "
            "function, call exporter.observe(loss=loss) in the loop instead."
        )
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    held: set[int] = set()
    for item in listed:
        if isinstance(item, Optimizer):
            held |= {id(parameter) for group in item.param_groups for parameter in group["params"]}
        else:
            raise ArgumentTypeError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(item).__name__}; for other "
                "kinds leave it out and call exporter.step() after each update."
            )
    own = set() if model is None else {id(parameter) for parameter in model.parameters()}
    if listed and own.isdisjoint(held):
        raise ArgumentError(
            f"optimizer must hold a parameter of the model, got {', '.join(type(item).__name__ for item in listed)} of "
            "other tensors; leave it out to count all that own one, or make it of model.parameters()."
        )


def check_ignored(given: Ignored, model: nn.Module | None) -> Ignored:
    """Return what is ignored; raise where it names a layer that is none of the model's.

    A shell pattern may match nothing, and what is below a module or parameter may be called by more than its name.

    Raises:
        ArgumentError: The message names the nearest layer.
    """
    if model is None:
        return given
    held = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    known = {site_name(name) for name, _ in held} | {"loss"}
    for _, where in given.pairs:
        above = {where[: found.start()] for found in re.finditer(r"\W|$", where)}
        if not set("*?[") & set(where) and above.isdisjoint(known - {""}) and where:
            raise ArgumentError(f"ignore names {where!r}, which is no layer of the model{nearest(where, known)}")
    return given


def make_writers(backends: str | Writer | Sequence[str | Writer], logdir: Path, wandb: object = None) -> list[Writer]:
    """Return a writer for each backend; a single name or writer counts as a list of one.

    Args:
        backends: Names or writers.
        logdir: Directory for the writers that write files.
        wandb: Arguments for the writer named ``"wandb"``, or the run that it writes to; it then need not be named.

    Raises:
        ArgumentError: An argument in ``wandb`` is unknown.
        ArgumentTypeError: ``wandb`` is neither a dictionary nor a run.
    """
    if isinstance(backends, str) or not isinstance(backends, (list, tuple)):
        backends = (backends,)  # type: ignore[assignment]
    if wandb is None:
        return [make_writer(backend, logdir) for backend in backends]  # type: ignore[union-attr]
    if not isinstance(wandb, Mapping) and not hasattr(wandb, "log"):
        raise ArgumentTypeError(
            f"wandb must be a dictionary of arguments of wandb.init or a run, got {type(wandb).__name__}; pass "
            "wandb={'project': 'name'} or wandb=wandb.init(...)."
        )
    own = writers.WandbWriter(**wandb) if isinstance(wandb, Mapping) else writers.WandbWriter(run=wandb)
    if "wandb" not in backends:  # type: ignore[operator]
        backends = (*backends, "wandb")  # type: ignore[misc]
    return [own if backend == "wandb" else make_writer(backend, logdir) for backend in backends]  # type: ignore[union-attr]


def make_preflight(steps: int) -> list[Writer]:
    """Return the writer that sums up the first steps in print; none for 0 steps."""
    return [PreflightWriter(steps)] if steps else []


def check_number(name: str, value: object, *, example: float, most: float = math.inf, way_out: str = "") -> None:
    """Refuse what is no number between 0 and ``most``.

    Args:
        name: The argument.
        value: What was given.
        example: A value that would do.
        most: Greatest value; any finite one by default.
        way_out: What to do, where that is more than giving the example.

    Raises:
        ArgumentError: It is negative, too large, infinite or NaN.
        ArgumentTypeError: It is no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}; for example {name}={example:g}.")
    if not (0 <= value <= most and math.isfinite(value)):
        wanted = f"lie between 0 and {most:g}" if math.isfinite(most) else "be a number of at least 0"
        raise ArgumentError(f"{name} must {wanted}, got {value!r}; {way_out or f'for example {name}={example:g}'}.")
