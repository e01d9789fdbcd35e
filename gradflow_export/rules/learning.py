"""Networks without a bend, and runs that learn nothing though nothing else is wrong: CAPACITY, NOT_LEARNING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import no_better, past, sites_of, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

_OTHERS = tuple(
    kind
    for kind in IssueType
    if kind not in {IssueType.NOT_LEARNING, IssueType.MEMORY_USAGE, IssueType.MEMORY_LEAK, IssueType.HEAD_REDUNDANCY}
)


@dataclass(frozen=True, kw_only=True)
class NoBend(Rule):
    """Find networks of several layers that are one linear map, where a linear map is not enough.

    Between the layers the graph of autograd shows nothing but sums, products with constants and changes of shape. A
    factorisation of low rank is made on purpose: a hidden layer must be at least as wide as one of its neighbours, so
    that it adds nothing. And the data must want more: what the best linear fit leaves still depends on the inputs (z of
    at least ``sure``, twice), while the loss has stopped falling above ``level`` of the best constant's.

    Source: Minsky and Papert 1969, Perceptrons; Baldi and Hornik 1989, Neural Networks 2; Bierens 1982.

    Attributes:
        sure: Least z-score of what a linear fit leaves.
        level: Least share of the best constant's loss that is left.
        settle: Steps in which a linear map may be found.
    """

    sure: float = 4.0
    level: float = 0.4
    settle: int = 40
    patience: int = 2

    name: ClassVar[str] = "no-bend"
    needs: ClassVar[tuple[str, ...]] = ("loss.unbent",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest test."""
        for site in sites_of(record, "loss.unbent"):
            z, depth = record.value("loss.unbent", site), record.value("loss.affine_depth", site) or 0.0
            if z is None or not z >= self.sure or depth < 2 or record.step < self.settle:
                continue
            share = no_better(history, site, self.level, 3)
            if share is None:
                continue
            return (
                Finding(
                    IssueType.CAPACITY,
                    Severity.MEDIUM,
                    (site,),
                    z,
                    self.sure,
                    f"{number(depth)} layers up to {site or 'the loss'} have no non-linearity between them and are one "
                    f"linear map; what the best linear fit leaves still depends on the inputs (z = {number(z)}), and "
                    f"the loss is at {number(share)} times that of the best constant answer.",
                    "put an activation between the layers and use its result, x = torch.relu(self.fc1(x)); "
                    "nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).",
                ),
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class NotLearning(Rule):
    """Find runs that say no more than a constant would, when nothing else explains it.

    After ``settle`` steps every loss that is known still lies at or above ``level`` of the best constant answer's in
    the middle of ``readings`` readings, and over the later two thirds of the run it did not fall against its own noise:
    of 100 steps a fall by 0.8 standard deviations of that noise would have been noticed in about half of all cases, one
    by 1.2 in nine of ten. Said of losses on targets only; those of players of a game, in which a batch has one kind of
    target, and of policies tell nothing by their size.

    Attributes:
        settle: Steps in which a model may find its feet.
        level: Least share of the best constant's loss.
        readings: How many readings are looked at.
    """

    settle: int = 80
    level: float = 0.97
    readings: int = 5
    patience: int = 3

    name: ClassVar[str] = "not-learning"
    needs: ClassVar[tuple[str, ...]] = ("loss.over_constant",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", "target.uniform_share")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses of this record."""
        if record.step < self.settle or solved(history) or still_falls(history):
            return ()
        shares = {}
        for site in sites_of(record, "loss.over_constant"):
            share = no_better(history, site, self.level, self.readings)
            uniform = past(history, "target.uniform_share", site)
            if share is None or (len(uniform) and uniform[-1] > 0.5):
                return ()
            shares[site] = share
        if not shares:
            return ()
        worst = max(shares.values())
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.MEDIUM,
                ("",),
                worst,
                self.level,
                f"After {record.step} steps the loss is {number(worst)} times that of the best constant answer and "
                "does not fall against its own noise: nothing of the inputs is used.",
                "first fit one batch, for _ in range(200): step(x, y): where its loss does not go to 0, the graph, the "
                "rate or the optimizer is at fault, else the data; then try ten times and a tenth of the rate.",
                follows_from=_OTHERS,
            ),
        )
