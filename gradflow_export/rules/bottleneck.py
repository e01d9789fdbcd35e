"""Single blocks that let less through than their neighbours: BOTTLENECK."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.attention import stacks
from gradflow_export.rules.base import Finding, Rule, number
from gradflow_export.rules.evidence import NORMED_AWAY, Floats, only, past, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import margin
from gradflow_export.rules.signals import Chain, chains, inside, outlying, owner, solved, stuck

READINGS = 5
"""Last readings of the loss of a term whose median counts."""


@dataclass(frozen=True, kw_only=True)
class Bottleneck(Rule):
    """Report blocks that damp the gradient far more than the other blocks.

    A block counts only if everything its predecessor outputs must pass it. Parallel heads, a branch with a path around
    it, layers that feed the loss directly, and branches whose output is added to others (such as an adapter that starts
    at 0) are not judged. If a layer's own weights pass enough gradient, an averaging or product between it and the
    previous layer is not attributed to it. If a module in the block is dead or saturated, that issue is reported
    instead. A block that takes large values down towards 1, as a normalization does, takes the gradient down as far:
    only what is missing beyond that counts.

    Source: leave-one-out robust outlier on log gains.

    Attributes:
        factor: Minimum factor by which the block's gain is below the median of the others.
        deviations: Minimum distance in robust standard deviations of the others.
        usual: Gain from which on the weights of a layer pass enough gradient.
    """

    factor: float = 20.0
    deviations: float = 6.0
    usual: float = 0.3

    name: ClassVar[str] = "bottleneck-gain"
    needs: ClassVar[tuple[str, ...]] = ("block.gradient_norm",)
    remembers: ClassVar[tuple[str, ...]] = ("parameter.initial_gain", "parameter.weight_norm")
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the gains of this record."""
        found = (found for links in chains(record, "block.gradient_norm") for found in self._judge(record, links))
        return tuple(finding for finding in found if self._at_fault(finding.layers[0], record, history))

    def _at_fault(self, block: str, record: StepRecord, history: History) -> bool:
        """Whether a block has no way around it and is no layer whose weights are of a usual size."""
        if _joins_others(record, block):
            return False
        gains, norms = history.at_sites("parameter.initial_gain"), history.at_sites("parameter.weight_norm")
        first = dict(zip(norms.sites, norms.first.tolist(), strict=True))
        now = reading_of(record, "parameter.weight_norm").as_dict()
        for site, gain in zip(gains.sites, gains.first.tolist(), strict=True):
            if owner(site) == block:
                size, began = now.get(site), first.get(site, math.nan)
                usual = gain * (size / began if size is not None and began > 0 else 1.0) >= self.usual
                return gain != 0.0 and not usual  # what begins at 0 on purpose lets more through at each step
        return True

    def _judge(self, record: StepRecord, links: Chain) -> Iterator[Finding]:
        # Where what a block gives does not all go through the next, the ratio of the two is no doing of that one.
        places = np.arange(len(links.sites) - 1) if links.joined is None else np.flatnonzero(links.joined)
        if links.ends:
            places = places[places < len(links.sites) - 2]  # what an output is multiplied by is the scale of the loss
        gains = links.log_gains[places]
        own = gains + _taken_down(record, links)[places]
        flags = outlying(own, math.log(self.factor), self.deviations)
        if len(gains) < 3:
            # Of two transitions, either may be the odd one: only a gain that damps by itself is at fault.
            flags &= own < -math.log(self.factor)
        for index in np.flatnonzero(flags):
            block, others = links.sites[places[index] + 1], np.delete(gains, index)
            if _ill_inside(record, block):
                continue
            usual = math.exp(median(others[np.isfinite(others)]))
            gain = math.exp(float(gains[index]))
            yield Finding(
                IssueType.BOTTLENECK,
                Severity.HIGH,
                (block,),
                gain,
                usual / self.factor,
                f"{block} passes on {number(gain)} of the gradient norm; the other blocks pass on about "
                f"{number(usual)}.",
                f"change only {block}: rescale its weights"
                + (f" by about {number(usual / gain)}" if gain > 0 else "")
                + ", add a skip connection around it (x + block(x)) or a LayerNorm after it.",
                cause="gain",
                follows_from=(IssueType.EXPLODING, IssueType.VANISHING, NORMED_AWAY),
            )


@dataclass(frozen=True, kw_only=True)
class RankBottleneck(Rule):
    """Report the first block whose output has a far lower effective rank than its input.

    Not reported: a narrow code that fits its data, because the dropped directions carried no information; an output of
    as high a rank as there are directions, two or more, that hold most of the targets' variance, or as the curved
    surface on which the targets lie has dimensions; a layer whose output goes to the loss, because the task sets its
    width; and one on a branch, such as the scores of attention pooling, where what the branch is fed with reaches the
    loss by another way too.

    Where the graph was not read, a chain counts as reaching the loss. If the following layers have an even lower rank,
    the network narrows towards its output, as with pooling and few classes; this counts only if the loss was read and
    does not fall.

    A low rank at the end of training is expected for classification (neural collapse, Papyan et al. 2020, PNAS 117), so
    the rule does not apply once the loss is solved. A layer that starts at 0 gains its rank step by step and must have
    a skip connection around it to learn at all.

    A convolution has one row per position, a linear layer after it one per sample, and n rows span n - 1 directions at
    most. The input counts with the rank that as few rows as those of the output would have shown: its inverse is
    ``1 / rank + 1 / (n - 1)``, which holds for the participation ratio of normally distributed rows and is at most
    lower for this rank.

    A remark until the loss has had ``settle`` steps, or the run has ended, and while it is far below a constant's: only
    then is something lost that the task needs.

    Source: effective rank, Roy and Vetterli 2007, EUSIPCO; of few rows, moments of the Wishart distribution.

    Attributes:
        ratio: Maximum fraction of the preceding block's effective rank.
        least: Least effective rank of the preceding block.
        waist: Minimum fraction of its rank that a later block spans, where that block is narrower than the one it
            feeds.
        settle: Steps that the loss has to fall.
        fits: Fraction of a constant's loss that is not lost on a narrow layer.
        patience: Ranks are read in groups of four steps whose samples are pooled, with long intervals between the
            groups.
    """

    ratio: float = 0.25
    least: float = 4.0
    waist: float = 0.9
    settle: int = 100
    fits: float = 0.2
    patience: int = 3
    heal: int = 2

    name: ClassVar[str] = "bottleneck-rank"
    needs: ClassVar[tuple[str, ...]] = ("block.effective_rank",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "loss.over_constant", "parameter.initial_gain", "target.directions")
    by_layer: ClassVar[bool] = True
    final: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the ranks of this record."""
        if solved(history):
            return ()
        waist = self.waist if history.run("loss").count and not stuck(history) else 0.0
        asked = float(history.at_sites("target.directions").values[-1:].max(initial=0.0))
        found = [self._judge(record, links, waist, asked) for links in chains(record, "block.effective_rank")]
        if not self._costs(history):
            found = [each and replace(each, severity=Severity.LOW) for each in found]
        gains = history.at_sites("parameter.initial_gain")
        blank = {owner(site) for site, gain in zip(gains.sites, gains.first.tolist(), strict=True) if gain == 0.0}
        return tuple(finding for finding in found if finding is not None and blank.isdisjoint(finding.layers))

    def _costs(self, history: History) -> bool:
        """Whether the loss has had its time and is not far below that of a constant, as far as it is known."""
        terms = history.at_sites("loss.over_constant").sites
        shares = [median(past(history, "loss.over_constant", term)[-READINGS:]) for term in terms]
        return (history.ended or history.seen >= self.settle) and not max(shares, default=1.0) < self.fits

    def _judge(self, record: StepRecord, links: Chain, waist: float, asked: float) -> Finding | None:
        ranks, rows = np.exp(links.logs), reading_of(record, "block.rank_rows").as_dict()
        off = [margin(record, "block.effective_rank", site) for site in links.sites]
        unseen = np.array([1.0 / max((rows.get(site) or math.inf) - 1.0, 1.0) for site in links.sites])
        for index in range(1, len(ranks) - (links.ends is not False)):
            after, block = float(ranks[index]), links.sites[index]
            # What as few rows as those of the output would have shown of the input.
            fewer = max(float(unseen[index] - unseen[index - 1]), 0.0)
            before = float(ranks[index - 1]) / (1.0 + fewer * float(ranks[index - 1]))
            if links.joined is not None and not links.joined[index - 1]:
                continue
            # Later blocks are read at the same rows: what those leave out is no difference between the two.
            if (
                before - off[index - 1] >= self.least
                and after + off[index] <= self.ratio * (before - off[index - 1])
                and ranks[index + 1 :].max(initial=0) >= waist * after
                and not 1 < asked <= round(after + off[index])
            ):
                shut = record.value("block.gradient_norm", links.sites[index - 1]) == 0.0  # what lies between lost all
                if shut or _ill_inside(record, block) or _goes_around(record, links, index):
                    return None
                return Finding(
                    IssueType.BOTTLENECK,
                    Severity.HIGH,
                    (block,),
                    after,
                    self.ratio * before,
                    f"the output of {block} has an effective rank of about {number(after)}, its input of "
                    f"{number(before)}: later layers cannot restore what is lost.",
                    f"widen {block} to at least {math.ceil(before)} units, or add a skip connection around it; if "
                    "it is narrow on purpose, compare the loss with that of a wider layer.",
                    cause="rank",
                    follows_from=(IssueType.EXPLODING, IssueType.VANISHING),
                )
        return None


@dataclass(frozen=True, kw_only=True)
class TokenBottleneck(Rule):
    """Report the block between two attention blocks that makes all tokens of a sequence the same.

    Pooling over tokens leaves one direction where there were as many as tokens. If attention itself has this effect, it
    is reported as RANK_COLLAPSE.

    Source: rank drop of a single block; residual as in Dong, Cordonnier and Loukas 2021, arXiv:2103.03404.

    Attributes:
        healthy: Minimum residual ``||X - 1 mean(X)^T|| / ||X||`` at the output of the previous block.
        residual: Maximum residual at the input of the next block.
    """

    healthy: float = 0.2
    residual: float = 0.05

    name: ClassVar[str] = "bottleneck-tokens"
    needs: ClassVar[tuple[str, ...]] = ("block.rank_residual",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge what lies between the blocks of each stack of this record."""
        found = []
        following = dict(pairwise(reading_of(record, "block.gradient_norm").sites))
        for sites, before, after in stacks(record) if not solved(history) else ():
            for index in np.flatnonzero((after[0, :-1] >= self.healthy) & (before[2, 1:] < self.residual)):
                block = following.get(sites[index], sites[index + 1])
                left, came = float(after[1, index]), float(before[1, index + 1])
                found.append(
                    Finding(
                        IssueType.BOTTLENECK,
                        Severity.HIGH,
                        (block,),
                        came,
                        self.residual,
                        f"the deviation of the tokens of a sequence from their mean is {number(left)} of their norm "
                        f"after {sites[index]} and {number(came)} before {sites[index + 1]}: {block} makes them the "
                        "same.",
                        f"add a skip connection around {block} (x + block(x)), or pool only after the last block that "
                        "needs individual tokens.",
                        cause="tokens",
                    )
                )
        return tuple(found)


def _taken_down(record: StepRecord, links: Chain) -> Floats:
    """Return by how much each block but the first takes large values down towards 1, as a logarithm, 0 at least.

    What divides the values divides the gradient too: a normalization passes on as little as what enters it is large.
    """
    sizes = reading_of(record, "block.output_rms").as_dict()
    logs = np.log(np.clip([sizes.get(site) or 1.0 for site in links.sites], 1.0, np.finfo(np.float32).max))
    return np.asarray(np.maximum(logs[:-1] - logs[1:], 0.0), dtype=np.float64)


def _joins_others(record: StepRecord, block: str) -> bool:
    """Whether what a block gives is joined by what other blocks give before it comes to the next one."""
    after = reading_of(record, "block.next").as_dict()
    place = after.get(block)
    return place is not None and place >= 0 and sum(other == place for other in after.values()) > 1


def _goes_around(record: StepRecord, links: Chain, index: int) -> bool:
    """Whether anything that forks before a block need not pass that block on its way to the loss."""
    if links.joined is None:
        return False
    reading, block = reading_of(record, "block.next"), links.sites[index]
    after = reading.as_dict()
    for fork in np.flatnonzero(~links.joined[:index]):
        here = links.sites[int(fork)]
        while here != block and (place := after.get(here)) is not None and place >= 0:
            here = reading.sites[int(place)]
        if here != block:
            return True
    return False


def _ill_inside(record: StepRecord, block: str) -> bool:
    """Whether a module of the block is dead or saturated in the same record."""
    for metric, limit in (("activation.dead_share", 0.9), ("activation.saturated_share", 0.8)):
        reading = reading_of(record, metric)
        if any(inside(site, block) for site in only(reading, reading.values >= limit).sites):
            return True
    return False
