"""Runs of more steps, for what does not show within the usual number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from gradflow_export.experiments.decision import Trial
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.mending.treatment import EXACT
from gradflow_export.experiments.patient import MEASURED
from gradflow_export.experiments.runs import Request
from gradflow_export.experiments.treatments import find
from gradflow_export.experiments.verdict import SEEDS, Verdict

LATER = 4
"""Multiple of the steps within which a script may begin to learn by itself, or a treatment may show what it does."""
LEADS = 0.95
"""Share of the loss without a treatment below which it is given so many steps."""


def later_steps(verdict: Verdict) -> int:
    """Return how many steps a longer run trains; 0 where there are no more, or something else is measured."""
    later = min(LATER * verdict.steps, verdict.training.steps - MEASURED)
    return 0 if later <= verdict.steps or verdict.measured else later


def longer(laboratory: Laboratory, verdict: Verdict, accused: Sequence[Trial]) -> None:
    """Give the script, and the exact treatment that leads and does not rescue it, more steps; these may show it.

    Args:
        laboratory: Where runs are done.
        verdict: What is known; where the treatment rescues in more steps, it is that of these.
        accused: Trials of what is accused.
    """
    base, later = verdict.baseline, later_steps(verdict)
    exact = [each for each in accused if each.acted and all(find(name).kind == EXACT for name in each.names)]
    leads = [each for each in exact if base and each.effects.get(0, math.inf) < LEADS * base.level(0)]
    if base is None or base.blind or not leads or not later:
        return
    lead = min(leads, key=lambda each: each.effects[0])
    asked = deque(Request(names, seed, later) for names in ((), lead.names) for seed in range(SEEDS))
    effects: dict[tuple[str, ...], dict[int, float]] = {(): {}, lead.names: {}}
    for request, result in laboratory.run(asked):
        effects[request.names][request.seed] = math.inf if result.error else result.effect
    if any(len(each) < SEEDS for each in effects.values()):
        return
    plain = replace(base, effect=tuple(effects[()][seed] for seed in range(SEEDS)), placebos={})
    trial = replace(lead, effects=effects[lead.names])
    if trial.rescues(plain):
        verdict.steps, verdict.baseline, verdict.trials, verdict.cures = later, plain, [trial], [trial]
