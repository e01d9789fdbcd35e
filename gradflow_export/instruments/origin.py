"""Where NaN or Inf began: found in the graph of a loss that is not finite, before the optimizer uses its gradients."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.first_broken import first_broken
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.backward_listener import is_scaled
from gradflow_export.hooks.discover import site_name
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.module_hooks import ModuleHook, Placed, hook_calls, is_plain_call
from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned
from gradflow_export.hooks.parameter_slots import briefly
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.instruments.base import Instrument, Setting
from gradflow_export.instruments.rerun import Repeatable, before_step, repeat
from gradflow_export.metrics.arrays.finite import looks_broken
from gradflow_export.metrics.arrays.local import local
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

HELD_BYTES = 8 * 2**20
"""Of passes that may be run again inputs up to this size are kept until the step ends; larger ones only as long as
somebody else keeps them."""

CALLS = 64
"""Forward passes of one step that are kept."""

LOOKS = 3
"""Failing steps per run that are looked into; a run that stays NaN costs nothing more."""


_Seen = tuple[Callable[[], Tensor | None], int]
"""A tensor that a forward pass took or gave, and what version of it."""


class _Pass:
    """One forward pass of the whole model, of which nothing is kept alive."""

    def __init__(self, number: int, given: list[_Seen]) -> None:
        self.number, self.given = number, given
        self.gave: list[_Seen] = []

    def outputs(self) -> list[Tensor]:
        """Return what it gave out, as far as that is still there."""
        return _there(self.gave)

    def was_given_broken(self) -> bool:
        """Whether NaN or Inf entered it."""
        return any(map(looks_broken, _there(self.given)))


Found = tuple[str, Sequence[str], int]
"""Kind, sites and number of the micro-batch."""


def _version(model: nn.Module) -> int:
    """Return how often weights were written to, by the first of them."""
    first = next(model.parameters(), None)
    return -1 if first is None else torch_private.version(first) or 0


class OriginInstrument(Instrument):
    """Says at which module, parameter or input the first NaN or Inf arose, and in which micro-batch.

    Nothing of the user's is called. Where ``backward`` is called on a loss that is not finite, the graph of autograd
    still holds what its operations saved, the weights are as they were, and the model's inputs and outputs are mostly
    alive: the first operation with finite inputs and a result that is not finite is named by its layer, or by the two
    layers it lies between. Where only gradients are not finite, the NaN arose in the backward pass, and the last
    parameter in order of registration that has it is nearest to where.

    A loss on another device than the CPU is not looked at, which would make the training thread wait for it.

    Args:
        model: Gives the model, or ``None`` when it is gone.
        rerun: True runs the failing step's forward passes again instead, on any device, without gradients, with the
            same dropout on the CPU and the same autocast; buffers and generators are put back. Python side effects of
            ``forward`` happen once more.
        guard: Wraps the hooks.
    """

    instrument: ClassVar[str] = "origin"
    interval: ClassVar[int] = 1

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        *,
        rerun: bool | None = None,
        guard: Guard = unguarded,
    ) -> None:
        self._model, self._rerun, self._guard = model, bool(rerun), guard
        self._version = -1
        self._calls: deque[Repeatable] = deque(maxlen=CALLS)
        self._passes: deque[_Pass] = deque(maxlen=CALLS)
        self._held = self._number = self._roots = self._unread = self._gone = 0
        self._left = LOOKS
        self._broken = False
        self._mark = f"gradflow_output_{id(self)}"
        self._found: Found | None = None
        self._out: Drained = []
        self.placed: Sequence[Placed] = ()

    @classmethod
    def make(cls, setting: Setting) -> OriginInstrument:
        """Make one for a model."""
        rerun = setting.given.get("rerun_nonfinite")
        return cls(weakref.ref(setting.model), rerun=rerun, guard=setting.part(cls.instrument))

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        return tuple(spec(f"origin.{kind}") for kind in ("input", "weights", "forward", "loss", "backward"))

    def attach(self) -> contextlib.ExitStack:
        """Begin to see what enters and leaves the model."""
        stack, model = contextlib.ExitStack(), self._model()
        stack.callback(self.forget)
        if model is not None:
            begin = ModuleHook(self._guard(self._repeatable if self._rerun else self._entered))
            self.placed = [hook_calls([(model, begin)], before=True, with_kwargs=True)]
            if not self._rerun:
                self.placed = [*self.placed, hook_calls([(model, ModuleHook(self._guard(self._left_model)))])]
            for placed in self.placed:
                stack.callback(placed)
        return stack

    def wants(self, total: float | None) -> bool:
        """Return whether gradients need a look: their norms do not add up to a number, or did not before."""
        return total is None or self._broken or self._found is not None or not math.isfinite(total)

    def see(self, root: Tensor) -> None:
        """Look at a loss before its backward pass.

        Args:
            root: What ``backward`` is called on.
        """
        self._roots, self._gone = self._roots + 1, self._number
        if self._rerun or self._found is not None or self._broken or not self._left:
            return
        if root.device.type != "cpu" or isinstance(root, torch_private.FakeTensor):
            self._unread += 1
            return
        if math.isfinite(float(local(root.detach()))):
            return
        model = self._model()
        if model is not None and not is_scaled(root):
            self._left -= 1
            self._found, self._version = self._behind(root, model), _version(model)
        self._unread += self._found is None

    def used(self, step: OptimizerStep, norms: Tensor, total: float | None, *, stepped: bool) -> None:
        """Look whether the gradients that are about to be used are finite, and if not, tell where that began.

        Args:
            step: The optimizer about to step. A step under a ``GradScaler`` may overflow and is passed over.
            norms: Their norms. Shape: ``[n]``, in the order of ``step.owned`` without those that have none.
            total: Their sum, where it is known.
            stepped: Whether they have been used: only entries that had a broken gradient are broken for that.
        """
        if not self._rerun and norms.device.type != "cpu":
            return
        # One sum instead of a look at each: it is finite unless one of them is not, or is beyond all that is healthy.
        was, self._broken = self._broken, not math.isfinite(float(norms.sum()) if total is None else total)
        if step.scaled or was:
            return
        if self._found is not None:  # of a loss that is Inf, gradients may be finite
            self._say(*self._found)
            self._found = None
        elif self._broken and self._left and not step.closure:
            self._left -= 1
            self._find(step, norms, stepped=stepped)

    def drain(self) -> Drained:
        """Give out what was found, and forget the passes of this step."""
        if self._found is not None and not self._broken:  # somebody took the gradients away before the step
            self._say(*self._found)
        out, self._out = self._out, []
        self.forget()
        return out

    def forget(self) -> None:
        """Forget the passes of this step."""
        self._calls.clear()
        self._passes.clear()
        self._held = self._number = self._roots = self._unread = self._gone = 0
        self._found = None

    def cleared(self) -> None:
        """Forget the backward passes so far, not what has entered the model since: their gradients were cleared."""
        while self._passes and self._passes[0].number <= self._gone:
            self._passes.popleft()
        for one in self._passes:
            one.number -= self._gone
        for _ in range(min(self._gone, len(self._calls))):
            self._calls.popleft()
        self._number, self._gone = self._number - self._gone, 0
        self._roots = self._unread = 0
        model = None if self._found is None else self._model()
        if model is None or _version(model) == self._version:  # else they were used, as between two calls of a closure
            self._found = None

    def _entered(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and is_plain_call():
            self._number += 1
            self._passes.append(_Pass(self._number, _seen((args, kwargs) if kwargs else args)))

    def _left_model(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and is_plain_call() and self._passes:
            self._passes[-1].gave = seen = _seen(output)
            for reference, _ in seen:
                node = getattr(reference(), "grad_fn", None)
                if node is not None:
                    node.metadata[self._mark] = True

    def _behind(self, root: Tensor, model: nn.Module) -> Found | None:
        """Find where a loss that is not finite began to be so."""
        broken = [site_name(name) for name, p in model.named_parameters() if looks_broken(p)]
        if broken:
            return "weights", broken, 0
        for one in self._passes:
            if one.was_given_broken():
                return "input", [RUN_SITE], one.number
        number = self._passes[-1].number if self._passes else self._roots
        begin = first_broken(root, model, self._mark, [tensor for one in self._passes for tensor in one.outputs()])
        if begin is None:
            return None
        return ("forward", begin.sites, number) if begin.sites else ("loss", [RUN_SITE], number)

    def _repeatable(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        leaves = torch_private.tree_leaves((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        held = torch_private.tree_map_only(Tensor, self._hold, (args, kwargs))
        self._number += 1
        self._calls.append(Repeatable(held, autocast, torch.get_rng_state()))

    def _hold(self, tensor: Tensor) -> Tensor | weakref.ref[Tensor]:
        """Keep a small input, or a parameter; remember a large one as long as somebody else keeps it."""
        self._held += tensor.numel() * tensor.element_size()
        small = self._held <= HELD_BYTES or isinstance(tensor, nn.Parameter)
        return tensor if small else weakref.ref(tensor)

    def _find(self, step: OptimizerStep, norms: Tensor, *, stepped: bool) -> None:
        model = self._model()
        if model is None:
            return
        broken = {name: p.detach() for name, p in model.named_parameters() if looks_broken(p)}
        mended = {name: before_step(p, model.get_parameter(name).grad) for name, p in broken.items() if stepped}
        broken = {name: p for name, p in broken.items() if name not in mended or looks_broken(mended[name])}
        if broken:
            self._say("weights", list(map(site_name, broken)), 0)
            return
        if not self._rerun:
            if self._roots and not self._unread:  # each loss was finite
                self._tell_backward(step.owned, norms, self._number or self._roots)
            return
        every = True
        for number, call in enumerate(self._calls, start=1):
            found = repeat(model, call, mended)
            if found is not None and found[0]:
                self._say(*found, number)
                return
            every &= found is None
        if every:  # what was not repeated may have been where it began
            self._tell_backward(step.owned, norms, len(self._calls))

    def _tell_backward(self, owned: Owned, norms: Tensor, passes: int) -> None:
        """Tell where a backward pass whose forward pass was finite broke first: the last parameter in order."""
        arrived = [place for place, p in zip(owned.where, owned.parameters, strict=True) if p.grad is not None]
        bad = [owned.sites[place] for place, norm in zip(arrived, norms, strict=True) if not torch.isfinite(norm)]
        if bad and (len(bad) < len(arrived) or passes):
            # All gradients alike with finite outputs: the loss itself, or its own backward pass.
            everywhere = len(bad) == len(arrived)
            self._say("loss" if everywhere else "backward", [RUN_SITE if everywhere else bad[-1]], passes)

    def _say(self, kind: str, sites: Sequence[str], micro_batch: int) -> None:
        values = torch.full((len(sites),), float(micro_batch))
        self._out.append(Pending(f"origin.{kind}", tuple(sites), values))


def _seen(values: Any) -> list[_Seen]:
    flat: Any = values if isinstance(values, tuple) else (values,)
    seen: list[_Seen] = []
    for value in flat:
        if not isinstance(value, Tensor):  # the usual call, tensors by position, is spared the walk through the others
            return _seen(tuple(leaf for leaf in torch_private.tree_leaves(values) if isinstance(leaf, Tensor)))
        if (value.is_floating_point() or value.is_complex()) and not value.is_inference():
            seen.append((briefly(value), torch_private.version(value)))
    return seen


def _there(seen: list[_Seen]) -> list[Tensor]:
    """Return the tensors that are still there and were not written to since."""
    found = [(reference(), version) for reference, version in seen]
    return [tensor for tensor, version in found if tensor is not None and torch_private.version(tensor) == version]
