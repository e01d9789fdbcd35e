"""Losses that do not suit what they are given: WRONG_LOSS, and targets no loss can take: BAD_TARGETS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np

from gradflow_export.records import loss_mistakes as known
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import layers_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import begun

_CE_TAKES_LOGITS = "return the logits and leave softmax to the loss: loss = nn.CrossEntropyLoss()(logits, targets)."
_BCE_TAKES_LOGITS = (
    "return the logits: loss = nn.BCEWithLogitsLoss()(logits, targets); or, if the activation is a sigmoid, keep "
    "it and use nn.BCELoss()."
)


class _Told(NamedTuple):
    """What is said of a mistake, with a place for its number, and what to do."""

    message: str
    advice: str


_TOLD: Mapping[str, _Told] = MappingProxyType(
    {
        **{
            mistake: _Told(
                f"The cross-entropy, which takes logits, is given values bounded by a {what}: it is never below {{0}}.",
                _CE_TAKES_LOGITS,
            )
            for mistake, what in (
                (known.SOFTMAX_BEFORE_CE, "softmax"),
                (known.SIGMOID_BEFORE_CE, "sigmoid"),
                (known.TANH_BEFORE_CE, "tanh"),
            )
        },
        known.RELU_BEFORE_CE: _Told(
            message="A ReLU between the last layer and the cross-entropy sets the target's logit to 0 for a "
            "fraction of {0} of the samples: no gradient passes there.",
            advice=_CE_TAKES_LOGITS,
        ),
        known.PROBABILITIES_IN_NLL: _Told(
            message="nll_loss, which takes log-probabilities, is given probabilities: the loss is a negative "
            "probability.",
            advice="replace softmax by log_softmax, loss = F.nll_loss(F.log_softmax(logits, dim=1), targets), or "
            "call F.cross_entropy(logits, targets).",
        ),
        known.LOGITS_IN_NLL: _Told(
            message="nll_loss, which takes log-probabilities, is given logits: the loss has no lower bound.",
            advice="call F.cross_entropy(logits, targets), or add nn.LogSoftmax(dim=1) after the last layer.",
        ),
        known.SIGMOID_BEFORE_BCE: _Told(
            message="The binary cross-entropy with logits is given values bounded by a sigmoid: predicted "
            "probabilities cannot be below 0.5, and the loss of a positive cannot fall below {0}.",
            advice=_BCE_TAKES_LOGITS,
        ),
        known.TANH_BEFORE_BCE: _Told(
            message="The binary cross-entropy with logits is given values bounded by a tanh: predicted "
            "probabilities stay between 0.27 and 0.73.",
            advice=_BCE_TAKES_LOGITS,
        ),
        **{
            mistake: _Told(
                f"The binary cross-entropy with logits is given values bounded by a {what}: predicted probabilities "
                "cannot be below 0.5.",
                _BCE_TAKES_LOGITS,
            )
            for mistake, what in ((known.SOFTMAX_BEFORE_BCE, "softmax"), (known.RELU_BEFORE_BCE, "ReLU"))
        },
        known.PROBABILITIES_IN_KL: _Told(
            message="kl_div, which takes log-probabilities as its first argument, is given probabilities.",
            advice="call F.kl_div(F.log_softmax(logits, dim=-1), target_probabilities, reduction='batchmean').",
        ),
        known.LOGARITHMS_IN_KL: _Told(
            message="kl_div, which takes probabilities as targets, is given negative numbers such as "
            "log-probabilities: the loss is NaN.",
            advice="F.kl_div(log_probabilities, targets.softmax(-1), reduction='batchmean'); or, for targets that "
            "are log-probabilities, set log_target=True.",
        ),
        known.SOFTMAX_OF_ONE: _Told(
            message="A softmax over one class is always 1, whatever the model computes, and no gradient passes.",
            advice="use nn.BCEWithLogitsLoss() for one output, or use one output per class in the last layer: "
            "nn.Linear(features, 2).",
        ),
        known.SOFTMAX_OVER_BATCH: _Told(
            message="A softmax runs over the batch instead of the classes: the prediction for a sample depends on "
            "the other samples.",
            advice="use the class dimension: softmax(dim=-1), or dim=1 for outputs [N, C, ...].",
        ),
        known.OVER_POSITIONS: _Told(
            message="The softmax of the loss runs over positions instead of classes, which are the last dimension "
            "of the model's output: positions compete for each class.",
            advice="log_softmax(dim=-1); F.cross_entropy takes classes in dimension 1: F.cross_entropy(logits.transpose"
            "(1, 2), targets), or logits.reshape(-1, classes).",
        ),
        known.OVER_SAMPLES: _Told(
            message="A softmax within the model runs over the {0} samples of a batch: the output for one sample "
            "depends on the others.",
            advice="use the dimension to choose from, as softmax(dim=1) for [N, choices]; dimension 0 is the batch.",
        ),
        known.DIMENSIONS_MIXED: _Told(
            message="A view() or reshape() that changes the order of dimensions cuts one of {0} and mixes its entries.",
            advice="swap dimensions: h.transpose(0, 1).flatten(1), images.permute(0, 3, 1, 2) if channels are last.",
        ),
        known.OVER_QUERIES: _Told(
            message="A softmax of attention runs over its {0} queries instead of the keys: the weights of a query "
            "do not sum to 1, and depend on the other queries.",
            advice="use scores.softmax(dim=-1) for scores of shape [..., queries, keys].",
        ),
        known.SWAPPED: _Told(
            message="The binary cross-entropy is given predictions and targets in the wrong order: its first "
            "argument has no gradient, and the loss is linear in the model's output.",
            advice="pass predictions first: F.binary_cross_entropy(predictions, targets).",
        ),
        known.TWICE: _Told(
            message="A softmax or sigmoid is applied to the result of another one: the probabilities stay close to "
            "each other whatever the model computes.",
            advice="apply it once: return the logits of the model, and pass them to F.cross_entropy(logits, "
            "targets) or F.binary_cross_entropy_with_logits(logits, targets).",
        ),
        known.POSITIONS_MIXED: _Told(
            message="The softmax runs over values of several samples or pixels instead of the classes of one: a "
            "view() or reshape() has mixed the dimensions.",
            advice="move the class dimension to the end before reshaping, logits.permute(0, 2, 3, 1).reshape(-1, "
            "classes); or pass logits of shape [N, C, ...] to cross_entropy.",
        ),
        known.BROADCAST: _Told(
            message="Predictions and targets have different shapes and were broadcast to all {0} x {0} pairs: the "
            "best prediction is then one number for all samples.",
            advice="make the shapes equal: criterion(outputs.squeeze(-1), targets), or targets.unsqueeze(-1).",
        ),
        known.ONE_NUMBER: _Told(
            message="Each of the {0} outputs for a sample is compared with one and the same number, by broadcasting: "
            "all of them learn to say the same.",
            advice="take the output that is meant: outputs.gather(1, actions[:, None]); or give the last layer one "
            "output, or the targets a column for each.",
        ),
        known.OUT_OF_REACH: _Told(
            message="Targets lie outside the range of the output activation: a fraction of {0} of their variance "
            "is out of reach.",
            advice="remove the output activation, or scale the targets into its range: sigmoid (0, 1), tanh (-1, "
            "1), ReLU 0 and above.",
        ),
        known.TARGETS_NO_SHARE: _Told(
            message="A fraction of {0} of the targets of a binary cross-entropy is outside [0, 1]: the loss has no "
            "lower bound.",
            advice="map them to 0 and 1: targets = (targets > 0).float(), or targets / 255 for masks read from images.",
        ),
        known.MAXIMISED: _Told(
            message="The loss has a minus sign: it is maximized.",
            advice="remove the minus: loss = criterion(outputs, targets).",
        ),
        known.LOGITS_IN_CTC: _Told(
            message="ctc_loss, which takes log-probabilities, is given logits: the loss has no lower bound.",
            advice="loss = F.ctc_loss(scores.log_softmax(-1), targets, input_lengths, target_lengths).",
        ),
        known.PROBABILITIES_IN_CTC: _Told(
            message="ctc_loss, which takes log-probabilities, is given probabilities: the most and the least "
            "likely class differ by at most a factor of 2.7.",
            advice="replace softmax by log_softmax: F.ctc_loss(scores.log_softmax(-1), targets, input_lengths, "
            "target_lengths).",
        ),
        known.UNSIGNED: _Told(
            message="A margin loss, which takes labels of -1 and 1, is given 0 for a fraction of {0} of them: for "
            "these samples it is constant, whatever the model computes.",
            advice="map the labels to -1 and 1: loss = criterion(scores, 2.0 * labels - 1.0).",
        ),
        known.MANY_LABELS: _Told(
            message="The softmax cross-entropy is given multi-label targets, with more than one 1 for a fraction "
            "of {0} of the samples: the classes compete, and their probabilities cannot all be 1.",
            advice="for independent labels, nn.BCEWithLogitsLoss()(logits, targets); for a choice among several "
            "correct classes, targets / targets.sum(1, keepdim=True).",
        ),
        known.CLAMPED_SCORES: _Told(
            message="The binary cross-entropy, which takes probabilities, is given a layer's outputs clamped to "
            "[0, 1]: no gradient passes where they are outside.",
            advice=_BCE_TAKES_LOGITS,
        ),
        known.COSINES_IN_CE: _Told(
            message="The cross-entropy, which takes logits, is given cosine similarities, unscaled or scaled "
            "down: it cannot fall below {0}.",
            advice="a temperature divides, cosines / 0.07, and a scale multiplies, as in CosFace and CLIP: "
            "F.cross_entropy(16.0 * cosines, targets).",
        ),
        known.FOCAL_OF_MEAN: _Told(
            message="The focal weight (1 - exp(-loss)) ** gamma is computed from the mean loss of a batch: all "
            "samples get the same weight.",
            advice="compute the loss of each sample first: ce = F.cross_entropy(logits, targets, "
            "reduction='none'); ((1 - torch.exp(-ce)) ** gamma * ce).mean().",
        ),
        known.OVERLAP_MINIMISED: _Told(
            message="The overlap of predictions and targets (Dice, Jaccard) is minimized: the loss is lowest "
            "without any overlap.",
            advice="use loss = 1.0 - overlap.",
        ),
        known.RATES_IN_POISSON: _Told(
            message="poisson_nll_loss, which takes the logarithm of a rate, is given an output that cannot be "
            "negative: the predicted rate is at least 1.",
            advice="remove the activation, or use rates: nn.PoissonNLLLoss(log_input=False).",
        ),
        known.SCORES_IN_LOGARITHM: _Told(
            message="The loss takes the logarithm of logits instead of probabilities: it is undefined for outputs "
            "below 0, and unbounded for outputs above 1.",
            advice="compute log-probabilities instead, logits.log_softmax(1) or F.logsigmoid(logits); or call "
            "F.cross_entropy(logits, targets) or F.binary_cross_entropy_with_logits(logits, targets).",
        ),
        known.SCORES_IN_OVERLAP: _Told(
            message="An overlap loss (Dice, Jaccard, Tversky), which takes probabilities, is given logits: its "
            "denominator can be 0, and the loss has no lower bound.",
            advice="use probabilities: dice_loss(torch.sigmoid(logits), targets), or logits.softmax(1) for classes.",
        ),
        known.UNLIKELY: _Told(
            message="The loss is the log-probability of the targets without a minus: training makes the targets as "
            "unlikely as possible.",
            advice="use loss = -log_probabilities.gather(1, targets[:, None]).mean(), or "
            "F.nll_loss(log_probabilities, targets); for two classes, F.binary_cross_entropy(probabilities, targets).",
        ),
        known.WITHOUT_BOUND: _Told(
            message="The terms of a scale (variance) and of its logarithm push the scale in the same direction: "
            "the loss falls without bound as the scale goes to 0 or infinity, whatever the data.",
            advice="check the signs. A Gaussian has error ** 2 / (2 * variance) + log(variance) / 2; a flow "
            "subtracts the log-determinant of the map from data to noise; the KL of a VAE is -0.5 * (1 + "
            "logvar - mu ** 2 - logvar.exp()).sum().",
        ),
        known.WEIGHTS_TURNED: _Told(
            message="The class weights of the loss are proportional to the class frequencies: the rarest class has "
            "{0} of the weight of the most frequent one, which makes the imbalance worse.",
            advice="invert them: nn.CrossEntropyLoss(weight=counts.sum() / counts), or "
            "nn.BCEWithLogitsLoss(pos_weight=negatives / positives).",
        ),
        known.WEIGHTS_FAR: _Told(
            message="The weights of the loss make a rare class {0} times as heavy as all others together: whatever the "
            "sample, it is the answer that costs least.",
            advice="balance the classes, and no more: nn.CrossEntropyLoss(weight=counts.sum() / counts), or "
            "nn.BCEWithLogitsLoss(pos_weight=negatives / positives).",
        ),
        known.DRAWN_TOGETHER: _Told(
            message="The loss only pulls two predictions together, and trains both: it is lowest when the output "
            "is the same for every sample (representation collapse).",
            advice="detach one side: loss = criterion(student, teacher.detach()), with the teacher not in the "
            "optimizer; or add a term that keeps samples apart: targets, negatives or a variance term.",
        ),
        known.WITH_ITSELF: _Told(
            message="The loss compares two outputs that are identical in every batch: this term is constant and "
            "trains nothing.",
            advice="a positive is another sample, or view, than its anchor: print((anchor == positive).all()); in a "
            "ratio of a policy, exp(new - old), the old one was computed before, without a gradient.",
        ),
        known.OWN_POSITIVES: _Told(
            message="Each sample of a contrastive loss is its own positive: both sides of a pair are identical, so "
            "the model learns no invariance between views.",
            advice="augment twice: one, other = augment(x), augment(x); without augmentation, use different "
            "dropout masks in the two passes.",
        ),
        known.PENALTY_TURNED: _Told(
            message="A penalty on the weights is subtracted from the loss: the loss falls without bound as they grow.",
            advice="add it: loss = loss + factor * sum(p.square().sum() for p in model.parameters()).",
        ),
    }
)

_WITHIN = (known.OVER_QUERIES, known.OVER_SAMPLES, known.DIMENSIONS_MIXED)
_LESSER = frozenset((
    known.COSINES_IN_CE, known.DIMENSIONS_MIXED, known.DRAWN_TOGETHER, known.FOCAL_OF_MEAN, known.MANY_LABELS,
    known.ONE_NUMBER, known.OWN_POSITIVES, known.PENALTY_TURNED, known.RELU_BEFORE_CE, known.WEIGHTS_TURNED,
    known.WEIGHTS_FAR,
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WrongLoss(Check):
    """Report mistakes in the loss that follow from its computation graph.

    Nearly all of them are structural and independent of the batch: a bounded activation before a loss that takes
    logits, a broadcast shape, a wrong dimension. Four are judged by numbers. Targets out of reach: below ``reach`` of
    their variance, they may be noise at the end of the range. A ReLU before a cross-entropy is harmless as long as
    gradients pass; ``shut`` is the fraction of samples for which they do not.

    Images are looked at: in the order in which channels lie in memory, numbers as far apart as there are channels are
    no more alike than neighbours. Last, a loss with a minus sign may be that of an adversary: it is reported if it has
    grown to ``grown`` times that of the best constant prediction in ``readings`` consecutive readings, or was as large
    in all earlier steps without the minus.

    Why it is bad:
        The loss still falls, but to a floor that the mistake sets: a softmax before a cross-entropy over 3 classes
        cannot fall below 0.55, and a broadcast regression learns the mean of the targets. Accuracy stays low, and no
        curve shows why.

    Example:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(dim=1))
        loss = nn.CrossEntropyLoss()(model(x), y)

    Use instead:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        loss = nn.CrossEntropyLoss()(model(x), y)

    Not reported:
        Log-probabilities given to a cross-entropy, which a second log_softmax does not change; binary cross-entropy on
        one-hot classes; a loss with a minus sign that does not grow, as in adversarial training; a ReLU before the loss
        that lets gradients pass; two predictions that are pulled together, if there are also targets, negatives or
        other terms.

    Attributes:
        reach: Minimum fraction of the targets' variance that is out of reach.
        shut: Minimum fraction of samples whose target logit a ReLU sets to 0.
        grown: Minimum multiple of the loss of the best constant prediction for a loss that is maximized.
        readings: Number of readings that must agree.
        always: Number of successive readings in which a sample must be its own pair.
        several: Minimum fraction of samples with more than one label.
    """

    reach: float = 0.05
    shut: float = 0.2
    grown: float = 2.0
    readings: int = 2
    always: int = 10
    several: float = 0.2
    patience: int = 2

    order: ClassVar[int] = 10
    quiet: ClassVar[bool] = False  # structure is what it is beside a NaN, and may be why there is one
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.WRONG_LOSS,)
    evidence: ClassVar[tuple[str, ...]] = tuple(f"mistake.{mistake}" for mistake in known.MISTAKES)
    alongside: ClassVar[tuple[str, ...]] = ("loss.known", "input.rms")
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", f"mistake.{known.RELU_BEFORE_CE}")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge what was found in this record."""
        mistakes = {
            name: float(value)
            for evidence in record.evidence
            if evidence.kind == "mistake"
            for name, value in evidence.values.items()
            if value is not None and name in _TOLD
        }
        found = ((name, numbers) for name, value in mistakes.items() if (numbers := self._judged(name, value, history)))
        return tuple(_finding(name, *numbers, layers_of(record, f"mistake.{name}"), history) for name, numbers in found)

    def _judged(self, mistake: str, value: float, history: History) -> tuple[float, float, bool] | None:
        """Return the number to tell, what it was judged against and whether that is sure; ``None`` if it is none."""
        limits = {known.OUT_OF_REACH: self.reach, known.MANY_LABELS: self.several, known.WITH_ITSELF: self.always}
        limits[known.RELU_BEFORE_CE] = self.shut
        if mistake == known.MAXIMISED:
            past = sorted(_greatest(history)[-self.readings :])
            if past[self.readings - 1 :] and past[0] >= self.grown:
                return past[-1], self.grown, True
            return _turned(history) or (value, self.grown, False)
        if math.isnan(value) or value < limits.get(mistake, -math.inf):
            return None
        past = _past(history, f"mistake.{mistake}")[-self.readings :]
        sure = mistake != known.RELU_BEFORE_CE or (len(past) == self.readings and min(past) >= self.shut)
        return value, limits.get(mistake, 0.0), sure


def _past(history: History, fact: str) -> list[float]:
    """Return the values of a fact, reading by reading; of several layers that of the last."""
    series = history.at_sites(fact)
    rows = zip(series.values, series.present, strict=True)
    return [*history.run(fact).values.tolist(), *(float(row[here][-1]) for row, here in rows if here.any())]


def _greatest(history: History) -> list[float]:
    """Return the greatest of the losses against the best constant, reading by reading."""
    series = history.at_sites("loss.over_constant")
    usable = series.present & np.isfinite(series.values)
    values = np.where(usable, series.values, np.float32(-np.inf))[usable.any(axis=1)]
    return [float(value) for value in values.max(axis=1, initial=-np.inf)]


def _turned(history: History) -> tuple[float, float, bool] | None:
    """Return the size of a loss that became what it was with a minus, against that before, and the least for sure."""
    loss = history.run("loss")
    after = -loss.values[int(begun(loss.steps, loss.values[:, None] < 0)[0]) :]
    size = median(after) / median(loss.values[: -len(after)][-10:]) if len(after) else 0.0
    return (size, 1 / 3, True) if 1 / 3 <= size <= 3 else None


def _finding(
    site: str, value: float, threshold: float, sure: bool, layers: tuple[str, ...], history: History
) -> Finding:
    (message, advice), loss = _TOLD[site], history.run("loss")
    turn = int(begun(loss.steps, loss.values[:, None] < 0, again=1)[0]) if site == known.MAXIMISED else 0
    around = loss.steps[turn - 1 :][:2].tolist() if turn else []  # the last loss above 0, and the first below
    since, before = (around[1], around[1] - around[0] - 1) if len(around) > 1 else (None, None)
    places = {known.TARGETS_NO_SHARE: ("target",), **dict.fromkeys(_WITHIN, layers)}
    return Finding(
        IssueType.WRONG_LOSS, Severity.MEDIUM if site in _LESSER else Severity.HIGH, places.get(site, ("loss",)), value,
        threshold, message.format(number(value)), advice, since, before, cause=site, origin=site, sure=sure,
    )  # fmt: skip
