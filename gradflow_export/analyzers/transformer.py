"""TransformerAnalyzer: attention entropy, sparsity, head diversity and rank collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.analyzers.base import Analyzer, Blocks, InputFn, LossFn, Recording
from gradflow_export.analyzers.objective import Objective
from gradflow_export.engine.build import is_compiled
from gradflow_export.hooks.discover import unwrap
from gradflow_export.instruments.attention import AttentionInstrument
from gradflow_export.records.step_record import Issue, Reading
from gradflow_export.rules.attention import FixedEntropy, layer_of
from gradflow_export.rules.base import Rule, number
from gradflow_export.rules.seed import FixedDiversity
from gradflow_export.validation import check_number

Weights = npt.NDArray[np.floating]


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer, averaged over the passes.

    Attributes:
        entropy: Mean over heads of the normalised entropy, in [0, 1]; 1 is uniform.
        head_entropies: The same of each head.
        sparsity: Share of weights below a tenth of the uniform weight.
        diversity: 0 for heads that are all alike, about 1 for unrelated ones; ``None`` for one head, or uniform ones.
        max_logit: Greatest magnitude of a logit in any pass.
        sink: Mean weight of the one key that receives most.
    """

    entropy: float | None
    head_entropies: tuple[float | None, ...]
    sparsity: float | None
    diversity: float | None
    max_logit: float | None
    sink: float | None


@dataclass(frozen=True)
class AttentionStats:
    """What the passes reported about attention; ``None`` where no attention was seen.

    Attributes:
        attention_entropy_mean: Mean over layers and heads of the normalised entropy, in [0, 1]; 1 is uniform.
        attention_sparsity: Mean over layers of the share of weights below a tenth of the uniform weight.
        head_diversity: Mean over layers of 1 - the mean cosine between heads, in [0, 2).
        rank_collapse_risk: ``"HIGH"`` when less than 5 % of the last block's output, and less than a fifth of what
            entered, tells its tokens apart; ``"MEDIUM"`` below 20 %; else ``"LOW"``.
        attention_entropy_nats: Mean over layers of the entropy in nats.
        rank_residuals: What tells tokens apart after each block with attention, in the last pass.
        layers: Each layer by name.
        attention_weights: With ``track_attention_weights``: weights of one sample of one pass by layer. Shape of each:
            ``[heads, queries, keys]``.
    """

    attention_entropy_mean: float | None
    attention_sparsity: float | None
    head_diversity: float | None
    rank_collapse_risk: str | None
    attention_entropy_nats: float | None = None
    rank_residuals: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, LayerAttention] = field(default_factory=dict)
    attention_weights: Mapping[str, Weights] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what a summary prints."""
        if self.attention_entropy_mean is None:
            return ["attention: none seen (FlexAttention, compiled models and custom kernels cannot be read)"]
        entropy, sparsity = _shown(self.attention_entropy_mean), _shown(self.attention_sparsity)
        out = [
            f"attention entropy {entropy} (1 is uniform), sparsity {sparsity}",
            f"head diversity {_shown(self.head_diversity)}, rank collapse risk {self.rank_collapse_risk or 'not read'}",
        ]
        for name, layer in self.layers.items():
            out.append(
                f"  {name}: entropy {_shown(layer.entropy)}, sparsity {_shown(layer.sparsity)}, diversity "
                f"{_shown(layer.diversity)}, largest logit {_shown(layer.max_logit)}"
            )
        return out


class TransformerAnalyzer(Analyzer):
    """Finds collapsed attention, redundant heads and rank collapse, beside what every analyzer finds.

    Attention is found by itself, however the model computes it, but for FlexAttention and other custom kernels::

        analyzer = TransformerAnalyzer(model)
        issues, attn_stats = analyzer.analyze(lambda: tokens, lambda output: loss_of(output), steps=20)
        analyzer.print_summary(issues, attn_stats)

    Args:
        model: What is analysed. It is left exactly as it was.
        enable_jacobian: Also examine the Jacobian of each block.
        enable_vector_analysis: Also examine the field of gradients.
        min_entropy_threshold: Report layers whose mean normalised entropy lies below this, such as 0.5. ``None`` leaves
            it to the rules, which tell attention that was learned from attention that collapsed.
        min_diversity_threshold: Report layers whose head diversity lies below this, such as 0.3; ``None`` as above.
        track_attention_weights: Make one more pass and keep its attention weights in the result.
        blocks: Names or modules whose gains are measured, from input to output; by default they are found.

    Raises:
        ArgumentError: The model has no parameters, or a threshold cannot be used.
        ArgumentTypeError: ``model`` is no module, or a threshold is no number.
    """

    title = "Attention and gradient flow"

    def __init__(
        self,
        model: nn.Module,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        min_entropy_threshold: float | None = None,
        min_diversity_threshold: float | None = None,
        track_attention_weights: bool = True,
        *,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(
            model, enable_jacobian=enable_jacobian, enable_vector_analysis=enable_vector_analysis, blocks=blocks
        )
        off = "None switches it off"
        if min_entropy_threshold is not None:
            check_number("min_entropy_threshold", min_entropy_threshold, example=0.5, most=1.0, way_out=off)
        if min_diversity_threshold is not None:
            check_number("min_diversity_threshold", min_diversity_threshold, example=0.3, most=2.0, way_out=off)
        self.min_entropy_threshold = min_entropy_threshold
        self.min_diversity_threshold = min_diversity_threshold
        self.track_attention_weights = track_attention_weights
        self._weights: Mapping[str, Weights] = MappingProxyType({})

    def analyze(
        self,
        input_fn: InputFn,
        loss_fn: LossFn,
        steps: int = 20,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> tuple[list[Issue], AttentionStats]:
        """Make passes through the model and return what is wrong, and what its attention does.

        Args:
            input_fn: Returns the input of one pass: one argument, a tuple of several, or a mapping of keywords.
            loss_fn: Takes the model's output and returns a scalar loss.
            steps: Passes: 5 is a quick check, 50 a detailed one.
            optimizer: ``None`` judges the weights as they are. With an optimizer every pass is a real training step;
                afterwards weights and optimizer are as they were.

        Returns:
            Issues, open ones first, worst first, and the statistics.

        Raises:
            ArgumentError: ``steps`` is below 1, or what the functions return cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        self._weights = MappingProxyType({})
        recording = self._run(input_fn, loss_fn, steps, optimizer)
        return recording.issues, _statistics(recording, self._weights)

    def _rules(self) -> tuple[Rule, ...]:
        rules = super()._rules()
        if self.min_entropy_threshold is not None:
            rules = (*rules, FixedEntropy(threshold=self.min_entropy_threshold))
        if self.min_diversity_threshold is not None:
            rules = (*rules, FixedDiversity(threshold=self.min_diversity_threshold))
        return rules

    def _examine(self, objective: Objective, recording: Recording) -> None:
        super()._examine(objective, recording)
        if not self.track_attention_weights:
            return
        reader = AttentionInstrument(unwrap(self.model), enabled=not is_compiled(self.model), keep_weights=True)
        with reader.attach():
            reader.arm(on=True)
            objective.evaluate(objective.input_fn())
            self._weights = MappingProxyType({site: kept.cpu().numpy() for site, kept in reader.weights.items()})


def _statistics(recording: Recording, weights: Mapping[str, Weights]) -> AttentionStats:
    entropies, nats = _means(recording, "attention.entropy"), _means(recording, "attention.entropy_nats")
    sparsity, diversity = _means(recording, "attention.sparsity"), _means(recording, "attention.diversity")
    sinks, logits = _means(recording, "attention.sink"), _greatest(recording, "attention.max_logit")
    layers = {}
    for name in sparsity:
        heads = [value for site, value in entropies.items() if layer_of(site) == name]
        layers[name] = LayerAttention(
            _mean(heads), tuple(heads), sparsity[name], diversity.get(name), logits.get(name), sinks.get(name)
        )
    residuals, entered = _last(recording, "block.rank_residual"), _last(recording, "block.input_residual")
    return AttentionStats(
        _mean(list(entropies.values())),
        _mean(list(sparsity.values())),
        _mean(list(diversity.values())),
        _risk(list(entered.values()), list(residuals.values())),
        _mean(list(nats.values())),
        MappingProxyType(residuals),
        MappingProxyType(layers),
        weights,
    )


def _risk(entered: Sequence[float], left: Sequence[float]) -> str | None:
    """Grade what tells tokens apart before and after the last block against what entered (Dong et al. 2021)."""
    if not entered or not left:
        return None
    # A module without a skip connection of its own may have one around it: what enters the last block tells.
    last = max(entered[-1], left[-1]) if len(left) > 1 else left[-1]
    if last < 0.05 and last < entered[0] / 5:
        return "HIGH"
    return "MEDIUM" if last < 0.2 and last < entered[0] else "LOW"


def _readings(recording: Recording, metric: str) -> list[Reading]:
    return [reading for record in recording.records if (reading := record.get(metric)) is not None]


def _means(recording: Recording, metric: str) -> dict[str, float | None]:
    """Return the mean over the passes at each site, ``None`` where nothing arrived in any."""
    values: dict[str, list[float | None]] = {}
    for reading in _readings(recording, metric):
        for site, value in reading.as_dict().items():
            values.setdefault(site, []).append(value)
    return {site: _mean(seen) for site, seen in values.items()}


def _greatest(recording: Recording, metric: str) -> dict[str, float | None]:
    greatest: dict[str, float | None] = {}
    for reading in _readings(recording, metric):
        for site, value in reading.as_dict().items():
            before = greatest.get(site)
            greatest[site] = value if before is None or (value is not None and not value <= before) else before
    return greatest


def _last(recording: Recording, metric: str) -> dict[str, float]:
    """Return the newest finite values of a metric by site."""
    for reading in reversed(_readings(recording, metric)):
        return {site: value for site, value in reading.as_dict().items() if value is not None and math.isfinite(value)}
    return {}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _shown(value: float | None) -> str:
    return "undefined" if value is None else number(value)
