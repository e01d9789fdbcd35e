"""Gradients in float16 that are too small for its numbers, without a scaled loss: UNDERFLOW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

QUANTUM = 2.0**-24
"""The smallest number of float16: what it computes below its normal range is a multiple of this."""
NORMAL = 2.0**-14
"""The smallest number of float16 that has all its digits."""


@dataclass(frozen=True, kw_only=True)
class Underflow(Check):
    """Find gradients computed in float16 most of which are exactly 0, because they lie below its smallest number.

    The grid of float16 proves it, whatever the type of the weights: below 6e-5 its numbers are multiples of 6e-8. Of at
    least two parameters the greatest entry of the gradient must be such a multiple below 6e-5, and the mean of those
    that are not 0 at most ``steps`` of them. A parameter counts where at least ``share`` are 0, and any other is on the
    grid. Zeros of units that are off, or of rows that were not looked up, have entries of a usual size beside them.

    Why it is bad:
        An entry that is rounded to 0 moves nothing: most weights stay as they were, the rest are moved by what is
        left of a few bits, and the loss falls slowly or not at all.

    Example:
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()

    Use instead:
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Not reported:
        A scaled loss; bfloat16 and float32; a loss that has fallen below a tenth of its first value; fewer than half of
        the parameters; gradients of which the greater part is above 6e-8.

    Attributes:
        share: Least share of zeros in a parameter's gradient.
        steps: Greatest mean of the entries that are not 0, in multiples of the smallest number.
        most: Least share of the parameters that have a gradient.
    """

    share: float = 0.5
    steps: float = 16.0
    most: float = 0.5
    patience: int = 2

    name: ClassVar[str] = "underflow"
    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.UNDERFLOW,)
    needs: ClassVar[tuple[str, ...]] = ("parameter.zero_share",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the entries of the gradients of this record."""
        zeros, greatest, means = (
            reading_of(record, f"parameter.{name}") for name in ("zero_share", "gradient_linf", "gradient_mean")
        )
        scaled = record.value("gradient.loss_scale") not in {None, 1.0}
        if not zeros.sites == greatest.sites == means.sites or scaled or solved(history):
            return ()
        here = zeros.present & greatest.present & means.present
        share, top, mean = (each.values.astype(np.float64) for each in (zeros, greatest, means))
        beside = 1.0 - np.minimum(share, 1.0)
        typical = np.divide(mean, beside, out=np.zeros_like(mean), where=beside > 0)
        grid = (top < NORMAL) & (top / QUANTUM == np.round(top / QUANTUM)) & (typical <= self.steps * QUANTUM)
        lost = here & (share >= self.share) & grid
        # A gradient of zeros alone may have any reason; beside others that are on the grid it has this one.
        if (here & grid & (top > 0)).sum() < 2 or lost.sum() < max(self.most * here.sum(), 2):
            return ()
        layers = tuple(site for site, flag in zip(zeros.sites, lost.tolist(), strict=True) if flag)
        value = float(share[lost].mean())
        return (
            Finding(
                IssueType.UNDERFLOW,
                Severity.HIGH,
                layers,
                value,
                self.share,
                f"{number(100 * value)} % of the gradient of {len(layers)} of {int(here.sum())} parameters is "
                f"exactly 0, and the rest is about {number(float(typical[here & grid].max()))}: float16 underflows "
                "below 6e-08.",
                'scale the loss, scaler = torch.amp.GradScaler("cuda"); scaler.scale(loss).backward(); '
                "scaler.step(optimizer); scaler.update(), or compute in torch.bfloat16.",
                cause="underflow",
                origin="float16 without a scaled loss",
            ),
        )
