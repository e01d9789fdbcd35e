"""Policies that explore too little or too much: POLICY_COLLAPSE, EXCESS_EXPLORATION."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median, theil_sen
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import Floats, reading_of
from gradflow_export.rules.history import History, RunSeries, SiteSeries
from gradflow_export.rules.signals import converged, inside

_MOVES = ("parameter.update_norm", "parameter.weight_norm")


def slope_of(values: Floats) -> float:
    """Return the median slope per reading over all pairs, 0 for fewer than three readings.

    Args:
        values: Shape: ``[n]``, finite.

    Source: Sen 1968, JASA 63.
    """
    return theil_sen(np.arange(len(values), dtype=np.float64), values) if len(values) >= 3 else 0.0


def collapse_risk(
    entropies: Floats, stds: Floats, least_entropy: float = 0.5, least_std: float = 0.1, horizon: int | None = None
) -> str:
    """Return ``"LOW"``, ``"MEDIUM"`` or ``"HIGH"``: how near a policy is to taking one action only.

    HIGH: the newest entropy is below a fifth of ``least_entropy``, or below ``least_entropy`` and on its way to that
    within ``horizon`` readings; or the standard deviation is below half of ``least_std``. MEDIUM: entropy or standard
    deviation is below its least value, or the entropy falls by more than half within ``horizon``.

    Args:
        entropies: Normalised entropies, oldest first; may be empty. Shape: ``[n]``.
        stds: Standard deviations, oldest first; may be empty. Shape: ``[m]``.
        least_entropy: Least entropy of a policy that explores.
        least_std: Least standard deviation of one.
        horizon: Readings to look ahead; by default as many as there are.
    """
    risk = "LOW"
    if len(entropies):
        ahead, slope, newest = horizon or len(entropies), slope_of(entropies), float(entropies[-1])
        nothing = 0.2 * least_entropy
        if newest < nothing or (newest < least_entropy and newest + ahead * slope < nothing):
            return "HIGH"
        if newest < least_entropy or slope < -0.5 / ahead:
            risk = "MEDIUM"
    if len(stds):
        newest = float(stds[-1])
        if newest < 0.5 * least_std:
            return "HIGH"
        risk = "MEDIUM" if newest < least_std else risk
    return risk


def adequacy(
    entropies: Floats,
    stds: Floats,
    least_entropy: float = 0.5,
    least_std: float = 0.1,
    most_std: float = 2.0,
    *,
    late: bool = False,
) -> str:
    """Return ``"TOO_LOW"``, ``"ADEQUATE"`` or ``"TOO_HIGH"``: how much a policy explores now.

    Args:
        entropies: Normalised entropies, oldest first; may be empty. Shape: ``[n]``.
        stds: Standard deviations, oldest first; may be empty. Shape: ``[m]``.
        least_entropy: Below it is too little.
        least_std: Below it is too little.
        most_std: Above it is too much.
        late: Whether training is more than half over; only then is a uniform choice (above 0.98) too much.
    """
    entropy = float(entropies[-1]) if len(entropies) else math.nan
    std = float(stds[-1]) if len(stds) else math.nan
    if entropy < least_entropy or std < least_std:
        return "TOO_LOW"
    return "TOO_HIGH" if std > most_std or (late and entropy > 0.98) else "ADEQUATE"


@dataclass(frozen=True, kw_only=True)
class PolicyCollapse(Rule):
    """Report a policy that takes one action almost always although training has not converged.

    The entropy of a policy falls during learning, so a low entropy alone is not reported before it is close to 0. It is
    not reported if the loss has settled, never went below 0, and had made half of its decrease before the entropy was
    gone: a deterministic policy then has a loss near 0 for that reason alone. It is not reported either if the loss
    fell far below zero together with the entropy, which only a rising return can cause, not a critic's error or an
    entropy bonus. A loss whose terms average to zero (a sampled log-probability times an advantage) carries no
    information about the return; a low entropy is then reported.

    Source: Mnih et al. 2016, arXiv:1602.01783, on entropy regularization.

    Attributes:
        entropy: Normalized entropy below which the policy does not explore.
        std: Standard deviation below which the policy does not explore.
    """

    entropy: float = 0.1
    std: float = 0.05

    name: ClassVar[str] = "policy collapse"
    needs: ClassVar[tuple[str, ...]] = ("policy.entropy", "policy.std")
    remembers: ClassVar[tuple[str, ...]] = ("loss", "policy.entropy", "policy.std")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge entropy and standard deviation of this record."""
        findings: list[Finding] = []
        for metric, least, what in (
            ("policy.entropy", self.entropy, "normalised entropy"),
            ("policy.std", self.std, "standard deviation"),
        ):
            value, past = record.value(metric), history.run(metric)
            if (
                value is None
                or not 0 <= value < least
                or _earned(past, least, history)
                or (_followed(past, least, history) and converged(history))
            ):
                continue
            sudden = past.first < 5 * least
            message = f"the {what} of the policy is {number(value)}: it takes one action almost always" + (
                ", and has done so from the beginning." if sudden else f"; it was {number(past.first)} at first."
            )
            advice = (
                "raise the entropy bonus (0.01 to 0.05 times the entropy in the loss), initialize the last layer "
                "with smaller weights (nn.init.orthogonal_(head.weight, 0.01)), normalize advantages, or lower the "
                "learning rate; keep log_std of a Gaussian policy above -2. If the return is already optimal, "
                "ignore this."
            )
            severity = Severity.HIGH if sudden else Severity.MEDIUM
            where = _heads(record, metric, low=least)
            findings.append(
                Finding(IssueType.POLICY_COLLAPSE, severity, where, value, least, message, advice, cause=metric)
            )
        return tuple(findings)


@dataclass(frozen=True, kw_only=True)
class ExcessExploration(Rule):
    """Report a policy whose actions stay random: a wide Gaussian that does not narrow, or a policy that stays uniform.

    The total length of training is unknown while it runs. A uniform policy is normal at first and is judged only after
    ``steps``; a wide Gaussian is judged after ``readings``, and only if it narrows by less than a tenth over them.

    A tenth of ``steps`` suffices if training has moved the weights of the policy head by as much as their norm, and the
    entropy is as close to the maximum as at first: an entropy bonus outweighs the advantages, or the return carries no
    signal.

    Attributes:
        std: Maximum standard deviation, in units of half the action range where that is given.
        entropy: Normalized entropy above which a policy counts as uniform.
        readings: Number of readings of the standard deviation that must agree.
        steps: Number of steps over which a uniform policy is normal.
        patience: One; ``readings`` and ``steps`` already require persistence.
    """

    std: float = 2.0
    entropy: float = 0.98
    readings: int = 8
    steps: int = 500
    patience: int = 1

    name: ClassVar[str] = "excess exploration"
    needs: ClassVar[tuple[str, ...]] = ("policy.entropy", "policy.std")
    remembers: ClassVar[tuple[str, ...]] = ("policy.entropy", "policy.std", *_MOVES)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the latest readings."""
        findings: list[Finding] = []
        spread, choice = history.run("policy.std"), history.run("policy.entropy")
        recent = spread.values[-self.readings :]
        if (
            record.value("policy.std") is not None
            and len(recent) == self.readings
            and bool((recent > self.std).all())
            and recent[-1] > 0.9 * recent[0]
        ):
            message = f"the standard deviation of the actions is {number(float(recent[-1]))} and does not fall."
            where = _heads(record, "policy.std", high=self.std)
            since = int(spread.steps[-self.readings])
            findings.append(self._finding(where, float(recent[-1]), self.std, message, since))
        uniform = record.value("policy.entropy")
        if uniform is not None and uniform > self.entropy:
            since = _since(choice, self.entropy)
            where = _heads(record, "policy.entropy", high=self.entropy)
            span = record.step - since
            deaf = 10 * span >= self.steps and self._ignores(where, choice, since, history)
            if span >= self.steps or deaf:
                message = f"the policy has been uniform over actions (entropy {uniform:.4f}) since step {since}" + (
                    ", although its weights moved by as much as their norm." if deaf else "."
                )
                findings.append(self._finding(where, uniform, self.entropy, message, since))
        return tuple(findings)

    def _ignores(self, heads: tuple[str, ...], choice: RunSeries, since: int, history: History) -> bool:
        """Whether a choice that has been uniform since a step does not follow its weights."""
        steps, values = choice.whole()
        lacks = 1.0 - values[steps >= since]
        update, weights = (_size(history.at_sites(name), heads) for name in _MOVES)
        if len(lacks) < self.readings or not update * (steps[-1] - since) >= weights > 0:
            return False
        return median(lacks[-5:]) <= median(lacks[:3])

    def _finding(self, where: tuple[str, ...], value: float, threshold: float, message: str, since: int) -> Finding:
        advice = (
            "lower the entropy bonus or the temperature, start log_std at or below 0 (or squash and bound it), and "
            "check that advantages differ between actions: constant advantages give no learning signal."
        )
        severity = Severity.MEDIUM if threshold == self.std else Severity.LOW
        return Finding(
            IssueType.EXCESS_EXPLORATION, severity, where, value, threshold, message, advice,
            since=since, cause="std" if threshold == self.std else "entropy",
        )  # fmt: skip


def _size(norms: SiteSeries, heads: tuple[str, ...]) -> float:
    """Return the usual norm of the heads together, of the whole model where none is known; NaN without readings."""
    own = [not heads[0] or any(inside(site, head) for head in heads) for site in norms.sites]
    squares = np.square(norms.values[:, own].astype(np.float64)).sum(axis=1)
    return math.sqrt(median(squares))


def _followed(past: RunSeries, least: float, history: History) -> bool:
    """Whether a loss that never goes below 0 had done half of its fall when a policy became certain."""
    loss = history.run("loss")
    if loss.low < 0:
        return False
    steps, values = past.whole()
    apart = np.flatnonzero(~(values < least))
    since = steps[apart[-1] + 1] if apart.size and apart[-1] + 1 < len(steps) else steps[0]
    at, losses = loss.whole()
    before = losses[at <= since][-5:]
    return before.size > 0 and median(before) <= loss.first - 0.5 * (loss.first - loss.low)


def _earned(spread: RunSeries, least: float, history: History) -> bool:
    """Whether a return that rose is what made the policy certain, as the loss tells it.

    The loss lies near its least; half of its fall or more lies below zero; and that half of it had been made before
    the spread first came below ``least``: what a collapsed policy's critic learns afterwards does not count.
    """
    loss, recent = history.run("loss"), history.run("loss").values[-5:]
    if loss.count < 10 or not np.isfinite(recent).all():
        return False
    level, fall = median(recent), loss.first - loss.low
    if not (fall > 0 and level <= loss.low + 0.25 * fall and min(loss.first, 0.0) - level >= 0.5 * fall):
        return False
    readings, values = spread.whole()
    low = np.flatnonzero(values < least)
    steps, losses = loss.whole()
    before = losses[steps < readings[low[0]]] if low.size else losses
    return len(before) >= 5 and median(before[-5:]) <= loss.first - 0.5 * fall


def _heads(record: StepRecord, metric: str, low: float = -math.inf, high: float = math.inf) -> tuple[str, ...]:
    """Return the heads where a value is out of bounds, the whole model when none is known."""
    values = reading_of(record, metric.replace("policy.", "policy.head_")).as_dict()
    return tuple(site for site, value in values.items() if value is not None and not low <= value <= high) or ("",)


def _since(series: RunSeries, bound: float) -> int:
    """Return the step since which a series, whose last value lies above a bound, has stayed above it."""
    steps, values = series.all()
    below = np.flatnonzero(values <= bound)
    return int(steps[below[-1] + 1 if below.size else 0])
