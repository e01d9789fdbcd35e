"""Terms of a loss that depend on the weights alone, such as an L1 norm: what they add, and how to leave them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.nodes import Op, kind_of, walk
from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.passages import SUMS
from gradflow_export.experiments.model_edits import tensors

DIFFERENCES = frozenset(("__sub__", "sub"))
TERMS = SUMS | DIFFERENCES
EVEN = frozenset((Op.ABS, Op.POW, Op.NORM, Op.LINALG_VECTOR_NORM))
LINEAR = frozenset((Op.LEAF, Op.ADD, Op.DIV, Op.MEAN, Op.MUL, Op.NEG, Op.STACK, Op.SUM, Op.UNSQUEEZE))
"""Operations of which the sizes of weights are made."""
DATA, ALONE, OTHER = "data", "alone", "other"
ANSWERS = 32
"""Last answers that are remembered; their graphs are kept as long."""
ROUNDING = 1e-5
"""Share by which a penalty may change while no weight does."""


class Penalties(Intervention):
    """Tells the terms of sums of scalars that reach weights, and none of what models answered."""

    stays = True

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[Node] = deque(maxlen=ANSWERS)
        self._alone: set[Node] = set()
        self._parts: dict[Node, float] = {}
        self._next = 0.0

    def left(self, module: nn.Module, output: Any) -> Any:
        """Remember what a model answers."""
        del module
        self._answers.extend(each.grad_fn for each in tensors([output]) if each.grad_fn is not None)
        return output

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Find the term of a sum that is a penalty."""
        self._next = 0.0
        if name in TERMS and len(args) == 2 and all(_is_term(each) for each in args):
            sides = [self._side(each.grad_fn) for each in args]
            self._next = sum(self._parts.get(each.grad_fn, 0.0) for each in args)
            if {DATA, ALONE} == set(sides):
                at = sides.index(ALONE)
                part = float(args[at].detach()) * (-1 if name in DIFFERENCES and at else 1)
                # What is taken off may belong to the loss, as the logarithm of a determinant does.
                kinds = {kind_of(node) for node in walk([args[at].grad_fn])}
                if part > 0 or (kinds <= EVEN | LINEAR and kinds & EVEN):
                    self._next += part
                    args = self.changed(args, at)
        return args, kwargs

    def result(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> Any:
        """Remember what it adds to the sum."""
        del args, kwargs
        if name in TERMS and self._next and isinstance(given, Tensor) and given.grad_fn is not None:
            self._parts[given.grad_fn], self._next = self._next, 0.0
        return given

    def changed(self, args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
        """Return the terms of a sum, one of which is a penalty."""
        del at
        return args

    def of(self, loss: Tensor) -> float:
        """Return the part of a loss that is a penalty."""
        return self._parts.get(loss.grad_fn, 0.0) if loss.grad_fn is not None else 0.0

    def after_step(self, optimizer: Optimizer) -> None:
        """Forget the graphs."""
        del optimizer
        self._alone, self._parts = set(), {}
        self._answers.clear()

    def _side(self, node: Node) -> str:
        """Return whether a term depends on what a model answered, on tables of weights alone, or on neither."""
        if node in self._parts:
            return DATA
        found, answers = OTHER, set(self._answers)
        for each in walk([node], past=lambda each: each not in self._alone) if answers else ():
            if each in answers:
                return DATA
            weight = getattr(each, "variable", None)
            if each in self._alone or (isinstance(weight, nn.Parameter) and weight.dim() > 1):
                found = ALONE
        self._alone |= {node} if found == ALONE else set()
        return found


class NoPenalty(Penalties):
    """Leaves penalties out of the loss."""

    def changed(self, args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
        """Take 0 in the place of one."""
        self.acted = True
        return tuple(each.detach() * 0 if number == at else each for number, each in enumerate(args))


def without(losses: Sequence[float], penalties: Sequence[float], window: int) -> list[float]:
    """Return losses without their penalties, where these are such: they stay as they are while the weights do.

    Args:
        losses: One for each step.
        penalties: What they contain of them.
        window: First step from which on no weight changes.
    """
    still = penalties[window:]
    if (
        len(penalties) != len(losses)
        or not any(penalties)
        or (still and max(still) - min(still) > ROUNDING * max(map(abs, still)))
    ):
        return list(losses)
    return [loss - penalty for loss, penalty in zip(losses, penalties, strict=True)]


def _is_term(given: Any) -> bool:
    return isinstance(given, Tensor) and not given.dim() and given.grad_fn is not None
