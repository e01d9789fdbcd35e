"""Representations that are nearly the same for every sample: COLLAPSE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import BoolArray, IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number, some
from gradflow_export.rules.evidence import INVERTED_MASK, Floats, no_better, reading_of, since_when
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import Chain, chains


@dataclass(frozen=True, kw_only=True)
class Collapse(Check):
    """Report models whose layers, from one on to the last, have nearly the same output for every sample.

    The variation of a layer's output between samples (or nodes, or positions) is measured relative to its norm. It must
    be ``healthy`` or more at the first block of a chain, and at most ``same`` from one of at least two blocks on to the
    last; no later layer can then distinguish samples. A loss at the level of the best constant prediction confirms
    this. If there is no such prediction, as for embeddings that are only pulled together, the last block must have
    varied by ``healthy`` at first and vary by at most ``gone`` now.

    Why it is bad:
        The output hardly depends on the input. Repeated averaging over neighbors makes all nodes of a graph alike
        (over-smoothing); embeddings that are only pulled together become equal (representation collapse).

    Example:
        for layer in self.layers:  # 16 rounds, each the mean over the neighbours
            x = torch.relu(layer(adjacency @ x))

    Use instead:
        for layer in self.layers:
            x = x + torch.relu(layer(adjacency @ x))

    Not reported:
        The loss is below 0.95 of that of the best constant prediction; a path leads around the blocks; VANISHING, DEAD,
        SATURATION, BAD_INIT or LEARNING_RATE explains it.

    Source: Oono and Suzuki 2020, arXiv:1905.10947; Jing et al. 2022, arXiv:2110.09348.

    Attributes:
        same: Maximum variation of a collapsed block, as a fraction of its norm.
        gone: The same for the last block if the loss cannot be compared.
        healthy: Minimum variation of the first block, and of the last one at first.
        level: Minimum fraction of the loss of the best constant prediction.
        blocks: Minimum number of collapsed blocks if the loss confirms it.
        settle: Number of steps before anything is reported.
        readings: Number of readings of the loss that must agree.
    """

    same: float = 0.01
    gone: float = 1e-3
    healthy: float = 0.1
    level: float = 0.95
    blocks: int = 2
    settle: int = 50
    readings: int = 4

    late: ClassVar[bool] = True
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.COLLAPSE,)
    needs: ClassVar[tuple[str, ...]] = ("block.output_spread",)
    remembers: ClassVar[tuple[str, ...]] = (
        "loss.over_constant", "loss.samples", "block.output_spread", "block.output_rms",
    )  # fmt: skip

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the blocks of this record."""
        alone = bool((history.at_sites("loss.samples").values[-1:] == 1).any())  # one sample differs from no other
        if history.seen < self.settle or record.get("block.output_rms") is None or alone:
            return ()
        found = (self._judge(record, history, links) for links in chains(record, "block.output_spread"))
        return tuple(finding for finding in found if finding is not None)

    def _judge(self, record: StepRecord, history: History, links: Chain) -> Finding | None:
        if links.joined is None:
            return None
        sizes = reading_of(record, "block.output_rms").as_dict()
        size = np.array([sizes.get(site) or np.nan for site in links.sites], dtype=np.float64)
        shares = np.exp(links.logs) / size
        start, agreed = self._begin(history, links.sites, shares)
        first = int(np.flatnonzero(~links.joined[:start])[-1] + 1) if not links.joined[:start].all() else 0
        if not first < start < len(shares) or not links.joined[start:].all() or not shares[first] >= self.healthy:
            return None
        value, layers = float(shares[start:].max()), links.sites[start:]
        spread, rms = (history.at_sites(f"block.output_{name}") for name in ("spread", "rms"))
        steps, at, of = np.intersect1d(spread.steps, rms.steps, return_indices=True)
        varies, size = spread.values[at, spread.sites.index(layers[-1])], rms.values[of, rms.sites.index(layers[-1])]
        since, before = since_when(steps, varies <= (self.same if agreed else self.gone) * size)
        return Finding(
            IssueType.COLLAPSE,
            Severity.HIGH if agreed else Severity.MEDIUM,
            layers,
            value,
            self.same,
            f"from {layers[0]} on, the outputs of different samples differ by at most {number(100 * value)} % of "
            f"their norm, in {some(layers)}; after {links.sites[first]} it is {number(100 * float(shares[first]))} "
            "%: the model has the same output for every sample.",
            f"add a skip connection around {layers[0]} (x + layer(x)) or use fewer averaging (message passing) "
            "layers; if the loss only pulls embeddings together, add a term that keeps them apart: negatives, "
            ".detach() on one side, or a variance term.",
            since=since,
            before=before,
            cause=layers[0],
            follows_from=(
                IssueType.NUMERICAL, IssueType.VANISHING, IssueType.EXPLODING, IssueType.DEAD, IssueType.SATURATION,
                IssueType.BAD_INIT, IssueType.LEARNING_RATE, IssueType.WRONG_LOSS, IssueType.DATA_SCALE,
                IssueType.BAD_TARGETS, IssueType.NOT_TRAINING, INVERTED_MASK,
            ),
        )  # fmt: skip

    def _begin(self, history: History, sites: tuple[str, ...], shares: Floats) -> tuple[int, bool]:
        """Return the first block that collapsed, and whether a constant prediction is as good as the model's."""
        known = history.at_sites("loss.over_constant").sites
        if known:
            agreed = any(no_better(history, site, self.level, self.readings) is not None for site in known)
            start = _first_of_the_last(shares <= self.same)
            return (start if agreed and len(shares) - start >= self.blocks else len(shares)), True
        size, spread = (_first(history, f"block.output_{name}", sites[-1]) for name in ("rms", "spread"))
        told_apart = spread >= self.healthy * size > 0
        return (_first_of_the_last(shares <= self.gone) if told_apart else len(shares)), False


def _first(history: History, metric: str, site: str) -> float:
    """Return the first value of a metric at a block, NaN where there is none."""
    series = history.at_sites(metric)
    return float(series.first[series.sites.index(site)]) if site in series.sites else math.nan


def _first_of_the_last(flags: BoolArray) -> int:
    """Return where the run of True begins that ends the row; its length where there is none."""
    wrong = np.flatnonzero(~flags)
    return int(wrong[-1]) + 1 if len(wrong) else 0
