"""Brings what the stability manager finds and does into the records of the exporters that watch the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from gradflow_export.debugging.nan.clipping import Clipped
from gradflow_export.debugging.nan.faults import Fault
from gradflow_export.debugging.nan.locate import Origin
from gradflow_export.debugging.nan.nan_policy import Outcome
from gradflow_export.exporter import Exporter, note, watching
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.readings import Drained, Pending
from gradflow_export.records.step_record import RUN_SITE, Issue, IssueType, Severity

HEALS_AFTER = 3
"""Finite steps in a row after which an issue is over, as for the rule of the same kind."""

_DONE: Mapping[str, str] = MappingProxyType(
    {
        "detect": "nothing was done about it",
        "skip": "the update was left out",
        "zero": "these entries were set to 0",
        "clamp": "these entries were clamped",
        "rewind": "the update was left out",
        "raise": "training was stopped before the update",
        "scaler": "the gradient scaler skips the step",
        "none": "gradients are finite",
    }
)

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "input": "look where such batches are made, and leave them out: if not torch.isfinite(x).all(): continue.",
        "buffers": "set them anew, as reset_running_stats() of a BatchNorm does, and leave out batches that hold NaN.",
        "weights": "restart from a checkpoint with finite weights and a smaller learning rate, or use policy 'rewind'.",
        "forward": "look at what this module computes: float16 overflows above 65504, log, sqrt and divisions need "
        "clamp_min(1e-8).",
        "nan_loss": "look at the batch first, torch.isfinite(x).all(), and leave such batches out; if it is finite, "
        "PyTorchDebuggingConfig(enable_autograd_anomaly=True) names the module where it begins.",
        "loss": "use a loss that works on logits, and clamp what goes into log, sqrt and divisions.",
        "backward": "sqrt, norm and pow have no finite slope at 0: add 1e-8 inside; torch.where passes NaN of the "
        "branch that was not taken.",
    }
)


class Reporting:
    """Tells exporters, and remembers what is still open.

    Args:
        exporter: The one to tell; by default every open one that watches the model.
    """

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter
        self.prevented = self.repaired = self.rewinds = 0
        self._passing, self._lasting = _Reported(), _Reported()

    def exporters(self, model: nn.Module) -> list[Exporter]:
        """Return who is notified about a model."""
        return watching(unwrap(model)) if self._exporter is None else [self._exporter]

    def step(
        self,
        model: nn.Module,
        faults: Sequence[Fault],
        outcome: Outcome,
        origin: Origin,
        named: Sequence[tuple[str, Tensor]],
        clipped: Clipped | None,
        lasting: Sequence[Fault] = (),
    ) -> None:
        """Report one step.

        Args:
            model: What is trained.
            faults: What is wrong with it.
            outcome: What was done.
            origin: Where it began.
            named: Parameters that had a gradient.
            clipped: What clipping did.
            lasting: What is broken although this step is not; it keeps an issue of its own open.
        """
        self.prevented += outcome.prevented
        self.repaired += outcome.action in {"zero", "clamp"}
        self.rewinds += outcome.back > 0
        exporters = self.exporters(model)
        if exporters:
            readings = [*origin.readings, *self._readings(faults, named, clipped)]
            for exporter in exporters:
                note(exporter, readings)
        self._passing.take(faults, exporters, outcome, origin)
        self._lasting.take(lasting, exporters, Outcome(), Origin())

    def _readings(
        self, faults: Sequence[Fault], named: Sequence[tuple[str, Tensor]], clipped: Clipped | None
    ) -> Drained:
        out: Drained = [
            _run("debugging.anomalies", len(faults)),
            _run("debugging.prevented", self.prevented),
            _run("debugging.repaired", self.repaired),
            _run("debugging.rewinds", self.rewinds),
        ]
        counts = {name: count for fault in faults for name, count in zip(fault.parameters, fault.entries, strict=False)}
        if counts:
            values = torch.tensor([float(counts.get(name, 0)) for name, _ in named], device="cpu")
            out.append(Pending("debugging.nonfinite", tuple(name for name, _ in named), values))
        if clipped is not None and clipped.mode != "none":
            out += [
                _run("gradient.norm_before_clip", clipped.before),
                _run("gradient.clip_scale", clipped.scale),
                _run("debugging.clipped_share", clipped.share),
            ]
        return out


class _Reported:
    """What was reported to exporters of one sort of faults, until it is over."""

    def __init__(self) -> None:
        self._open: list[tuple[Exporter, Issue]] = []
        self._well = 0

    def take(self, faults: Sequence[Fault], exporters: Sequence[Exporter], outcome: Outcome, origin: Origin) -> None:
        """Report faults, at each step that has them: a rule that has said the same may have healed since."""
        self._well = 0 if faults else self._well + 1
        for exporter in exporters if faults else ():
            known = next((issue for other, issue in self._open if other is exporter), None)
            issue = known or _issue(faults, outcome, origin, exporter.current_step)
            if known is None:
                self._open.append((exporter, issue))
            exporter.add_issue(issue)
        if self._well >= HEALS_AFTER:
            for exporter, issue in self._open:
                exporter.add_issue(replace(issue, healed_step=exporter.current_step))
            self._open.clear()


def _run(metric: str, value: float) -> Pending:
    return Pending(metric, (RUN_SITE,), torch.tensor([float(value)], dtype=torch.float64, device="cpu"))


def _issue(faults: Sequence[Fault], outcome: Outcome, origin: Origin, step: int) -> Issue:
    layers = origin.sites or next((fault.parameters for fault in faults if fault.parameters), ()) or (RUN_SITE,)
    begins = f"; it begins {origin.words}" if origin.words else ""
    kinds = {fault.kind for fault in faults}
    broken = "weights" if kinds & {"broken_weights", "broken_state"} else "buffers" if "broken_buffers" in kinds else ""
    # A loss that is not finite was so before the backward pass, and what comes back then shows no place.
    broken = broken or ("nan_loss" if kinds & {"nan_loss", "inf_loss"} else "")
    return Issue(
        IssueType.NUMERICAL,
        Severity.CRITICAL,
        layers[0],
        step,
        float(sum(map(sum, (fault.entries for fault in faults))) or len(faults)),
        0.0,
        f"{' and '.join(fault.message for fault in faults)}{begins}; {_done(outcome)}.",
        _ADVICE[origin.kind or broken or "backward"],
        layers,
        cause=f"{origin.words.removeprefix('in ')}, step {step}" if origin.words else "",
    )


def _done(outcome: Outcome) -> str:
    return f"weights went back by {outcome.back} step(s)" if outcome.back else _DONE[outcome.action]
