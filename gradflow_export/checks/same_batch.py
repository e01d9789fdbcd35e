"""Batches that are drawn anew at each step and always hold the same samples: BAD_TARGETS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Check, Finding, number
from gradflow_export.rules.evidence import layers_of, seen
from gradflow_export.rules.history import History


@dataclass(frozen=True, kw_only=True)
class SameBatch(Check):
    """Report loops whose batches hold the same samples in the same order at each step, although each is loaded anew.

    Training on all data at once, or overfitting one batch as a test, keeps the same tensor. A batch that is loaded
    again at each step with the same content is a mistake.

    Why it is bad:
        The model memorizes a few samples. The loss goes to 0 as if training worked, and nothing is learned from the
        rest of the data.

    Example:
        for step in range(1000):
            x, y = next(iter(loader))  # begins again each time, and is not shuffled
            loss = F.cross_entropy(model(x), y)

    Use instead:
        for epoch in range(10):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)

    Not reported:
        No loader draws batches of this size from more data, for example if all data are one batch; the batch is at the
        same memory address; batches of more than 256 samples; the order of the samples changes.

    Attributes:
        repeats: Number of consecutive readings with the same samples.
        steps: Number of steps before anything is reported.
        patience: One; ``repeats`` already requires persistence.
    """

    repeats: int = 8
    steps: int = 20
    patience: int = 1

    name: ClassVar[str] = "same-batch"
    raises: ClassVar[tuple[IssueType, ...]] = (IssueType.BAD_TARGETS,)
    evidence: ClassVar[tuple[str, ...]] = ("input.repeats",)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the batches read so far."""
        for site in layers_of(record, "input.repeats"):
            times = seen(record, "input.repeats", site) or 0.0
            if times < self.repeats or record.step < self.steps:
                continue
            return (
                Finding(
                    IssueType.BAD_TARGETS,
                    Severity.MEDIUM,
                    ("input",),
                    times,
                    float(self.repeats),
                    f"{number(times + 1)} consecutive batches, each loaded anew, held the same samples, up to step "
                    f"{record.step}: the rest of the data is never used.",
                    "iterate over the loader, for x, y in loader, instead of calling next(iter(loader)) at each step.",
                    cause="same batch",
                    origin="same batch",
                ),
            )
        return ()
