"""Columns of targets, or terms of the loss, that are not learned while others are: NOT_LEARNING, BAD_TARGETS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median, theil_sen
from gradflow_export.records.step_record import RUN_SITE, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import OTHERS, Floats, past, seen, values_of
from gradflow_export.rules.history import History

_READ = ("over_constant", "attained", "square")
BEHIND = 0.6
"""Share of the loss of its best constant prediction above which it is asked what is known of a column."""


def parts_of(site: str, parts: dict[str, Floats]) -> dict[str, dict[str, float]]:
    """Return by fact and column what was read of the columns that are behind, and the lowest share of all.

    Args:
        site: Of the loss; one of several columns has its number behind it.
        parts: By name, a number of each column; nothing, or ``"over_constant"`` among others.
    """
    shares = parts.get("over_constant", np.zeros(0))
    if not np.isfinite(shares).any():
        return {}
    behind = [(f"{site}[{i}]" if len(shares) > 1 else site, i) for i in np.flatnonzero(shares > BEHIND)]
    found = {f"column.{fact}": {part: float(values[i]) for part, i in behind} for fact, values in parts.items()}
    return {"column.least": {site: float(np.nanmin(shares))}, **(found if behind else {})}


@dataclass(frozen=True, kw_only=True)
class UnlearnedPart(Check):
    """Report columns of the targets, or terms of the loss, that are not learned while others are.

    Each column is compared with its own best constant prediction, over the last readings, so that the scale and the
    weight of a column do not matter. Another column, or another term, must have come down to ``learned`` of its own. A
    closed-form fit on some of the samples, evaluated leave-one-out, shows that the column can be learned: it lowers the
    loss of the best constant prediction by ``open`` or more, and the model has learned less than ``hardly`` of that and
    at its pace would not in as many steps again. Without such a fit a column may be noise.

    If a fit explains the squared distance of a column from its mean, but not the column itself, its sign is random: it
    does not follow from the inputs. Noise whose size depends on the inputs is no explanation: at most a third of the
    variance of the square of a normal variable follows from its scale.

    Why it is bad:
        The loss falls as the other columns are learned, and looks healthy. What was not learned is predicted as its
        mean for every sample.

    Example:
        for x, y in loader:
            y = torch.stack([temperature, pressure], dim=1)  # 0 to 1, and 90 000 to 110 000
            loss = F.mse_loss(model(x), y)

    Use instead:
        for x, y in loader:
            y = (torch.stack([temperature, pressure], dim=1) - mean) / std  # mean and std of each column
            loss = F.mse_loss(model(x), y)

    Not reported:
        No other part is learned either, which is NOT_LEARNING of the whole loss; columns that a closed-form fit cannot
        predict, such as noise; columns that come down; masked losses; more than 32 columns, which count as one;
        sequences of words; the first 120 steps.

    Attributes:
        settle: Number of initial steps without a verdict.
        learned: Maximum fraction of the loss of the best constant prediction for a part that is learned.
        open: Minimum fraction of the loss of the best constant prediction that a closed-form fit takes off.
        hardly: Fraction of that below which a part is not learned.
        begun: Fraction of that from which on it is a remark.
        patient: Number of steps before which it is one: parts that are harder are learned later.
        level: Minimum fraction of the loss of the best constant prediction for a random sign.
        square: Maximum fraction of the variance of its square that the fit leaves.
        tests: Minimum number of tests in the later two thirds of the steps.
        patience: One; ``tests`` already requires persistence.
    """

    settle: int = 120
    learned: float = 0.5
    open: float = 0.3
    hardly: float = 0.4
    begun: float = 0.2
    patient: int = 200
    level: float = 0.85
    square: float = 0.5
    tests: int = 3
    patience: int = 1

    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING, IssueType.BAD_TARGETS)
    evidence: ClassVar[tuple[str, ...]] = ("column.least", *(f"column.{name}" for name in _READ))
    remembers: ClassVar[tuple[str, ...]] = evidence

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the columns that are behind."""
        sites = (*history.at_sites("column.least").sites, RUN_SITE)
        best = min((past(history, "column.least", site)[-1:].min(initial=np.inf) for site in sites), default=np.inf)
        behind = values_of(record, "column.over_constant")
        if history.seen < self.settle or best > self.learned:
            return ()
        known = {part: self._known(record, history, part) for part in behind}
        left, turned = (tuple(part for part in behind if known[part] == what) for what in ("left", "turned"))
        found = []
        if left:
            share, fit = behind[left[0]], seen(record, "column.attained", left[0]) or 0.0
            begun = 1.0 - share >= self.begun * (1.0 - fit) or history.seen < self.patient
            found.append(
                Finding(
                    IssueType.NOT_LEARNING,
                    Severity.LOW if begun else Severity.MEDIUM,
                    left,
                    share,
                    1.0 - self.hardly * (1.0 - fit),
                    f"After {history.seen} steps the loss of {some(left)} is {number(100 * share)} % of that of the "
                    f"best constant prediction, while a closed-form fit attains {number(100 * fit)} %, and other parts "
                    f"of the loss are at {number(100 * best)} %: this part is not learned.",
                    "give each part a weight that counts: standardize each column of the targets, (y - y.mean(0)) / "
                    "y.std(0), and divide the loss of each task by its initial value; check that nothing clamps, "
                    "slices or detaches this output.",
                    cause="part",
                    origin="one part of several",
                    follows_from=OTHERS,
                )
            )
        if turned:
            explained = 1.0 - (seen(record, "column.square", turned[0]) or 0.0)
            found.append(
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.MEDIUM,
                    ("target",),
                    explained,
                    1.0 - self.square,
                    f"The targets of {some(turned)} have a random sign: a closed-form fit explains "
                    f"{number(100 * explained)} % of the squared distance from their mean and nothing of themselves; "
                    f"the model predicts their mean, and other parts of the loss are at {number(100 * best)} % of "
                    "that of the best constant prediction.",
                    "transform inputs and targets together: a mirrored picture has mirrored points, x, points[:, 0] = "
                    "x.flip(-1), -points[:, 0]; a sign or a direction that the inputs do not show needs a loss that "
                    "ignores it.",
                    cause="sign",
                    origin="random sign",
                    follows_from=(IssueType.WRONG_LOSS, IssueType.DATA_SCALE, IssueType.NOT_TRAINING),
                )
            )
        return tuple(found)

    def _known(self, record: StepRecord, history: History, part: str) -> str:
        """Return whether a part is left to learn, or its size follows from the inputs and its sign does not."""
        series, late = history.at_sites("column.over_constant"), record.step - history.seen / 1.5
        steps = series.steps[series.steps >= late].astype(np.float64)
        shares, fits, squares = (past(history, f"column.{name}", part, late) for name in _READ)
        if not self.tests <= len(shares) == len(steps) or len(fits) < self.tests:
            return ""
        fit, pace = 1.0 - median(fits), max(0.0, -theil_sen(steps, shares) * history.seen)
        if fit >= self.open:
            return "left" if 1.0 - shares[-self.tests :].min() + pace < self.hardly * fit else ""
        turned = median(shares) >= self.level and median(squares) <= self.square
        return "turned" if turned else ""
