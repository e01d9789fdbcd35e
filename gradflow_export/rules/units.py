"""Activations that have stopped responding: DEAD, SATURATION."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import only, reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import begun, solved


@dataclass(frozen=True, kw_only=True)
class Dead(Rule):
    """Report modules in which nearly all units output 0 for every sample, so that no gradient passes through them.

    Many zeros alone are not reported: in a healthy sparse layer every unit is active for some sample. Whether units
    are active is pooled over many steps, unless all outputs of a module are 0 in three consecutive steps and never
    were before.

    Source: Lu et al. 2019, arXiv:1903.06733.

    Attributes:
        share: Minimum fraction of units of a module without any output above 0.
    """

    share: float = 0.9

    name: ClassVar[str] = "dead"
    needs: ClassVar[tuple[str, ...]] = ("activation.dead_share",)
    remembers: ClassVar[tuple[str, ...]] = ("activation.zero_share",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the dead shares of this record."""
        reading, zero = reading_of(record, "activation.dead_share"), history.at_sites("activation.zero_share")
        off = begun(zero.steps, zero.present & (zero.values == 1.0)) < len(zero.steps)
        died = np.isin(reading.sites, [zero.sites[index] for index in np.flatnonzero(off)])
        dead = only(
            replace(reading, values=np.where(died, np.float32(1), reading.values)),
            died | (reading.values >= self.share),
        )
        if not dead.sites:
            return ()
        layers, first = dead.sites, float(dead.values[0])
        message = f"{number(100 * first)} % of the units of {layers[0]} are 0 for every sample" + (
            f"; likewise {some(layers[1:])}." if len(layers) > 1 else "."
        )
        advice = (
            f"check the bias of the layer before {layers[0]}: set it to 0 (nn.init.zeros_(layer.bias)), initialize "
            "the weights with nn.init.kaiming_normal_, lower the learning rate if the units died during training, "
            "or use nn.LeakyReLU(0.01)."
        )
        severity = Severity.HIGH if float(dead.values.max()) >= 0.99 else Severity.MEDIUM
        urgent = bool(died.any())
        return (Finding(IssueType.DEAD, severity, layers, first, self.share, message, advice, urgent=urgent),)


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

    name: ClassVar[str] = "saturated"
    needs: ClassVar[tuple[str, ...]] = ("activation.saturated_share",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the saturated shares of this record."""
        reading, loss = reading_of(record, "activation.saturated_share"), history.run("loss").last
        flat = reading.values > self.share
        measured = np.flatnonzero(reading.present)
        if measured.size and math.isfinite(loss) and 0 <= loss < self.small:
            flat[measured[-1]] = False
        ill = only(reading, flat)
        if not ill.sites or solved(history):
            return ()
        layers, first = ill.sites, float(ill.values[0])
        message = (
            f"{number(100 * first)} % of the outputs of {layers[0]} are saturated: the derivative there is below 1 %"
            + (f"; likewise {some(layers[1:])}." if len(layers) > 1 else ".")
        )
        advice = (
            f"reduce the input of {layers[0]}: standardize the inputs ((x - mean) / std), scale down the weights of "
            "the layer before it, or add nn.LayerNorm before the activation."
        )
        severity = Severity.HIGH if first >= 0.95 else Severity.MEDIUM
        return (Finding(IssueType.SATURATION, severity, layers, first, self.share, message, advice),)
