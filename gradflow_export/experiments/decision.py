"""What follows from the runs: whether a program is ill, and which treatment rescues it.

Rescue is not improvement. Most sound scripts are untuned in their first sixty steps, and a better learning rate makes
them better; the question is whether a program that does not learn begins to. One that learns slowly is not ill.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradflow_export.rules.evidence import Floats, fall

LEARNED = 0.9
"""Share of the loss before training above which nothing was learned."""
FROM_INPUTS = 0.98
"""Share of a placebo's loss above which nothing was learned from the inputs."""
RESCUED = 0.7
"""Share of the loss without the treatment below which a treatment rescues, in the screening run."""
CONFIRMED = 0.85
"""The same in two more seeds."""
LEFT = 0.1
"""Share of the loss before training below which most is learned."""
FAR = 0.5
"""The same with each seed, for what nothing accuses in a program that learns, and for larger steps there."""
WORSE = 1.1
"""Share of the loss without the treatment up to which what removes a finding does no harm."""
EQUAL = 1.25
"""Ratio of effects up to which two treatments are named together."""
FALLS = 2.0
"""Least z-score, over all seeds, of a loss that falls against its own noise."""
SURE = 3.0
"""The same where there is no placebo to be compared with."""
APART = 4.0
"""Least mean of the differences to a placebo's losses on the same batches, in standard errors."""
LESS = 0.999
"""Share of a placebo's loss below which a difference is not one of rounding."""
INFORMED = 0.5
"""Share of a placebo's first losses below which a model begins with what it learned elsewhere."""
FIRST = 5
"""First losses of which the typical one is looked at for that."""
DIVERGED = 2.0
"""Multiple of the loss before training above which a run has diverged."""
LEAST = 1e-12


@dataclass(frozen=True)
class Baseline:
    """Runs without a treatment, and the placebos.

    Attributes:
        first: Loss before training of each seed: that of the first weights on the batches which it is measured on after
            training, or else the first loss.
        effect: Mean loss after training, of each seed; infinite where a loss was no number.
        placebos: Mean loss after training of the first seed, by the name of the placebo; of those that acted.
        moves: Why it learns or may begin to, although its loss is hardly lower; empty where nothing says so.
    """

    first: tuple[float, ...]
    effect: tuple[float, ...]
    placebos: Mapping[str, float] = field(default_factory=dict)
    moves: str = ""

    def level(self, seed: int) -> float:
        """Return the loss that a treatment has to be better than: of a script that diverges that before training."""
        number = min(seed, len(self.first) - 1)
        bounds = (self.first[number], math.inf if self.diverges else self.effect[number])
        return min(filter(math.isfinite, bounds), default=math.inf)

    @property
    def diverges(self) -> bool:
        """Whether the loss rises far with any seed: that others learn then says little."""
        return any(effect > DIVERGED * first for first, effect in zip(self.first, self.effect, strict=True))

    @property
    def progress(self) -> float:
        """Loss after training as a share of that before it; the median over seeds."""
        return statistics.median(
            effect / max(first, LEAST) if math.isfinite(first) else math.inf
            for first, effect in zip(self.first, self.effect, strict=True)
        )

    @property
    def against_placebo(self) -> float | None:
        """Loss after training as a share of that of each placebo, the least; ``None`` without one that trains."""
        placebos = [each for each in self.placebos.values() if math.isfinite(each)]
        if not placebos or not math.isfinite(self.effect[0]):
            return None
        # A loss that is always 0 is that of each placebo.
        return min((self.effect[0] + LEAST) / (max(each, 0.0) + LEAST) for each in placebos)

    @property
    def complaint(self) -> str:
        """Why the program is ill, in one sentence; empty where it is not."""
        return "" if self.slow else self._little

    @property
    def slow(self) -> str:
        """What is small though the program learns, in one sentence; empty where it learns well or not at all."""
        return (
            f"{self._little}, but {self.moves}"
            if self.moves and all(map(math.isfinite, self.effect)) and (self._little)
            else ""
        )

    @property
    def _little(self) -> str:
        against = self.against_placebo
        if not all(map(math.isfinite, self.effect)):
            return "the loss does not stay finite"
        if self.diverges:
            return "the loss rises far above that before training, with one seed or more"
        if self.progress > LEARNED:
            return f"the loss after training is {self.progress:.2f} of that before it"
        if against is not None and against >= FROM_INPUTS:
            return f"the loss is {against:.2f} of that with placebo inputs (shuffled or noise)"
        return ""

    @property
    def blind(self) -> bool:
        """Whether the loss falls, and as far where the inputs mean nothing."""
        against = self.against_placebo
        return self.progress <= LEARNED and not self.diverges and against is not None and against >= FROM_INPUTS

    @property
    def placebo(self) -> str:
        """The placebo with the lowest loss, of a script whose loss falls as far with it; empty of any other script."""
        return min(self.placebos, key=self.placebos.__getitem__) if self.blind else ""

    @property
    def ill(self) -> bool:
        """Whether the program does not learn: a licence to treat, no alarm."""
        return bool(self.complaint)


def moves(plain: Sequence[Sequence[float]], placebos: Sequence[Sequence[float]], steps: int, *, rising: bool) -> str:
    """Return why a program learns or may begin to, in a few words; empty where nothing says so.

    Args:
        plain: Losses of the runs without a treatment, one for each seed, the placebos' first.
        placebos: Losses of the placebos. After training they are measured on the same batches as the first run.
        steps: How many steps are training; the others measure its effect.
        rising: Whether the learning rate still rises.
    """
    if rising:
        return "its learning rate still rises"
    own = np.asarray(plain[0])
    given = [np.asarray(each) for each in placebos if len(each) == len(own) > steps]
    if given and all(np.median(own[:FIRST]) < INFORMED * np.median(each[:FIRST]) for each in given):
        return "it starts pretrained, well below the placebos"
    # The seeds are independent of each other, so that the sum of their scores has the variance of their number.
    falls = sum(fall(np.asarray(each[:steps])) for each in plain) / math.sqrt(len(plain))
    if falls >= (FALLS if given else SURE) and all(_apart(own[steps:], each[steps:]) for each in given):
        return "it falls steadily"
    return ""


def _apart(own: Floats, placebo: Floats) -> bool:
    """Return whether a run is better than a placebo on the same batches, beyond noise."""
    differences = placebo - own
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return bool(differences.mean() > APART * error and own.mean() < LESS * placebo.mean())


@dataclass(frozen=True)
class Trial:
    """What a treatment did.

    Attributes:
        names: The treatments that were tried together.
        effects: Mean loss after training, by seed.
        acted: Whether it changed anything.
        error: Why a run of it failed; empty where none did.
        gone: Whether a finding that structure proves, and whose fix it is, was there no more, by seed.
        mistake: Whether what it removes is a mistake in any script.
        left: Issue types that a watched run shows with it; ``None`` where none was watched.
        blind: Mean loss after training with it and inputs that mean nothing, by seed.
        stands_in: Whether it stands for what only the author has: then the script has to learn from its inputs.
        of_degree: Whether it tunes, or undoes what is often meant, and no number far off accuses that.
    """

    names: tuple[str, ...]
    effects: Mapping[int, float]
    acted: bool = True
    error: str = ""
    gone: Mapping[int, bool] = field(default_factory=dict)
    mistake: bool = False
    left: Collection[str] | None = None
    blind: Mapping[int, float] = field(default_factory=dict)
    stands_in: bool = False
    of_degree: bool = False

    def screened(self, baseline: Baseline) -> bool:
        """Whether the first seed asks for a confirmation."""
        effect = self.effects.get(0, math.inf)
        level = baseline.level(0)
        return self.acted and not self.error and math.isfinite(effect) and (effect < RESCUED * level)

    def informed(self, seed: int) -> bool:
        """Whether with it the loss is lower than it is with inputs that mean nothing."""
        return self.effects.get(seed, math.inf) < LEARNED * self.blind.get(seed, -math.inf)

    def rescues(self, baseline: Baseline) -> bool:
        """Whether all three seeds agree that the program learns with it: from its inputs, where it did not."""
        blind = baseline.blind or self.stands_in
        lower = {
            seed: effect < CONFIRMED * baseline.level(seed) and (self.informed(seed) or not blind)
            for seed, effect in self.effects.items()
        }
        return self.screened(baseline) and len(lower) >= 3 and all(lower.values())

    def turns(self, baseline: Baseline) -> bool:
        """Whether with all seeds the loss is so much lower that it is no matter of tuning, and much was left."""
        return baseline.progress > LEFT and all(e < FAR * baseline.level(seed) for seed, e in self.effects.items())

    def suffices(self, baseline: Baseline) -> bool:
        """Whether it does enough, whatever finding asks for it: what is of degree turns a program that learns."""
        return not self.of_degree or baseline.ill or bool(baseline.slow) or self.turns(baseline)

    def promises(self, baseline: Baseline | None) -> bool:
        """Whether the first seed asks for two more, for either reason; ``None`` where losses cannot be compared."""
        gone = self.acted and not self.error and self.gone.get(0, False)
        if baseline is None:
            return gone and not self.stands_in
        return self.screened(baseline) or (gone and (self.stands_in or self.harmless(baseline)))

    def harmless(self, baseline: Baseline) -> bool:
        """Whether every loss is a number, and their median over seeds no greater than without it, beyond noise.

        What removes a mistake may make the steps smaller, as clearing old gradients does: then it is enough that the
        script learns.
        """
        last = len(baseline.effect) - 1
        # Of a loss that is no number the one before training is as great as it may be.
        plain = [each if math.isfinite(each) else baseline.level(seed) for seed, each in enumerate(baseline.effect)]
        # A loss that is always 0 is none: any other is no worse.
        empty = not any((*plain, *baseline.first))
        shares = [effect / max(plain[min(seed, last)], LEAST) for seed, effect in self.effects.items()]
        learns = self.mistake and all(
            effect < LEARNED * baseline.first[min(seed, last)] for seed, effect in self.effects.items()
        )
        return all(map(math.isfinite, self.effects.values())) and (
            empty or learns or statistics.median(shares) <= WORSE
        )

    def relieves(self, baseline: Baseline | None) -> bool:
        """Whether in all three seeds the finding is gone and the loss is :meth:`harmless`.

        Args:
            baseline: ``None`` where losses cannot be compared.
        """
        if self.stands_in:
            sound = baseline is not None and all(map(self.informed, self.effects))
        else:
            sound = baseline is None or self.harmless(baseline)
        return sound and self.acted and not self.error and len(self.gone) >= 3 and all(self.gone.values())


def best(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trial with the smallest loss and those that are as good, best first.

    Args:
        trials: Such that rescue.
    """
    ranked = sorted(trials, key=lambda trial: trial.effects[0])
    return [trial for trial in ranked if trial.effects[0] <= EQUAL * max(ranked[0].effects[0], LEAST)]


def number(value: float) -> str:
    """Return a loss as it is printed."""
    return f"{value:.3g}" if math.isfinite(value) else "NaN or Inf"
