"""Inputs and targets on a scale no network can start from: DATA_SCALE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, surest
from gradflow_export.rules.evidence import layers_of, no_better, none_better, seen
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import stuck

_NORMALISE = (
    "normalize the features with the statistics of the training set, x = (x - mean) / std (pixels: x / 255, or "
    "transforms.Normalize), or start the model with nn.BatchNorm1d(features)."
)


@dataclass(frozen=True, kw_only=True)
class DataScale(Check):
    """Report inputs whose scale, or whose range of scales, keeps the first layer from learning.

    The curvature of the loss along the weights of the first layer is ``rms(x)^2`` times that along its bias, and along
    the weights of the largest feature ``ratio^2`` times that of a typical one. This is a condition number that the
    learning rate has to cope with. With ``large`` = 10 it is a hundred, which Adam and a good learning rate may handle,
    so it is reported only if the model is no better than the best constant prediction after ``settle`` steps.

    With ``extreme`` = 1000 it is a million: an update that suits the bias is a million times too large for the weights.
    A model whose largest feature is that far above a typical one learns from the largest alone, so that its loss may
    fall nevertheless: this is reported at once, and ``uneven`` = 100 times with LOW severity.

    If inputs were scaled by their minimum and maximum, one placeholder for missing data squeezes all other values into
    a tiny range, with nothing in between. Large inputs are not reported if a normalization before or after the first
    layer makes it independent of the scale.

    Why it is bad:
        The curvature along a weight grows with the square of its input. With pixels from 0 to 255, an update that suits
        the biases is ten thousand times too large for the weights, and one that suits the weights does not change the
        biases.

    Example:
        x = images.float()  # 0 to 255
        loss = F.cross_entropy(model(x), y)

    Use instead:
        x = images.float() / 255
        loss = F.cross_entropy(model(x), y)

    Not reported:
        A normalization before or directly after the first layer; features of similar scale of a model that becomes
        better than a constant prediction anyway; token ids.

    Source: LeCun et al. 1998, Efficient BackProp, section 4.3.

    Attributes:
        large: Minimum magnitude of inputs.
        uneven: Minimum ratio of the largest to a typical feature of large inputs; with ``extreme``, whatever the loss
            does.
        small: Maximum magnitude that is too small.
        extreme: Minimum magnitude that is reported immediately.
        settle: Number of steps in which a model can show that it learns anyway.
        level: Fraction of the loss of the best constant prediction that counts as no better.
        squeezed: Minimum fraction of features whose middle half spans a thousandth of the range of the inputs, where
            next to no value lies in between.
    """

    squeezed: float = 0.5
    large: float = 10.0
    uneven: float = 100.0
    small: float = 0.01
    extreme: float = 1000.0
    settle: int = 50
    level: float = 0.9
    patience: int = 2
    heal: int = 10

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.DATA_SCALE,)
    evidence: ClassVar[tuple[str, ...]] = ("input.rms",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the inputs of this record."""
        return surest(each for site in layers_of(record, "input.rms") for each in self._of(record, history, site))

    def _of(self, record: StepRecord, history: History, site: str) -> Iterable[Finding]:
        """Yield what is odd about the inputs of one layer, for sure where it does harm."""
        size, normalised = seen(record, "input.rms", site), seen(record, "input.normalised", site)
        harmed = self._harmed(history)
        if (seen(record, "input.squeezed_share", site) or 0.0) >= self.squeezed:
            yield replace(_squeezed(record, site, self.squeezed), sure=harmed)
        ratio, constant = seen(record, "input.feature_ratio", site), seen(record, "input.constant_share", site)
        # What all samples share is left of them where they differ by less than that share of their size.
        spread = (seen(record, "input.std", site) or 0.0) / size if size and normalised != 1.0 else 1.0
        if constant == 1.0 or spread <= self.small:
            yield replace(_same(site, 0.0 if constant == 1.0 else spread), sure=harmed)
        # What normalises behind the layer makes it blind to large inputs, not to those that vanish beside its bias.
        large = size is not None and self.large <= size < np.inf and normalised == 0.0
        if size is None or not (large or 0 < size <= self.small):
            return
        apart = ratio if large and ratio is not None and ratio >= self.uneven else None
        lost = size >= self.extreme and self._lost(history)
        medium = harmed or (apart or 0.0) >= self.extreme
        severity = Severity.HIGH if lost else Severity.MEDIUM if medium else Severity.LOW
        sure = lost or medium or (apart is not None and history.seen >= self.settle)
        yield replace(self._finding(record, site, size, apart, severity), sure=sure)

    def _lost(self, history: History) -> bool:
        """Whether the model has never come near the best constant prediction."""
        series = history.at_sites("loss.over_constant")
        values = series.values[series.present]
        return len(values) > 0 and bool((values >= 3.0).all())

    def _harmed(self, history: History) -> bool:
        if not history.at_sites("loss.over_constant").sites:
            return stuck(history, span=2 * self.settle)
        return history.seen >= self.settle and none_better(history, self.level, 3) is not None

    def _finding(self, record: StepRecord, site: str, size: float, ratio: float | None, severity: Severity) -> Finding:
        mean, spread = seen(record, "input.mean", site) or 0.0, seen(record, "input.std", site) or 0.0
        bytes_ = seen(record, "input.whole_share", site) == 1.0 and (seen(record, "input.max", site) or 0.0) <= 255.0
        what = "bytes from 0 to 255" if bytes_ and size > self.large else f"a size of {number(size)}"
        message = (
            f"Inputs of {site or 'the first layer'} have {what} (mean {number(mean)}, standard deviation "
            f"{number(spread)}), and the model does not normalize them."
        )
        if ratio is not None:
            message = (
                f"The largest input feature of {site or 'the first layer'} is {number(ratio)} times the typical one "
                f"(inputs: mean {number(mean)}, standard deviation {number(spread)}), and the model does not "
                "normalize them."
            )
        return Finding(
            IssueType.DATA_SCALE,
            severity,
            ("input",),
            size if ratio is None else ratio,
            self.uneven if ratio is not None else self.large if size > 1 else self.small,
            message,
            _NORMALISE,
            cause="input",
        )


def _squeezed(record: StepRecord, site: str, least: float) -> Finding:
    share = seen(record, "input.squeezed_share", site) or 0.0
    mean, spread = seen(record, "input.mean", site) or 0.0, seen(record, "input.std", site) or 0.0
    return Finding(
        IssueType.DATA_SCALE,
        Severity.MEDIUM,
        ("input",),
        share,
        least,
        f"For {number(100 * share)} % of the input features of {site or 'the first layer'}, half of the values lie "
        f"within a thousandth of the range of all inputs (mean {number(mean)}, standard deviation "
        f"{number(spread)}): a few outliers set the scale, and the other values are nearly equal.",
        "find the outliers, print(x.min(), x.max(), x.median()): remove placeholders for missing data (-9999, "
        "1e20) before computing the minimum, maximum or mean, or scale by quantiles.",
        cause="squeezed",
        origin="extremes set the scale",
    )


def _same(site: str, spread: float) -> Finding:
    but = f" up to {number(100 * spread)} % of their norm" if spread else ""
    return Finding(
        IssueType.DATA_SCALE,
        Severity.HIGH,
        ("input",),
        spread,
        spread,
        f"All input samples of {site or 'the first layer'} are equal{but}: the model cannot distinguish them.",
        "check the batches of the loader, print(next(iter(loader))[0].std(dim=0)): a transform may use integer "
        "division (x // 255) or subtract the wrong mean, or one sample may be repeated.",
        cause="equal inputs",
    )


@dataclass(frozen=True, kw_only=True)
class TargetScale(Check):
    """Report regression targets whose scale is out of proportion to the model's outputs.

    A new network outputs values of about 1, and one step of size ``lr`` changes them by a small multiple of it.
    Reported only if predictions stay below ``reach`` of the targets' magnitude (or above its inverse) and the loss is
    no better than that of the best constant prediction after ``settle`` steps. Bounded outputs are WRONG_LOSS.

    Why it is bad:
        A new network outputs values of about 1, and a step changes them by a small multiple of the learning rate.
        Targets of 100 000 are thousands of steps away, whatever the model learns from the inputs.

    Example:
        loss = F.mse_loss(model(x), prices)  # prices of about 250 000

    Use instead:
        loss = F.mse_loss(model(x), (prices - prices.mean()) / prices.std())

    Not reported:
        Predictions reach a twentieth of the targets' magnitude within 20 steps; the loss is below that of the best
        constant prediction; an output activation bounds the outputs, which is WRONG_LOSS.

    Attributes:
        large: Minimum magnitude of targets.
        small: Maximum magnitude of targets that are too small.
        reach: Maximum magnitude of predictions, as a fraction of that of the targets.
        settle: Number of steps before it is judged.
    """

    large: float = 30.0
    small: float = 0.01
    reach: float = 0.05
    settle: int = 20

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.DATA_SCALE,)
    evidence: ClassVar[tuple[str, ...]] = ("target.reach",)
    remembers: ClassVar[tuple[str, ...]] = ("loss.over_constant",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the targets of this record."""
        return surest(each for site in layers_of(record, "target.reach") for each in self._of(record, history, site))

    def _of(self, record: StepRecord, history: History, site: str) -> Iterable[Finding]:
        """Yield targets of a size that predictions do not have, for sure where they stay so far away."""
        reach, size = seen(record, "target.reach", site), seen(record, "target.rms", site)
        if reach is None or size is None or not np.isfinite(reach):
            return
        far = size >= self.large and reach <= self.reach
        if far or (size <= self.small and reach >= 1.0 / self.reach):
            settled = history.seen >= (self.settle if far else 5 * self.settle)
            yield Finding(
                IssueType.DATA_SCALE,
                Severity.HIGH,
                ("target",),
                reach,
                self.reach if far else 1.0 / self.reach,
                f"Targets have a magnitude of {number(size)}, and predictions ({site or 'the model'}) after "
                f"{history.seen} steps have {number(reach)} times that, and the loss is no better than a constant's.",
                "standardize the targets, y = (y - y_mean) / y_std, and invert this for predictions; or "
                "initialize the last layer with that mean and scale: nn.init.constant_(last.bias, y_mean).",
                cause="target",
                sure=settled and no_better(history, site, 0.9, 3) is not None,
            )

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether targets are no better answered still: to come nearer to them is no end of it."""
        sites = (*history.at_sites("loss.over_constant").sites, RUN_SITE)
        return any(no_better(history, site, 0.9, 3) is not None for site in sites)
