"""RLPolicyAnalyzer: whether a policy explores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.analyzers.base import Analyzer, Blocks, InputFn, LossFn, Recording
from gradflow_export.analyzers.objective import Losses
from gradflow_export.engine.training_loop import TrainingLoop
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import number
from gradflow_export.rules.policy import adequacy, collapse_risk
from gradflow_export.validation import check_number

Values = npt.NDArray[np.floating]
ActionExtractor = Callable[[Any], Sequence[Any]]
_PARTS = ("logits", "std", "mean", "value")


@dataclass(frozen=True)
class PolicyStats:
    """What the passes reported about a policy; ``None`` where nothing was extracted.

    Attributes:
        discrete_entropy_normalized: Mean over the passes of the entropy of discrete actions over that of a uniform
            choice, in [0, 1]; higher is more exploration.
        continuous_std_mean: Mean over the passes of the standard deviation of continuous actions.
        entropy_collapse_risk: ``"LOW"``, ``"MEDIUM"`` or ``"HIGH"``.
        exploration_adequacy: ``"TOO_LOW"``, ``"ADEQUATE"`` or ``"TOO_HIGH"``.
        continuous_entropy: Mean over the passes of the entropy per continuous action, in nats.
        entropies: Normalised entropy of each pass.
        stds: Mean standard deviation of each pass.
        distributions: With ``track_distributions``: ``logits``, ``std``, ``mean`` and ``value`` of the last pass, as
            far as they were extracted.
    """

    discrete_entropy_normalized: float | None = None
    continuous_std_mean: float | None = None
    entropy_collapse_risk: str | None = None
    exploration_adequacy: str | None = None
    continuous_entropy: float | None = None
    entropies: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    distributions: Mapping[str, Values] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what a summary prints."""
        if self.exploration_adequacy is None:
            return ["policy: no distribution seen; pass action_extractor=lambda output: (logits, std, mean, value)"]
        parts = []
        if self.discrete_entropy_normalized is not None:
            parts.append(f"entropy {number(self.discrete_entropy_normalized)} (1 is uniform)")
        if self.continuous_std_mean is not None:
            parts.append(f"standard deviation {number(self.continuous_std_mean)}")
        risk = f"collapse risk {self.entropy_collapse_risk}, exploration {self.exploration_adequacy}"
        return [f"policy: {', '.join(parts)}; {risk}"]


class RLPolicyAnalyzer(Analyzer):
    """Finds policies that stopped exploring, or explore at random, beside what every analyzer finds.

    What the model's output means is said by ``action_extractor``::

        analyzer = RLPolicyAnalyzer(model)
        issues, stats = analyzer.analyze(
            lambda: states, lambda output: loss_of(output), steps=20,
            action_extractor=lambda output: (output.logits, None, None, output.value),
        )
        analyzer.print_summary(issues, stats)

    Args:
        model: What is analysed. It is left exactly as it was.
        enable_jacobian: Also examine the Jacobian of each block.
        enable_vector_analysis: Also examine the field of gradients.
        min_entropy_threshold: Least normalised entropy of discrete actions.
        min_std_threshold: Least standard deviation of continuous actions.
        max_std_threshold: Greatest standard deviation of continuous actions.
        track_distributions: Keep what was extracted in the last pass in the result.
        blocks: Names or modules whose gains are measured, from input to output; by default they are found.

    Raises:
        ArgumentError: The model has no parameters, or a threshold cannot be used.
        ArgumentTypeError: ``model`` is no module, or a threshold is no number.
    """

    title: ClassVar[str] = "Policy and gradient flow"

    def __init__(
        self,
        model: nn.Module,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        min_entropy_threshold: float = 0.5,
        min_std_threshold: float = 0.1,
        max_std_threshold: float = 2.0,
        track_distributions: bool = True,
        *,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(
            model, enable_jacobian=enable_jacobian, enable_vector_analysis=enable_vector_analysis, blocks=blocks
        )
        for name, value in (
            ("min_entropy_threshold", min_entropy_threshold),
            ("min_std_threshold", min_std_threshold),
            ("max_std_threshold", max_std_threshold),
        ):
            check_number(name, value, example=0.5, way_out="0 switches a minimum off")
        self.min_entropy_threshold = float(min_entropy_threshold)
        self.min_std_threshold, self.max_std_threshold = float(min_std_threshold), float(max_std_threshold)
        self.track_distributions = track_distributions
        self._extract: ActionExtractor | None = None
        self._last: dict[str, Tensor] = {}

    def analyze(
        self,
        input_fn: InputFn,
        loss_fn: LossFn,
        steps: int = 20,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        action_extractor: ActionExtractor | None = None,
    ) -> tuple[list[Issue], PolicyStats]:
        """Make passes through the model and return what is wrong, and how its policy explores.

        Args:
            input_fn: Returns the input of one pass: one argument, a tuple of several, or a mapping of keywords.
            loss_fn: Takes the model's output and returns a scalar loss.
            steps: Passes: 5 is a quick check, 50 a detailed one.
            optimizer: ``None`` judges the weights as they are. With an optimizer every pass is a real training step;
                afterwards weights and optimizer are as they were.
            action_extractor: Takes the model's output and returns ``(logits, std, mean, value)``, ``None`` for what
                there is not. Without it nothing is said of the policy.

        Returns:
            Issues, open ones first, worst first, and the statistics.

        Raises:
            ArgumentError: ``steps`` is below 1, or what the functions return cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        if action_extractor is not None and not callable(action_extractor):
            raise ArgumentTypeError(
                f"action_extractor must be a function, got {type(action_extractor).__name__}; for example "
                "action_extractor=lambda output: (output, None, None, None)."
            )
        self._extract, self._last = action_extractor, {}
        recording = self._run(input_fn, loss_fn, steps, optimizer)
        stats = self._statistics(recording)
        recording.found.extend(self._judged(stats, recording))
        return recording.issues, stats

    def _observe(self, loop: TrainingLoop, output: Any, losses: Losses) -> None:
        super()._observe(loop, output, losses)
        if self._extract is None:
            return
        parts = self._extract(output)
        if not isinstance(parts, (tuple, list)) or len(parts) != len(_PARTS):
            raise ArgumentError(
                f"action_extractor must return (logits, std, mean, value), got {type(parts).__name__}"
                + (f" of {len(parts)}" if isinstance(parts, (tuple, list)) else "")
                + "; return None for what there is not."
            )
        found = {name: part for name, part in zip(_PARTS, parts, strict=True) if isinstance(part, Tensor)}
        loop.instruments.hand("policy", {name: found[name] for name in ("logits", "std") if name in found})
        self._last = {name: part.detach() for name, part in found.items()} if self.track_distributions else {}

    def _statistics(self, recording: Recording) -> PolicyStats:
        entropies, stds = recording.values("policy.entropy"), recording.values("policy.std")
        if not entropies and not stds:
            return PolicyStats()
        series = np.asarray(entropies, dtype=np.float64), np.asarray(stds, dtype=np.float64)
        kept = {name: part.cpu().numpy().copy() for name, part in self._last.items()}
        return PolicyStats(
            _mean(entropies),
            _mean(stds),
            collapse_risk(*series, self.min_entropy_threshold, self.min_std_threshold),
            adequacy(*series, self.min_entropy_threshold, self.min_std_threshold, self.max_std_threshold),
            _mean(recording.values("policy.gaussian_entropy")),
            tuple(entropies),
            tuple(stds),
            MappingProxyType(kept),
        )

    def _judged(self, stats: PolicyStats, recording: Recording) -> list[Issue]:
        """Return what the thresholds say, as far as no rule has reported it."""
        known = {issue.issue_type for issue in recording.issues}
        found: list[Issue] = []
        if stats.entropy_collapse_risk in {"MEDIUM", "HIGH"} and IssueType.POLICY_COLLAPSE not in known:
            severity = Severity.HIGH if stats.entropy_collapse_risk == "HIGH" else Severity.MEDIUM
            by_entropy = bool(stats.entropies) and not (stats.stds and stats.stds[-1] < self.min_std_threshold)
            value = stats.entropies[-1] if by_entropy else stats.stds[-1]
            what = "normalised entropy" if by_entropy else "standard deviation"
            found.append(
                Issue(
                    IssueType.POLICY_COLLAPSE, severity, _head(recording, "entropy" if by_entropy else "std"), 1, value,
                    self.min_entropy_threshold if by_entropy else self.min_std_threshold,
                    f"the {what} of the policy is {number(value)}: collapse risk {stats.entropy_collapse_risk}.",
                    "raise the entropy bonus, start the last layer with small weights (nn.init.orthogonal_(w, 0.01)), "
                    "or bound log_std from below; a policy that has learned what to do may be this sure.",
                )
            )  # fmt: skip
        if stats.exploration_adequacy == "TOO_HIGH" and IssueType.EXCESS_EXPLORATION not in known:
            found.append(
                Issue(
                    IssueType.EXCESS_EXPLORATION, Severity.MEDIUM, _head(recording, "std"), 1, stats.stds[-1],
                    self.max_std_threshold, f"the standard deviation of the actions is {number(stats.stds[-1])}.",
                    "start log_std at or below 0, bound it from above, or lower the entropy bonus.",
                )
            )  # fmt: skip
        return found


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _head(recording: Recording, name: str) -> str:
    """Return the layer that the last pass's distribution came from, ``""`` when it is not known."""
    reading = recording.records[-1].get(f"policy.head_{name}")
    return "" if reading is None else reading.sites[0]
