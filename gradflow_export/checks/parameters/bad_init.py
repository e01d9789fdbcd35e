"""Weights that begin where nothing can be learned: BAD_INIT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import none_better, only, past, reading_of, seen, values_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import connected

COPIES, ZEROS, LARGE, SMALL = "units are copies", "zeros", "too large", "too small"
DOUBLES, SIBLINGS, ONE_SIDED = "units have doubles", "layers are copies", "one-sided"
OF_DEGREE = frozenset({LARGE, SMALL, ONE_SIDED})
"""Causes that a number decides, which other weights change whatever they do to the training."""


@dataclass(frozen=True, kw_only=True)
class BadInit(Check):
    """Report layers whose units are identical, layers that stay at zero, and initial weights of the wrong scale.

    Identical rows at the start are not reported if another layer breaks the symmetry: the rows must still be equal
    after some steps. Zeros that change at the first step are intended in residual branches, adapters and output layers.
    Large weights are reported if they cause predictions that are far worse than a constant at first and do not improve
    soon. If the inputs are large, they are reported instead. A choice among classes is reported whatever made it so
    sure, such as a temperature: the first loss is ``sure`` times that of equal probabilities or more, and still above
    ``left`` times after twice ``after`` steps: from trained weights it comes down sooner.

    Rows may also be identical in groups, for example if one layer computes several parameters for each of several
    parts. All rows must then have a duplicate, because rows of classes that no batch has contained yet are equal as
    well. Whole layers whose names differ only in a number are also compared, once all of them have changed with a
    gradient.

    Why it is bad:
        Identical units get the same gradient and stay identical: a layer of 512 units acts like a single one. Weights
        that are too large saturate the next layers, or start with a loss that takes the whole run to come down.

    Example:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.1)

    Use instead:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)

    Not reported:
        Zeros that change at the first step, as in residual branches and adapters; rows whose symmetry another layer
        breaks; large weights whose predictions are no worse than a constant; large inputs, which are DATA_SCALE; the
        scale of weights that training is resumed with.

    Source: symmetry, Goodfellow et al. 2016, Deep Learning, section 8.4; gain of a layer, He et al. 2015,
    arXiv:1502.01852.

    Attributes:
        alike: Maximum relative difference of rows, or of layers, that count as copies: the effect of rounding.
        together: Maximum distance of rows that started equal, as a fraction of how far they have moved; rounding
            separates them slowly.
        worse: Minimum first loss, as a multiple of that of the best constant prediction.
        head: The same if the last layer's own weights are too large, whether or not the loss comes down.
        sure: The same against equal probabilities for all classes, whatever the weights.
        left: What of that is left where it does not come down by itself.
        after: Number of steps within which it may come down by itself.
        moves: Update-to-weight ratio below which nothing comes down, whatever it began with.
        gain: Minimum root mean square of the weights times the root of the number of inputs.
        tiny: Maximum such number for most layers if the signal vanishes; PyTorch's default is 0.58.
        depth: Maximum log gain over the whole chain at the first step if the signal vanishes.
        inputs: Maximum magnitude of inputs that are not themselves the cause.
        one_sided: Minimum absolute mean of the weights relative to their root mean square.
        great: Minimum gain of such weights.
        level: Minimum loss relative to the best constant prediction, for these to be reported.
        steep: Minimum log gain over the whole chain at the first step for which a loss like a constant's is attributed
            to large weights.
        usual: Minimum gain of such weights; PyTorch's default is 0.58.
        patience: One; weights are initialized once.
        heal: Practically never; initial weights are not read again.
    """

    alike: float = 1e-5
    together: float = 0.3
    worse: float = 5.0
    head: float = 4.0
    sure: float = 3.0
    left: float = 2.0
    after: int = 20
    moves: float = 1e-5
    gain: float = 4.0
    tiny: float = 0.35
    depth: float = -7.0
    inputs: float = 10.0
    one_sided: float = 0.75
    great: float = 2.0
    level: float = 0.95
    steep: float = 5.5
    usual: float = 1.0
    patience: int = 1
    heal: int = 1000

    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_INIT,)
    needs: ClassVar[tuple[str, ...]] = ("gain.depth",)
    evidence: ClassVar[tuple[str, ...]] = ("parameter.row_spread", "loss.over_constant")
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "gain.depth",
        "input.rms",
        "update.ratio",
        "loss.over_constant",
        "connection.state",
        "parameter.initial_gain",
        "parameter.initial_mean",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the first weights, and their rows a few steps later."""
        again = "parameter.row_spread" in record.facts and "parameter.initial_gain" not in record.facts
        rows = (_copies, _zeros, _doubles, _siblings) if again else ()
        later = tuple(each for look in rows for each in look(self, record, history))
        losses, read = history.run("loss").whole()[0], history.at_sites("parameter.initial_gain").steps
        if len(losses) and len(read) and losses[0] + self.after < read[0]:
            return later  # resumed, or added later: not the weights that the first losses are of; a scaler skips a few
        looks = (self._large, self._head, self._one_sided, self._steep) if history.seen >= self.after else (self._head,)
        large_inputs = float(np.nanmax(history.at_sites("input.rms").first, initial=0.0)) > self.inputs
        due = looks if record.facts.get("loss.over_constant") and not large_inputs else ()
        large = [finding for look in due for finding in look(record, history)][:1]
        return (*later, *large, *_small(self, history))

    def _large(self, record: StepRecord, history: History) -> Iterable[Finding]:
        over, gains = history.at_sites("loss.over_constant"), history.at_sites("parameter.initial_gain")
        if not (len(over.steps) and len(gains.steps)):  # read at the same step for the first time
            return
        worse = over.present[-1] & (over.first >= self.worse) & (over.values[-1] > 1.0)
        first = gains.first
        order = np.argsort(-np.nan_to_num(first), kind="stable")
        names = tuple(gains.sites[i] for i in order if first[i] >= self.gain)
        if names and worse.any():
            greatest, times = float(first[order[0]]), float(over.first[worse].max())
            yield _finding(
                Severity.MEDIUM,
                names,
                greatest,
                self.gain,
                f"the initial loss was {number(times)} times that of the best constant prediction and is still "
                f"above it after {history.seen} steps: the initial weights of {some(names)} were up to "
                f"{number(greatest)} times too large for their number of inputs.",
                "scale the weights by the number of inputs: nn.init.kaiming_normal_(layer.weight) or "
                "nn.init.xavier_uniform_(layer.weight) instead of nn.init.normal_(layer.weight).",
                LARGE,
            )

    def _one_sided(self, record: StepRecord, history: History) -> Iterable[Finding]:
        means, gains = history.at_sites("parameter.initial_mean"), history.at_sites("parameter.initial_gain")
        if means.sites != gains.sites or not len(means.steps):
            return
        there = (means.first >= self.one_sided) & (gains.first >= self.great)
        names = tuple(gains.sites[index] for index in np.flatnonzero(there))
        worst = none_better(history, self.level, 5)
        if 2 * len(names) < len(gains.sites) or len(names) < 2 or worst is None or not math.isfinite(worst):
            return
        greatest = float(means.first[there].max())
        yield _finding(
            Severity.MEDIUM,
            names,
            greatest,
            self.one_sided,
            f"nearly all initial weights of {some(names)} have the same sign (mean {number(greatest)} of their root "
            "mean square): inputs add up instead of canceling, all units of a layer have nearly the same output, "
            f"and the loss is {number(worst)} times that of the best constant prediction after {history.seen} steps.",
            "initialize the weights with mean 0: nn.init.kaiming_normal_(layer.weight) or "
            "nn.init.xavier_uniform_(layer.weight) instead of torch.rand or nn.init.uniform_(layer.weight).",
            ONE_SIDED,
        )

    def _head(self, record: StepRecord, history: History) -> Iterable[Finding]:
        over, gains = history.at_sites("loss.over_constant"), history.at_sites("parameter.initial_gain")
        known = dict(zip(gains.sites, gains.first.tolist(), strict=True))
        names = tuple(sorted((name for name in known if known[name] >= self.gain), key=lambda name: -known[name]))
        moves = not history.run("update.ratio").last < self.moves
        for site, times in zip(over.sites, over.first.tolist(), strict=True):
            name = f"{site}.weight" if site else "weight"
            gain, classes = known.get(name, 0.0), seen(record, "loss.choice", site) or 0.0
            share = (seen(record, "loss.constant", site) or 0.0) / math.log(classes) if classes > 1 else 0.0
            # Where one class came alone at first, the first that could be compared with a constant is no initial loss.
            begun = history.run("loss").first / math.log(classes) if classes > 1 else 0.0
            sure, now = min(times * share, begun), median(past(history, "loss.over_constant", site)[-5:]) * share
            if times >= self.head and gain >= self.gain:
                yield _finding(
                    Severity.MEDIUM,
                    names,
                    gain,
                    self.gain,
                    f"the initial loss was {number(times)} times that of the best constant prediction: the initial "
                    f"weights of {some(names)}, including the last layer, were up to {number(known[names[0]])} "
                    "times too large for their number of inputs.",
                    f"scale them by the number of inputs: nn.init.normal_({name}, std=features ** -0.5); for an "
                    "embedding tied to the output layer, std=0.02.",
                    LARGE,
                )
            elif sure >= self.sure and now > self.left and history.seen >= 2 * self.after and moves:
                yield _finding(
                    Severity.MEDIUM,
                    names or (site,),
                    sure,
                    self.sure,
                    f"the initial loss was {number(sure)} times that of equal probabilities for all {number(classes)} "
                    f"classes, and is still {number(now)} times that after {history.seen} steps: the scores began far "
                    "apart.",
                    "make the first scores small: raise the temperature, drop a factor, or lower first weights.",
                    LARGE,
                )

    def _steep(self, record: StepRecord, history: History) -> Iterable[Finding]:
        depth, gains = history.run("gain.depth"), history.at_sites("parameter.initial_gain")
        if not len(gains.steps) or not depth.first >= self.steep:
            return
        worst = none_better(history, self.level, 10)
        order = np.argsort(-np.nan_to_num(gains.first), kind="stable")
        names = tuple(gains.sites[index] for index in order if gains.first[index] >= self.usual)
        if worst is None or not math.isfinite(worst):
            return
        yield _finding(
            Severity.MEDIUM,
            names or ("",),
            depth.first,
            self.steep,
            f"at the first step the gradient grew {number(math.exp(min(depth.first, 700.0)))}-fold from the last "
            "layer back to the first, so a tiny change of the input changes the output completely, and the loss is "
            f"{number(worst)} times that of the best constant prediction after {history.seen} steps.",
            "use smaller initial weights where a later operation multiplies them: sin(w0 * layer(x)) needs weights "
            "within sqrt(6 / inputs) / w0; otherwise use nn.init.kaiming_normal_(layer.weight), which preserves "
            "the scale.",
            LARGE,
        )


def _small(check: BadInit, history: History) -> Iterable[Finding]:
    depth, gains, loss = history.run("gain.depth"), history.at_sites("parameter.initial_gain"), history.run("loss")
    if history.seen < check.after or depth.count == 0 or not len(gains.steps) or loss.count < 10:
        return
    if loss.low <= 0 or depth.first > check.depth or median(loss.values[-10:]) <= 0.95 * loss.first:
        return
    first = gains.first
    small = np.isfinite(first) & (first > 0) & (first <= check.tiny)
    if 2 * int(small.sum()) <= len(first) or len(first) < 2:
        return
    names = tuple(gains.sites[index] for index in np.flatnonzero(small))
    usual = median(first[small])
    yield _finding(
        Severity.MEDIUM,
        names,
        usual,
        check.tiny,
        f"the initial weights of {len(names)} of {len(first)} layers ({some(names)}) were about {number(usual)} of "
        f"the scale that preserves the signal, which shrank to exp({number(depth.first)}) over the depth; after "
        f"{history.seen} steps the loss is {number(loss.last)}, initially {number(loss.first)}.",
        "scale the weights by the number of inputs: nn.init.kaiming_normal_(layer.weight) before ReLU, "
        "nn.init.xavier_uniform_(layer.weight) before tanh.",
        SMALL,
    )


def _copies(check: BadInit, record: StepRecord, history: History) -> Iterable[Finding]:
    moved = reading_of(record, "parameter.update_norm").as_dict()
    read, parted = values_of(record, "parameter.row_spread"), values_of(record, "parameter.row_parting")
    names = tuple(
        site
        for site, apart in read.items()
        if moved.get(site) and (apart <= check.alike or parted.get(site, math.inf) <= check.together)
    )
    if names:
        yield _finding(
            Severity.HIGH,
            names,
            read[names[0]],
            check.alike,
            f"all units of {some(names)} have the same weights, and still do after {history.seen - 1} steps: "
            "they compute the same output and get the same gradient, so each layer acts like a single unit.",
            "initialize the weights randomly instead of with a constant: "
            "nn.init.kaiming_normal_(layer.weight), or keep PyTorch's default initialization.",
            COPIES,
        )


def _zeros(_check: BadInit, record: StepRecord, history: History) -> Iterable[Finding]:
    read, sizes = record.facts.get("parameter.row_spread", {}), reading_of(record, "parameter.weight_norm")
    zero = connected(history, Wiring.OWNED | Wiring.GRADIENT).intersection(only(sizes, sizes.values == 0.0).sites)
    blank = tuple(site for site, apart in read.items() if apart is None and site in zero)
    if blank:
        yield _finding(
            Severity.HIGH,
            blank,
            0.0,
            0.0,
            f"the weights of {some(blank)} are all 0, and still are after {history.seen - 1} steps.",
            "initialize at most one of two consecutive layers with zeros, otherwise no gradient passes: use "
            "nn.init.kaiming_normal_(layer.weight) for the others, or keep PyTorch's default initialization.",
            ZEROS,
        )


def _doubles(check: BadInit, record: StepRecord, history: History) -> Iterable[Finding]:
    apart, moving = values_of(record, "parameter.row_spread"), _moving(record)
    names = tuple(
        name
        for name, share in values_of(record, "parameter.row_doubles").items()
        if share == 1.0 and name in moving and apart.get(name, 0.0) > check.alike
    )
    if names:
        yield _finding(
            Severity.MEDIUM,
            names,
            1.0,
            1.0,
            f"each unit of {some(names)} has a duplicate with the same weights, and still does after "
            f"{history.seen - 1} steps: duplicates compute the same output and get the same gradient.",
            f"initialize {names[0]} randomly instead of with a constant or repeated values, or use different biases "
            "for the duplicates: nn.init.normal_(layer.weight, std=0.02).",
            DOUBLES,
        )


def _siblings(check: BadInit, record: StepRecord, history: History) -> Iterable[Finding]:
    """Yield layers that only the numbers in their names distinguish."""
    gaps, moving = values_of(record, "parameter.sibling_gap"), _moving(record)
    names = tuple(name for name, gap in gaps.items() if gap <= check.alike and name in moving)
    if names:
        yield _finding(
            Severity.MEDIUM,
            names,
            0.0,
            0.0,
            f"the weights of {some(names)} equal those of another layer of the same kind, and still do after "
            f"{history.seen - 1} steps: they get the same gradients and stay equal.",
            "create each of them separately instead of copying one, nn.ModuleList(make() for _ in range(n)) "
            "without copy.deepcopy or a common seed; if they are meant to be tied, use one module several times.",
            SIBLINGS,
        )


def _moving(record: StepRecord) -> set[str]:
    """Return the parameters that this record's step moved along a gradient that is not 0."""
    sizes, along = (reading_of(record, f"parameter.{name}_norm").as_dict() for name in ("update", "gradient"))
    return {site for site, size in sizes.items() if size and along.get(site)}


def _finding(
    severity: Severity, names: tuple[str, ...], value: float, threshold: float, message: str, advice: str, cause: str
) -> Finding:
    return Finding(
        IssueType.BAD_INIT, severity, names, value, threshold, message, advice, since=1, cause=cause, origin=cause
    )
