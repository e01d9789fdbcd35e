"""Reads the whole graph of a few losses for mistakes that lie between layers: what is cut off, what sees the answer."""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.loss_graph import terms_of
from gradflow_export.checks.detached import Draws, cut_off
from gradflow_export.checks.layers.discarded import Activations
from gradflow_export.checks.leakage import across_queries, across_samples, graph_behind, samples_of
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.compiled_calls import CompiledCode
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.hooks.members import members
from gradflow_export.hooks.readings import Clue, Drained
from gradflow_export.instruments.base import Instrument, Setting
from gradflow_export.records.loss_mistakes import OVER_QUERIES, OVER_SAMPLES

LOOKS = 8
"""Sampled steps that are looked at: structure seldom changes."""
ROOTS = 2
"""Losses of one of these steps that are read."""


class StructureInstrument(Instrument):
    """In the first sampled steps reads the graph of each loss as a whole, before its backward pass.

    Args:
        model: The unwrapped model; only weak references to it and its modules are kept.
        code: Knows whether the model turned out to be compiled.
        guard: Wraps what reads the graph.
    """

    instrument: ClassVar[str] = "inputs"
    interval: ClassVar[int] = 100

    def __init__(self, model: nn.Module, *, code: CompiledCode | None = None, guard: Guard = unguarded) -> None:
        self._model, self._code = weakref.ref(model), code
        self._read, self._draws = guard(self._look), Draws(guard)
        self._activations = Activations(model, code=code, guard=guard)
        self._steps = self._roots = 0
        self._out: Drained = []
        self._cut: dict[str, bool] = {}

    @classmethod
    def make(cls, setting: Setting) -> StructureInstrument:
        """Make one for a model."""
        return cls(setting.model, code=setting.code, guard=setting.part(cls.instrument))

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack puts everything back."""
        stack = super().attach()
        stack.enter_context(self._activations.attach())
        return stack

    def arm(self, *, on: bool) -> None:
        """Begin to look, or with ``on=False`` look no more."""
        self.armed = on and self._steps < LOOKS
        self._steps += self.armed
        self._activations.arm(on=self.armed)
        if self.armed and not (self._code is not None and self._code.found):
            self._draws.install()
        else:
            self._draws.remove()

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        self._out, self._cut, self._roots = [], {}, 0
        self._draws.forget()
        self._activations.forget()

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        out = self._out
        if self._cut:
            out.append(Clue.by_layer("cut_off.receives", self._cut))
        lost = self._activations.discarded() if self._roots <= ROOTS else []
        if lost:
            out.append(Clue.by_layer("layer.discarded", dict.fromkeys(lost, True)))
        self.forget()
        return out

    def see(self, root: Tensor) -> None:
        """Look at a loss that is about to be propagated back.

        Args:
            root: A scalar with a graph, of which nothing has been freed.
        """
        self._roots += self.armed
        if self.armed and self._roots <= ROOTS:
            self._read(root)

    def _look(self, root: Tensor) -> None:
        model, graph = self._model(), graph_behind(root.grad_fn)
        if model is None or graph is None:
            self._roots += ROOTS  # what this one uses is not known
            return
        names, owners, backwards = dict[int, str](), dict[int, str](), set[int]()
        for site, module in members(model):
            plain = isinstance(module, nn.Linear | nn.Conv1d) and "." in site
            owner = site.rpartition(".")[0] if plain else site
            for key, parameter in torch_private.parameters(module):
                names[id(parameter)], owners[id(parameter)] = site, owner
                if isinstance(module, nn.RNNBase) and "weight_ih" in key and key.endswith("_reverse"):
                    backwards.add(id(parameter))
        with torch.no_grad():
            self._activations.read(graph, names)
            self._cut.update(cut_off(graph, names, self._draws))
            found = [(OVER_QUERIES, across_queries(graph, owners))]
            for term in terms_of(root)[0]:
                self._out.extend(samples_of(term, graph, owners, backwards))
                found.append((OVER_SAMPLES, across_samples(term, graph, owners)))
            for mistake, mixed in found:
                if mixed:
                    self._out.append(Clue.by_layer(f"mistake.{mistake}", mixed))
