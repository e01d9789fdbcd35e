"""Runs that learn nothing though nothing else is wrong, and sequences along the wrong dimension: NOT_LEARNING."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import (
    GROWN,
    OTHERS,
    chosen_blindly,
    constant_level,
    fall,
    fell,
    fell_since,
    gradient_grows,
    growth_of_targets,
    layers_of,
    none_better,
    past,
    seen,
    still_falls,
)
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import solved

BATCH_FOR_TIME = "batch taken for time"
"""Cause of a model that takes the samples of a batch for the steps of a sequence."""
ONE_ANSWER = "one answer"
"""Cause of a model that gives all samples of a batch one output."""
_OPEN = "left to learn"
_FIT_FIRST = (
    "first overfit a single batch, for _ in range(200): step(x, y): if its loss does not reach 0, the graph, the "
    "learning rate or the optimizer is at fault, otherwise the data: each target belongs to its input (order, added "
    "noise, crop or flip); then try ten times and a tenth of the learning rate."
)
_LEFT = (
    "compare the layers: learning rate (a separate parameter group?), scale of the initial weights, dropout and "
    "weight decay; then try ten times and a tenth of the learning rate."
)
_PAID = (
    "check the other terms of the loss, which fall at the expense of this one: their sign, for a penalty is added, and "
    "their weight."
)
_TERM = ("the loss", "the known term of the loss")
_SO_FAR = (
    ": its targets depend on the inputs, and its predictions do not.",
    " and does not fall below it: the inputs are not used.",
)
_WEIGH = (
    "increase the weight of this term or reduce the others: sum the reconstruction loss over features if the KL is "
    "summed, anneal the KL weight from 0, divide the loss of each task by its initial value."
)


@dataclass(frozen=True, kw_only=True)
class NotLearning(Check):
    """Report runs that are no better than a constant prediction, if no other issue explains it.

    After ``settle`` steps, the median of the last ``readings`` losses is at or above ``level`` of that of the best
    constant prediction, or all of those of the later half of the steps are, if they are fewer; and the loss did not
    fall beyond its own noise, neither over the last two thirds of the run nor at their end. Over 100 steps, a fall by
    0.8 standard deviations of that noise is detected in about half of all cases, a fall by 1.2 in nine of ten.

    If the loss is above ``wild`` times that level, as after a bad start or with dropout, it must not have fallen since
    the first step. From step ``patient`` on, neither a fall above the level counts nor a nearly blind choice.

    Next to terms of the loss that are unknown or improve, a single term is judged from step ``patient`` on, if its
    targets are known to depend on the inputs and its predictions do not correlate with them; an example is the
    reconstruction of a VAE dominated by the KL term. Adversarial losses with one class per batch, losses of policies,
    and those whose targets grow as the run goes on, are not comparable and not judged.

    If a closed-form fit on some of the samples, evaluated leave-one-out, lowers the loss of the best constant
    prediction by ``open`` or more, the model must have come down by ``half`` of that, or be on its way: a loss that
    falls would get there within ``soon`` times the steps so far.

    Below ``hardly`` the severity is MEDIUM. It is LOW above it, while the learning rate or the gradient rises, before
    step ``patient`` if anything was learned, and if the loss falls: many losses fall slowly at first, so a straight
    line through them ends too high. At the end of the run nothing is yet to come, and only what was learned counts.
    What was learned by then and is lost again is DIVERGING, or is learned anew.

    For any loss: a model whose outputs are equal for all samples of a batch, up to rounding, although the inputs
    differ, in ``readings`` consecutive readings, does not use its inputs, or averages over the samples.

    Why it is bad:
        The model predicts the same for every sample. The cause may be any mistake that no other check has found; this
        check is a last resort.

    Example:
        for x, y in loader:
            loss = F.cross_entropy(model(torch.randn_like(x)), y)  # the batch was replaced by noise

    Use instead:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)

    Not reported:
        Another issue explains it; the loss falls beyond its own noise, or was below ``lost``, and what was learned is
        lost (DIVERGING) or the data are others; predictions correlate with their targets; the first 120 steps, or 200
        for a single term; terms whose targets show no dependence on the inputs; adversarial losses and policies.

    Attributes:
        settle: Number of initial steps without a verdict.
        early: Number of steps in which a last layer initialized with zeros may give all samples the same output.
        level: Minimum fraction of the loss of the best constant prediction.
        wild: Multiple of the loss of the best constant prediction that chance alone does not explain.
        patient: Number of steps in which targets that show no dependence are left to BAD_TARGETS, and a little counts.
        sure: Minimum z-score that counts as dependence.
        open: Minimum fraction of the loss of the best constant prediction that a closed-form fit takes off.
        half: Fraction of that which the model must have learned.
        hardly: Fraction of that below which the severity is MEDIUM.
        level_of: Number of losses whose median is the level of the run at some step.
        lost: Fraction of the loss of the best constant prediction below which something had been learned.
        soon: Maximum number of further steps, as a multiple of the steps so far.
        readings: Number of readings used, of the later half of the steps.
        few: Minimum number of these readings.
        beside: Multiple of its known term above which the first loss holds a penalty too.
        heal: High, because a fall by chance over a few readings is not learning.
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
    level_of: int = 20
    lost: float = 0.7
    soon: float = 3.0
    readings: int = 5
    few: int = 2
    beside: float = 2.0
    heal: int = 15

    late: ClassVar[bool] = True
    final: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING,)
    evidence: ClassVar[tuple[str, ...]] = ("loss.over_constant", "answer.alike")
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "learning_rate",
        "gradient.total_norm",
        "answer.alike",
        "loss.over_constant",
        "loss.sense",
        "target.uniform_share",
        "target.rms",
        "target.dependence",
        "target.attained",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge all losses of this record, and whether the answers tell samples apart."""
        alike = past(history, "answer.alike", RUN_SITE)[-self.readings :]
        if history.seen >= self.early and len(alike) == self.readings and alike.min() == 1.0:
            return (
                Finding(
                    IssueType.NOT_LEARNING,
                    Severity.HIGH,
                    ("",),
                    1.0,
                    1.0,
                    f"The model has the same output for all samples of a batch, up to rounding, in {self.readings} "
                    f"readings up to step {record.step}, although the inputs differ.",
                    "look for a mean, sum or softmax over the batch dimension, x.mean(0), F.softmax(x, dim=0), and "
                    "for a layer whose output is all zeros or unused.",
                    cause=ONE_ANSWER,
                    origin=ONE_ANSWER,
                    follows_from=OTHERS,
                ),
            )
        sites = layers_of(record, "loss.over_constant") if history.seen >= self.settle else ()
        for site in sites:
            left = self._left(record, history, site)
            if left:
                return left
        known = all(seen(record, "loss.known", site) for site in sites)
        # Readings of the first half say little of now, however few there are since.
        half = record.step - history.seen / 2
        lately = {site: past(history, "loss.over_constant", site, half)[-self.readings :] for site in sites}
        sure = {s: median(v) if len(v) == self.readings else v.min() for s, v in lately.items() if len(v) >= self.few}
        stuck = {s: median(lately[s]) for s, value in sure.items() if value >= self.level}
        shares = {s: v for s, v in stuck.items() if chosen_blindly(record, history, s) or not self._excused(history, s)}
        worst = max(shares.values(), default=0.0)
        falls = solved(history) or _falls(self, history, worst)
        term = _beside_more(history, self.beside) if known else np.zeros(0)
        if len(term):
            falls = fall(term[len(term) // 3 :]) >= 2.5
        whole = known and len(shares) == len(sites) and not falls
        if not whole:
            parts = {} if known and len(sites) == 1 else shares
            shares = {s: v for s, v in parts.items() if v <= self.wild and self._unread(history, s)}
            worst = max(shares.values(), default=0.0)
        if not shares or (whole and _best(history, self.level_of) < self.lost * constant_level(history)):
            return ()
        rate = history.run("learning_rate")
        climbs = bool(rate.high <= rate.last > 1.1 * rate.values[rate.steps >= half].min(initial=np.inf))
        rises = f"the learning rate is still rising, {number(rate.last)} so far: shorten the warm-up; or " * climbs
        layers, part = (("",), "the loss") if whole else (tuple(shares), f"the loss at {some(tuple(shares))}")
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.MEDIUM,
                layers,
                worst,
                self.level,
                f"After {history.seen} steps {part} is {number(100 * worst)} % of that of the best constant prediction"
                f"{_SO_FAR[bool(whole)]}",
                rises + (_FIT_FIRST if whole else _WEIGH),
                urgent=history.seen >= (2 - history.ended) * self.patient,  # few are read: patience would double them
                follows_from=OTHERS,
            ),
        )

    def refuted(self, issue: Issue, history: History) -> bool:
        """Whether the loss has fallen since, or to nearly 0, and not only because the batches became easier."""
        now = median(history.run("loss").values[-self.readings :])
        if issue.cause == _OPEN and now < issue.threshold * constant_level(history):
            return True
        term = _beside_more(history, self.beside)
        if issue.layer or len(term):
            shares = (past(history, "loss.over_constant", issue.layer) if issue.layer else term)[-self.readings :]
            return len(shares) == self.readings and bool(shares.max() < issue.threshold)
        if issue.cause != _OPEN and self.lasts(issue, history):
            return False
        return solved(history) or (issue.cause != _OPEN and fell_since(history, issue.step))

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether every loss is still at the level of a constant prediction; a fall by chance does not count."""
        learns = any(self._excused(history, site) for site in history.at_sites("loss.over_constant").sites)
        return issue.layer == "" and not learns and none_better(history, self.level, self.readings) is not None

    def _left(self, record: StepRecord, history: History, site: str) -> tuple[Finding, ...]:
        """Report a model that has not learned, nor will soon, most of what a closed-form fit has."""
        fits, shares = past(history, "target.attained", site)[-2:], past(history, "loss.over_constant", site)
        (at, past_losses), best = history.run("loss").whole(), _best(history, self.level_of)
        if len(fits) < 2 or min(len(shares), len(past_losses)) < 2 * self.readings or self._plays(history, site):
            return ()
        fit, lately, series = 1.0 - median(fits), shares[-self.readings :], history.at_sites("loss.over_constant")
        # Beside terms whose weights may change, as those of two mixed targets, the best reading counts.
        share = median(lately) if seen(record, "loss.known", site) else float(lately.min())
        best /= np.fmin(constant_level(history), history.run("loss").first)
        least = 1.0 - self.half * fit
        # A loss that is more than its one known term may fall at its expense.
        paid = best <= least < shares.min() and share >= self.level and len(series.sites) <= 1
        if fit < self.open or share <= least or (best <= least and not paid):
            return ()  # what was learned and is lost again is not left to learn
        # The losses of the later two thirds, of which there are many, or the readings of one term of several.
        past_losses, steps = past_losses[len(past_losses) // 3 :], float(record.step - at[0] + 1) / 3.0
        if len(series.sites) > 1 or past_losses.min(initial=np.inf) <= 0:
            past_losses, steps = shares, float(np.ptp(series.steps[-len(shares) :])) / 2.0
        then, now = median(past_losses[: len(past_losses) // 2]), median(past_losses[len(past_losses) // 2 :])
        gained = share * (then / now - 1.0)
        slow = gained * self.soon * history.seen < (share - 1.0 + fit) * steps
        if (learns := (share <= self.wild or gained > 0) and _falls(self, history) and not paid) and not slow:
            return ()
        rates = history.run("learning_rate").values[-30:]
        rises = len(rates) > 0 and rates[-1] > 1.05 * rates[0]
        grows, early = gradient_grows(history), history.seen < self.patient  # as where a plateau is left
        soon = ((early and share < self.level) or grows) and not paid
        hope = (learns or soon or rises) and not (history.ended and (not early or (share >= self.level and not grows)))
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.LOW if hope or 1.0 - share >= self.hardly * fit else Severity.MEDIUM,
                ("",),
                share,
                least,
                f"After {history.seen} steps {_TERM[bool(paid)]} is {number(100 * share)} % of that of the best "
                f"constant prediction, while a closed-form fit attains {number(100 - 100 * fit)} %: the targets can be "
                "learned.",
                _PAID if paid else _LEFT,
                cause=_OPEN,
                origin=_OPEN,
                urgent=True,  # based on many readings already
                follows_from=OTHERS,
            ),
        )

    def _plays(self, history: History, site: str) -> bool:
        """Whether a batch has one kind of target, as those of players of a game, or targets grow, as values do."""
        uniform = past(history, "target.uniform_share", site)[-1:]
        return growth_of_targets(history)[1] >= GROWN or bool((uniform > 0.5).any())

    def _unread(self, history: History, site: str) -> bool:
        """Whether a part's targets are known to depend on the inputs, and its predictions were looked at."""
        tests, goes = past(history, "target.dependence", site), past(history, "loss.sense", site)
        return history.seen >= self.patient and len(goes) >= self.readings and bool((tests[-1:] >= self.sure).any())

    def _excused(self, history: History, site: str) -> bool:
        """Whether something is learned, however little, or targets are to be judged first."""
        tests, goes = past(history, "target.dependence", site), past(history, "loss.sense", site)
        return (
            # It may be the targets' fault, and soon be reported as such.
            (history.seen < self.patient and len(tests) > 0 and bool(tests[-1] < self.sure))
            or (len(goes) > 0 and float(goes.sum()) >= self.sure * len(goes) ** (1.0 if history.ended else 0.5))
            or self._plays(history, site)
        )


def _falls(check: NotLearning, history: History, share: float = 0.0) -> bool:
    """Whether the loss falls; down to the constant's level it does by saying less, of large answers or of noise."""
    if history.ended and none_better(history, check.level, check.readings) is not None:
        return False
    most = constant_level(history) if history.seen >= check.patient else np.nan
    return still_falls(history, most=most) or (share > check.wild and fell(history))


def _best(history: History, readings: int) -> float:
    """Return the lowest level that the loss ever had, of so many losses."""
    losses = history.run("loss").whole()[1]
    levels = np.lib.stride_tricks.sliding_window_view(losses, min(readings, len(losses)))
    return float(np.median(levels, axis=1).min(initial=np.inf))


def _beside_more(history: History, beside: float) -> npt.NDArray[np.float64]:
    """Return the readings of the one known term of a loss that began far above it: a penalty, too, may fall."""
    series = history.at_sites("loss.over_constant")
    if len(series.sites) != 1 or not history.run("loss").first > beside * series.first[0] * constant_level(history):
        return np.zeros(0)
    return past(history, "loss.over_constant", series.sites[0])


@dataclass(frozen=True, kw_only=True)
class BatchForTime(Check):
    """Report recurrent and attention layers that run along the batch dimension and treat time steps as samples.

    For an input ``[samples, steps, features]``, a layer without ``batch_first=True`` treats the first dimension as
    time. This is detected if the loss has one prediction for each of what the layer treats as time steps, and not one
    for each of what it treats as sequences, nor one for each step of each sequence.

    Why it is bad:
        The layer carries its state from one sample to the next and sees one time step of each. It cannot learn from
        order, and its output for a sample depends on the rest of the batch.

    Example:
        rnn = nn.LSTM(6, 16)  # takes [time, batch, features]
        output, _ = rnn(x)  # x is [batch, time, features]

    Use instead:
        rnn = nn.LSTM(6, 16, batch_first=True)
        output, _ = rnn(x)

    Not reported:
        The loss has a prediction for each sequence as the layer treats them, or for each step of each sequence; batch
        and time have the same length.

    Attributes:
        readings: Minimum number of readings that agree.
    """

    readings: int = 4
    patience: int = 1
    heal: int = 100

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
                f"{some(tuple(turned))} treats the {number(samples)} samples of a batch as the time steps of "
                f"{number(length)} sequences: it runs over samples instead of time.",
                "set batch_first, nn.LSTM(..., batch_first=True) or nn.TransformerEncoderLayer(..., "
                "batch_first=True) for inputs [batch, time, features]; or pass x.transpose(0, 1).",
                cause=BATCH_FOR_TIME,
                origin=BATCH_FOR_TIME,
            ),
        )
