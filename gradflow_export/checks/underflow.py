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
    """Report gradients computed in float16 that are mostly 0 because they are below its smallest number.

    This follows from the spacing of float16, whatever the dtype of the weights: below 6e-5 its numbers are multiples of
    6e-8. In at least two parameters the largest entry of the gradient must be such a multiple below 6e-5, and the mean
    of the nonzero entries at most ``steps`` multiples. A parameter counts if at least ``share`` of its entries are 0
    and all others are multiples. Zeros of inactive units, or of rows that were not looked up, have entries of a usual
    size next to them.

    Why it is bad:
        An entry that is rounded to 0 changes nothing. Most weights stay constant, the others get gradients with only a
        few bits, and the loss falls slowly or not at all.

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
        the parameters; gradients that are mostly above 6e-8.

    Attributes:
        share: Minimum fraction of zeros in the gradient of a parameter.
        steps: Maximum mean of the nonzero entries, in multiples of the smallest number.
        most: Minimum fraction of the parameters that have a gradient.
    """

    share: float = 0.5
    steps: float = 16.0
    most: float = 0.5
    patience: int = 2

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
