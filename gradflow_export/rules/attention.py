"""Attention that no longer chooses, heads that repeat each other, tokens that became one: the transformer's faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Reading, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import Floats, only, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import likely, most_at_first, off, site_margins
from gradflow_export.rules.signals import converged, solved

LEARNED = 0.2
"""Share of the loss that must have gone while a reading left its healthy range, for it to count as learned."""


def layer_of(site: str) -> str:
    """Return the attention a head belongs to: ``"blocks.0.attn"`` of ``"blocks.0.attn.head3"``."""
    return site.rpartition(".head")[0]


def _by_layer(reading: Reading) -> Iterator[tuple[str, list[int]]]:
    """Yield each layer with the indices of its heads that have a finite value."""
    layers: dict[str, list[int]] = {}
    for index, site in enumerate(reading.sites):
        if reading.present[index] and np.isfinite(reading.values[index]):
            layers.setdefault(layer_of(site), []).append(index)
    yield from layers.items()


def _rests_on_a_sink(record: StepRecord, layer: str, share: float) -> bool:
    """Whether a layer's queries mostly look at one and the same key, which trained models do to do nothing."""
    return likely(record, "attention.sink", layer)[2] >= share


def _loss_at(history: History, step: int) -> float:
    """Return the loss about a step: the median of three of the whole run, thinned."""
    steps, values = history.run("loss").whole()
    index = int(np.searchsorted(steps, step, side="right"))
    return median(values[max(0, index - 2) : index + 1])


def _learned(history: History, metric: str, sites: list[str], healthy: float, *, least: float) -> bool:
    """Whether a reading left its healthy range while the loss fell: then it is what the task asked for.

    Never for a reading that was ill when it was first seen. A loss that has fallen by :data:`LEARNED` since the reading
    was last healthy (since the first step, where that is too long ago) indicates learning; one that has not, a fault.

    Args:
        history: Holds ``metric``, its error, and ``loss``.
        metric: What is ill.
        sites: Where; the greatest value of these counts.
        healthy: Least healthy value.
        least: Greatest ill value.
    """
    series, loss = history.at_sites(metric), history.run("loss")
    columns = [series.sites.index(site) for site in sites]
    if bool((most_at_first(history, metric)[columns] < least).all()):
        return False
    most = series.values + site_margins(history, metric)
    shown = np.where(series.present, most, -np.inf)[:, columns].max(axis=1)
    well = np.flatnonzero(shown >= healthy)
    before = _loss_at(history, int(series.steps[well[-1]])) if well.size else loss.first
    now = median(loss.values[-5:][np.isfinite(loss.values[-5:])])
    return bool(now < before - LEARNED * abs(before))


@dataclass(frozen=True, kw_only=True)
class AttentionCollapse(Rule):
    """Report layers whose heads all put nearly all attention weight on one key, before anything was learned.

    If no head of a layer chooses among keys, no gradient reaches its queries and keys. Not reported: layers in which
    one head still chooses, attention that became sharp while the loss fell, a layer in which all queries attend to the
    same key (an attention sink), and a solved task.

    Source: Zhai et al. 2023, arXiv:2303.06296.

    Attributes:
        entropy: Normalized entropy that at least one head of a healthy layer exceeds.
        healthy: Normalized entropy above which a layer counts as healthy in its history.
        sink: Mean weight of one key at which a layer counts as having an attention sink.
    """

    entropy: float = 0.15
    healthy: float = 0.5
    sink: float = 0.7

    needs: ClassVar[tuple[str, ...]] = ("attention.entropy",)
    remembers: ClassVar[tuple[str, ...]] = ("attention.entropy", "attention.entropy_error", "loss")
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the heads of this record, layer by layer."""
        reading = reading_of(record, "attention.entropy")
        if solved(history) or converged(history):
            return ()
        most = reading.values + off(record, reading)
        ill: list[tuple[str, float]] = []
        series, later = history.at_sites("attention.entropy"), False
        for layer, heads in _by_layer(reading):
            highest = float(reading.values[heads].max())
            sites = [reading.sites[index] for index in heads]
            if most[heads].max() >= self.entropy or _rests_on_a_sink(record, layer, self.sink):
                continue
            if not _learned(history, "attention.entropy", sites, self.healthy, least=self.entropy):
                ill.append((layer, highest))
                first = [series.first[series.sites.index(site)] for site in sites]
                later = later or not all(value < self.entropy for value in first)
        if not ill:
            return ()
        layer, highest = ill[0]
        logit = record.value("attention.max_logit", layer)
        message = (
            f"every head of {layer} attends almost entirely to one key: normalized entropy at most "
            f"{number(highest)} (1 is uniform)"
            + (f", logits up to {number(logit)}" if logit is not None else "")
            + (f"; likewise {some(tuple(name for name, _ in ill[1:]))}." if len(ill) > 1 else ".")
        )
        advice = (
            f"normalize queries and keys in {layer} (QK-norm: a LayerNorm or RMSNorm on each), or scale its query "
            "and key weights down so that logits start near 1; "
            + ("lower the learning rate or use a longer warm-up" if later else "check its initialization and its scale")
            + ", and check that scores are scaled by head_dim ** -0.5."
        )
        finding = Finding(
            IssueType.ATTENTION_COLLAPSE,
            Severity.HIGH,
            tuple(name for name, _ in ill),
            highest,
            self.entropy,
            message,
            advice,
            follows_from=(IssueType.EXPLODING,) if later else (),
        )
        return (finding,)


@dataclass(frozen=True, kw_only=True)
class HeadRedundancy(Rule):
    """Report layers whose heads all have nearly the same attention weights, so that one head would suffice.

    Heads that are equal from the first reading were initialized identically. Not reported: heads that became similar
    while the loss fell, heads that all attend to one key, and uniform attention, which cannot be compared.

    Source: definition of diversity; many heads of trained models can be removed: Michel et al. 2019, arXiv:1905.10650.

    Attributes:
        diversity: Least diversity of a layer's heads.
        healthy: Diversity above which a layer counts as healthy in its history.
        sink: Mean weight of one key at which a layer counts as having an attention sink.
    """

    diversity: float = 0.05
    healthy: float = 0.3
    sink: float = 0.5

    needs: ClassVar[tuple[str, ...]] = ("attention.diversity",)
    remembers: ClassVar[tuple[str, ...]] = ("attention.diversity", "attention.diversity_error", "loss")
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the layers of this record."""
        reading = reading_of(record, "attention.diversity")
        if solved(history) or converged(history):
            return ()
        low = only(reading, reading.values + off(record, reading) < self.diversity)
        layers = tuple(
            layer
            for layer in low.sites
            if not _rests_on_a_sink(record, layer, self.sink)
            and not _learned(history, "attention.diversity", [layer], self.healthy, least=self.diversity)
        )
        if not layers:
            return ()
        first = float(low.values[low.sites.index(layers[0])])
        message = (
            f"the heads of {layers[0]} have nearly the same attention weights: diversity {number(first)} (0 for "
            "equal heads, about 1 for unrelated ones)" + (f"; likewise {some(layers[1:])}." if len(layers) > 1 else ".")
        )
        advice = (
            f"initialize the heads of {layers[0]} independently (nn.init.xavier_uniform_ on the whole query and key "
            "weights, instead of copying one head to all), check that the tensor is split into heads along the "
            "right dimension, or use fewer heads."
        )
        # Tokens that are all the same are attended to in the same way by every head.
        return (
            Finding(
                IssueType.HEAD_REDUNDANCY,
                Severity.MEDIUM,
                layers,
                first,
                self.diversity,
                message,
                advice,
                follows_from=(IssueType.RANK_COLLAPSE,),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RankCollapse(Rule):
    """Report a stack of attention layers after which all tokens of a sequence are the same.

    The rule compares the residual ``||X - 1 mean(X)^T|| / ||X||`` at the input and output of the last block of each
    stack with that at the input of the first block. Both are used because a module without its own skip connection may
    have one around it. Pure attention shrinks the residual doubly exponentially with depth; skip connections and MLPs
    counteract this. Sparse attention is not a cause; it slows the collapse (Wu et al. 2024, arXiv:2405.18781).

    Source: Dong, Cordonnier and Loukas 2021, arXiv:2103.03404.

    Attributes:
        residual: Least healthy residual at the end of a stack.
        share: Minimum fraction of the input's residual that must be left.
        healthy: Residual after a block above which something behind it made the tokens the same.
    """

    residual: float = 0.05
    share: float = 0.2
    healthy: float = 0.2

    needs: ClassVar[tuple[str, ...]] = ("block.rank_residual",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the end of each stack of this record."""
        if solved(history) or converged(history):
            return ()
        found = []
        for sites, (least, before, most), (_, after, most_after) in stacks(record):
            limit = min(self.residual, self.share * float(least[0]))
            if not (most[-1] < limit and most_after[-1] < limit):
                continue
            # The last block that was given tokens that differ.
            start = int(np.flatnonzero(before >= limit)[-1])
            if most_after[start] >= self.healthy:
                continue  # it left them so: what made them the same is no attention, but a bottleneck after it
            found.append(self._finding(sites[start:], float(after[-1]), float(before[0]), limit))
        return tuple(found)

    def _finding(self, layers: tuple[str, ...], value: float, before: float, limit: float) -> Finding:
        message = (
            f"from {layers[0]} on, all tokens of a sequence are nearly the same: their deviation from the mean "
            f"token is {number(value)} of their norm after {layers[-1]}, and was {number(before)} before attention."
        )
        advice = (
            f"add a skip connection around the attention of {layers[0]} (x + attention(norm(x))) and an MLP after "
            "it; if there is one already, scale down the attention output or remove what shrinks the skip path."
        )
        return Finding(IssueType.RANK_COLLAPSE, Severity.HIGH, layers, value, limit, message, advice, cause=layers[-1])


def stacks(record: StepRecord) -> Iterator[tuple[tuple[str, ...], Floats, Floats]]:
    """Yield each list of two or more blocks with its finite residuals, before and after: a decoder is judged apart.

    Of each residual the least that it may be, what was read, and the greatest. Shape of both: ``[3, blocks]``.
    """
    entered = reading_of(record, "block.input_residual").as_dict()
    stacks: dict[str, list[str]] = {}
    for site, left in reading_of(record, "block.rank_residual").as_dict().items():
        came = entered.get(site)
        if left is not None and came is not None and math.isfinite(left) and math.isfinite(came):
            stacks.setdefault(site.rpartition(".")[0], []).append(site)
    for blocks in stacks.values():
        if len(blocks) > 1:
            ends = ([likely(record, f"block.{m}_residual", site) for site in blocks] for m in ("input", "rank"))
            before, after = (np.array(each, dtype=np.float64).T for each in ends)
            yield tuple(blocks), before, after


@dataclass(frozen=True, kw_only=True)
class FixedEntropy(Rule):
    """Report layers whose mean normalized attention entropy is below a given threshold.

    Attributes:
        threshold: Least mean over the heads of a layer.
        collapsed: Mean below which the issue is of high severity.
    """

    threshold: float = 0.5
    collapsed: float = 0.15

    name: ClassVar[str] = "fixed-attention-entropy"
    needs: ClassVar[tuple[str, ...]] = ("attention.entropy",)
    by_layer: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Compare each layer's mean."""
        reading = reading_of(record, "attention.entropy")
        means = {layer: float(reading.values[heads].mean()) for layer, heads in _by_layer(reading)}
        far = {layer: float(off(record, reading)[heads].mean()) for layer, heads in _by_layer(reading)}
        low = tuple(layer for layer, mean in means.items() if mean + far[layer] < self.threshold)
        if not low:
            return ()
        value = means[low[0]]
        return (
            Finding(
                IssueType.ATTENTION_COLLAPSE,
                Severity.HIGH if value < self.collapsed else Severity.MEDIUM,
                low,
                value,
                self.threshold,
                f"the attention entropy of {some(low)} is {number(value)} of that of uniform attention; the threshold "
                f"given is {number(self.threshold)}.",
                "check whether the loss still falls: the task may need sharp attention; if it does not fall, lower "
                "the learning rate or normalize queries and keys.",
                cause="fixed",
            ),
        )
