"""RecurrentAnalyzer: how far back in time a recurrent network remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.analyzers.base import Analyzer, Blocks, InputFn, LossFn, Recording
from gradflow_export.analyzers.objective import Objective
from gradflow_export.engine.build import is_compiled
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.instruments.recurrent import RecurrentInstrument
from gradflow_export.metrics.recurrent import criticality, effective_radius, memory_length
from gradflow_export.metrics.unrolled import Unrolled
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import Rule, number
from gradflow_export.rules.recurrent import COMPOSES, Subcritical, Supercritical
from gradflow_export.validation import check_number

Trajectory = npt.NDArray[np.float64]

SHORT_MEMORY = 10
"""Steps below which a memory is called short, in sequences that are longer."""
LOW_RANK = 0.1
"""Share of the state's width below which the effective rank is called low."""
_LEAST_STEPS = 4


@dataclass(frozen=True)
class LayerDynamics:
    """What the state Jacobians of one layer and direction do; medians over the passes.

    Attributes:
        spectral_radius: Greatest magnitude of an eigenvalue of the one-step Jacobian.
        lyapunov: Largest Lyapunov exponent, in nats per step.
        temporal_decay_rate: What is left of a gradient after one step back in time; 1 is no decay.
        effective_memory_length: Steps until a tenth of a gradient is left; infinite when it does not decay.
        criticality: ``"SUBCRITICAL"``, ``"CRITICAL"`` or ``"SUPERCRITICAL"``.
        spectral_norm: Greatest singular value of the one-step Jacobian.
        effective_rank: Effective rank of the one-step Jacobian; ``None`` above 512 dimensions.
        rank_share: The same divided by the width of the state.
        sequence_length: Steps of the longest sequence.
    """

    spectral_radius: float
    lyapunov: float
    temporal_decay_rate: float
    effective_memory_length: float
    criticality: str
    spectral_norm: float
    effective_rank: float | None
    rank_share: float | None
    sequence_length: int


@dataclass(frozen=True)
class RecurrentDynamics:
    """What the passes reported about recurrent layers; single numbers are those of the layer that remembers longest.

    Attributes:
        spectral_radius: Greatest magnitude of an eigenvalue of the one-step Jacobian of the state; ``None`` when no
            recurrent layer was called, as are the others.
        criticality: ``"SUBCRITICAL"``, ``"CRITICAL"`` or ``"SUPERCRITICAL"``.
        effective_memory_length: Steps until a tenth of a gradient is left; infinite when it does not decay.
        temporal_decay_rate: What is left of a gradient after one step back in time; 1 is no decay.
        layers: Each layer and direction by name.
        hidden_states: With ``track_hidden_states``: states of one more pass, by layer and direction. Shape of each:
            ``[steps, sequences, width]``.
    """

    spectral_radius: float | None = None
    criticality: str | None = None
    effective_memory_length: float | None = None
    temporal_decay_rate: float | None = None
    layers: Mapping[str, LayerDynamics] = field(default_factory=dict)
    hidden_states: Mapping[str, Trajectory] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what a summary prints."""
        if not self.layers:
            return ["recurrent layers: none seen (own recurrences and parametrized weights cannot be read)"]
        return [
            f"{name}: {layer.criticality}, spectral radius {number(layer.spectral_radius)}, gradient left per step "
            f"{number(layer.temporal_decay_rate)}, memory {number(layer.effective_memory_length)} of "
            f"{layer.sequence_length} steps"
            for name, layer in self.layers.items()
        ]


class RecurrentAnalyzer(Analyzer):
    """Finds recurrent layers that forget too fast, or whose gradients grow, beside what every analyzer finds.

    Read are ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and loops over their cells::

        analyzer = RecurrentAnalyzer(model)
        issues, dynamics = analyzer.analyze(lambda: sequences, lambda output: loss_of(output), steps=20)
        analyzer.print_summary(issues, dynamics)

    PyTorch's own initialisation lies below the band, so that most fresh networks are ``SUBCRITICAL``; training raises
    them where the task needs memory. This is reported with low severity; what no standard initialisation does, and
    gradients that grow, with a higher one.

    Args:
        model: What is analysed. It is left exactly as it was.
        enable_jacobian: Examine the Jacobians of the state; without them nothing but the base issues is found.
        enable_vector_analysis: Also examine the field of gradients.
        optimal_radius: Centre of the critical band.
        critical_band: Half the width of the critical band.
        track_hidden_states: Make one more pass and keep its states in the result.
        blocks: Names or modules whose gains are measured, from input to output; by default they are found.

    Raises:
        ArgumentError: The model has no parameters, or a number cannot be used.
        ArgumentTypeError: ``model`` is no module, or an argument is no number.
    """

    title: ClassVar[str] = "Recurrent dynamics and gradient flow"

    def __init__(
        self,
        model: nn.Module,
        enable_jacobian: bool = True,
        enable_vector_analysis: bool = False,
        optimal_radius: float = 0.9,
        critical_band: float = 0.15,
        track_hidden_states: bool = True,
        *,
        blocks: Blocks | None = None,
    ) -> None:
        # The Jacobians of blocks say nothing of time, so the switch means those of the state here.
        super().__init__(model, enable_vector_analysis=enable_vector_analysis, blocks=blocks)
        check_number("optimal_radius", optimal_radius, example=0.9)
        check_number("critical_band", critical_band, example=0.15)
        self.state_jacobian = enable_jacobian
        self.optimal_radius, self.critical_band = float(optimal_radius), float(critical_band)
        self.track_hidden_states = track_hidden_states
        self._states: Mapping[str, Trajectory] = MappingProxyType({})

    def analyze(
        self,
        input_fn: InputFn,
        loss_fn: LossFn,
        steps: int = 20,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> tuple[list[Issue], RecurrentDynamics]:
        """Make passes through the model and return what is wrong, and how its recurrent layers behave in time.

        Args:
            input_fn: Returns the input of one pass: one argument, a tuple of several, or a mapping of keywords.
            loss_fn: Takes the model's output and returns a scalar loss.
            steps: Passes: 5 is a quick check, 50 a detailed one.
            optimizer: ``None`` judges the weights as they are. With an optimizer every pass is a real training step;
                afterwards weights and optimizer are as they were.

        Returns:
            Issues, open ones first, worst first, and the dynamics.

        Raises:
            ArgumentError: ``steps`` is below 1, or what the functions return cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        self._states = MappingProxyType({})
        recording = self._run(input_fn, loss_fn, steps, optimizer)
        if not self.state_jacobian:
            return recording.issues, RecurrentDynamics(hidden_states=self._states)
        layers = _layers(recording, self.optimal_radius, self.critical_band)
        recording.found.extend(self._judged(layers, recording))
        if not layers:
            return recording.issues, RecurrentDynamics(hidden_states=self._states)
        best = max(layers.values(), key=lambda layer: layer.temporal_decay_rate)
        dynamics = RecurrentDynamics(
            best.spectral_radius,
            best.criticality,
            best.effective_memory_length,
            best.temporal_decay_rate,
            MappingProxyType(layers),
            self._states,
        )
        return recording.issues, dynamics

    def _rules(self) -> tuple[Rule, ...]:
        rules = super()._rules()
        if self.state_jacobian:
            return rules
        return tuple(rule for rule in rules if not isinstance(rule, (Subcritical, Supercritical)))

    def _judged(self, layers: Mapping[str, LayerDynamics], recording: Recording) -> list[Issue]:
        """Return what lies outside the band, remembers shortly or has a low rank, as far as no rule has reported it."""
        known = {(issue.issue_type, layer) for issue in recording.issues for layer in issue.layers}
        found = [
            issue for site, layer in layers.items() for issue in (self._outside(site, layer), _low_rank(site, layer))
        ]
        return [issue for issue in found if issue is not None and (issue.issue_type, issue.layer) not in known]

    def _outside(self, site: str, layer: LayerDynamics) -> Issue | None:
        radius = _judged_radius(layer)
        low, high = self.optimal_radius - self.critical_band, self.optimal_radius + self.critical_band
        said = f"{site} keeps {number(radius)} of a gradient per step back in time"
        if layer.criticality == "SUPERCRITICAL":
            advice = "rescale weight_hh (nn.init.orthogonal_), clip gradients, or shorten the sequences."
            kind, threshold = IssueType.RECURRENT_SUPERCRITICAL, high
            message = f"{said}, above {number(high)}: states and gradients grow."
        elif layer.sequence_length < _LEAST_STEPS:
            return None
        elif layer.criticality == "SUBCRITICAL" or layer.effective_memory_length < min(
            SHORT_MEMORY, layer.sequence_length
        ):
            advice = (
                "if the task needs earlier steps, set the forget-gate bias of an LSTM to 1, or orthogonal weight_hh "
                "(nn.init.orthogonal_); if not, leave it."
            )
            kind, threshold = IssueType.RECURRENT_SUBCRITICAL, low
            message = (
                f"{said}: a tenth is left after {number(layer.effective_memory_length)} of {layer.sequence_length} "
                "steps."
            )
        else:
            return None
        return Issue(kind, Severity.LOW, site, 1, radius, threshold, message, advice)

    def _examine(self, objective: Objective, recording: Recording) -> None:
        super()._examine(objective, recording)
        if not self.track_hidden_states:
            return
        reader = RecurrentInstrument(ModuleCalls(enabled=not is_compiled(self.model)), unwrap(self.model))
        with reader.attach():
            reader.arm(on=True)
            objective.evaluate(objective.input_fn())
            kept: dict[str, Trajectory] = {}
            for sample in reader.drain():
                unrolled = getattr(sample, "analyse", None)
                if isinstance(unrolled, Unrolled):
                    groups = unrolled.trajectories(torch.as_tensor(sample.values).cpu().numpy())
                    kept |= {site: states[0] for site, states in groups.items() if states}
        self._states = MappingProxyType(kept)


def _judged_radius(layer: LayerDynamics) -> float:
    """Return what composes over time where there is enough of it, else the spectral radius."""
    return layer.temporal_decay_rate if layer.sequence_length >= COMPOSES else layer.spectral_radius


def _layers(recording: Recording, optimal: float, band: float) -> dict[str, LayerDynamics]:
    """Return the dynamics of each layer whose Jacobians were finite in some pass."""
    values: dict[str, dict[str, list[float]]] = {}
    for record in recording.records:
        for reading in record.readings:
            if reading.metric.startswith("recurrent."):
                for site, value in reading.as_dict().items():
                    if value is not None and not math.isnan(value):
                        by_name = values.setdefault(site, {})
                        by_name.setdefault(reading.metric.removeprefix("recurrent."), []).append(value)
    out: dict[str, LayerDynamics] = {}
    for site, seen in values.items():
        if not {"spectral_radius", "lyapunov", "length"} <= seen.keys():
            continue
        radius, exponent, length = (median(seen[name]) for name in ("spectral_radius", "lyapunov", "length"))
        decay = effective_radius(exponent)
        out[site] = LayerDynamics(
            radius,
            exponent,
            decay,
            memory_length(exponent),
            criticality(decay if length >= COMPOSES else radius, optimal, band),
            median(seen["spectral_norm"]),
            median(seen["effective_rank"]) if "effective_rank" in seen else None,
            median(seen["rank_share"]) if "rank_share" in seen else None,
            int(length),
        )
    return out


def _low_rank(site: str, layer: LayerDynamics) -> Issue | None:
    if layer.rank_share is None or layer.effective_rank is None or layer.rank_share >= LOW_RANK:
        return None
    return Issue(
        IssueType.RANK_COLLAPSE,
        Severity.MEDIUM,
        site,
        1,
        layer.rank_share,
        LOW_RANK,
        f"{site} passes on {number(layer.effective_rank)} directions of its state, "
        f"{number(100 * layer.rank_share)} % of its width.",
        "initialise weight_hh with nn.init.orthogonal_, and look for saturated gates: most of the state is not used.",
    )
