"""Treatments for steps of the wrong size: rates of groups, limits of the gradient, a loss that is summed, and NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.autograd_graph.loss_shape import factor_of, shape_of
from gradflow_export.autograd_graph.nodes import Node, Op, below, kind_of, sources
from gradflow_export.experiments.interventions import FullRate, GroupOption, Intervention, KeptGradients, weights
from gradflow_export.experiments.mending.forgotten import TakenSteps
from gradflow_export.experiments.mending.treatment import EXACT, TUNING, Treatment
from gradflow_export.records.issues import IssueType

_T = IssueType
HEAVY = 0.98
"""Momentum above which gradients are added up for so long that it may be the cause."""
TIGHT = 0.1
"""Share of the gradient's norm that clipping leaves below which it may be the cause."""


MANY = 16
"""Terms that a loss adds up from which on their sum may be the cause."""


class OneRate(GroupOption):
    """Every group has the greatest learning rate of all groups of its optimizer."""

    def __init__(self) -> None:
        super().__init__("lr", 1.0)

    def value(self, optimizer: Optimizer, number: int, current: Any) -> Any:
        """Return the greatest learning rate before any of them was changed."""
        del number, optimizer
        return max((before for _, before in self._before), default=current)


class KeptToOne(KeptGradients):
    """Gives the optimizer the gradients as the last backward pass left them, scaled down to a norm of 1."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Put them back and scale them."""
        super().before_step(optimizer)
        nn.utils.clip_grad_norm_([weight for weight, _ in self._before], 1.0)


class Clipped(Intervention):
    """Scales the gradient of each step down to a norm of 1 where it is larger."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Scale it."""
        dense = [weight for weight in weights(optimizer) if weight.grad is not None and not weight.grad.is_sparse]
        self.acted |= bool(nn.utils.clip_grad_norm_(dense, 1.0) > 1.0)


class FiniteGradients(Intervention):
    """Takes 0 in the place of each entry of a gradient that is not finite."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Replace them."""
        for weight in weights(optimizer):
            if weight.grad is not None and not weight.grad.is_sparse and not bool(weight.grad.isfinite().all()):
                weight.grad = weight.grad.nan_to_num(0.0, 0.0, 0.0)
                self.acted = True


class MeanLoss(Intervention):
    """Differentiates the mean of what a loss adds up."""

    def function(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Divide it by the number of its terms."""
        count = terms(args[0].grad_fn) if name == "backward" else 1.0
        if not count >= MANY:
            return args, kwargs
        self.acted = True
        return (args[0] / count, *args[1:]), kwargs


def terms(node: Node) -> float:
    """Return how many numbers a loss adds up, times what multiplies them; 1 of a mean, NaN where that is no number."""
    factor = 1.0
    while kind_of(node) in {Op.DIV, Op.MUL, Op.NEG}:
        factor *= 1.0 if kind_of(node) == Op.NEG else abs(factor_of(node))
        node = below(node)
    if kind_of(node) == Op.ADD:
        return factor * max(map(terms, sources(node)), default=1.0)
    # The reduction "sum" has the number 2.
    if kind_of(node) != Op.SUM and getattr(node, "_saved_reduction", 1) != 2:
        return factor
    shape = shape_of(below(node))
    # Of the scores of all classes one counts.
    return factor * math.prod(shape) / (shape[1] if kind_of(node) in {Op.NLL_LOSS, Op.NLL_LOSS_2D} else 1)


LIMITS: tuple[Treatment, ...] = (
    Treatment(
        "a step after each backward pass",
        EXACT,
        TakenSteps,
        "gradients that are cleared before an optimizer step uses them",
        "optimizer.step()  # after loss.backward(), before the next optimizer.zero_grad()",
        (_T.NOT_TRAINING, _T.STAGNATION),
        lambda facts: bool(facts.get("forgotten")),
        evident=lambda facts: bool(facts.get("forgotten")),
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "zeros in place of NaN gradients",
        EXACT,
        FiniteGradients,
        "gradients that are NaN or Inf where the loss is finite",
        "norm = (x.square().sum(-1) + 1e-12).sqrt()  # sqrt(), log() and divisions have no finite derivative at 0",
        (_T.NUMERICAL, _T.EXPLODING),
        lambda facts: facts["broken"] > 0,
        mistake=True,
    ),
    Treatment(
        "clip gradients to norm 1 instead",
        EXACT,
        KeptToOne,
        "a limit for the gradient that is too tight",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # in place of the script's own limit",
        (_T.LEARNING_RATE, _T.NOT_TRAINING),
        lambda facts: 0 < facts["kept"] < TIGHT,
        of_loop=True,
    ),
    Treatment(
        "the mean of the loss",
        EXACT,
        MeanLoss,
        "a loss that is a sum over the batch, so that its gradient grows with the batch",
        "loss = criterion(outputs, targets)  # with reduction='mean', or loss.mean() in place of loss.sum()",
        (_T.LEARNING_RATE, _T.WRONG_LOSS, _T.EXPLODING, _T.NUMERICAL, _T.UNSTABLE, _T.DIVERGING),
        lambda facts: facts["terms"] >= MANY,
        evident=lambda facts: facts["terms"] >= MANY,
    ),
    Treatment(
        "weight decay 0",
        EXACT,
        lambda: GroupOption("weight_decay", 0.0),
        "a weight decay that outweighs the gradient",
        "for group in optimizer.param_groups:\n    group['weight_decay'] = 0.0",
        (_T.LEARNING_RATE, _T.NOT_LEARNING),
        lambda facts: bool(facts["decay"]),
        choice=True,
    ),
    Treatment(
        "nine tenths of the momentum",
        EXACT,
        lambda: GroupOption("momentum", 0.9),
        "a momentum that adds up the gradients of hundreds of steps",
        "for group in optimizer.param_groups:\n    group['momentum'] *= 0.9",
        (_T.LEARNING_RATE, _T.UNSTABLE, _T.EXPLODING, _T.DIVERGING),
        lambda facts: facts["momentum"] > HEAVY,
        chosen=lambda facts: facts["momentum"] > HEAVY,
    ),
)

GROUPS: tuple[Treatment, ...] = (
    Treatment(
        "the optimizer's own learning rate",
        TUNING,
        FullRate,
        "parameter groups with a learning rate far below that of their optimizer",
        "for group in optimizer.param_groups:\n    group['lr'] = optimizer.defaults['lr']",
        (_T.LEARNING_RATE, _T.STAGNATION),
        lambda facts: facts["reached"] < 0.5 and not facts["schedule"],
        of_loop=True,
    ),
    Treatment(
        "one learning rate for all layers",
        TUNING,
        OneRate,
        "parameter groups with a learning rate far below that of the others",
        "for group in optimizer.param_groups:\n    group['lr'] = max(each['lr'] for each in optimizer.param_groups)",
        (_T.LEARNING_RATE, _T.STAGNATION),
        lambda facts: facts["apart"] > 1,
    ),
)
