"""Runs that learn nothing though nothing else is wrong, and sequences along the wrong dimension: NOT_LEARNING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import fell, fell_since, layers_of, no_better, none_better, past, seen, still_falls
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

_OTHERS = tuple(
    kind
    for kind in IssueType
    if kind not in {IssueType.NOT_LEARNING, IssueType.MEMORY_USAGE, IssueType.MEMORY_LEAK, IssueType.HEAD_REDUNDANCY}
)

_OPEN = "left to learn"
_FIT_FIRST = (
    "first fit one batch, for _ in range(200): step(x, y): where its loss does not go to 0, the graph, the rate or the "
    "optimizer is at fault, else the data; then try ten times and a tenth of the rate."
)
_LEFT = (
    "compare what each layer gets: its learning rate (a group of its own?), the size of its first weights, dropout and "
    "weight decay; then try ten times and a tenth of the rate."
)
_WEIGH = (
    "weigh this part more or the others less: sum a reconstruction over its features where a KL is summed, let the "
    "weight of a KL grow from 0, divide the loss of each task by its first size."
)


@dataclass(frozen=True, kw_only=True)
class NotLearning(Check):
    """Find runs that say no more than a constant would, when nothing else explains it.

    After ``settle`` steps every loss still lies at or above ``level`` of the best constant answer's in the middle of
    ``readings`` readings, and neither over the later two thirds of the run nor at their end did it fall against its own
    noise: of 100 steps a fall by 0.8 standard deviations of that noise would have been noticed in about half of all
    cases, one by 1.2 in nine of ten. Where it lies above ``wild`` times that level, as after a bad start or under
    dropout, it must not have fallen since the first step.

    Beside parts that are unknown or learn, a part of the loss counts from step ``patient`` on where its targets are
    known to depend on the inputs, and its predictions do not go with them: the reconstruction of a VAE whose KL drowns
    it. Those of players of a game, in which a batch has one kind of target, and of policies tell nothing by their size.

    Where a fit in closed form on some of the samples, each left out of its own fit, takes ``open`` and more off the
    best constant's loss, the model must have learned ``half`` of that, or be on its way: a loss that falls would get
    there within ``soon`` times the steps so far. Below ``hardly`` the odds are high; above it, or while the rate rises,
    it is a remark.

    Whatever the loss: a model whose answers are one and the same for all samples of a batch, to the last digits, though
    what enters differs, in ``readings`` readings on end, does not use its inputs, or has averaged the samples away.

    Why it is bad:
        The model says the same of every sample. It may be any mistake that nothing else has named: it is a last resort.

    Example:
        for x, y in loader:
            loss = F.cross_entropy(model(torch.randn_like(x)), y)  # the batch was replaced by noise

    Use instead:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)

    Not reported:
        Another issue explains it; the loss falls against its own noise; predictions go with their targets all the
        same; the first 120 steps, 200 of a part; parts whose targets do not show that they depend on the inputs;
        players of a game and policies, whose losses tell nothing by their size.

    Attributes:
        settle: Steps in which a model may find its feet.
        early: Steps in which a last layer that began with zeros may give all samples one answer.
        level: Least share of the best constant's loss.
        wild: A share of the best constant's loss that chance alone does not explain.
        patient: Steps in which targets without a trace of dependence on the inputs are left to BAD_TARGETS.
        sure: Least z-score that counts as dependence.
        open: Least share of the best constant's loss that a fit in closed form takes off where targets can be learned.
        half: Share of that which a model has to have learned.
        hardly: Share of that which counts as nearly nothing.
        soon: Steps that are still to come, at most, as a multiple of those so far.
        readings: How many readings are looked at.
        heal: Many; what chance lets fall for a few readings is not learned.
    """

    settle: int = 120
    early: int = 20
    level: float = 0.97
    wild: float = 1.2
    patient: int = 200
    sure: float = 3.0
    open: float = 0.3
    half: float = 0.6
    hardly: float = 0.4
    soon: float = 3.0
    readings: int = 5
    heal: int = 15

    name: ClassVar[str] = "not-learning"
    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING,)
    evidence: ClassVar[tuple[str, ...]] = ("loss.over_constant", "answer.alike")
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "learning_rate",
        "answer.alike",
        "loss.over_constant",
        "loss.sense",
        "target.uniform_share",
        "target.dependence",
        "target.attained",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses of this record, and whether the answers tell samples apart."""
        alike = past(history, "answer.alike", RUN_SITE)[-self.readings :]
        if record.step >= self.early and len(alike) == self.readings and alike.min() == 1.0:
            return (
                Finding(
                    IssueType.NOT_LEARNING,
                    Severity.HIGH,
                    ("",),
                    1.0,
                    1.0,
                    f"The model gives all samples of a batch one and the same answer, to the last digits, in "
                    f"{self.readings} readings up to step {record.step}, though what enters differs.",
                    "look for a mean, sum or softmax over the first dimension, which is the batch, x.mean(0), "
                    "F.softmax(x, dim=0), and for a layer whose output is all zeros or is not used.",
                    cause="one answer",
                    follows_from=_OTHERS,
                ),
            )
        sites = layers_of(record, "loss.over_constant") if record.step >= self.settle else ()
        for site in sites:
            left = self._left(record, history, site)
            if left:
                return left
        known = all(seen(record, "loss.known", site) for site in sites)
        stuck = {site: no_better(history, site, self.level, self.readings) for site in sites}
        shares = {s: v for s, v in stuck.items() if v is not None and not self._excused(history, s)}
        worst = max(shares.values(), default=0.0)
        falls = solved(history) or still_falls(history) or (worst > self.wild and fell(history))
        whole = known and len(shares) == len(sites) and not falls
        if not whole:
            parts = {} if known and len(sites) == 1 else shares
            shares = {s: v for s, v in parts.items() if v <= self.wild and self._unread(record, history, s)}
            worst = max(shares.values(), default=0.0)
        if not shares:
            return ()
        layers, part = (("",), "the loss") if whole else (tuple(shares), f"the loss at {some(tuple(shares))}")
        message = f"After {record.step} steps {part} is {number(100 * worst)} % of that of the best constant answer" + (
            " and does not fall against its own noise: nothing of the inputs is used."
            if whole
            else ": its targets depend on the inputs, and its predictions do not."
        )
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.MEDIUM,
                layers,
                worst,
                self.level,
                message,
                _FIT_FIRST if whole else _WEIGH,
                follows_from=_OTHERS,
            ),
        )

    def refuted(self, issue: Issue, history: History) -> bool:
        """Whether the loss has fallen since, and not only because the batches became easier."""
        whole = issue.layer == "" and issue.cause != _OPEN
        return whole and fell_since(history, issue.step) and not self.lasts(issue, history)

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether every loss is at the level of a constant answer still; a fall by chance is no end of it."""
        learns = any(self._excused(history, site) for site in history.at_sites("loss.over_constant").sites)
        return issue.layer == "" and not learns and none_better(history, self.level, self.readings) is not None

    def _left(self, record: StepRecord, history: History, site: str) -> tuple[Finding, ...]:
        """Say where a fit in closed form has learned most of what the model has not, nor soon will at this pace."""
        fits, shares = past(history, "target.attained", site)[-2:], past(history, "loss.over_constant", site)
        if len(fits) < 2 or len(shares) < 2 * self.readings or self._plays(history, site):
            return ()
        fit, share = 1.0 - median(fits), median(shares[-self.readings :])
        if fit < self.open or 1.0 - share >= self.half * fit:
            return ()
        # Half of the readings against the other: what falls from far above is on its way.
        at = history.at_sites("loss.over_constant").steps[-len(shares) :]
        middle = len(shares) // 2
        gained, steps = median(shares[:middle]) - median(shares[middle:]), float(np.ptp(at)) / 2.0
        slow = gained * self.soon * record.step < (share - 1.0 + fit) * steps
        if not slow and (share <= self.wild or gained > 0) and still_falls(history):
            return ()
        rates = history.run("learning_rate").values[-30:]
        rises = len(rates) > 0 and rates[-1] > 1.05 * rates[0]
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.LOW if rises or 1.0 - share >= self.hardly * fit else Severity.MEDIUM,
                ("",),
                share,
                1.0 - self.half * fit,
                f"After {record.step} steps the loss is {number(100 * share)} % of that of the best constant answer, "
                f"while a fit in closed form comes to {number(100 - 100 * fit)} %: most of what can be learned is not.",
                _LEFT,
                cause=_OPEN,
                origin=_OPEN,
                urgent=True,  # what it was judged by are many readings already
                follows_from=_OTHERS,
            ),
        )

    def _plays(self, history: History, site: str) -> bool:
        """Whether a batch has one kind of target, as those of players of a game."""
        return bool((past(history, "target.uniform_share", site)[-1:] > 0.5).any())

    def _unread(self, record: StepRecord, history: History, site: str) -> bool:
        """Whether a part's targets are known to depend on the inputs, and its predictions were looked at."""
        tests, goes = past(history, "target.dependence", site), past(history, "loss.sense", site)
        return record.step >= self.patient and len(goes) >= self.readings and bool((tests[-1:] >= self.sure).any())

    def _excused(self, history: History, site: str) -> bool:
        """Whether something is learned, however little, or targets are to be judged first."""
        tests, goes = past(history, "target.dependence", site), past(history, "loss.sense", site)
        return (
            # It may be the targets' fault, and soon be reported as such.
            ((history.run("loss").steps[-1:] < self.patient).any() and len(tests) > 0 and bool(tests[-1] < self.sure))
            or (len(goes) > 0 and float(goes.sum()) >= self.sure * len(goes) ** 0.5)
            or self._plays(history, site)
        )


@dataclass(frozen=True, kw_only=True)
class BatchForTime(Check):
    """Find layers of sequences that run along the batch, from sample to sample, and take the steps for samples.

    Of an input ``[samples, steps, features]`` a layer without ``batch_first=True`` takes the first dimension for time.
    That shows where the loss has one prediction for each of what the layer takes for steps, and not one for each of
    what it takes for sequences, nor one for each step of each.

    Why it is bad:
        The layer carries its state from one sample to the next, and sees one step of each: it cannot learn from order,
        and what it says of a sample depends on the rest of the batch.

    Example:
        rnn = nn.LSTM(6, 16)  # takes [time, batch, features]
        output, _ = rnn(x)  # x is [batch, time, features]

    Use instead:
        rnn = nn.LSTM(6, 16, batch_first=True)
        output, _ = rnn(x)

    Not reported:
        The loss has a prediction for each sequence as the layer takes them, or for each step of each; batch and time
        have the same length.

    Attributes:
        readings: Fewest readings that all say so.
    """

    readings: int = 4
    patience: int = 1
    heal: int = 100

    name: ClassVar[str] = "batch-for-time"
    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING,)
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
