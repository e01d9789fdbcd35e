"""What the runs of one training showed, and more steps for what they leave open."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradflow_export.experiments.decision import LEARNED, WORSE, Baseline, Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.patient import MEASURED
from gradflow_export.experiments.runs import Request
from gradflow_export.experiments.survey import Training
from gradflow_export.records.issues import IssueType

SEEDS = 3
LATER = 4
"""Multiple of the steps within which a script may begin to learn by itself, or a treatment may show what it does."""
LEADS = 0.95
"""Share of the loss without a treatment below which it is given so many steps, where nothing accuses what it mends."""


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
        planned: What is tried as long as nothing helps, in order.
        shorter: What was known after fewer steps, where a longer run took the place of that.
        cut: Why it ended before everything was tried, in a few words; empty where it did not.
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
    planned: Sequence[tuple[str, ...]] = ()
    shorter: Verdict | None = None
    cut: str = ""
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
        return [each for each in self.trials if each.acted and not self.helps(each) and each not in self.pending]

    @property
    def surplus(self) -> list[Trial]:
        """What helps and is no cure: another one goes before it, or the program learns as it is."""
        named = [*self.cures, *self.faster]
        return [each for each in self.trials if each.acted and self.helps(each) and each not in named]

    @property
    def pending(self) -> list[Trial]:
        """What promises to help with the first seed, where the search ended before the others."""
        base = None if self.refused else self.baseline
        return [each for each in self.trials if self.cut and len(each.effects) < SEEDS and each.promises(base)]

    @property
    def untried(self) -> list[tuple[str, ...]]:
        """What was planned and has not been tried, where the search ended before."""
        tried = {each.names for each in (*self.trials, *(self.shorter.trials if self.shorter else ()))}
        return [names for names in self.planned if self.cut and names not in tried]


def later_steps(verdict: Verdict) -> int:
    """Return how many steps a longer run trains; 0 where there are no more, or something else is measured."""
    later = min(LATER * verdict.steps, verdict.training.steps - MEASURED)
    return 0 if later <= verdict.steps or verdict.measured else later


def longer(laboratory: Laboratory, verdict: Verdict, accused: Sequence[Trial], others: Sequence[Trial] = ()) -> None:
    """Give the script, and what leads and does not rescue it, more steps; these may show it.

    Args:
        laboratory: Where runs are done.
        verdict: What is known; where the treatment rescues in more steps, it is that of these.
        accused: Trials of what is accused.
        others: Trials of which one counts where the script does not learn in more steps either.
    """
    base, later = verdict.baseline, later_steps(verdict)
    leads = [
        each
        for each in (*accused, *others)
        if base and each.acted and each.effects.get(0, math.inf) < (WORSE if each in accused else LEADS) * base.level(0)
    ]
    if base is None or base.blind or not leads or not later:
        return
    lead = min(leads, key=lambda each: (each not in accused, each.effects[0]))
    asked = deque(Request(names, seed, later) for names in ((), lead.names) for seed in range(SEEDS))
    effects: dict[tuple[str, ...], dict[int, float]] = {(): {}, lead.names: {}}
    for request, result in laboratory.run(asked):
        effects[request.names][request.seed] = math.inf if result.error else result.effect
    if any(len(each) < SEEDS for each in effects.values()):
        return
    plain = replace(base, effect=tuple(effects[()][seed] for seed in range(SEEDS)), placebos={})
    trial = replace(lead, effects=effects[lead.names])
    if trial.rescues(plain) and trial.suffices(plain) and (lead in accused or plain.progress > LEARNED):
        verdict.shorter = replace(verdict, trials=[each for each in verdict.trials if each is not lead])
        verdict.steps, verdict.baseline, verdict.trials, verdict.cures = later, plain, [trial], [trial]
