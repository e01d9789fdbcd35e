"""Stacked linear layers without an activation between them: CAPACITY."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import no_better, values_of
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class StackedLinear(Check):
    """Report consecutive linear layers without an activation between them, although the model should be non-linear.

    Between such layers the autograd graph contains only sums, products with constants and reshapes, so together they
    are one linear map. A low-rank factorization is intentional. Therefore at least one layer in the row must be as wide
    as one of its neighbors, so that it adds no capacity.

    Four observations show that an activation is missing. (1) The model has activation modules, but none of them is on
    the path from its first layer to the loss, or all of them are linear (a slope of 1). (2) It has no activations but a
    normalization between any two of at least ``row`` layers, which a linear map does not need. (3) At least ``row``
    layers are stacked while the graph is non-linear elsewhere; convolutions are excluded, because factorized
    convolutions are common.

    (4) While the graph is non-linear elsewhere, two linear layers or two convolutions of the same kind in one parent
    module follow each other directly, and the tensor between them is at least as wide as one end and not used by
    anything else. One of the layers could do the same.

    Why it is bad:
        Consecutive linear layers are equivalent to a single linear layer. The model has the cost of a deep network and
        the capacity of a single layer.

    Example:
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3))

    Use instead:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    Not reported:
        A low-rank factorization, with a middle narrower than both ends; stacked convolutions if the graph is non-linear
        elsewhere; two layers of different modules; a linear model without activation modules, which LinearLimit judges.

    Source: Minsky and Papert 1969, Perceptrons; Baldi and Hornik 1989, Neural Networks 2.

    Attributes:
        row: Minimum number of stacked layers.
    """

    row: int = 3
    patience: int = 2

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("layer.row", "layer.merged")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        layers, length = _row(record)
        idle = max(values_of(record, "loss.idle_activations").values(), default=0.0)
        norms = max(values_of(record, "loss.affine_norms").values(), default=0.0)
        if length >= 2 and idle > 0:
            return (
                _unbent(layers, idle, 0.0, f"none of the {number(idle)} activation modules in the model has an effect"),
            )
        if length >= self.row and norms >= length - 1:
            return (
                _unbent(
                    layers,
                    length,
                    self.row,
                    "the normalization layers between them indicate that activations are missing",
                ),
            )
        if length >= self.row and not record.facts.get("loss.affine_depth"):
            return (_unbent(layers, length, self.row, "elsewhere the network is non-linear"),)
        merged = values_of(record, "layer.merged")
        if merged:
            width = max(merged.values())
            why = f"the layer between them is {number(width)} times as wide as the narrower end, which adds no capacity"
            are = "are one linear map" if len(merged) == 2 else "are half as many"
            return (_unbent(tuple(merged), width, 1.0, why, are),)
        return ()


@dataclass(frozen=True, kw_only=True)
class LinearLimit(Check):
    """Report networks of several layers that are one linear map, although the data require a non-linear model.

    The residual of the best linear fit still depends on the inputs (z of at least ``sure`` in two consecutive tests),
    while the loss is at least ``level`` of that of the best constant prediction. Not reported: a deep linear network on
    a linear problem, a low-rank factorization, and a single layer.

    Why it is bad:
        The model has reached the best linear map, but the residual still depends on the inputs. More training does not
        help.

    Example:
        model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 1))  # the targets are a XOR of the inputs

    Use instead:
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))

    Not reported:
        A linear problem; a single layer; a low-rank factorization; the first 30 steps; a loss below 0.4 of that of the
        best constant prediction.

    Source: Bierens 1982, Journal of Econometrics 20.

    Attributes:
        sure: Minimum z-score of the residual of a linear fit.
        level: Minimum loss, as a fraction of that of the best constant prediction.
        settle: Number of steps in which a linear map may be found.
    """

    sure: float = 4.0
    level: float = 0.4
    settle: int = 30
    patience: int = 2

    order: ClassVar[int] = 60
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.CAPACITY,)
    evidence: ClassVar[tuple[str, ...]] = ("loss.unbent",)
    remembers: ClassVar[tuple[str, ...]] = ("loss.over_constant",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest test."""
        layers, length = _row(record)
        for site, z in values_of(record, "loss.unbent").items():
            if not z >= self.sure or length < 2 or history.seen < self.settle:
                continue
            share = no_better(history, site, self.level, 3)
            if share is not None:
                why = (
                    f"the residual of the best linear fit still depends on the inputs (z = {number(z)}), and the "
                    f"loss is at {number(100 * share)} % of that of the best constant prediction"
                )
                return (_unbent(layers, z, self.sure, why),)
        return ()


def _row(record: StepRecord) -> tuple[tuple[str, ...], float]:
    """Return the layers in a row, and how many there are."""
    row = values_of(record, "layer.row")
    return tuple(row), max(row.values(), default=0.0)


def _unbent(
    layers: tuple[str, ...], value: float, threshold: float, why: str, are: str = "are one linear map"
) -> Finding:
    return Finding(
        IssueType.CAPACITY,
        Severity.MEDIUM,
        layers,
        value,
        threshold,
        f"{len(layers)} layers ({some(layers)}) have no activation between them and {are}; {why}.",
        "add an activation between the layers and use its result, x = torch.relu(self.fc1(x)); "
        "nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).",
    )
