"""Forward passes that are run again, under hooks, to find the module that made NaN or Inf; only on request."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import hook_all_calls
from gradflow_export.metrics.arrays.finite import looks_broken
from gradflow_export.records.step_record import RUN_SITE


@dataclass(frozen=True)
class Repeatable:
    """One forward pass of the whole model: what is needed to repeat it.

    Attributes:
        arguments: Positional and keyword arguments; in place of large tensors weak references.
        autocast: Device type, whether it was enabled, and its dtype.
        random_state: Of the CPU's generator.
    """

    arguments: Any
    autocast: tuple[str, bool, torch.dtype]
    random_state: Tensor


_NOT_REPEATED: tuple[str, tuple[str, ...]] = ("", ())


class _Follower:
    """Follows one forward pass and remembers the first module that made something that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): site_name(name) for name, module in model.named_modules()}
        self._inside: list[str] = []
        self.found: tuple[str, Sequence[str]] | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            return
        if self.found is None and _broken(args):
            # Made by the parent's own code, between its children; or given from outside.
            self.found = ("forward", [self._inside[-1]]) if self._inside else ("input", [RUN_SITE])
        self._inside.append(self._names[id(module)])

    def leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if id(module) not in self._names:
            return
        name = self._inside.pop()
        if self.found is None and _broken(output):
            self.found = ("forward", [name])


def before_step(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return weights with 0 where a gradient broke them, which is nearly what they were before the step.

    Args:
        parameter: The weights as they are.
        gradient: What the step used.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return parameter
    return torch.where(torch.isfinite(gradient), parameter, 0.0)


def repeat(model: nn.Module, call: Repeatable, weights: dict[str, Tensor]) -> tuple[str, Sequence[str]] | None:
    """Run one forward pass again.

    Args:
        model: The model.
        call: What it was called with.
        weights: What to take for some of its parameters.

    Returns:
        Kind and site of the first broken value, ``None`` when every value is finite; the kind ``""`` where the pass
        cannot be repeated: its inputs are gone, or other ranks would have to take part.
    """
    if any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in torch_private.tree_leaves(call.arguments)):
        return _NOT_REPEATED
    args, kwargs = torch_private.tree_map_only(weakref.ref, lambda reference: reference(), call.arguments)
    if _broken((args, kwargs)):
        return "input", [RUN_SITE]
    needs_other_ranks = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if needs_other_ranks or any(hasattr(p, "placements") for p in model.parameters()):
        return _NOT_REPEATED
    follower = _Follower(model)
    device, enabled, dtype = call.autocast
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_state_kept(model, device))
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        stack.enter_context(_Alone())  # type: ignore[no-untyped-call]  # torch leaves its class untyped
        stack.callback(hook_all_calls(follower.enter, before=True))
        stack.callback(hook_all_calls(follower.leave))
        torch.set_rng_state(call.random_state)
        try:
            functional_call(model, weights, args, kwargs) if weights else model(*args, **kwargs)
        except Exception:
            return follower.found or _NOT_REPEATED
    return follower.found


class _Alone(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Ends a repeated pass at its first collective: the other ranks may not repeat theirs, and it would never end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in torch_private.COLLECTIVES:
            raise RuntimeError(f"{func} needs other ranks; the repeated forward pass ends here.")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _state_kept(model: nn.Module, device: str) -> Iterator[None]:
    """Put buffers and random generators back at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=None if device == "cuda" else []):
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


def _broken(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and looks_broken(leaf) for leaf in torch_private.tree_leaves(values))
