"""A rule of one's own: the loss rises for many records in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradflow_export.records.issues import IssueType, Severity
from gradflow_export.rules.base import Finding, Rule, number


@dataclass(frozen=True, kw_only=True)
class RisingLoss(Rule):
    """Find a loss that rises from record to record.

    Attributes:
        records: Least number of records in a row that are each above the one before.
    """

    name = "rising-loss"
    needs = ("loss",)
    remembers = ("loss",)
    patience: int = 1
    records: int = 10

    def check(self, record, history):
        """Return a finding where the last losses rise without exception."""
        losses = np.asarray(history.run("loss").values)[-self.records - 1 :]
        if len(losses) <= self.records or not (np.diff(losses) > 0).all():
            return ()
        return (
            Finding(
                IssueType.DIVERGING,
                Severity.MEDIUM,
                ("",),
                value=float(losses[-1]),
                threshold=float(losses[0]),
                message=f"the loss rose {self.records} times in a row, to {number(losses[-1])}",
                advice="check the sign of the loss and the learning rate",
            ),
        )
