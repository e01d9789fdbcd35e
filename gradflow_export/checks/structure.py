"""Reads the whole graph of a few losses for mistakes that lie between layers: what is cut off, what sees the answer."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradflow_export.autograd_graph.loss_graph import terms_of
from gradflow_export.checks.detached import Draws, cut_off
from gradflow_export.checks.layers.discarded import Activations
from gradflow_export.checks.layers.masked import kept_apart
from gradflow_export.checks.layers.reordered import reordered
from gradflow_export.checks.leakage import across_queries, across_samples, graph_behind, samples_of
from gradflow_export.hooks import torch_private
from gradflow_export.hooks.members import members
from gradflow_export.hooks.readings import Drained
from gradflow_export.instruments.base import Reader, Setting
from gradflow_export.records.loss_mistakes import DIMENSIONS_MIXED, OVER_QUERIES, OVER_SAMPLES, POSITIONS_MIXED

ROOTS = 2
"""Losses of one of these steps that are read."""


class StructureInstrument(Reader):
    """In the first sampled steps reads the graph of each loss as a whole, before its backward pass."""

    looks: ClassVar[float] = 8
    instrument: ClassVar[str] = "inputs"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._read, self._draws = self._guard(self._look), Draws(self._guard)
        self._activations = Activations(setting.model, code=self._code, guard=self._guard)
        self._roots = 0

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack puts everything back."""
        stack = super().attach()
        stack.enter_context(self._activations.attach())
        return stack

    def listen(self, until: contextlib.ExitStack) -> None:
        """Begin to see activations and samples that are drawn; what compiled code draws is not seen."""
        self._activations.arm(on=True)
        until.callback(self._activations.arm, on=False)
        if not self._code.found:
            self._draws.install(until)

    def forget(self) -> None:
        """Forget what was collected: the step makes no record."""
        super().forget()
        self._roots = 0
        self._draws.forget()
        self._activations.forget()

    def drain(self) -> Drained:
        """Give out what was collected since the last call, and forget it."""
        if self._roots <= ROOTS and (lost := self._activations.discarded()):
            self._facts["layer.discarded"] = dict.fromkeys(lost, True)
        return super().drain()

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
            self._facts["cut_off.receives"].update(cut_off(graph, names, self._draws))
            self._facts[f"mistake.{OVER_QUERIES}"].update(across_queries(graph, owners))
            self._out.extend(kept_apart(graph, owners))
            terms = terms_of(root)[0]
            if not any(POSITIONS_MIXED in term.mistakes for term in terms):  # which says the same of the last layer
                self._facts[f"mistake.{DIMENSIONS_MIXED}"].update(reordered(graph, owners))
            for term in terms:
                self._out.extend(samples_of(term, graph, owners, backwards))
                self._facts[f"mistake.{OVER_SAMPLES}"].update(across_samples(term, graph, owners))
