"""Layers that are one: CAPACITY."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import layers_of, seen
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class RepeatedLayer(Rule):
    """Find a layer that stands several times in one container, as by ``[layer] * n``: n layers with the weights of one.

    It takes calls of which each is given what the one before made, or all the same tensor. A layer that is registered
    once and called several times, or registered elsewhere besides, is shared on purpose.
    """

    patience: int = 2
    heal: int = 100

    name: ClassVar[str] = "repeated-layer"
    evidence: ClassVar[tuple[str, ...]] = ("layer.repeated",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the calls of this record."""
        del history
        layers = layers_of(record, "layer.repeated")
        if not layers:
            return ()
        count = max(seen(record, "layer.repeated", site) or 0.0 for site in layers)
        return (
            Finding(
                IssueType.CAPACITY,
                Severity.MEDIUM,
                layers,
                count,
                1.0,
                f"{some(layers)} stands {number(count)} times in its container: all are one layer with one set of "
                "weights.",
                "make each anew, nn.ModuleList([Block() for _ in range(n)]) in place of [Block()] * n; where one is "
                "meant to be shared, register it once and call it n times, or say so: watch(ignore=[('CAPACITY', "
                f"{layers[0]!r})]).",
                cause="repeated layer",
            ),
        )
