"""What the runs of one training showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradflow_export.experiments.decision import Baseline, Trial
from gradflow_export.experiments.survey import Training
from gradflow_export.records.issues import IssueType

SEEDS = 3


@dataclass
class Verdict:
    """What the runs of one training showed.

    Attributes:
        training: Which steps of the program were examined.
        steps: Optimizer steps of each run.
        refused: Why nothing can be judged; empty where it can.
        baseline: Runs without treatment, and placebos; ``None`` where they failed.
        trials: Everything that was tried, in order.
        cures: What rescues, the best first; more than one where they are as good.
        faster: What makes a program that learns slowly learn faster, the best first; no cure.
        curves: Losses of runs by a name for them, for charts.
        facts: What the first run saw.
        measured: The user's yardstick, where it takes the place of the loss.
        found: Type and cause of what a watched run shows.
        accused: What structure proves against it, and a watched run shows again.
        suspects: What the symptoms accuse.
        seeds: How many seeds gave runs that differ.
        cut: Whether the budget ended it before everything was tried.
        runs: How many runs there were.
        cpu: Their seconds of processor time.
    """

    training: Training
    steps: int
    refused: str = ""
    baseline: Baseline | None = None
    trials: list[Trial] = field(default_factory=list)
    cures: list[Trial] = field(default_factory=list)
    faster: list[Trial] = field(default_factory=list)
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    measured: str = ""
    found: Sequence[tuple[str, str]] = ()
    accused: frozenset[IssueType] = frozenset()
    suspects: tuple[IssueType, ...] = ()
    seeds: int = SEEDS
    cut: bool = False
    runs: int = 0
    cpu: float = 0.0

    def rescues(self, trial: Trial) -> bool:
        """Whether the loss says that a treatment makes the program learn."""
        return self.baseline is not None and not self.refused and trial.rescues(self.baseline)

    def relieves(self, trial: Trial) -> bool:
        """Whether a treatment removes what structure proves, without harm to the loss where there is one to compare."""
        return self.baseline is not None and trial.relieves(None if self.refused else self.baseline)

    def helps(self, trial: Trial) -> bool:
        """Whether a treatment does either."""
        return self.rescues(trial) or self.relieves(trial)

    @property
    def vain(self) -> list[Trial]:
        """What was tried and does not help."""
        return [trial for trial in self.trials if trial.acted and not self.helps(trial)]
