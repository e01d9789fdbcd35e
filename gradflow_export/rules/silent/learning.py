"""Networks without a bend, and runs that learn nothing though nothing else is wrong: CAPACITY, NOT_LEARNING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import begins_to_fall, fell, layers_of, no_better, past, seen, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

_OTHERS = tuple(
    kind
    for kind in IssueType
    if kind not in {IssueType.NOT_LEARNING, IssueType.MEMORY_USAGE, IssueType.MEMORY_LEAK, IssueType.HEAD_REDUNDANCY}
)


@dataclass(frozen=True, kw_only=True)
class NoBend(Rule):
    """Find layers that follow each other without a non-linearity, though the model has some.

    Between such layers the graph of autograd shows nothing but sums, products with constants and changes of shape, so
    that together they are one linear map. A factorisation of low rank is made on purpose: somewhere in the row a layer
    must be at least as wide as one of its neighbours, so that it adds nothing. That a non-linearity is wanted shows in
    one of four ways. The model has activation modules, and none of them is on the way from its first layer to the loss,
    or none bends (a slope of 1). It has none, but a normalisation between any two of ``row`` layers and more: what is
    one linear map needs none. Or ``row`` layers and more stand in a row, while the graph bends elsewhere; convolutions
    do not count, of which a factorisation has some. Or, while it bends elsewhere, two linear layers or two like
    convolutions of the same parent module stand directly behind each other, and what is between them is at least as
    wide as one end and used by nothing else: the same could be said by one of them.

    Source: Minsky and Papert 1969, Perceptrons; Baldi and Hornik 1989, Neural Networks 2.

    Attributes:
        row: Least number of layers in a row.
    """

    row: int = 3
    patience: int = 2

    name: ClassVar[str] = "no-bend"
    evidence: ClassVar[tuple[str, ...]] = ("layer.row", "layer.merged")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the graph of this record."""
        del history  # the graph alone tells it
        layers, length = _row(record)
        straight = layers_of(record, "loss.affine_depth")
        idle = max((seen(record, "loss.idle_activations", site) or 0.0 for site in straight), default=0.0)
        norms = max((seen(record, "loss.affine_norms", site) or 0.0 for site in straight), default=0.0)
        if length >= 2 and idle > 0:
            return (
                _unbent(layers, idle, 0.0, f"of {number(idle)} activation modules in the model none bends anything"),
            )
        if length >= self.row and norms >= length - 1:
            return (_unbent(layers, length, self.row, "normalisations between them serve networks that bend"),)
        if length >= self.row and not straight:
            return (_unbent(layers, length, self.row, "elsewhere the network bends"),)
        merged = layers_of(record, "layer.merged")
        if merged:
            width = max(seen(record, "layer.merged", site) or 0.0 for site in merged)
            why = f"what is between them is {number(width)} times as wide as the narrower end, which adds nothing"
            return (_unbent(merged, width, 1.0, why, "are one linear map" if len(merged) == 2 else "are half as many"),)
        return ()


@dataclass(frozen=True, kw_only=True)
class LinearLimit(Rule):
    """Find networks of several layers that are one linear map, where the data want more than that.

    What the best linear fit leaves still depends on the inputs (z of at least ``sure``, in two tests on end), while the
    loss is at no less than ``level`` of the best constant answer's. A deep linear network on a linear problem, a
    factorisation of low rank and a single layer are left in peace.

    Source: Bierens 1982, Journal of Econometrics 20.

    Attributes:
        sure: Least z-score of what a linear fit leaves.
        level: Least share of the best constant's loss that is left.
        settle: Steps in which a linear map may be found.
    """

    sure: float = 4.0
    level: float = 0.4
    settle: int = 30
    patience: int = 2

    name: ClassVar[str] = "linear-limit"
    evidence: ClassVar[tuple[str, ...]] = ("loss.unbent",)
    remembers: ClassVar[tuple[str, ...]] = ("loss.over_constant",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the newest test."""
        layers, length = _row(record)
        for site in layers_of(record, "loss.unbent"):
            z = seen(record, "loss.unbent", site)
            if z is None or not z >= self.sure or length < 2 or record.step < self.settle:
                continue
            share = no_better(history, site, self.level, 3)
            if share is not None:
                why = (
                    f"what the best linear fit leaves still depends on the inputs (z = {number(z)}), and the loss is "
                    f"at {number(share)} times that of the best constant answer"
                )
                return (_unbent(layers, z, self.sure, why),)
        return ()


def _row(record: StepRecord) -> tuple[tuple[str, ...], float]:
    """Return the layers in a row, and how many there are."""
    layers = layers_of(record, "layer.row")
    return layers, max((seen(record, "layer.row", site) or 0.0 for site in layers), default=0.0)


def _unbent(
    layers: tuple[str, ...], value: float, threshold: float, why: str, are: str = "are one linear map"
) -> Finding:
    return Finding(
        IssueType.CAPACITY,
        Severity.MEDIUM,
        layers,
        value,
        threshold,
        f"{len(layers)} layers ({some(layers)}) have no non-linearity between them and {are}; {why}.",
        "put an activation between the layers and use its result, x = torch.relu(self.fc1(x)); "
        "nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).",
    )


@dataclass(frozen=True, kw_only=True)
class NotLearning(Rule):
    """Find runs that say no more than a constant would, when nothing else explains it.

    After ``settle`` steps every loss still lies at or above ``level`` of the best constant answer's in the middle of
    ``readings`` readings, and over the later two thirds of the run it did not fall against its own noise: of 100 steps
    a fall by 0.8 standard deviations of that noise would have been noticed in about half of all cases, one by 1.2 in
    nine of ten. Where it lies above ``wild`` times that level, as after a bad start or under dropout, it must not have
    fallen since the first step. Said of losses that are known as a whole; those of players of a game, in which a batch
    has one kind of target, and of policies tell nothing by their size.

    Attributes:
        settle: Steps in which a model may find its feet.
        level: Least share of the best constant's loss.
        wild: A share of the best constant's loss that chance alone does not explain.
        patient: Steps in which targets without a trace of dependence on the inputs are left to BAD_TARGETS.
        sure: Least z-score that counts as dependence.
        readings: How many readings are looked at.
        heal: Many; what chance lets fall for a few readings is not learned.
    """

    settle: int = 120
    level: float = 0.97
    wild: float = 1.2
    patient: int = 200
    sure: float = 3.0
    readings: int = 5
    patience: int = 3
    heal: int = 15

    name: ClassVar[str] = "not-learning"
    evidence: ClassVar[tuple[str, ...]] = ("loss.over_constant",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", "target.uniform_share", "target.dependence")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses of this record."""
        if record.step < self.settle or solved(history) or still_falls(history) or begins_to_fall(history):
            return ()
        shares = {}
        for site in layers_of(record, "loss.over_constant"):
            share = no_better(history, site, self.level, self.readings)
            if not seen(record, "loss.known", site) or (share is not None and share > self.wild and fell(history)):
                return ()
            tests = past(history, "target.dependence", site)
            if record.step < self.patient and len(tests) and tests[-1] < self.sure:
                return ()  # it may be the targets' fault, and soon be told as such
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


@dataclass(frozen=True, kw_only=True)
class BatchForTime(Rule):
    """Find layers of sequences that run along the batch, from sample to sample, and take the steps for samples.

    Of an input ``[samples, steps, features]`` a layer without ``batch_first=True`` takes the first dimension for time.
    That shows where the loss has one prediction for each of what the layer takes for steps, and not one for each of
    what it takes for sequences, nor one for each step of each.

    Attributes:
        readings: Fewest readings that all say so.
        patience: One; the readings are the patience.
    """

    readings: int = 4
    patience: int = 1
    heal: int = 100

    name: ClassVar[str] = "batch-for-time"
    evidence: ClassVar[tuple[str, ...]] = ("layer.taken_steps",)
    remembers: ClassVar[tuple[str, ...]] = ("layer.taken_steps", "layer.taken_sequences", "loss.samples")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the shapes of the steps so far."""
        losses = history.at_sites("loss.samples")
        counts = set(losses.values[losses.present].tolist()) | set(history.run("loss.samples").values.tolist())
        turned = []
        for site in layers_of(record, "layer.taken_steps"):
            steps, taken = past(history, "layer.taken_steps", site), past(history, "layer.taken_sequences", site)
            apart = len(steps) == len(taken) >= self.readings and bool((taken > 1).all() and (taken != steps).all())
            if apart and counts and counts <= set(steps.tolist()) and counts.isdisjoint(taken.tolist()):
                turned.append(site)
        if not turned:
            return ()
        length = seen(record, "layer.taken_sequences", turned[0]) or 0.0
        samples = seen(record, "layer.taken_steps", turned[0]) or 0.0
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.HIGH,
                tuple(turned),
                samples,
                length,
                f"{some(tuple(turned))} takes the {number(samples)} samples of a batch for the steps of "
                f"{number(length)} sequences: it runs from sample to sample, and not along time.",
                "say where the batch is, nn.LSTM(..., batch_first=True) or nn.TransformerEncoderLayer(..., batch_first="
                "True) for inputs [batch, time, features]; or give it x.transpose(0, 1).",
                cause="batch taken for time",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EmptyLoss(Rule):
    """Find losses that are exactly 0, and send back nothing, from the first step on: no target counts.

    A loss that starts at 0 by the data alone would differ from it for one sample in ``least`` batches.

    Attributes:
        least: Fewest losses, and half as many gradients, before anything is said.
    """

    least: int = 20
    patience: int = 1
    heal: int = 1

    name: ClassVar[str] = "empty-loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "gradient.total_norm")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses so far."""
        loss, gradient = history.run("loss"), history.run("gradient.total_norm")
        if loss.count < self.least or 2 * gradient.count < self.least:
            return ()
        if not (loss.low == loss.high == gradient.low == gradient.high == 0.0):
            return ()
        return (
            Finding(
                IssueType.BAD_TARGETS,
                Severity.HIGH,
                ("target",),
                0.0,
                0.0,
                f"All {loss.count} losses up to step {record.step} were exactly 0, and so was every gradient: no "
                "target counts.",
                "look at the targets that remain: (labels != -100).sum() must not be 0; check the mask, ignore_index "
                "and the weights of the loss.",
                since=int(loss.steps[0]) if loss.count <= len(loss.steps) else 1,
                cause="empty",
            ),
        )
