"""Replicas of one model that are no longer the same on every rank: DESYNC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of
from gradflow_export.rules.history import History

_SAID: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "parameter.replica_gap": (
            "",
            (
                "the ranks no longer hold the same weights: {count} of {total} replicated parameters ({names}) differ, "
                "by {percent} % of their checksum at most."
            ),
            (
                "average gradients on every rank before each step (DistributedDataParallel does; exit no_sync() "
                "for the last micro-batch), use the same learning rate and skip the same steps on all ranks, and "
                "make any other weight change on all ranks; then broadcast rank 0's weights: "
                "torch.distributed.broadcast(p.data, src=0)."
            ),
        ),
        "parameter.copy_gap": (
            "copies",
            (
                "{count} of {total} copies ({names}) are no longer equal: they differ by up to {percent} % of "
                "their largest entry."
            ),
            (
                "share one tensor if they are meant to be tied (self.right = self.left), or use the same gradient, "
                "clipping, learning rate and weight decay for both; then make them equal again: b.data.copy_(a)."
            ),
        ),
    }
)
"""Cause, message and advice by metric; copies are named as ``copy = first``."""


@dataclass(frozen=True, kw_only=True)
class Desync(Rule):
    """Report parameters that should be equal on all ranks and are not.

    Averaged gradients are bit-for-bit equal on all ranks, and so are the updates computed from them. Healthy replicas
    have no distance at all, and a distance does not disappear by itself.

    Source: Li et al. 2020, arXiv:2006.15704, section 3.2.1: replicas start equal and get the same gradients.

    Attributes:
        gap: Minimum relative distance of the checksums; ranks with different hardware may round differently below it.
    """

    gap: float = 1e-6
    patience: int = 2

    needs: ClassVar[tuple[str, ...]] = tuple(_SAID)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the checksums and the copies of this record."""
        for metric, (cause, message, advice) in _SAID.items():
            reading = reading_of(record, metric)
            apart = only(reading, reading.values > self.gap)
            if apart.sites:
                worst = float(apart.values.max())
                layers = tuple(dict.fromkeys(part for name in apart.sites for part in name.split(" = ")))
                words = message.format(
                    count=len(apart.sites), total=int(reading.present.sum()), names=some(apart.sites),
                    percent=number(100 * worst),
                )  # fmt: skip
                return (Finding(IssueType.DESYNC, Severity.HIGH, layers, worst, self.gap, words, advice, cause=cause),)
        return ()
