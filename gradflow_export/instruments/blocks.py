"""Gradient norms at the outputs of blocks, and what the blocks send forward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.junctions import LOSS, Junctions
from gradflow_export.hooks.chains import Choice, NamedModule
from gradflow_export.hooks.compiled_calls import Reading
from gradflow_export.hooks.gradient_hooks import GradientStore
from gradflow_export.hooks.guards import Guard, Part, unguarded
from gradflow_export.hooks.module_calls import ModuleCalls, output_tensor
from gradflow_export.hooks.output_stats import SentOutputs
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.hooks.site_buffer import Places
from gradflow_export.records.catalog import MetricSpec, spec

UNKNOWN = -2


class BlockInstrument:
    """Gradient norms, output sizes, output spreads and samples of block outputs, while the module calls are armed.

    Args:
        calls: Sees the blocks being called.
        blocks: Names and modules.
        by_call_order: Whether their order is that of their calls, because they are leaf modules or of several lists.
        whole: Whether they are all there is, so that after the last comes the loss.
        found: Whether nobody said that these blocks form a chain, so that it is looked up in the graph.
        guard: Wraps the hooks.

    Attributes:
        choices: Why these blocks; read by nobody but users.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        blocks: Sequence[NamedModule],
        *,
        by_call_order: bool = False,
        whole: bool = False,
        found: bool = False,
        guard: Guard = unguarded,
    ) -> None:
        self.names = tuple(name for name, _ in blocks)
        self.store = GradientStore(self.names, guard=guard)
        self.calls = calls
        self._modules = [module for _, module in blocks]
        self._guard = guard
        self._part = guard if isinstance(guard, Part) else Part()
        self._spent = 0.0
        self._order: list[int] | None = [] if by_call_order else None
        self._placed = [not by_call_order] * len(self.names)
        self._latest: int | None = None
        self._whole = whole
        self.choices: tuple[Choice, ...] = ()
        self._ordered: tuple[tuple[str, ...], Places] | None = None
        self.junctions = Junctions() if found or by_call_order else None
        self._known: tuple[tuple[int, tuple[str, ...]], Drained] | None = None
        self._sent = SentOutputs(self.names)
        self._expected: dict[int, Callable[[Tensor], None]] = {}

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = ("gradient_norm", "output_rms", "output_max", "output_spread", "next")
        return tuple(spec(f"block.{name}") for name in names)

    @property
    def sample_rows(self) -> bool:
        """Whether samples of rows are kept for ranks, and the greatest entries."""
        return self._sent.sample_rows

    @sample_rows.setter
    def sample_rows(self, on: bool) -> None:
        self._sent.sample_rows = on

    def attach(self) -> contextlib.ExitStack:
        """Begin to watch the blocks' calls."""
        for index, module in enumerate(self._modules):
            inside = Reading(self._guard(partial(self._made, index)), self._guard(partial(self._sent_back, index)))
            called = partial(self._called, index)
            self.calls.add(module, called if isinstance(self._guard, Part) else self._guard(called), inside)
        self._modules.clear()
        stack = self.calls.attach()
        stack.callback(self.store.leave)
        return stack

    def _called(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        part = self._part
        if part.off:
            return
        began = time.perf_counter()
        try:
            # Only floating and complex tensors can require a gradient.
            plain = type(output) is Tensor and output.requires_grad
            tensor = output if plain else output_tensor(output)
            order, junctions = self._order, self.junctions
            if order is not None:
                if not self._placed[index]:
                    self._first_call(index)
                self._latest = index
            if tensor is None:
                return
            if junctions is not None and junctions.left > 0:
                junctions.mark(index, output)
            self.store.watch(index, tensor)
            self._sent.take(index, tensor)
        except Exception as error:
            part.failed(error)
        except BaseException:
            torch.set_grad_enabled(True)  # as it was, or the call were not seen: Ctrl-C may come within no_grad()
            raise
        finally:
            self._spent += time.perf_counter() - began

    def _first_call(self, index: int) -> None:
        if self._order is not None:  # one that is skipped now and then comes after what is called before it
            self._order.insert(0 if self._latest is None else self._order.index(self._latest) + 1, index)
            self._placed[index] = True
        self._ordered = None
        if self.junctions is not None:
            self.junctions.again()

    def _made(self, index: int, tensor: Tensor) -> None:
        """Take an output inside compiled code, whose gradient comes by itself and whose graph cannot be followed."""
        self.junctions = None
        if not self._placed[index]:
            self._first_call(index)
        self._latest = index
        self._expected[index] = self.store.expect(index)
        self._sent.take(index, tensor)

    def _sent_back(self, index: int, gradient: Tensor) -> None:
        """Take a gradient inside compiled code."""
        take = self._expected.get(index)
        if take is not None:
            take(gradient)

    def follow(self, loss: Tensor) -> None:
        """Learn from the graph of a loss how the blocks hang together."""
        if self.junctions is not None and self.calls.armed:
            self.junctions.follow(loss)

    def in_order(self) -> tuple[tuple[str, ...], Places]:
        """Return the names from input to output, as far as known, and their indices."""
        if self._ordered is None:
            every = range(len(self.names))
            known = list(self._order or ())
            order = [*known, *sorted(set(every).difference(known))]
            self._ordered = tuple(self.names[index] for index in order), np.array(order, dtype=np.int64)
        return self._ordered

    def drain(self) -> Drained:
        """Give out norms, sizes, spreads and samples in depth order, and forget them."""
        self._tell_time()
        self._latest = None
        self.store.take_back()
        if not self._sent and not self.store:
            self.store.settle()
            return []
        sites, order = self.in_order()
        if self.junctions is not None and self.junctions.left > 0:
            self.junctions.settle(self.store.arrivals())
        out = [*self.store.drain(sites, order), *self._sent.drain(sites, order), *self._following(order, sites)]
        if self.junctions is not None:
            self.junctions.forget()
        return out

    def _following(self, order: Places, sites: tuple[str, ...]) -> Drained:
        """Give out the place of the block that each must pass on the way to the loss, where that is known."""
        if self.junctions is None:
            return []
        if self._known is None or self._known[0] != (self.junctions.steps, sites):
            indices = [int(index) for index in order]
            following = self.junctions.following(indices)
            # Of a list of blocks, unlike of leaf modules, nobody knows what comes after the last.
            end = LOSS if self._whole else UNKNOWN
            places = {LOSS: end, **{index: place for place, index in enumerate(indices)}}
            where = [place for place, index in enumerate(indices) if index in following]
            values = np.array([float(places[following[indices[place]]]) for place in where])
            pending = Pending("block.next", sites, values, np.array(where, dtype=np.int64))
            self._known = (self.junctions.steps, sites), [pending] if where else []
        return list(self._known[1])

    def forget(self) -> None:
        """Forget what was collected, and what is still on its way: the step makes no record."""
        self._tell_time()
        self._latest = None
        self._sent.forget()
        if self.junctions is not None:
            self.junctions.forget()
        self.store.reset()

    def _tell_time(self) -> None:
        self._part.took(self._spent + self.store.spent)
        self._spent = self.store.spent = 0.0
