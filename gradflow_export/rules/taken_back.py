"""Parameters that an optimizer moves and something else puts back before they are used: STAGNATION."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import FloatArray, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, some
from gradflow_export.rules.history import History

TAKEN_BACK = "taken back"


@dataclass(frozen=True, kw_only=True)
class TakenBack(Rule):
    """Find parameters that change in the optimizer's step and are what they were when the next forward pass uses them.

    So it is with weights that are laid on a grid after the step, where no update is as long as half a step of the grid,
    and with weights that are restored. Where the weights lie between the points of a declared grid an update is only
    late; where just some rows were looked at, nobody can say that the others rest too.

    Attributes:
        patience: A warm-up begins with updates that are lost, and is over soon.
    """

    patience: int = 8
    heal: int = 2

    name: ClassVar[str] = "taken-back"
    needs: ClassVar[tuple[str, ...]] = ("parameter.change_norm",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the updates of this record."""
        del history  # the patience is the judge's
        change = record.get("parameter.change_norm")
        if change is None:
            return ()
        moved = _at(record, "parameter.update_norm", change.sites)
        whole = _at(record, "parameter.read_share", change.sites) == 1
        late = _at(record, "parameter.between", change.sites) > 0
        where = np.flatnonzero(change.present & (change.values == 0) & (moved > 0) & whole & ~late)
        if not where.size:
            return ()
        layers = tuple(change.sites[index] for index in where)
        total = int(change.present.sum())
        message = (
            f"{len(layers)} of {total} parameters ({some(layers)}) move in optimizer.step() and are back, bit for bit, "
            "when the next forward pass uses them."
        )
        advice = (
            "find what writes to them between step() and the forward pass. Where they are rounded to a grid, keep the "
            "unrounded weights for the optimizer and round a copy in forward (straight-through), or raise the learning "
            "rate until an update is half a step of the grid; where they are to stay, call requires_grad_(False)."
        )
        severity = Severity.HIGH if 2 * len(layers) >= total else Severity.MEDIUM
        return (Finding(IssueType.STAGNATION, severity, layers, 0.0, 0.0, message, advice, origin=TAKEN_BACK),)


def _at(record: StepRecord, metric: str, sites: tuple[str, ...]) -> FloatArray:
    """Return a metric at ``sites``, NaN where missing. Shape: ``[len(sites)]``."""
    reading = record.get(metric)
    known = {} if reading is None else reading.as_dict()
    return np.array([np.nan if known.get(site) is None else known[site] for site in sites], dtype=np.float32)
