"""Whether a model is one player of a game: others that train in turns with it have losses that go through it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import walk
from gradflow_export.hooks.backward_listener import ALWAYS_CHECKED, CHECKED_EVERY, MOST_NODES, Roots, saved
from gradflow_export.hooks.guards import Guard, unguarded
from gradflow_export.metrics.arrays.norms import dense_entries

FOLLOWED = 4
"""Parameters that are asked whether their gradient was cleared."""
OFTEN = 3
"""Passes that another optimizer alone stepped with; one may be left over by a gradient scaler that skipped a step."""


class Game:
    """Notices that the loss of one player goes through the weights of another, which has a loss of its own.

    Of a model that is gone through, the gradients of a pass are cleared after another optimizer has stepped with it
    and before its own has, again and again between its own steps; or its weights are frozen in a pass that is
    another's. Of a model that goes through others, its passes hold weights of an optimizer that steps after passes in
    which the model has no part. Models that are trained one beside the other, or by the same passes, are no players.

    Nothing is looked at before another optimizer has stepped.

    Args:
        model: Returns the model, ``None`` when it is gone.
        roots: Notified of backward passes; its ``game`` is set.
        guard: Keeps an error here from ending what is read of the loss and of the optimizer's steps.
    """

    def __init__(self, model: Callable[[], nn.Module | None], roots: Roots, guard: Guard = unguarded) -> None:
        self._model, self._roots = model, roots
        self.stepped, self._turn = guard(self._stepped), guard(self._passes)
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._mine = self._through = self._lent = self._fresh = False
        self._looks = self._times = 0

    def _stepped(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer that steps and owns no parameter of the model."""
        roots = self._roots
        if roots.game:
            return
        if roots.on_turn is None:
            roots.on_turn = self._turn
            return
        roots.game = self._through
        self._lent = self._mine and not roots.used
        if not self._mine:
            self._others.add(optimizer)

    def _passes(self, tensors: Sequence[Any], *, mine: bool) -> None:
        """Take notice of a backward pass that begins, the model's or another's."""
        model, roots = self._model(), self._roots
        if roots.game or model is None:
            return
        self._fresh |= roots.used
        lent, self._lent = self._lent and not roots.used, False
        if lent and self._fresh and _cleared(model):  # before its own optimizer has stepped, as it does at other times
            self._times, self._fresh = self._times + 1, False
            roots.game = self._times >= OFTEN
        self._mine, self._through = mine, False
        if mine:
            roots.used = False
        self._looks += 1
        if self._looks > ALWAYS_CHECKED and self._looks % CHECKED_EVERY:
            return
        others = [p for each in self._others for group in each.param_groups for p in group["params"]]
        held = _holds(tensors, others if mine else model.parameters())
        self._through = held and not mine
        roots.game |= held and mine


def _cleared(model: nn.Module) -> bool:
    """Whether gradients are gone; waits for the device where they were not cleared by ``None``."""
    some = [p.grad for p in model.parameters() if p.requires_grad][:FOLLOWED]
    return not any(grad is not None and bool(dense_entries(grad).any()) for grad in some)


def _holds(tensors: Iterable[Any], parameters: Iterable[Tensor]) -> bool:
    """Whether the graph of one of some tensors holds one of some parameters, as a leaf or, frozen, as a factor."""
    wanted = list(parameters)
    leaves, places = set(map(id, wanted)), {p.untyped_storage().data_ptr() for p in wanted if p.numel()} - {0}
    for node in walk([t.grad_fn for t in tensors if isinstance(t, Tensor)], most=MOST_NODES) if wanted else ():
        if id(getattr(node, "variable", None)) in leaves:
            return True
        names = [name.removeprefix("_saved_") for name in dir(node) if name.startswith("_saved_")]
        kept = [each for each in (saved(node, name) for name in names) if each is not None]
        if any(each.untyped_storage().data_ptr() in places for each in kept):
            return True
    return False
