"""Gradients along depth: VANISHING, EXPLODING."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress, takewhile
from typing import ClassVar

import numpy as np

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.statistics import median, theil_sen
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import NORMED_AWAY, none_better, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import SURE
from gradflow_export.rules.signals import Chain, chains, connected, converged, outlying, owner, solved

WORST = 0.75
"""Share of the whole change, in nats, from which a layer is named."""


def grade(log_factor: float) -> Severity:
    """Return the severity of a gradient that changes by ``exp(log_factor)`` over the depth of the model."""
    decades = abs(log_factor) / math.log(10.0)
    if decades >= 6.0:
        return Severity.CRITICAL
    return Severity.HIGH if decades >= 4.0 else Severity.MEDIUM


def _worst(links: Chain, whole: float, limit: float) -> tuple[str, ...]:
    """Return where the gradient has changed beyond ``limit``, and by three quarters of all it changes by, in nats.

    The rest of the chain is on the way there and shows it less; what is named is what the issue is about.
    """
    far = links.logs - links.logs[-1]
    reached = far <= min(limit, WORST * whole) if whole < 0 else far >= max(limit, WORST * whole)
    return tuple(site for site, here in zip(links.sites, reached, strict=True) if here)


def _spreads(record: StepRecord, links: Chain) -> Chain | None:
    """Return the output spreads along the same chain."""
    return next(
        (one for one in chains(record, "block.output_spread") if not set(one.sites).isdisjoint(links.sites)), None
    )


def _doubt(record: StepRecord, spreads: Chain) -> float:
    """Return how far the rise of estimated spreads may be off, in nats."""
    ends = spreads.sites[0], spreads.sites[-1]
    return SURE * math.hypot(*(record.value("block.output_spread_error", site) or 0.0 for site in ends))


@dataclass(frozen=True, kw_only=True)
class Vanishing(Rule):
    """Report a chain of blocks along which the gradient vanishes, independent of the scale of the loss.

    The sum of the log gains over the chain is below ``ln depth_gain``. A single block that damps the gradient is a
    BOTTLENECK.

    Source: Saxe et al. 2014, arXiv:1312.6120; Schoenholz et al. 2017, arXiv:1611.01232.

    Attributes:
        depth_gain: Minimum healthy factor over the whole chain.
        idle: The same while the loss is at ``level``, after ``settle`` steps.
        level: Minimum fraction of the loss of the best constant prediction.
        settle: Number of initial steps in which a plateau is not judged.
        alone: Maximum part of the depth gain that may be left once single outlier blocks are excluded.
    """

    depth_gain: float = 1e-4
    idle: float = 1e-2
    level: float = 0.97
    settle: int = 80
    alone: float = 1e-2

    needs: ClassVar[tuple[str, ...]] = ("block.gradient_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the chain of this record."""
        idle = history.seen >= self.settle and none_better(history, self.level, 5) is not None
        limit = self.idle if idle else self.depth_gain
        found = tuple(each for links in chains(record, "block.gradient_norm") for each in self._backward(links, limit))
        return () if found and converged(history) else found

    def _backward(self, links: Chain, limit: float) -> tuple[Finding, ...]:
        # A gradient that drops to exactly 0 is blocked (dead, masked); one that vanished fades before it is 0.
        alive = np.isfinite(links.logs)
        if not alive[-1]:
            return ()
        gains = Chain(links.sites, links.logs[alive]).log_gains
        depth = float(links.logs[alive][0] - links.logs[-1])
        if not depth < math.log(limit):
            return ()
        flags = outlying(gains, math.log(20.0), 6.0)
        if not float(gains[~flags].sum()) < math.log(self.alone):
            return ()
        layers = _worst(links, depth, math.log(limit))
        typical = math.exp(median(gains))
        message = (
            f"the gradient at {layers[0]} is {number(math.exp(depth))} of the one at {links.sites[-1]}: "
            f"each block passes on about {number(typical)} of it (healthy: 0.5 to 2)."
        )
        advice = (
            f"add a skip connection (x + block(x)) or a LayerNorm before the blocks from {layers[0]} on"
            + (f", or scale their initial weights by about {number(1.0 / typical)}" if 0 < typical < 1 else "")
            + "; where Sigmoid or Tanh saturates, use ReLU or GELU with nn.init.kaiming_normal_(layer.weight). If a "
            "norm is applied after the addition (Post-LN), move it before the block, x + block(norm(x)), or warm up "
            "the learning rate."
        )
        return (
            Finding(
                IssueType.VANISHING, grade(depth), layers, math.exp(depth), limit, message, advice,
                follows_from=(NORMED_AWAY,),
            ),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VanishingParameters(Rule):
    """Report vanishing gradients outside a chain of blocks: in recurrent layers, a deep head, unknown architectures.

    The rule compares the root mean square of each weight's gradient, ``||g|| / sqrt(numel)``. For stacked recurrent
    layers, the input weights of the first and last layer are compared. Otherwise the weights after the last block, in
    order of registration, must fall by ``ratio`` from last to first and also follow a line with that slope (Theil-Sen),
    so that a single small gradient does not count as a trend. Only parameters with at least two dimensions are
    compared.

    Attributes:
        ratio: Minimum healthy ratio of the first to the last.
        least: Minimum number of weights for a trend.
    """

    ratio: float = 1e-4
    least: int = 4

    needs: ClassVar[tuple[str, ...]] = ("parameter.numel",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss",
        "block.gradient_norm",
        "connection.state",
        "parameter.recurrent_layer",
    )

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the weights of this record."""
        sizes = _root_mean_squares(record)
        stacks = _stacks(sizes, history)
        if not stacks:
            inside = tuple(f"{block}." for block in history.at_sites("block.gradient_norm").sites)
            behind = [*takewhile(lambda site: not site.startswith(inside), reversed(sizes))][::-1]
            vectors = connected(history, Wiring.VECTOR)
            links = _chained([site for site in behind if site not in vectors], sizes)
            if len(links.sites) >= self.least and self._trend(links):
                stacks = [links]
        found = tuple(finding for links in stacks if (finding := self._judge(links)) is not None)
        return () if found and converged(history) else found

    def _trend(self, links: Chain) -> bool:
        slope = theil_sen(np.arange(len(links.logs), dtype=np.float64), links.logs)
        return -slope * (len(links.logs) - 1) < math.log(self.ratio)

    def _judge(self, links: Chain) -> Finding | None:
        fall = float(links.logs[0] - links.logs[-1])
        if not fall < math.log(self.ratio):
            return None
        layers = _worst(links, fall, math.log(self.ratio))
        message = f"the RMS gradient of {links.sites[0]} is {number(math.exp(fall))} of that of {links.sites[-1]}."
        advice = (
            f"use fewer stacked layers before {links.sites[-1]}, add skip connections or LayerNorm between them, or "
            "initialize the weights larger: nn.init.orthogonal_(weight), and a forget-gate bias of 1 in an LSTM."
        )
        return Finding(IssueType.VANISHING, grade(fall), layers, math.exp(fall), self.ratio, message, advice)


def _root_mean_squares(record: StepRecord) -> dict[str, float]:
    """Return the root mean square gradient of each parameter whose gradient is finite and not 0."""
    norms, known = reading_of(record, "parameter.gradient_norm"), reading_of(record, "parameter.numel").as_dict()
    values = np.where(norms.present, norms.values, 0.0).astype(np.float64)
    sizes = np.array([known.get(site) or 0.0 for site in norms.sites], dtype=np.float64)
    usable = (values > 0) & (values < math.inf) & (sizes > 0) & (sizes < math.inf)
    found = values[usable] / np.sqrt(sizes[usable])
    return dict(zip(compress(norms.sites, usable.tolist()), found.tolist(), strict=True))


def _chained(sites: list[str], sizes: Mapping[str, float]) -> Chain:
    return Chain(tuple(sites), np.log(np.array([sizes[site] for site in sites], dtype=np.float64)))


def _stacks(sizes: Mapping[str, float], history: History) -> list[Chain]:
    """Return the input weights of each stacked recurrent module, first layer first."""
    known = history.at_sites("parameter.recurrent_layer")
    layers = np.where(known.present, known.values, -1.0).max(axis=0, initial=-1.0)
    stacks: dict[str, list[tuple[float, str]]] = {}
    for site, layer in zip(known.sites, layers.tolist(), strict=True):
        if site in sizes and layer >= 0:
            stacks.setdefault(owner(site), []).append((layer, site))
    return [_chained([site for _, site in sorted(members)], sizes) for members in stacks.values() if len(members) > 1]


@dataclass(frozen=True, kw_only=True)
class ExplodingDepth(Rule):
    """Report a chain of blocks that amplifies the gradient, or the activations, to unusable values.

    Source: Pascanu et al. 2013, arXiv:1211.5063; Schoenholz et al. 2017, arXiv:1611.01232.

    Attributes:
        depth_gain: Maximum healthy factor over the whole chain.
        spread: Maximum healthy ratio of the output spread of the last block to that of the first.
        amplifying: Median log gain above which a growing forward signal counts.
        asked: Ratio of output to target magnitude up to which a growing output counts as fitting the targets; gradients
            may then grow by the same factor more.
        urgent: Factor over the whole chain at which the issue opens immediately; such a model rarely lasts three steps.
        learned: Fraction of the first loss below which outputs may grow.
    """

    depth_gain: float = 1e2
    spread: float = 1e2
    amplifying: float = 0.3
    asked: float = 3.0
    urgent: float = 1e3
    learned: float = 0.5

    needs: ClassVar[tuple[str, ...]] = ("block.gradient_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("target.rms", "block.gradient_norm", "learning_rate", "loss")

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the chain of this record."""
        targets = history.at_sites("target.rms").values
        large = self.asked * float(targets[-1].max()) if targets.size else 0.0
        found = []
        for links in chains(record, "block.gradient_norm"):
            spreads = _spreads(record, links)
            limit = math.log(self.depth_gain)
            if spreads is not None and large > 0 and float(spreads.logs[-1]) <= math.log(large):
                limit, spreads = limit + max(spreads.rise, 0.0), None
            # Scores that grow while the loss falls are sure of what was learned.
            finding = self._judge(record, links, None if solved(history, self.learned) else spreads, limit)
            if finding is not None:
                found.append(_as_trained(finding, links, limit, history))
        return tuple(found)

    def _judge(self, record: StepRecord, links: Chain, spreads: Chain | None, limit: float) -> Finding | None:
        gains = links.log_gains[np.isfinite(links.log_gains)]
        depth, typical = -links.rise, math.exp(median(gains))
        growth, doubt = (math.nan, 0.0) if spreads is None else (spreads.rise, _doubt(record, spreads))
        if depth > limit:
            layers = _worst(links, depth, limit)
            what = f"the gradient grows {number(math.exp(depth))}-fold from {links.sites[-1]} back to {layers[0]}"
            value, threshold = depth, math.exp(limit)
            steepest = int(np.nanargmax(np.where(np.isfinite(links.log_gains), links.log_gains, np.nan)))
            if links.log_gains[steepest] > depth / 2:
                return self._single(links, steepest, what, depth, limit)
        elif growth - doubt > math.log(self.spread) and math.log(typical) > self.amplifying:
            layers, value, threshold = links.sites, growth, self.spread
            what = f"the output grows {number(math.exp(growth))}-fold from {links.sites[0]} to {links.sites[-1]}"
        else:
            return None
        return Finding(
            IssueType.EXPLODING,
            grade(value),
            layers,
            math.exp(value),
            threshold,
            f"{what}: each block multiplies it by about {number(typical)} (healthy: 0.5 to 2).",
            f"scale the initial weights of {some(layers, 2)} by about {number(1.0 / max(typical, 1.0))} "
            "(nn.init.kaiming_normal_ for ReLU, nn.init.orthogonal_ otherwise) or add normalization; until then "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
            urgent=value > math.log(self.urgent),
        )

    def _single(self, links: Chain, steepest: int, what: str, depth: float, limit: float) -> Finding:
        """Blame the one block that makes most of the growth."""
        block, factor = links.sites[steepest + 1], math.exp(float(links.log_gains[steepest]))
        return Finding(
            IssueType.EXPLODING,
            grade(depth),
            (block,),
            factor,
            math.exp(limit),
            f"{what}, and {block} alone multiplies it by {number(factor)} (healthy: 0.5 to 2).",
            f"scale the initial weights of {block} by about {number(1.0 / factor)} (nn.init.kaiming_normal_ for "
            "ReLU, nn.init.orthogonal_ otherwise) or add a LayerNorm before it; until then "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).",
            urgent=depth > math.log(self.urgent),
        )


def _as_trained(finding: Finding, links: Chain, limit: float, history: History) -> Finding:
    """Return a finding that says to take smaller steps where the gradient did not grow so at first."""
    norms = history.at_sites("block.gradient_norm")
    first = dict(zip(norms.sites, norms.first.tolist(), strict=True))
    begin, end = first.get(links.sites[0], math.nan), first.get(links.sites[-1], math.nan)
    if not 0 < begin < math.exp(limit / 2) * end:
        return finding
    rate = history.run("learning_rate")
    advice = (
        f"it was {number(begin / end)}-fold at first, so training made it: lower the learning rate"
        + (f" from {number(rate.last)}" if rate.count else "")
        + " by a factor of ten or more, and clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
    )
    return replace(finding, advice=advice)
