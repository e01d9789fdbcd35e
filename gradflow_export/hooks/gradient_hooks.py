"""Norms of the gradients that come back to outputs."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradflow_export.hooks import torch_private
from gradflow_export.hooks.guards import Guard, Part, unguarded
from gradflow_export.hooks.instances import instances
from gradflow_export.hooks.readings import Drained
from gradflow_export.hooks.site_buffer import Places, SiteValues
from gradflow_export.metrics.arrays.local import PLAIN, shards
from gradflow_export.metrics.arrays.norms import norm
from gradflow_export.metrics.arrays.one_pass import usable_interface
from gradflow_export.native.outputs import GradientReader

Repeat = Literal["combine", "overwrite", "raise"]
_is_compiling = torch.compiler.is_compiling


def _nothing() -> None:
    """No-op callback."""


class _Hook(partial[None]):
    """A tensor hook that is not pickled along, and of whose loss nobody need be warned."""

    __slots__ = ()
    __torch_unserializable__ = True


class TensorHooks:
    """Hooks on tensors, which the user may hold for longer than we are there: what is left of them is taken away.

    Args:
        call: What each of them calls: with what it is placed with, and the gradient.

    Attributes:
        call: The same; nobody else keeps it.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def place(self, tensor: Tensor, *given: Any) -> None:
        """Have the gradient of a tensor taken when it comes."""
        node = tensor.grad_fn if type(tensor) in PLAIN else None
        torch_private.hook_gradient(tensor, node, _Hook(self.call, *given))

    def remove(self) -> None:
        """Leave no hook on a tensor that is still there; they are searched for, as keeping books costs at each step."""
        if sys.getrefcount(self.call) <= 2:  # ours and the argument; the search looks at every object there is
            return
        ours = [hook for hook in instances(_Hook) if hook.func is self.call]
        for holder in gc.get_referrers(*ours) if ours else ():
            if type(holder) is OrderedDict:
                for key in [key for key, hook in holder.items() if any(hook is one for one in ours)]:
                    del holder[key]


class GradientStore:
    """Norms of the gradients that arrived at block outputs, on the device.

    With ``repeat="combine"`` norms of several backward passes (micro-batches), or of several calls of one block, are
    joined as ``(a^2 + b^2)^(1/2)``: the L2 norm over all of them together. ``"overwrite"`` keeps the last; ``"raise"``
    raises RuntimeError into backward.

    Attributes:
        backward_passes: How many there were.
        on_backward: Called with each.
        stirred: Whether a gradient has come since the norms were last forgotten.
        under: Backward passes under way, where somebody sees them.
        after: Whether one is over: what then comes outside, as by ``torch.autograd.grad``, is none of the step's.
        spent: Seconds in hooks that nobody wrapped.
    """

    def __init__(
        self, names: Sequence[str], *, norm_type: str = "l2", repeat: Repeat = "combine", guard: Guard = unguarded
    ) -> None:
        self.names = tuple(names)
        self.norm_type = norm_type
        self.repeat = repeat
        self.backward_passes = 0
        self.on_backward: Callable[[], None] = _nothing
        self.spent = 0.0
        self.stirred = self.after = False
        self.under: Sized = ()
        self._kept: tuple[Any, ...] | None = None
        self._counted: int | None = None
        self._fresh = True
        self._generation = 0
        self._settled = False
        self._norms = SiteValues(len(self.names))
        self._arrivals = np.zeros(len(self.names), dtype=np.int64)
        interface = usable_interface() if norm_type == "l2" and repeat == "combine" else None
        self._reader: GradientReader | None = None
        if interface is not None:
            self._reader = GradientReader(interface, self._norms.numbers, self._norms.present, self._arrivals)
        self._part = guard if isinstance(guard, Part) else Part()
        self._hooks = TensorHooks(self._arrived if isinstance(guard, Part) else guard(self._arrived))

    def watch(self, index: int, output: Tensor) -> None:
        """Take the gradient of this output when it comes."""
        node = output.grad_fn if type(output) in PLAIN else None
        torch_private.hook_gradient(output, node, self.expect(index))

    def expect(self, index: int) -> Callable[[Tensor], None]:
        """Return what takes the gradient of an output that was made just now."""
        if index == self._counted:
            self._fresh = True
        if self._settled:
            self._settled = False
            self._generation += 1
        return _Hook(self._hooks.call, index, self._generation)

    def leave(self) -> None:
        """Forget all norms, and leave no hook on an output."""
        self.reset()
        self._hooks.remove()

    def reset(self) -> None:
        """Forget all norms, and ignore gradients of outputs watched before now."""
        self.clear()
        self._generation += 1

    def settle(self) -> None:
        """Forget norms that were given out; what the same graph still sends is taken until a new one is begun.

        An optimizer may step in the middle of a backward pass, or between two through one graph.
        """
        self.clear()
        self._settled = True

    def clear(self) -> None:
        """Forget all norms; gradients still on their way are taken."""
        self._norms.clear()
        self._arrivals[:] = 0
        self.stirred = self.after = False
        self._kept = None

    def take_back(self) -> None:
        """Forget what came after the last backward pass."""
        kept, self._kept = self._kept, None
        if kept is not None:
            norms = self._norms
            norms.numbers[:], norms.present[:], norms.tensors, self._arrivals[:] = kept

    def norms(self) -> dict[int, Tensor]:
        """Return a float64 scalar per block that a gradient arrived for."""
        where = map(int, np.flatnonzero(self._norms.present))
        return {index: torch.as_tensor(self._norms.get(index), dtype=torch.float64) for index in where}

    def arrivals(self) -> dict[int, int]:
        """Return how many gradients came to each block."""
        return {int(index): int(self._arrivals[index]) for index in np.flatnonzero(self._arrivals)}

    def __bool__(self) -> bool:
        """Whether there is any norm."""
        return bool(self._norms.present.any())

    def drain(self, sites: tuple[str, ...], order: Places) -> Drained:
        """Give out the norms, and :meth:`settle`.

        Args:
            sites: Names in the order wanted.
            order: Their places. Shape: ``[len(sites)]``.
        """
        out: Drained = [*self._norms.pending("block.gradient_norm", sites, order)]
        self.settle()
        return out

    def _arrived(self, index: int, generation: int, gradient: Tensor | None) -> None:
        part = self._part
        # Of several outputs one that nothing takes has none.
        if _is_compiling() or part.off or gradient is None or torch_private.is_batched(gradient):
            return
        began = time.perf_counter()
        try:
            if index == self._counted or self._counted is None:
                self._count(index)
            if generation != self._generation:
                return
            if self._kept is not None and self.under:
                self.take_back()
            elif self.after and self._kept is None and not self.under:
                norms = self._norms
                self._kept = norms.numbers.copy(), norms.present.copy(), dict(norms.tensors), self._arrivals.copy()
            self.stirred = True
            quick = self._reader
            if (
                quick is None
                or type(gradient) not in PLAIN
                or index in self._norms.tensors
                or not quick.read(index, gradient)
            ):
                self._read(index, gradient)
        except Exception as error:
            part.failed(error)
        finally:
            self.spent += time.perf_counter() - began

    def _count(self, index: int) -> None:
        """Count backward passes by the block that a gradient came to first."""
        self._counted = index
        if self._fresh:
            self._fresh = False  # a block called many times in one forward pass is counted once
            self.backward_passes += 1
            self.on_backward()

    def _read(self, index: int, gradient: Tensor) -> None:
        """Take a gradient that the library does not read."""
        self._arrivals[index] += 1
        earlier = self._norms.get(index) if self._norms.present[index] else None
        if earlier is not None and self.repeat == "raise":
            raise RuntimeError(
                f"a gradient arrived at block {index} ({self.names[index]}) twice without reset(): either backward() "
                "ran again, or this block was called more than once in one forward pass. Call reset() between backward "
                "passes, or construct with strict_single_backward=False to keep the last one."
            )
        now = norm(gradient, self.norm_type)
        parts = shards(gradient)
        # The norm of the whole, were every shard like this one; their root mean square is exact.
        now = now * math.sqrt(parts) if parts > 1 else now
        if earlier is not None and self.repeat == "combine":
            # One of the two may be float64 because float32 could not hold it.
            now = torch.hypot(torch.as_tensor(earlier).double(), torch.as_tensor(now).double())
        self._norms.put(index, now)
