"""Where NaN or Inf began: the failing batch is run again, under hooks, before the optimizer uses its gradients."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.finite import looks_broken
from gradflow_export.records import RUN_SITE
from gradflow_export.taps.base import Drained, Guard, Pending, unguarded
from gradflow_export.taps.discover import site_name
from gradflow_export.taps.hooks import ModuleHook, hook_calls
from gradflow_export.taps.optimizers import OptimizerStep, Owned

HELD_BYTES = 8 * 2**20
"""Inputs of one step up to this size are kept until the step ends; of larger ones only what the user keeps is used."""

CALLS = 64
"""Forward passes of one step that are kept."""

RERUNS = 3
"""Failing steps per run that are looked into; a run that stays NaN costs nothing more."""


@dataclass(frozen=True)
class _Call:
    """One forward pass of the whole model: what is needed to repeat it."""

    arguments: Any
    autocast: tuple[str, bool, torch.dtype]
    random_state: Tensor | None


class OriginTap:
    """Says at which module, parameter or input the first NaN or Inf arose, and in which micro-batch.

    Until then it costs one hook on the model and one look at numbers that were read anyway. Where the gradients are
    not finite when the optimizer is about to use them, the weights are still as they were: the step's forward passes
    are repeated without gradients, with the same dropout on the CPU and the same autocast, and buffers and generators
    are put back. Python side effects of ``forward`` happen once more. When every output is finite, the NaN arose in the
    backward pass, and the last parameter in order of registration that has it is nearest to where.

    Args:
        model: Gives the model, or ``None`` when it is gone.
        rerun: True always; False never; ``None`` where looking does not make the training thread wait for a device,
            which is on the CPU.
        guard: Wraps the hook.
    """

    def __init__(
        self, model: Callable[[], nn.Module | None], *, rerun: bool | None = None, guard: Guard = unguarded
    ) -> None:
        self._model, self._rerun, self._guard = model, rerun, guard
        self._calls: deque[_Call] = deque(maxlen=CALLS)
        self._held = 0
        self._left = RERUNS
        self._broken = self._random = False
        self._out: Drained = []

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        return tuple(spec(f"origin.{kind}") for kind in ("input", "weights", "forward", "loss", "backward"))

    def attach(self) -> contextlib.ExitStack:
        """Begin to remember the inputs of the model."""
        stack, model = contextlib.ExitStack(), self._model()
        stack.callback(self.forget)
        if model is not None and self._rerun is not False:
            self._random = any("dropout" in type(module).__name__.lower() for module in model.modules())
            hook = ModuleHook(self._guard(self._called))
            stack.callback(hook_calls([(model, hook)], before=True, with_kwargs=True))
        return stack

    def is_healthy(self, total: float | None) -> bool:
        """Whether gradients need no look at them, as their norms tell that add up to ``total``, and did not before."""
        return total is not None and not self._broken and math.isfinite(total)

    def inspect(self, step: OptimizerStep, norms: Tensor, total: float | None = None, *, stepped: bool = False) -> None:
        """Look whether the gradients that are about to be used are finite, and if not, where that began.

        Args:
            step: The optimizer about to step. A step under a ``GradScaler`` may overflow and is passed over.
            norms: Their norms. Shape: ``[n]``, in the order of ``step.owned`` without those that have none.
            total: Their sum, where it is known.
            stepped: Whether they have been used: only entries that had a broken gradient are broken for that.
        """
        if self._rerun is False or (self._rerun is None and norms.device.type != "cpu"):
            return
        # One sum instead of a look at each: it is finite unless one of them is not, or is beyond all that is healthy.
        was, self._broken = self._broken, not math.isfinite(float(norms.sum()) if total is None else total)
        if self._broken and not was and self._left and not step.scaled and not step.closure:
            self._left -= 1
            self._find(step, norms, stepped=stepped)

    def drain(self) -> Drained:
        """Give out what was found, and forget the inputs of this step."""
        out, self._out = self._out, []
        self.forget()
        return out

    def forget(self) -> None:
        """Forget the inputs of this step."""
        self._calls.clear()
        self._held = 0

    def _called(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # At every step: the usual call, tensors by position, is spared the walk through nested arguments.
        simple = not kwargs and all(isinstance(arg, Tensor) for arg in args)
        leaves = args if simple else pytree.tree_leaves((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        if device != "cpu" and self._rerun is not True:
            return
        autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if simple:
            held: Any = (tuple(map(self._hold, args)), {})
        else:
            held = pytree.tree_map_only(Tensor, self._hold, (args, kwargs))
        self._calls.append(_Call(held, autocast, torch.get_rng_state() if self._random else None))

    def _hold(self, tensor: Tensor) -> Tensor | weakref.ref[Tensor]:
        """Keep a small input; remember a large one as long as somebody else keeps it."""
        self._held += tensor.numel() * tensor.element_size()
        return tensor if self._held <= HELD_BYTES else weakref.ref(tensor)

    def _find(self, step: OptimizerStep, norms: Tensor, *, stepped: bool) -> None:
        model = self._model()
        if model is None:
            return
        broken = {name: p.detach() for name, p in model.named_parameters() if looks_broken(p)}
        mended = {name: _before(p, model.get_parameter(name).grad) for name, p in broken.items() if stepped}
        broken = {name: p for name, p in broken.items() if name not in mended or looks_broken(mended[name])}
        if broken:
            self._say("weights", list(map(site_name, broken)), 0)
            return
        every = True
        for number, call in enumerate(self._calls, start=1):
            found = _repeat(model, call, mended)
            if found is not None and found[0]:
                self._say(*found, number)
                return
            every &= found is None
        if every:  # what was not repeated may have been where it began
            self._tell_backward(step.owned, norms)

    def _tell_backward(self, owned: Owned, norms: Tensor) -> None:
        """Tell where a backward pass whose forward pass was finite broke first: the last parameter in order."""
        arrived = [place for place, p in zip(owned.where, owned.parameters, strict=True) if p.grad is not None]
        bad = [owned.sites[place] for place, norm in zip(arrived, norms, strict=True) if not torch.isfinite(norm)]
        if bad and (len(bad) < len(arrived) or self._calls):
            # All gradients alike with finite outputs: the loss itself, or its own backward pass.
            everywhere = len(bad) == len(arrived)
            self._say("loss" if everywhere else "backward", [RUN_SITE if everywhere else bad[-1]], len(self._calls))

    def _say(self, kind: str, sites: Sequence[str], micro_batch: int) -> None:
        values = torch.full((len(sites),), float(micro_batch))
        self._out.append(Pending(f"origin.{kind}", tuple(sites), values))


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


_NOT_REPEATED: tuple[str, tuple[str, ...]] = ("", ())


def _before(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return weights with 0 where a gradient broke them, which is nearly what they were before the step."""
    if gradient is None or gradient.layout is not torch.strided:
        return parameter
    return torch.where(torch.isfinite(gradient), parameter, 0.0)


def _repeat(model: nn.Module, call: _Call, weights: dict[str, Tensor]) -> tuple[str, Sequence[str]] | None:
    """Run one forward pass again.

    Args:
        model: The model.
        call: What it was called with.
        weights: What to take for some of its parameters.

    Returns:
        Kind and site of the first broken value, ``None`` when every value is finite; the kind ``""`` where the pass
        cannot be repeated: its inputs are gone, or other ranks would have to take part.
    """
    if any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in pytree.tree_leaves(call.arguments)):
        return _NOT_REPEATED
    args, kwargs = pytree.tree_map_only(weakref.ref, lambda reference: reference(), call.arguments)
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
        stack.enter_context(_Alone())  # type: ignore[no-untyped-call]  # as above
        stack.callback(register_module_forward_pre_hook(follower.enter).remove)
        stack.callback(register_module_forward_hook(follower.leave).remove)
        if call.random_state is not None:
            torch.set_rng_state(call.random_state)
        try:
            functional_call(model, weights, args, kwargs) if weights else model(*args, **kwargs)
        except Exception:
            return follower.found or _NOT_REPEATED
    return follower.found


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its metaclass untyped
    """Ends a repeated pass at its first collective: the other ranks may not repeat theirs, and it would never end."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
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
    return any(isinstance(leaf, Tensor) and looks_broken(leaf) for leaf in pytree.tree_leaves(values))
