"""Recurrent layers that forget at once, or whose gradients grow over time: RECURRENT_SUBCRITICAL, _SUPERCRITICAL."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.evidence import Wiring
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.evidence import reading_of
from gradflow_export.rules.history import History
from gradflow_export.rules.sampled import likely
from gradflow_export.rules.signals import lately, owner, solved, stuck

COMPOSES = 8
"""Steps from which on the Lyapunov exponent, which composes over time, is judged instead of the spectral radius."""

_LAYER = re.compile(r"\.l\d+(_reverse)?$")


@dataclass(frozen=True)
class Memory:
    """What one layer's state keeps of a gradient.

    Attributes:
        site: Its name.
        radius: Factor per step back in time.
        length: Steps of the sequences.
    """

    site: str
    radius: float
    length: float

    @property
    def module(self) -> str:
        """The module the layer belongs to."""
        return _LAYER.sub("", self.site)

    @property
    def steps(self) -> float:
        """Steps until a tenth of a gradient is left."""
        if self.radius <= 0:
            return 0.0
        return math.inf if self.radius >= 1 else math.log(0.1) / math.log(self.radius)

    @property
    def log_growth(self) -> float:
        """Logarithm of what a gradient is multiplied by on its way through the whole sequence."""
        return self.length * math.log(self.radius) if self.radius > 0 else -math.inf


def memories(record: StepRecord) -> tuple[tuple[Memory, ...], ...]:
    """Return the least that each recurrent layer may keep, what was read of it, and the most.

    Layers without finite values are left out.
    """
    out = []
    for site, steps in reading_of(record, "recurrent.length").as_dict().items():
        metric = "recurrent.decay" if steps is not None and steps >= COMPOSES else "recurrent.spectral_radius"
        ends = likely(record, metric, site)
        if steps is not None and math.isfinite(ends[1]) and math.isfinite(steps) and ends[1] >= 0:
            out.append(tuple(Memory(site, radius, steps) for radius in ends))
    return tuple(out)


@dataclass(frozen=True, kw_only=True)
class Subcritical(Rule):
    """Report recurrent modules whose state decays long before their sequences end, if this may limit learning.

    Standard initializations start below the critical band around 0.9, in which memory is long: at 0.5 to 0.75 with
    PyTorch's defaults. Training raises the value if the task needs memory. A module is therefore reported in two cases
    only. Either each of its layers keeps less than ``forgets``, which no standard initialization does, and the loss was
    never halved; a task that needs no memory is learned anyway. Or all layers are below ``band`` and the loss has not
    changed over hundreds of steps; this is a hint of low severity. One layer with a long memory is enough for the
    module. A frozen module is what it was trained to be.

    Source: Pascanu et al. 2013, arXiv:1211.5063; Engelken et al. 2023, arXiv:2006.02427.

    Attributes:
        forgets: Factor per time step below which the state has no useful memory: 0.4 leaves a tenth after 2.5 steps.
        band: Lower edge of the critical band.
        least: Minimum sequence length; shorter sequences need no memory.
        learned: Fraction of its first value below which a loss shows that memory is not lacking.
    """

    forgets: float = 0.4
    band: float = 0.75
    least: int = 4
    learned: float = 0.5

    needs: ClassVar[tuple[str, ...]] = ("recurrent.length",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", "connection.state")
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge each recurrent module by the layer of it that remembers best."""
        trained, frozen = (
            {owner(site) for site in lately(history, *bits)} for bits in ((Wiring.TRAINABLE, 0), (0, Wiring.TRAINABLE))
        )
        modules: dict[str, list[tuple[Memory, ...]]] = {}
        for memory in memories(record):
            modules.setdefault(memory[1].module, []).append(memory)
        findings = []
        for layers in modules.values():
            _, best, most = max(layers, key=lambda memory: memory[2].radius)
            if best.length < self.least or most.steps >= best.length or best.module in frozen - trained:
                continue
            if most.radius < self.forgets:
                if not 0 <= history.run("loss").low < self.learned * history.run("loss").first:
                    severity = Severity.HIGH if 2 * best.radius < self.forgets else Severity.MEDIUM
                    findings.append(self._finding(layers, best, severity, self.forgets, ""))
            elif most.radius < self.band and stuck(history):
                also = " and the loss has not fallen by a tenth since the first steps"
                findings.append(self._finding(layers, best, Severity.LOW, self.band, also))
        return tuple(findings)

    def _finding(
        self, layers: list[tuple[Memory, ...]], best: Memory, severity: Severity, threshold: float, also: str
    ) -> Finding:
        sites = tuple(memory[1].site for memory in layers)
        message = (
            f"the state of {some(sites)} keeps {number(100 * best.radius)} % of a gradient per step back in time: a "
            f"tenth is left after {number(best.steps)} of {number(best.length)} time steps{also}."
        )
        advice = (
            f"lengthen the memory of {best.module}: nn.init.orthogonal_ on weight_hh of an RNN, 1 as the "
            "forget-gate bias of an LSTM (bias_ih[hidden:2 * hidden]), 1 as the update-gate bias of a GRU (the "
            "same rows); standardize the inputs if they saturate tanh. If the task does not need earlier time "
            "steps, ignore this."
        )
        return Finding(
            IssueType.RECURRENT_SUBCRITICAL, severity, sites, best.radius, threshold, message, advice,
            follows_from=(IssueType.VANISHING,) if severity is Severity.LOW else (),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Supercritical(Rule):
    """Report recurrent layers that amplify the gradient on its way through the sequence.

    A factor slightly above 1 is healthy (an LSTM initialized for long memory starts at 1.05) and harmless over few
    steps, so the growth over the whole sequence is judged. To store a bit, a layer must latch: it separates neighboring
    states between its two stable states, and its factor rises above 1 while the loss falls. Growth up to ``harm`` is
    therefore not reported once the loss has halved, and no growth is reported once the loss is down to a tenth.

    Source: Pascanu et al. 2013, arXiv:1211.5063; Bengio, Simard and Frasconi 1994, IEEE Trans. Neural Networks 5,
    section III, on latching; Sompolinsky, Crisanti and Sommers 1988.

    Attributes:
        band: Upper edge of the critical band.
        growth: Minimum factor over the whole sequence.
        harm: Factor up to which a falling loss shows that there is no harm; also the gain over depth from which on a
            network is called exploding.
        learned: Fraction of its first value below which the loss shows that.
    """

    band: float = 1.05
    growth: float = 10.0
    harm: float = 100.0
    learned: float = 0.5

    needs: ClassVar[tuple[str, ...]] = ("recurrent.length",)
    remembers: ClassVar[tuple[str, ...]] = ("loss",)
    by_layer: ClassVar[bool] = True

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge each layer and direction."""
        least = self.growth if not solved(history, self.learned) else math.inf if solved(history) else self.harm
        judged = (each for each in memories(record) if each[0].radius > self.band)
        found = [memory for low, memory, _ in judged if low.log_growth > math.log(least)]
        if not found:
            return ()
        worst = max(found, key=lambda memory: memory.log_growth)
        decades = worst.log_growth / math.log(10)
        severity = Severity.CRITICAL if decades > 6 else Severity.HIGH if decades > 2 else Severity.MEDIUM
        sites = tuple(memory.site for memory in found)
        message = (
            f"the state of {worst.site} multiplies a gradient by {number(worst.radius)} per step back in time, 10 "
            f"to the power of {number(decades)} over {number(worst.length)} time steps."
        )
        advice = (
            f"reduce the recurrent weights of {worst.site}: nn.init.orthogonal_ on weight_hh, or divide it by "
            f"{number(worst.radius)}; use tanh or an LSTM instead of a ReLU recurrence; until then clip with "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
        )
        return (Finding(IssueType.RECURRENT_SUPERCRITICAL, severity, sites, worst.radius, self.band, message, advice),)
