"""Gradient norms at the outputs of blocks, and what the blocks send forward."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradflow_export.catalog import MetricSpec, spec
from gradflow_export.metrics.local import shards
from gradflow_export.metrics.norms import dense_entries, linf, norm
from gradflow_export.metrics.onepass import usable_interface
from gradflow_export.metrics.outputs import (
    RANK_FEATURES,
    RANK_ROWS,
    SPREAD_FEATURES,
    SPREAD_ROWS,
    is_floating,
    output_rms,
    output_spreads,
)
from gradflow_export.metrics.samples import rows_of
from gradflow_export.native.outputs import Grid, grid_of, read_outputs
from gradflow_export.taps.base import Drained, Guard, Pending, Sample, join_scalars, unguarded
from gradflow_export.taps.calls import ModuleCalls
from gradflow_export.taps.compiled import Reading
from gradflow_export.taps.discover import NamedModule
from gradflow_export.taps.junctions import LOSS, Junctions
from gradflow_export.taps.waiting import Waiting

_PREFERRED_KEYS = ("last_hidden_state", "hidden_states", "logits", "sample")
UNKNOWN = -2
Repeat = Literal["combine", "overwrite", "raise"]


def _nothing() -> None:
    """Stand in where nobody wants to know."""


def output_tensor(output: Any) -> Tensor | None:
    """Choose the tensor of a block's output whose gradient is measured.

    Args:
        output: A tensor, or a tuple, list, mapping or Hugging Face output that holds one, nested or not.

    Returns:
        The first floating tensor that requires a gradient; in mappings the keys ``last_hidden_state``,
        ``hidden_states``, ``logits`` and ``sample`` come first. ``None`` when there is none.
    """
    if isinstance(output, Tensor):
        return output if output.requires_grad and is_floating(output) else None
    for part in _parts(output):
        chosen = output_tensor(part)
        if chosen is not None:
            return chosen
    return None


def _parts(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        first = [output[key] for key in _PREFERRED_KEYS if key in output]
        return [*first, *(value for key, value in output.items() if key not in _PREFERRED_KEYS)]
    return output if isinstance(output, (tuple, list)) else ()


class GradientStore:
    """Norms of the gradients that arrived at block outputs, on the device.

    With ``repeat="combine"`` norms of several backward passes (micro-batches), or of several calls of one block, are
    joined as ``(a^2 + b^2)^(1/2)``: the L2 norm over all of them together. ``"overwrite"`` keeps the last; ``"raise"``
    raises RuntimeError into backward.
    """

    def __init__(
        self, names: Sequence[str], *, norm_type: str = "l2", repeat: Repeat = "combine", guard: Guard = unguarded
    ) -> None:
        self.names = tuple(names)
        self.norm_type = norm_type
        self.repeat = repeat
        self.backward_passes = 0
        self.on_backward: Callable[[], None] = _nothing
        self._counted: int | None = None
        self._fresh = True
        self._generation = 0
        self._settled = False
        self._norms: dict[int, Tensor | float] = {}
        self._interface = usable_interface() if norm_type == "l2" and repeat == "combine" else None
        self._waiting = Waiting(self._read)
        self.arrivals: Counter[int] = Counter()
        self._take = guard(self._arrived)

    def watch(self, index: int, output: Tensor) -> None:
        """Take the gradient of this output when it comes."""
        hook = unserializable_hook(self.expect(index))  # type: ignore[no-untyped-call]
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def expect(self, index: int) -> Callable[[Tensor], None]:
        """Return what takes the gradient of an output that was made just now."""
        self._fresh |= index == self._counted
        if self._settled:
            self._settled = False
            self._generation += 1
        return partial(self._take, index, self._generation)

    def reset(self) -> None:
        """Forget all norms, and ignore gradients of outputs watched before now."""
        self.clear()
        self.arrivals.clear()
        self._generation += 1

    def settle(self) -> None:
        """Forget norms that were given out; what the same graph still sends is taken until a new one is begun.

        An optimizer may step in the middle of a backward pass, or between two through one graph.
        """
        self.clear()
        self.arrivals.clear()
        self._settled = True

    def clear(self) -> None:
        """Forget all norms; gradients still on their way are taken."""
        self._norms = {}
        self._waiting.clear()

    def norms(self) -> dict[int, Tensor]:
        """Return a scalar tensor per block that a gradient arrived for."""
        return {index: torch.as_tensor(value) for index, value in self.values().items()}

    def values(self) -> dict[int, Tensor | float]:
        """Return :meth:`norms`, those that are on the host as numbers."""
        self._waiting.flush()
        return dict(self._norms)

    def _arrived(self, index: int, generation: int, gradient: Tensor) -> None:
        self._counted = index if self._counted is None else self._counted
        if index == self._counted and self._fresh:
            self._fresh = False  # a block called many times in one forward pass is counted once
            self.backward_passes += 1
            self.on_backward()
        if generation != self._generation:
            return
        self.arrivals[index] += 1
        earlier = self._norms.get(index)
        if earlier is not None and self.repeat == "raise":
            raise RuntimeError(
                f"a gradient arrived at block {index} ({self.names[index]}) twice without reset(): either backward() "
                "ran again, or this block was called more than once in one forward pass. Call reset() between backward "
                "passes, or construct with strict_single_backward=False to keep the last one."
            )
        if self._interface is None or not self._waiting.offer(index, gradient):
            self._put(index, self._by_torch(gradient))

    def _read(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Read gradients together."""
        if self._interface is not None:
            norms = read_outputs(self._interface, gradients, [Grid()] * len(gradients))[0]
            for index, gradient, now in zip(indices, gradients, norms, strict=True):
                self._put(index, self._by_torch(gradient) if now < 0 else now)

    def _by_torch(self, gradient: Tensor) -> Tensor:
        now = norm(gradient, self.norm_type)
        parts = shards(gradient)
        # The norm of the whole, were every shard like this one; their root mean square is exact.
        return now * math.sqrt(parts) if parts > 1 else now

    def _put(self, index: int, now: Tensor | float) -> None:
        earlier = self._norms.get(index)
        if earlier is not None and self.repeat == "combine":
            if isinstance(earlier, float) and isinstance(now, float):
                now = math.hypot(earlier, now)
            else:
                # One of the two may be float64 because float32 could not hold it.
                now = torch.hypot(torch.as_tensor(earlier).double(), torch.as_tensor(now).double())
        self._norms[index] = now


class BlockTap:
    """Gradient norms, output sizes, output spreads and samples of block outputs, while the module calls are armed.

    Args:
        calls: Sees the blocks being called.
        blocks: Names and modules.
        by_call_order: Whether their order is that of their first calls, because they are leaf modules.
        found: Whether nobody said that these blocks form a chain, so that it is looked up in the graph.
        guard: Wraps the hooks.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        blocks: Sequence[NamedModule],
        *,
        by_call_order: bool = False,
        found: bool = False,
        guard: Guard = unguarded,
    ) -> None:
        self.names = tuple(name for name, _ in blocks)
        self.store = GradientStore(self.names, guard=guard)
        self.sample_rows = False
        self.calls = calls
        self._modules = [module for _, module in blocks]
        self._guard = guard
        self._order: dict[int, None] | None = {} if by_call_order else None
        self.junctions = Junctions() if found or by_call_order else None
        self._known: tuple[tuple[int, tuple[str, ...]], Drained] | None = None
        self._interface = usable_interface()
        self._outputs = Waiting(self._read_outputs)
        self._spreads: dict[int, float] = {}
        self._sizes: dict[int, Tensor | float] = {}
        self._greatest: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._expected: dict[int, Callable[[Tensor], None]] = {}

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this tap can give out."""
        names = ("gradient_norm", "output_rms", "output_max", "output_spread", "next")
        return tuple(spec(f"block.{name}") for name in names)

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the blocks' calls."""
        for index, module in enumerate(self._modules):
            inside = Reading(self._guard(partial(self._made, index)), self._guard(partial(self._sent_back, index)))
            self.calls.add(module, self._guard(partial(self._called, index)), inside)
        self._modules.clear()
        stack = self.calls.attach()
        stack.callback(self.store.reset)
        return stack

    def _called(self, index: int, _module: nn.Module, output: Any) -> None:
        tensor = output_tensor(output)
        if self._order is not None and index not in self._order:
            self._order[index] = None
            if self.junctions is not None:
                self.junctions.again()
        if tensor is None:
            return
        if self.junctions is not None and self.junctions.learning:
            self.junctions.mark(index, output)
        self.store.watch(index, tensor)
        self._measure(index, tensor)

    def _made(self, index: int, tensor: Tensor) -> None:
        """Take an output inside compiled code, whose gradient comes by itself and whose graph cannot be followed."""
        self.junctions = None
        if self._order is not None:
            self._order.setdefault(index)
        self._expected[index] = self.store.expect(index)
        self._measure(index, tensor)

    def _sent_back(self, index: int, gradient: Tensor) -> None:
        """Take a gradient inside compiled code."""
        take = self._expected.get(index)
        if take is not None:
            take(gradient)

    def _measure(self, index: int, tensor: Tensor) -> None:
        together = self._interface is not None and not self.sample_rows and tensor.numel()
        if not together or not self._outputs.offer(index, tensor):
            self._measure_by_torch(index, tensor)

    def _read_outputs(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """Read outputs together."""
        if self._interface is None:
            return
        grids = [_grid_of(output.shape) for output in outputs]
        norms, spreads = read_outputs(self._interface, outputs, grids)
        for index, output, size, spread in zip(indices, outputs, norms, spreads, strict=True):
            if size < 0:
                self._measure_by_torch(index, output)
                continue
            self._sizes[index], self._spreads[index] = size / math.sqrt(output.numel()), spread
            self._rows.pop(index, None)

    def _measure_by_torch(self, index: int, tensor: Tensor) -> None:
        with torch.no_grad():
            self._spreads.pop(index, None)
            self._sizes[index] = output_rms(tensor)
            if self.sample_rows:
                self._greatest[index] = linf(dense_entries(tensor))
            limits = (RANK_ROWS, RANK_FEATURES) if self.sample_rows else (SPREAD_ROWS, SPREAD_FEATURES)
            # A copy: the next in-place operation of the model would change a view.
            self._rows[index] = rows_of(tensor, *limits).clone()

    def follow(self, loss: Tensor) -> None:
        """Learn from the graph of a loss how the blocks hang together."""
        if self.junctions is not None:
            self.junctions.follow(loss)

    def depth_order(self) -> list[int]:
        """Return block indices from input to output, as far as known."""
        every = range(len(self.names))
        if self._order is None:
            return list(every)
        return [*self._order, *(index for index in every if index not in self._order)]

    def drain(self) -> Drained:
        """Give out norms, sizes, spreads and samples in depth order, and forget them."""
        self._outputs.flush()
        norms = self.store.values()
        if not self._sizes and not norms:
            self.store.settle()
            return []
        order = self.depth_order()
        sites = tuple(self.names[index] for index in order)
        if self.junctions is not None and self.junctions.learning:
            self.junctions.settle(self.store.arrivals)
        spreads: dict[int, Tensor | float] = dict(self._spreads)
        if self._rows:
            with torch.no_grad():
                spreads.update(zip(self._rows, output_spreads(list(self._rows.values())).unbind(), strict=True))
        out: Drained = []
        for metric, values in (
            ("block.gradient_norm", norms),
            ("block.output_rms", self._sizes),
            ("block.output_max", self._greatest),
            ("block.output_spread", spreads),
        ):
            where = [place for place, index in enumerate(order) if index in values]
            if where:
                joined = join_scalars([values[order[place]] for place in where])
                out.append(Pending(metric, sites, joined, np.array(where, dtype=np.int64)))
        out.extend(self._following(order, sites))
        if self.sample_rows:
            out.extend(Sample("block.effective_rank", self.names[index], rows) for index, rows in self._rows.items())
        self._forget_outputs()
        self.store.settle()
        return out

    def _following(self, order: Sequence[int], sites: tuple[str, ...]) -> Drained:
        """Give out the place of the block that each must pass on the way to the loss, where that is known."""
        if self.junctions is None:
            return []
        if self._known is None or self._known[0] != (self.junctions.steps, sites):
            following = self.junctions.following(order)
            # Of a list of blocks, unlike of leaf modules, nobody knows what comes after the last.
            end = LOSS if self._order is not None else UNKNOWN
            places = {LOSS: end, **{index: place for place, index in enumerate(order)}}
            where = [place for place, index in enumerate(order) if index in following]
            values = torch.tensor([float(places[following[order[place]]]) for place in where], dtype=torch.float64)
            pending = Pending("block.next", sites, values, np.array(where, dtype=np.int64))
            self._known = (self.junctions.steps, sites), [pending] if where else []
        return list(self._known[1])

    def forget(self) -> None:
        """Forget what was collected, and what is still on its way: the step makes no record."""
        self._forget_outputs()
        self.store.reset()

    def _forget_outputs(self) -> None:
        self._sizes, self._greatest, self._rows, self._spreads = {}, {}, {}, {}
        self._outputs.clear()
        if self.junctions is not None:
            self.junctions.forget()


@functools.lru_cache(maxsize=256)
def _grid_of(shape: tuple[int, ...]) -> Grid:
    return grid_of(shape, SPREAD_ROWS, SPREAD_FEATURES)
