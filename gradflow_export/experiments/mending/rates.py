"""Treatments for learning rates that differ between parameter groups, and for a limit of the gradient."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import FullRate, GroupOption, KeptGradients
from gradflow_export.experiments.mending.treatment import EXACT, TUNING, Treatment
from gradflow_export.records.issues import IssueType

_T = IssueType
TIGHT = 0.1
"""Share of the gradient's norm that clipping leaves below which it may be the cause."""


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


LIMITS: tuple[Treatment, ...] = (
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
