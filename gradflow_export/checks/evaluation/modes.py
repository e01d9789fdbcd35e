"""Evaluation that drops and training that does not: EVAL_RANDOM; training that drops nearly all: NOT_LEARNING."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import DROPOUT, constant_level, none_better, still_falls, supervised, values_of
from gradflow_export.rules.history import History, SiteSeries

_NOISE, _SUPERVISED = "mode.evaluation_noise", "loss.supervised"
_PARTS, _DROPPED = "mode.parts_training", "mode.training_dropout"
_DROPOUT, _TRAINING, _ASLEEP = "mode.evaluation_dropout", "mode.evaluation_training", "mode.training_evaluation"


@dataclass(frozen=True, kw_only=True)
class WrongMode(Check):
    """Report dropout in evaluation mode, evaluation in training mode, and training in evaluation mode.

    Noise in evaluation is reported only for a single predictive model: all losses compare predictions with targets that
    are classes or one number per sample, and the same data are not evaluated several times. Models that generate,
    reconstruct or average over noise need it. Passes without gradients in training mode count as evaluation only if
    they occur between some of the steps; methods that need one for each step (pseudo-labels, adversarial directions)
    are not reported. If the model itself is never called, calls of its children count, for a single predictive model.

    A model that trains in evaluation mode from the first step has frozen its statistics intentionally, unless these are
    the initial 0 and 1 of a BatchNorm.

    Why it is bad:
        Dropout in evaluation makes results worse and different each time; evaluation in training mode changes the
        statistics of BatchNorm; a model that stays in evaluation mode trains without its regularization.

    Example:
        accuracy = (model(x_val).argmax(1) == y_val).float().mean()  # the model is in training mode

    Use instead:
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_val).argmax(1) == y_val).float().mean()
        model.train()

    Not reported:
        The same data are evaluated several times in a row (Monte Carlo dropout); a submodule was put into training mode
        explicitly; a pass without gradients before each step; noise in models that generate or reconstruct; a model
        that trains in evaluation mode from the first step with estimated statistics.

    Attributes:
        often: Maximum fraction of the steps since the first evaluation in training mode that have one before them.
        asleep: Minimum number of steps in evaluation mode.
        patience: One; the counts above already require persistence.
    """

    often: float = 0.4
    asleep: int = 5
    patience: int = 1

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.EVAL_RANDOM,)
    evidence: ClassVar[tuple[str, ...]] = (_DROPOUT, _NOISE, _TRAINING, _PARTS, _ASLEEP)
    alongside: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", _TRAINING, _PARTS, _ASLEEP, _SUPERVISED)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the modes of the passes since the last step."""
        noise, quiet = self._noise(record, history), self._training(record, history, _TRAINING)
        # A generator's samples are drawn in training mode, and its critic, whose answers the loss is of, is not called.
        parts = self._training(record, history, _PARTS) if _answers(record, history) else ()
        return (*self._dropout(record), *noise, *quiet, *parts, *self._asleep(record, history))

    def _dropout(self, record: StepRecord) -> Iterable[Finding]:
        names, worst = _above(record, _DROPOUT)
        if names:
            yield _finding(
                Severity.HIGH,
                names,
                worst,
                0.0,
                f"dropout drops {number(100 * worst)} % at {some(names)} although the model is in evaluation mode: "
                "two evaluations of the same data give different results.",
                "pass the mode to it: F.dropout(x, p, training=self.training), dropout_p=self.p if self.training "
                "else 0.0 for scaled_dot_product_attention, or use nn.Dropout as a registered submodule.",
                "dropout in evaluation",
            )

    def _noise(self, record: StepRecord, history: History) -> Iterable[Finding]:
        names, _ = _above(record, _NOISE)
        if names and supervised(history):
            yield _finding(
                Severity.MEDIUM,
                names,
                1.0,
                0.0,
                f"random numbers are drawn at {some(names)} although the model is in evaluation mode: two "
                "evaluations of the same data give different results.",
                "draw them only in training, if self.training: x = x + noise, and use the mean or argmax "
                "otherwise; if the noise is intended, evaluate the same data several times and average.",
                "noise in evaluation",
            )

    def _training(self, record: StepRecord, history: History, fact: str) -> Iterable[Finding]:
        names, passes = _above(record, fact)
        episodes = _episodes(history.at_sites(fact))
        if names and episodes:
            # Of steps that are not recorded nobody knows what came before them.
            recent = int((history.run("loss").steps >= episodes[0]).sum())
            if len(episodes) <= self.often * recent:
                yield _finding(  # a policy samples so, and a generator
                    Severity.MEDIUM if supervised(history) else Severity.LOW,
                    names,
                    passes,
                    0.0,
                    f"{number(passes)} passes without gradients before this step, as in {len(episodes)} of the last "
                    f"{recent} recorded steps, ran in training mode: {some(names)} apply dropout, or use and update "
                    "batch statistics.",
                    "call model.eval() before evaluation and model.train() after it.",
                    "evaluation in training mode",
                    episodes[0],
                )

    def _asleep(self, record: StepRecord, history: History) -> Iterable[Finding]:
        names, _ = _above(record, _ASLEEP)
        episodes = _episodes(history.at_sites(_ASLEEP))
        if names and len(episodes) >= self.asleep:
            yield _finding(
                Severity.HIGH,
                names,
                float(len(episodes)),
                0.0,
                f"the model has been training in evaluation mode since step {episodes[0]}: {some(names)} apply no "
                "dropout and do not update batch statistics, "
                f"{'as they did before' if episodes[0] > 1 else 'which still have their initial values'}.",
                "call model.train() after each evaluation, before the next training step.",
                "training in evaluation mode",
                episodes[0],
            )


@dataclass(frozen=True, kw_only=True)
class DrownedByDropout(Check):
    """Report dropout of most units, if little is learned.

    Dropout with probability ``p`` adds noise to each unit whose power is ``p / (1 - p)`` times that of the unit: 19
    times at 0.95, and 1 at 0.5. It is reported where that is ``noise`` or more, and after ``settle`` steps the loss has
    stopped to fall above ``halfway`` of its first value or above ``level`` of that of the best constant prediction, or
    falls towards that one alone. At the end of the run a loss that still falls counts as well, if that level is known.

    Why it is bad:
        The layers after it see mostly noise, and so does the gradient. The model can only learn what is left when most
        of its units are averaged away.

    Example:
        nn.Dropout(0.95)  # p taken for the probability of keeping a unit

    Use instead:
        nn.Dropout(0.05)

    Not reported:
        The loss falls, or fell to less than half of its first value, or clearly below that of the best constant;
        dropout by ``functional.dropout``; the first 150 steps.

    Attributes:
        noise: Minimum power of the noise, as a multiple of that of the signal.
        settle: Number of initial steps without a verdict.
        halfway: Fraction of the first loss above which the model has not learned.
        level: The same fraction of the loss of the best constant prediction.
        heal: High, because a fall by chance is not learning.
    """

    noise: float = 3.9
    settle: int = 150
    halfway: float = 0.5
    level: float = 0.7
    heal: int = 4

    final: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.NOT_LEARNING,)
    needs: ClassVar[tuple[str, ...]] = ("update.ratio",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", _DROPPED)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the course of the loss behind such layers."""
        dropped, loss, least = history.at_sites(_DROPPED), history.run("loss"), self.noise / (1.0 + self.noise)
        layers = tuple(dropped.sites[index] for index in np.flatnonzero(dropped.first >= least))
        share, high = float(dropped.first.max(initial=0.0)), median(loss.values[-20:]) > self.halfway * loss.first
        known = bool(history.at_sites("loss.over_constant").sites)
        high = none_better(history, self.level, 5) is not None if known else high
        falls = not (history.ended and known) and still_falls(history, most=constant_level(history))
        if not (layers and high and history.seen >= self.settle) or falls:
            return ()
        return (
            Finding(
                IssueType.NOT_LEARNING,
                Severity.MEDIUM,
                layers,
                share,
                least,
                f"{some(layers)} drops {number(100 * share)} % of its units, and after {history.seen} steps little is "
                f"learned: the noise is {number(share / max(1.0 - share, 1e-3))} times as strong as what passes.",
                "lower p, which is the probability of dropping a unit: nn.Dropout(0.1) keeps 90 % of them.",
                since=1,
                urgent=history.ended,
                cause=DROPOUT,
                origin=DROPOUT,
            ),
        )


def _finding(
    severity: Severity,
    names: tuple[str, ...],
    value: float,
    threshold: float,
    message: str,
    advice: str,
    cause: str,
    since: int | None = None,
) -> Finding:
    return Finding(
        IssueType.EVAL_RANDOM,
        severity,
        names,
        value,
        threshold,
        message,
        advice,
        since=since,
        cause=cause,
        origin=cause,
    )


def _answers(record: StepRecord, history: History) -> bool:
    """Whether one of the parts that were called without gradients makes the answers that a loss is of."""
    called, makers = record.facts.get(_PARTS, {}), history.at_sites(_SUPERVISED).sites
    return supervised(history) and any(f"{maker}.".startswith(f"{part}.") for maker in makers for part in called)


def _above(record: StepRecord, fact: str) -> tuple[tuple[str, ...], float]:
    """Return the layers at which a fact is finite and above 0, and the greatest value."""
    found = {layer: value for layer, value in values_of(record, fact).items() if 0 < value < math.inf}
    return tuple(found), max(found.values(), default=0.0)


def _episodes(series: SiteSeries) -> list[int]:
    """Return the steps of the window at which any value was above 0."""
    above = (series.present & np.isfinite(series.values) & (series.values > 0)).any(axis=1)
    return [int(step) for step in series.steps[above]]
