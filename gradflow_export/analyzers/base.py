"""What all analyzers share: a few passes through the user's model, read by the instruments and judged by the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.analyzers.jacobian import JacobianFlow, examine_blocks
from gradflow_export.analyzers.objective import (
    Losses,
    Objective,
    Player,
    as_optimizers,
    named_players,
    needs_closure,
)
from gradflow_export.analyzers.preserve import preserved
from gradflow_export.analyzers.vector import VectorFlow, examine_field
from gradflow_export.config import Settings, make_settings
from gradflow_export.engine.assemble import Assembler
from gradflow_export.engine.build import describe, is_compiled, make_loop
from gradflow_export.engine.isolation import Guard
from gradflow_export.engine.training_loop import TrainingLoop
from gradflow_export.engine.transfer import Bundle
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.exporter import suspended
from gradflow_export.hooks.discover import find_blocks, named_blocks, site_name, unwrap
from gradflow_export.profiles import profile
from gradflow_export.records.step_record import Issue, Reading, StepRecord
from gradflow_export.report.summary import RunSummary
from gradflow_export.report.text import issue_lines
from gradflow_export.rules.base import Rule
from gradflow_export.rules.judge import Judge
from gradflow_export.schedule import INTERVALS
from gradflow_export.validation import check_model

InputFn = Callable[[], Any]
LossFn = Callable[[Any], Any]
Blocks = Iterable[str | nn.Module]

_ABOUT_UPDATES = (
    "parameter.update_norm", "parameter.update_norm_error", "parameter.update_ratio",
    "parameter.update_ratio_error", "parameter.changed", "update.total_norm", "update.norm_error", "update.ratio",
    "update.ratio_error",
)  # fmt: skip
_ABOUT_THE_PROCESS = "runtime."
_DENSE: Mapping[str, int] = MappingProxyType({**dict.fromkeys(INTERVALS, 1), "histograms": 10**9})
"""Everything in every pass, but histograms, which no rule reads."""


@dataclass
class Recording:
    """What the passes of one analysis left: records, judged one by one on the calling thread.

    Attributes:
        judge: Asked about every record.
        still: Whether the weights rest, so that there are no updates to speak of.
        summary: Statistics and issues.
        records: One per pass.
        found: Issues that a closer look found.
    """

    judge: Judge
    still: bool
    summary: RunSummary = field(default_factory=RunSummary)
    records: list[StepRecord] = field(default_factory=list)
    found: list[Issue] = field(default_factory=list)
    _assembler: Assembler = field(default_factory=Assembler)

    @property
    def issues(self) -> list[Issue]:
        """Issues as they stand now: open ones first, worst first."""
        return sorted([*self.summary.issues, *self.found], key=lambda i: (not i.open, -i.severity, i.step))

    def take(self, bundle: Bundle) -> None:
        """Turn what the instruments gave out in one pass into a record and judge it."""
        readings, _, evidence = self._assembler.assemble(bundle)
        kept = [r for r in readings if not self._meaningless(r)]
        record = StepRecord(bundle.step, bundle.wall_time, tuple(kept), evidence=evidence)
        record = replace(record, issues=self.judge.check(record))
        self.records.append(record)
        self.summary.add(record)

    def values(self, metric: str) -> list[float]:
        """Return a run-level metric over the passes in which it arrived."""
        return [value for record in self.records if (value := record.value(metric)) is not None]

    def _meaningless(self, reading: Reading) -> bool:
        return reading.metric.startswith(_ABOUT_THE_PROCESS) or (self.still and reading.metric in _ABOUT_UPDATES)


class Analyzer:
    """Drives a model for some passes; what a family of analyzers adds is in its subclasses.

    A subclass calls :meth:`_run` from its own ``analyze`` and reads the :class:`Recording` it returns. It may override
    :meth:`_rules` (more detectors), :meth:`_observe` (called with the output of every pass) and :meth:`_examine`
    (called once after the passes, while the weights are still where the last pass left them).

    Args:
        model: What is analysed; wrappers are looked through. It is left exactly as it was.
        enable_jacobian: Examine the Jacobians of the blocks.
        enable_vector_analysis: Examine the field of gradients.
        blocks: Names or modules whose gains are measured, from input to output; by default they are found.
        thresholds: Fixed thresholds by name, each of which adds its fixed rule beside the scale-free ones.

    Attributes:
        recording: What the last analysis read.
        vector: Its field of gradients, when asked for.
        jacobian: Its Jacobians, when asked for.

    Raises:
        ArgumentError: The model has no parameters, or a threshold cannot be used.
        ArgumentTypeError: ``model`` is no module.
    """

    title: ClassVar[str] = "Gradient flow"

    def __init__(
        self,
        model: nn.Module,
        *,
        enable_jacobian: bool = False,
        enable_vector_analysis: bool = False,
        blocks: Blocks | None = None,
        thresholds: Mapping[str, float | None] | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.enable_jacobian, self.enable_vector_analysis = enable_jacobian, enable_vector_analysis
        self.blocks = None if blocks is None else tuple(blocks)
        given = {name: value for name, value in (thresholds or {}).items() if value is not None}
        self.settings: Settings = make_settings(None, {"intervals": _DENSE, **given})
        profile(self.settings.profile, self.settings.thresholds)  # so that a bad threshold is reported now
        self.recording: Recording | None = None
        self.vector: VectorFlow | None = None
        self.jacobian: JacobianFlow | None = None

    def _run(
        self,
        input_fn: InputFn,
        loss_fn: LossFn,
        steps: int,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        players: Sequence[Player] | None = None,
    ) -> Recording:
        """Make the passes, judge them, examine the model, and put everything back.

        Raises:
            ArgumentError: ``steps`` is below 1, or what the functions return cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        _check(input_fn, loss_fn, steps)
        inner = unwrap(self.model)
        optimizers = as_optimizers(optimizer, inner)
        objective = Objective(
            self.model,
            input_fn,
            loss_fn,
            None if players is None else named_players(inner, players),
            [[p for group in o.param_groups for p in group["params"]] for o in optimizers],
        )
        rules = [
            replace(rule, patience=min(rule.patience, steps))
            for rule in self._rules()
            if not _is_idle(rule, still=not optimizers)
        ]
        recording = Recording(Judge(rules), still=not optimizers)
        recording.summary.info = describe(inner, self.settings)
        with suspended(inner), preserved(inner, optimizers):
            self._drive(objective, steps, optimizers, recording)
            self._examine(objective, recording)
        self.recording = recording
        return recording

    def _rules(self) -> tuple[Rule, ...]:
        """Return the detectors that judge the passes."""
        return profile(self.settings.profile, self.settings.thresholds)

    def _observe(self, loop: TrainingLoop, output: Any, losses: Losses) -> None:  # noqa: ARG002 - for subclasses
        """Hand over to the instruments what hooks cannot see; called after every forward pass."""
        loop.instruments.loss.observe({"loss": losses[0]})

    def _examine(self, objective: Objective, recording: Recording) -> None:
        """Look closer once the passes are over; issues found here are added to ``recording.found``."""
        inner = unwrap(self.model)
        self.vector = self.jacobian = None
        if self.enable_vector_analysis:
            self.vector, found = examine_field(inner, objective)
            known = {issue.issue_type for issue in recording.issues}
            recording.found.extend(issue for issue in found if issue.issue_type not in known)
        if self.enable_jacobian:
            blocks = find_blocks(inner)[0] if self.blocks is None else named_blocks(inner, self.blocks)
            self.jacobian = examine_blocks(objective, blocks)

    def _drive(self, objective: Objective, steps: int, optimizers: Sequence[Optimizer], recording: Recording) -> None:
        inner = unwrap(self.model)
        loop = make_loop(
            inner,
            self.settings,
            Guard(),
            recording.take,
            optimizer=optimizers or None,
            blocks=self.blocks,
            compiled=is_compiled(self.model),
        )
        with loop.attach():
            for _ in range(steps):
                inputs = objective.input_fn()

                def forward_backward(inputs: Any = inputs) -> torch.Tensor:
                    for parameter in inner.parameters():
                        parameter.grad = None
                    output, losses = objective.evaluate(inputs)
                    self._observe(loop, output, losses)
                    objective.backward(losses)
                    return losses[0].detach()

                _advance(loop, inner, optimizers, forward_backward)
            loop.finish()

    def get_healthy_layers(self, issues: Iterable[Issue] | None = None) -> list[str]:
        """Return the layers that no open issue is about, in registration order.

        A layer is a module without children, or one with parameters of its own. It is not healthy when an issue names
        it, one of its parameters, or a block that holds it.

        Args:
            issues: As ``analyze`` returned them, or some of them; by default all of the last analysis.

        Raises:
            RuntimeError: Nothing was analysed yet, and no issues are given.
        """
        if issues is None:
            if self.recording is None:
                raise RuntimeError("expected an analysis before get_healthy_layers(), got none; call analyze() first.")
            issues = self.recording.issues
        named = {layer for issue in issues if issue.open for layer in issue.layers if layer}
        layers = [
            site_name(name) or type(module).__name__
            for name, module in unwrap(self.model).named_modules()
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        ]
        return [layer for layer in layers if not any(_concerns(site, layer) for site in named)]

    def print_summary(self, issues: Iterable[Issue], *results: Any) -> None:
        """Print a verdict, each issue with what to do, and what the analyzer measured.

        Args:
            issues: As ``analyze`` returned them, or some of them.
            *results: What ``analyze`` returned beside the issues.
        """
        print("\n".join(self._summary_lines(list(issues), *results)))

    def _summary_lines(self, issues: Sequence[Issue], *results: Any) -> list[str]:
        """Return the lines of :meth:`print_summary`; results are printed by their ``lines()``."""
        passes = f", {len(self.recording.records)} passes" if self.recording is not None else ""
        lines = [f"{self.title} of {type(unwrap(self.model)).__name__}{passes}"]
        if not issues:
            lines.append("  healthy: no issue found")
        else:
            counts = {
                name: sum(i.severity.name == name for i in issues) for name in ("CRITICAL", "HIGH", "MEDIUM", "LOW")
            }
            lines.append(
                f"  {len(issues)} issue{'s' * (len(issues) > 1)}: "
                + ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            )
        for issue in issues:
            lines += issue_lines(issue)
        for result in (self.vector, self.jacobian, *results):
            if result is not None:
                lines += [f"  {line}" for line in result.lines()]
        return lines


def _concerns(site: str, layer: str) -> bool:
    """Return whether a name is that of a layer, of something in it, or of a module that holds it."""
    return f"{site}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{site}.")


def _advance(
    loop: TrainingLoop, model: nn.Module, optimizers: Sequence[Optimizer], forward_backward: Callable[[], torch.Tensor]
) -> None:
    """Make one pass, and one step of each optimizer."""
    if len(optimizers) == 1 and needs_closure(optimizers[0]):
        optimizers[0].step(forward_backward)  # type: ignore[arg-type]
        return
    forward_backward()
    for optimizer in optimizers:
        optimizer.step()
    if not optimizers:
        loop.step_by_hand(model)


def _is_idle(rule: Rule, *, still: bool) -> bool:
    """Whether a rule has nothing to judge in an analysis: the process's memory, or updates that are not made."""
    needs = {*rule.needs, *rule.evidence}
    return all(name.startswith(_ABOUT_THE_PROCESS) for name in needs) or (still and needs <= set(_ABOUT_UPDATES))


def _check(input_fn: object, loss_fn: object, steps: object) -> None:
    for name, function in (("input_fn", input_fn), ("loss_fn", loss_fn)):
        if not callable(function):
            raise ArgumentTypeError(
                f"{name} must be a function, got {type(function).__name__}; for example "
                + ("input_fn=lambda: torch.randn(32, 784)." if name == "input_fn" else "loss_fn=lambda output: ...")
            )
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ArgumentTypeError(f"steps must be a whole number of passes, got {steps!r}.")
    if steps < 1:
        raise ArgumentError(f"steps must be at least 1 pass, got {steps}; 5 is a quick check, 20 the usual.")
