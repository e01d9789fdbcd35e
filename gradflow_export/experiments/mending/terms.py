"""A change to a loss of several terms, one of which drowns the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradflow_export.experiments.interventions import Intervention, leaves
from gradflow_export.experiments.mending.passages import SUMS

QUIET = 0.1
"""Share of the next term's gradient that is left of the one with the largest."""
LOUD = 10.0
"""Multiple of the next term's gradient from which on a term drowns the others."""


class QuietTerm(Intervention):
    """Weighs the term of a loss with by far the largest gradient less, so that others decide.

    Terms are the numbers that a loss is the sum of, and are known by their place in the sums of a step. Gradients are
    compared in the first backward pass.
    """

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._weights: dict[tuple[int, int], float] | None = None

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Weigh what is added."""
        if not self._weights or not _adds(name, args):
            return args, kwargs
        self.acted = True
        number = len(self._sums)
        return tuple(each * self._weights.get((number, at), 1.0) for at, each in enumerate(args)), kwargs

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Remember the sum."""
        del kwargs
        if _adds(name, args):
            self._sums.append((given, args))
        return given

    def before_backward(self, loss: Tensor) -> None:
        """Compare the terms' gradients, the first time."""
        if self._weights is None and self._sums:
            self._weights = self._compared(loss)
        self._sums = []

    def _compared(self, loss: Tensor) -> dict[tuple[int, int], float]:
        known, sizes = list(leaves(loss)), {}
        for place, term in self._terms(len(self._sums) - 1):
            found = torch.autograd.grad(term, known, retain_graph=True, allow_unused=True)
            sizes[place] = sum(float(each.double().square().sum()) for each in found if each is not None) ** 0.5
        ranked = sorted((place for place in sizes if sizes[place] > 0), key=sizes.__getitem__)
        if len(ranked) < 2 or sizes[ranked[-1]] < LOUD * sizes[ranked[-2]]:
            return {}
        return {ranked[-1]: QUIET * sizes[ranked[-2]] / sizes[ranked[-1]]}

    def _terms(self, number: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield place and value of what a sum consists of, and the sums within it."""
        for at, term in enumerate(self._sums[number][1]):
            inner = next((each for each in range(number) if self._sums[each][0] is term), None)
            if inner is None:
                yield (number, at), term
            else:
                yield from self._terms(inner)


def _adds(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether two numbers are added through which gradients flow."""
    pair = len(args) == 2 and all(isinstance(each, Tensor) and each.numel() == 1 for each in args)
    return name in SUMS and pair and all(each.requires_grad for each in args)
