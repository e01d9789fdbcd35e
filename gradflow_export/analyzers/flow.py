"""GradientFlowAnalyzer: the default choice for any network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.analyzers.base import Analyzer, Blocks, InputFn, LossFn, Recording
from gradflow_export.analyzers.circular import CircularFlow, circular_flow
from gradflow_export.analyzers.objective import Player
from gradflow_export.records.step_record import Issue
from gradflow_export.rules.base import number


class GradientFlowAnalyzer(Analyzer):
    """Finds vanishing, exploding, dead, saturated, unstable and non-finite gradients within a few passes.

    The rules compare layers with each other, so no scaling of the loss hides or makes an issue. A threshold that is
    given by name is judged literally beside them::

        analyzer = GradientFlowAnalyzer(model)
        issues = analyzer.analyze(lambda: torch.randn(32, 784), lambda output: F.cross_entropy(output, targets))
        analyzer.print_summary(issues)

    Args:
        model: What is analysed. It is left exactly as it was: parameters, gradients, buffers, training flags, random
            generators.
        enable_jacobian: Also examine the Jacobian of each block; see ``analyzer.jacobian``.
        enable_vector_analysis: Also examine the field of gradients: divergence, curl, coherence; see
            ``analyzer.vector``.
        enable_rnn_analyzer: Print the dynamics of recurrent layers, which are judged in any case.
        enable_circular_flow_analyser: Report whether the weights went round in the passes, see
            ``analyzer.circular``; needs an optimizer and at least 24 passes.
        vanishing_threshold: Report parameters with a gradient norm below this; a lower number reports fewer.
        exploding_threshold: Report parameters with a gradient norm above this.
        dead_threshold: Report parameters with a greater share of zero gradient entries.
        unstable_cv_threshold: Report a coefficient of variation of the gradient norm above this. Over n passes it is
            at most the square root of n: 3 needs 10 passes.
        blocks: Names or modules whose gains are measured, from input to output; by default they are found.

    Raises:
        ArgumentError: The model has no parameters, or a threshold cannot be used.
        ArgumentTypeError: ``model`` is no module.
    """

    def __init__(
        self,
        model: nn.Module,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        enable_rnn_analyzer: bool = False,
        enable_circular_flow_analyser: bool = False,
        vanishing_threshold: float | None = None,
        exploding_threshold: float | None = None,
        dead_threshold: float | None = None,
        unstable_cv_threshold: float | None = None,
        *,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(
            model,
            enable_jacobian=enable_jacobian,
            enable_vector_analysis=enable_vector_analysis,
            blocks=blocks,
            thresholds={
                "vanishing_threshold": vanishing_threshold,
                "exploding_threshold": exploding_threshold,
                "dead_threshold": dead_threshold,
                "unstable_cv_threshold": unstable_cv_threshold,
            },
        )
        self.enable_rnn_analyzer = enable_rnn_analyzer
        self.enable_circular_flow_analyser = enable_circular_flow_analyser
        self.circular: CircularFlow | None = None

    def analyze(
        self,
        input_fn: InputFn,
        loss_fn: LossFn,
        steps: int = 20,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        players: Sequence[Player] | None = None,
    ) -> list[Issue]:
        """Make passes through the model and return what is wrong.

        Args:
            input_fn: Returns the input of one pass: one argument, a tuple of several, or a mapping of keywords.
            loss_fn: Takes the model's output and returns a scalar loss; for a game, one loss per player.
            steps: Passes: 5 is a quick check, 50 a detailed one.
            optimizer: ``None`` judges the weights as they are. With an optimizer, or one per player, every pass is a
                real training step; afterwards weights and optimizer are as they were.
            players: For a game, the modules (or their names, or parameters) that each loss trains, in order; by
                default what each optimizer owns.

        Returns:
            Issues, open ones first, worst first; empty for a healthy model.

        Raises:
            ArgumentError: ``steps`` is below 1, or what the functions return cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        recording = self._run(input_fn, loss_fn, steps, optimizer, players)
        self.circular = circular_flow(recording) if self.enable_circular_flow_analyser else None
        return recording.issues

    def _summary_lines(self, issues: Sequence[Issue], *results: Any) -> list[str]:
        lines = super()._summary_lines(issues, *([self.circular] if self.circular is not None else []), *results)
        if self.enable_rnn_analyzer and self.recording is not None:
            lines += [f"  {line}" for line in _recurrent_lines(self.recording)]
        return lines


def _recurrent_lines(recording: Recording) -> list[str]:
    """Return what the last pass reported about recurrent layers."""
    readings = [r for r in recording.records[-1].readings if r.metric.startswith("recurrent.")]
    return ["Recurrent layers: " + ("" if readings else "none were seen")] + [
        f"  {reading.metric.partition('.')[2]:<18} {site:<20} {number(value)}"
        for reading in readings
        for site, value in reading.as_dict().items()
        if value is not None
    ]
