"""Activations that have stopped responding: DEAD, SATURATION."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of, since_when
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import begun, solved


@dataclass(frozen=True, kw_only=True)
class Dead(Rule):
    """Report modules in which nearly all units output 0 for every sample, so that no gradient passes through them.

    Many zeros alone are not reported: in a healthy sparse layer every unit is active for some sample. Whether units
    are active is pooled over many steps, unless all outputs of a module are 0 in three consecutive steps and never
    were before. It began with the first of the last readings in which all outputs are 0; where some are not, in one of
    the steps that were pooled.

    Source: Lu et al. 2019, arXiv:1903.06733.

    Attributes:
        share: Minimum fraction of units of a module without any output above 0.
        pooled: Number of readings over which it is pooled at most.
    """

    share: float = 0.9
    pooled: int = 10

    needs: ClassVar[tuple[str, ...]] = ("activation.dead_share",)
    remembers: ClassVar[tuple[str, ...]] = ("activation.zero_share",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the dead shares of this record."""
        reading, zero = reading_of(record, "activation.dead_share"), history.at_sites("activation.zero_share")
        flags, pooled = zero.present & (zero.values == 1.0), zero.steps[-1 - self.pooled :][:1].tolist()
        sudden = begun(zero.steps, flags) < len(zero.steps)
        known = {site: (bool(sudden[at]), flags[:, at]) for at, site in enumerate(zero.sites)}
        found: dict[tuple[int | None, int | None, bool], dict[str, float]] = {}
        for site, value in zip(reading.sites, reading.values.tolist(), strict=True):
            at_once, zeros = known.get(site, (False, np.zeros(0, bool)))
            if at_once or value >= np.float32(self.share):
                since, before = since_when(zero.steps, zeros)
                if pooled and not zeros[-1:].any():
                    since, before = record.step, max(record.step - pooled[0] - 1, 0)
                found.setdefault((since, before, at_once), {})[site] = 1.0 if at_once else value
        return tuple(self._found(shares, *begins, tuple(shares)) for begins, shares in found.items())

    def _found(
        self, shares: Mapping[str, float], since: int | None, before: int | None, urgent: bool, layers: tuple[str, ...]
    ) -> Finding:
        first = shares[layers[0]]
        message = f"{number(100 * first)} % of the units of {layers[0]} are 0 for every sample" + (
            f"; likewise {some(layers[1:])}." if len(layers) > 1 else "."
        )
        advice = (
            f"check the bias of the layer before {layers[0]}: set it to 0 (nn.init.zeros_(layer.bias)), initialize "
            "the weights with nn.init.kaiming_normal_, lower the learning rate if the units died during training, "
            "or use nn.LeakyReLU(0.01)."
        )
        severity = Severity.HIGH if max(shares[layer] for layer in layers) >= 0.99 else Severity.MEDIUM
        return Finding(
            IssueType.DEAD, severity, layers, first, self.share, message, advice,
            since=since, before=before, urgent=urgent, about=partial(self._found, shares, since, before, urgent),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Saturated(Rule):
    """Report modules most of whose outputs lie in the flat region of the activation, while the loss is not solved.

    The output activation of a model may saturate because the predictions are correct. For it, a loss below ``small``
    counts as solved from the start.

    Source: Glorot and Bengio 2010, AISTATS.

    Attributes:
        share: Fraction of outputs with a derivative below 1 % of its maximum.
        small: Loss below which a saturated output activation is not reported.
    """

    share: float = 0.8
    small: float = 1e-3

    needs: ClassVar[tuple[str, ...]] = ("activation.saturated_share",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the saturated shares of this record."""
        reading, loss = reading_of(record, "activation.saturated_share"), history.run("loss").last
        flat = reading.values > self.share
        if 0 <= loss < self.small:
            flat[np.flatnonzero(reading.present)[-1:]] = False
        ill = only(reading, flat)
        if not ill.sites or solved(history):
            return ()
        return (self._found(dict(zip(ill.sites, ill.values.tolist(), strict=True)), ill.sites),)

    def _found(self, shares: Mapping[str, float], layers: tuple[str, ...]) -> Finding:
        first = shares[layers[0]]
        message = (
            f"{number(100 * first)} % of the outputs of {layers[0]} are saturated: the derivative there is below 1 %"
            + (f"; likewise {some(layers[1:])}." if len(layers) > 1 else ".")
        )
        advice = (
            f"reduce what enters the activation of {layers[0]}: standardize the inputs ((x - mean) / std), scale down "
            "the weights before it, or add nn.LayerNorm before the activation."
        )
        severity = Severity.HIGH if first >= 0.95 else Severity.MEDIUM
        return Finding(
            IssueType.SATURATION, severity, layers, first, self.share, message, advice,
            about=partial(self._found, shares),
        )  # fmt: skip
