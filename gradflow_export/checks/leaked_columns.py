"""Finds targets that stand among the inputs as numbers: a column of the table, the last step of a window: LEAKAGE."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import distinct, first_of_each, median
from gradflow_export.records.step_record import BoolArray, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import Floats, layers_of, seen
from gradflow_export.rules.history import History

POOL = 1024
"""Last steps of sequences that are remembered."""
LEAST = 4
"""Fewest columns of inputs for each one of targets: what is to be reproduced as a whole is no leak."""
ROWS = 128
"""Fewest different samples that are judged."""
VALUES = 16
"""Fewest different values of a continuous target."""
CLASSES = 64
"""Classes of which each may have a column of its own."""
MEMBERS = 8
"""Fewest samples of a class."""
ROUNDING, COARSE = 1e-5, 2e-3
"""What a target may differ from a column that was scaled, as a share of its spread: in a sequence, and in a table.

In a table, half precision may have rounded it, and no earlier step is nearly the same.
"""
SHARED = 0.02
"""Least share of values that neighbouring columns have in common where rows are windows of one series."""


def copies(
    x: Floats, y: Floats, steps: tuple[int, int], *, numbers: bool, timed: bool = False, wide: int = 0
) -> tuple[int, int]:
    """Return which column of inputs is the target, -1 for none, and how many different samples were compared.

    A column counts that follows from the target in every sample by one factor and one offset, or columns of which each
    is 1 for one class alone. In rows that are steps of a sequence it must be one of the last step, for what came before
    may be what is to be remembered; windows of one series end too late wherever they hold the target, but for a series
    of which each step tells the others. Of several numbers one is enough; classes must all be there.

    Args:
        x: Inputs. Shape: ``[n, inputs]``.
        y: Targets. Shape: ``[n, targets]``.
        steps: The two dimensions of a sample that were made one, ``(1, inputs)`` for a sample of one dimension, zeros
            where all columns are of the last step.
        numbers: Whether targets are numbers and no classes.
        timed: Whether the first of the two dimensions is time; else it may be either.
        wide: How many targets there would be if these were as many of all as the inputs are.
    """
    here = np.isfinite(x).all(axis=1) & np.isfinite(y).all(axis=1)
    x, y = x[here], y[here]
    once = first_of_each(np.concatenate([x, y], axis=1))
    x, y = x[once], y[once]
    if len(x) < ROWS or (any(steps) and x.shape[1] < LEAST * max(y.shape[1], wide)):
        return -1, len(x)
    shared = all(steps) and any(_shares(x, lag) for lag in {1, steps[1]} if lag < x.shape[1])
    window = shared and _hardly_recur(x)
    places = np.arange(x.shape[1]) if window or (steps[0] < 2 and not shared) else _last_places(x, steps, timed=timed)
    share = COARSE if steps[0] == 1 and not shared else ROUNDING
    classes = [] if numbers else [(y[:, 0] == label).astype(np.float64) for label in distinct(y)[:CLASSES]]
    for wanted in ([*y.T], classes):
        found = [_copy(x, column, places, share, numbers=numbers, window=window) for column in wanted]
        if found and (max(found) if numbers else min(found)) >= 0:
            return max(found), len(x)
    return -1, len(x)


class LastSteps:
    """The last steps of sequences and their targets, as layers are given them that take all steps as rows.

    An input beside a wider one is a sequence of one step.

    Used on the worker thread only.
    """

    def __init__(self) -> None:
        self._rows: deque[npt.NDArray[np.float32]] = deque()

    def take(
        self, site: str, columns: int, steps: int, values: npt.NDArray[np.float32], *, numbers: bool
    ) -> dict[str, dict[str, float]]:
        """Return which number of the last step is the target, counted from that of the first.

        Args:
            site: The layer that they enter.
            columns: Numbers of each step.
            steps: Steps of a sequence.
            values: The last step if time is the first dimension, the same if samples are, and the targets.
            numbers: Whether targets are numbers and no classes.
        """
        self._rows.append(values)
        while sum(map(len, self._rows)) - len(self._rows[0]) >= POOL or self._rows[0].shape != values.shape:
            self._rows.popleft()
        rows = np.concatenate(self._rows).astype(np.float64)
        y = rows[:, 2 * columns :]
        if steps > 1 and steps * columns < LEAST * y.shape[1]:
            return {}
        told = [
            copies(rows[:, order * columns : (order + 1) * columns], y, (0, 0), numbers=numbers) for order in (0, 1)
        ]
        column, compared = max(told)
        place = (steps - 1) * columns + column if column >= 0 else -1
        return {"target.column": {site: float(place)}, "target.compared": {site: float(compared)}}


def _last_places(x: Floats, steps: tuple[int, int], *, timed: bool) -> npt.NDArray[np.int64]:
    """Return the columns of the last step of a sequence."""
    every, columns = np.arange(x.shape[1]), steps[1]
    return np.flatnonzero((every >= len(every) - columns) | ((every % columns == columns - 1) & (not timed)))


def _among(values: Floats, known: npt.NDArray[np.floating]) -> BoolArray:
    """Return which values are among known ones, which are in order; ``np.isin`` loads a megabyte of masked arrays."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(known[places] == values, dtype=np.bool_)


def _shares(x: Floats, lag: int) -> bool:
    """Whether numbers that stand in one column stand some places further on as well, as in windows of one series."""
    pairs = zip(x.T[:8], x.T[lag : lag + 8], strict=False)
    shared = [_among(before, distinct(after)).mean() for before, after in pairs]
    return median(np.asarray(shared, dtype=np.float64)) > SHARED


def _hardly_recur(x: Floats) -> bool:
    """Whether numbers hardly recur in a column: those of few values, as of symbols, stand in all columns by chance."""
    return median(np.array([len(distinct(column)) for column in x.T[:8]], dtype=np.float64)) > len(x) / 2


def _copy(
    x: Floats, y: Floats, places: npt.NDArray[np.int64], share: float, *, numbers: bool, window: bool = False
) -> int:
    """Return the first of some columns that is the target but for a share of its spread, -1 for none."""
    values, counts = np.unique(y, return_counts=True)
    continuous = numbers and len(values) >= VALUES
    if not continuous and (
        len(values) < 2 or np.sort(counts)[-2] < MEMBERS or not np.array_equal(values, values.round())
    ):
        return -1
    a, b = x[:, places] - x[:, places].mean(axis=0), y - y.mean()
    size = np.square(a).sum(axis=0)
    slope = np.divide(a.T @ b, size, out=np.zeros_like(size), where=size > 0)
    same = np.abs(b[:, None] - a * slope).max(axis=0) <= share * b.std()
    return int(places[same][0]) if same.any() and not (window and same.mean() > 1 / LEAST) else -1


@dataclass(frozen=True, kw_only=True)
class LeakedTarget(Check):
    """Report targets that are part of the inputs: a column of the table, or the last step of the window.

    Inputs and targets are compared value by value. A column that equals the target in each of at least ``samples``
    different samples, up to one factor and one offset, is not a coincidence.

    Why it is bad:
        The model copies the target. The loss on training and held-out data goes to 0, and predictions are useless when
        the target is not known yet.

    Example:
        x = table  # the price is still one of its columns
        y = table[:, PRICE]
        loss = F.mse_loss(model(x), y[:, None])

    Use instead:
        y = table[:, PRICE]
        x = torch.cat([table[:, :PRICE], table[:, PRICE + 1 :]], dim=1)
        loss = F.mse_loss(model(x), y[:, None])

    Not reported:
        Targets that are the inputs as a whole, or more than a quarter of them; earlier steps of sequences that are not
        windows of one series, which may be what is to be remembered; a series of which each step tells the others; a
        target that can be computed only from several columns together; fewer than 128 different samples; a single
        input of fewer than 4 columns; images.

    Attributes:
        samples: Minimum number of different samples.
    """

    samples: int = ROWS
    patience: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.LEAKAGE,)
    evidence: ClassVar[tuple[str, ...]] = ("target.column",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the samples read so far."""
        for site in layers_of(record, "target.column"):
            column, rows = (seen(record, f"target.{fact}", site) or 0.0 for fact in ("column", "compared"))
            if column >= 0 and rows >= self.samples:
                return (
                    Finding(
                        IssueType.LEAKAGE,
                        Severity.HIGH,
                        ("input",),
                        rows,
                        float(self.samples),
                        f"Column {number(column)} of the inputs equals the target{f' ({site})' if site else ''}, in "
                        f"each of {number(rows)} different samples: the model copies the target from its input.",
                        f"remove it from the inputs, x = torch.cat([x[:, :{int(column)}], x[:, {int(column)} + 1:]], "
                        "dim=1), or end the window one step before the target; remove any other feature derived from "
                        "the target too.",
                        cause="leaked target",
                        origin="the target is among the inputs",
                    ),
                )
        return ()
