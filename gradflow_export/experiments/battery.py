"""Decides what is run next, and when the cause is clear: noise and placebos, exact treatments, tuning, combinations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gradflow_export.experiments.decision import FROM_INPUTS, LEARNED, LEFT, Baseline, Trial, best, moves, number
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.measure import Yardstick, failure, yardstick
from gradflow_export.experiments.mending.treatment import EXACT, MENDING, PLACEBO, TRIED, TUNING, Treatment
from gradflow_export.experiments.patient import MEASURED
from gradflow_export.experiments.runs import Request, Result
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.treatments import TREATMENTS, WATCH, combinations, find, nearness, of_kind
from gradflow_export.experiments.verdict import SEEDS, Verdict, later_steps, longer
from gradflow_export.experiments.watched import accused
from gradflow_export.records.issues import IssueType

LEAST_STEPS = 20
LOOK, UNMOVED = ("look", "batches"), "no steps"
STILL = ("look", UNMOVED)
RISING = 0.5
"""Share of the steps from which on a learning rate that rises is one that warms up."""
RUNS = 40
"""How many runs the experiments take at most, for a prediction of their time."""


class Battery:
    """The experiments on one training of a program.

    Args:
        laboratory: Where runs are done.
        training: Which steps of the program.
        steps: Steps that each run trains, fewer where the program makes fewer.
        budget: Seconds of processor time.
        everything: Whether all treatments are tried, whatever the first ones show.
        suspects: Issue types that the symptoms accuse: their treatments are tried first.
        tell: Called with a line about what is being done.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        training: Training,
        *,
        steps: int,
        budget: float = math.inf,
        everything: bool = False,
        suspects: Sequence[IssueType] = (),
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._laboratory, self._budget, self._everything, self._tell = laboratory, budget, everything, tell
        self._suspects = suspects
        self._rule = Yardstick()
        # Once the program is done it cannot be measured any more.
        self.verdict = Verdict(training, min(steps, training.steps - MEASURED), suspects=tuple(suspects))

    def run(self) -> Verdict:
        """Do the experiments; what is known so far stands in :attr:`verdict` all the time."""
        verdict, laboratory = self.verdict, self._laboratory
        if verdict.steps < LEAST_STEPS:
            verdict.refused = (
                f"it makes {verdict.training.steps} optimizer steps; at least {LEAST_STEPS + MEASURED} are needed to "
                "compare runs. Give the arguments with which it trains longer."
            )
            return verdict
        before = laboratory.runs, laboratory.cpu
        laboratory.examine(verdict.training)
        try:
            self._observe()
            if not verdict.refused:
                self._treat()
            elif verdict.accused:
                self._try([(each.name,) for each in _mending(verdict)])
        except BaseException:
            verdict.cut = "the search was stopped"
            raise
        finally:
            verdict.runs, verdict.cpu = laboratory.runs - before[0], laboratory.cpu - before[1]
        return verdict

    def _observe(self) -> None:
        """Run the program as it is, with each seed, and with placebos."""
        verdict = self.verdict
        placebos = [each.name for each in TREATMENTS if each.kind == PLACEBO]
        asked = [
            (LOOK, 0),
            (STILL, 0),
            *(((name,), 0) for name in placebos),
            *(((), seed) for seed in range(1, SEEDS)),
            *(((UNMOVED,), seed) for seed in range(1, SEEDS)),
            *([((WATCH,), 0)] if self._suspects else []),
        ]
        found: dict[tuple[tuple[str, ...], int], Result] = {}
        self._tell(f"{len(asked)} runs as it is, with other seeds, and with placebo inputs")
        for request, result in self._runs(asked):
            found[request.names, request.seed] = result
        look, still = found.get((LOOK, 0)), found.get((STILL, 0))
        plain = [look, *(found.get(((), seed)) for seed in range(1, SEEDS))]
        seeds = [each for each in plain if each is not None and each.losses and not each.error]
        if look is None or look.error or not look.losses or len(seeds) < SEEDS:
            verdict.refused = failure(plain)
            return
        if ((WATCH,), 0) in found:
            verdict.found = tuple(map(tuple, found[(WATCH,), 0].facts.get("found", ())))
            verdict.accused = accused(verdict.found).intersection(self._suspects)
        doubted = IssueType.WRONG_LOSS in verdict.accused
        rule = self._rule = yardstick(self._laboratory.measure, seeds, look, still, doubted=doubted)
        verdict.measured, verdict.refused = rule.text, rule.refused
        verdict.facts = {**look.facts, "measured": "" if rule.signed else rule.text}
        given = {name: found[(name,), 0] for name in placebos if ((name,), 0) in found}
        unmoved = [still, *(found.get(((UNMOVED,), seed)) for seed in range(1, SEEDS))]
        verdict.baseline = Baseline(
            tuple(rule.start(each, other) for each, other in zip(seeds, unmoved, strict=True)),
            tuple(rule.effect(each) for each in seeds),
            {name: rule.effect(each) for name, each in given.items() if each.acted and not each.error},
            moves(
                [rule.course(each) for each in seeds],
                [rule.course(each) for each in given.values() if each.acted and not each.error],
                verdict.steps,
                rising=look.facts["rising"] >= RISING,
            ),
        )
        verdict.facts = {**verdict.facts, "learns": not (verdict.baseline.ill or verdict.baseline.slow)}
        verdict.seeds = len({each.losses for each in seeds})
        verdict.curves.update({"as it is": look.losses, **{name: each.losses for name, each in given.items()}})

    def _treat(self) -> None:
        verdict = self.verdict
        assert verdict.baseline is not None
        ill, slow = verdict.baseline.ill, bool(verdict.baseline.slow)
        self._tell(f"it does not learn: {verdict.baseline.complaint}" if ill else verdict.baseline.slow or "it learns")
        exact, tuning = (_ordered(of_kind(kind, verdict.facts), verdict) for kind in (EXACT, TUNING))
        # A loss that may become negative falls without end with larger steps.
        tuning = [each for each in tuning if not self._rule.signed or _named([each.name], verdict)]
        # What the symptoms accuse is tried with what is exact, and goes before it.
        accused = [e for e in tuning if not _near([e.name], verdict) and (ill or slow or self._licensed([e.name]))]
        first = [e for e in exact if slow or self._everything or not e.choice or self._licensed([e.name])] + accused
        first = [*first, *(each for each in _mending(verdict) if each not in first)]
        possible = combinations({each.name for each in exact + tuning}) if ill else []
        early = [names for names in possible if find(names[0]).kind == EXACT]
        after = [e for e in tuning if ill or self._everything or (slow and IssueType.LEARNING_RATE in e.fixes)]
        after = [each for each in after if each not in first]
        verdict.planned = [*((each.name,) for each in first + after), *possible]
        self._try([*((each.name,) for each in first), *early])
        seen = [e for e in verdict.trials if ill and (_evident(e.names, verdict) or _structural(e.names, verdict))]
        if all(_tunes(trial.names) for trial in verdict.cures) and not verdict.cut:
            longer(self._laboratory, verdict, [each for each in seen if _exact(each.names)])
        if not verdict.cures or self._everything:
            self._try([(each.name,) for each in after])
        if self._begins_later():
            return
        if not verdict.cures and not verdict.cut:
            longer(self._laboratory, verdict, *left([each for each in verdict.trials if each not in seen], verdict))
        if ill and not verdict.cures:
            self._try([names for names in possible if self._licensed(names) and names not in early])
            self._begins_later()
        if slow and not verdict.cures:
            verdict.faster = best([each for each in verdict.trials if verdict.rescues(each)])[:1]

    def _begins_later(self) -> bool:
        """Take larger steps, and what no symptom names, for no cure where the script begins to learn a little later."""
        verdict = self.verdict
        tuned = [_near(trial.names, verdict) > 0 and _tunes(trial.names) for trial in verdict.cures]
        hasten = [any(find(n).hastens for n in t.names) and not _named(t.names, verdict) for t in verdict.cures]
        if not verdict.cures or not all(map(max, tuned, hasten)) or not (later := later_steps(verdict)):
            return False
        assert verdict.baseline is not None
        asked = deque(Request(names, 0, later) for names in ((), (verdict.baseline.placebo,)) if "" not in names)
        done = {request.names: result.effect for request, result in self._laboratory.run(asked)}
        blind = done.get((verdict.baseline.placebo,), math.inf)
        if () not in done or done[()] >= min(LEARNED * verdict.baseline.first[0], FROM_INPUTS * blind):
            return False
        verdict.baseline = replace(verdict.baseline, moves=f"it begins to learn within {later} steps")
        verdict.faster, verdict.cures = verdict.cures[:1], []
        return True

    def _licensed(self, names: Sequence[str]) -> bool:
        """Return whether a rescue by these treatments is believed: no program is tuned that learns.

        It is where the program is ill, where what the treatment removes is a mistake in any program, and where the
        symptoms accuse what it mends. One that learns slowly may have a cause that an exact treatment removes.
        """
        baseline, treatments = self.verdict.baseline, [find(name) for name in names]
        if baseline is None or baseline.ill or any(each.mistake for each in treatments):
            return True
        if _named(names, self.verdict):
            return True
        near = _near(names, self.verdict)
        if all(each.kind == EXACT for each in treatments):
            return bool(baseline.slow) or (near < 2 and not any(each.choice for each in treatments))
        return near == 0 and bool(baseline.slow)

    def _believed(self, trial: Trial) -> bool:
        """Return whether it rescues and is licensed, or is exact and no choice and does more than tuning would.

        That is asked of what tunes and of choices for a script that learns, too, whatever accuses them.
        """
        base, treatments = self.verdict.baseline, [find(name) for name in trial.names]
        assert base is not None
        exact = all(each.kind == EXACT and not each.choice for each in treatments)
        # A number is no cure while what structure proves is still found with another one.
        stands = _tunes(trial.names) and not self.verdict.accused.isdisjoint(map(IssueType, trial.left or ()))
        licensed = self._licensed(trial.names) and trial.suffices(base) and not stands
        return self.verdict.rescues(trial) and ((trial.turns(base) and exact) or licensed)

    def _try(self, wanted: Sequence[tuple[str, ...]]) -> None:
        """Try treatments, confirm what helps, and name the best, also where this is interrupted."""
        tried: dict[tuple[str, ...], Trial] = {}
        try:
            self._screen(wanted, tried)
        finally:
            self._name(list(tried.values()))

    def _screen(self, wanted: Sequence[tuple[str, ...]], tried: dict[tuple[str, ...], Trial]) -> None:
        """Try treatments, and confirm what helps; what is known so far stands in ``tried``."""
        verdict = self.verdict
        baseline = verdict.baseline
        assert baseline is not None
        given = {each.name for each in TREATMENTS if each.kind == PLACEBO}
        for request, result in self._runs(
            [((*names, WATCH) if fixed(names, verdict) else names, 0) for names in wanted]
        ):
            names, failed = tuple(name for name in request.names if find(name).kind in TRIED), result.error
            seed, effect = request.seed, math.inf if failed else self._rule.effect(result)
            treatments, placebo = [find(name) for name in names], not given.isdisjoint(request.names)
            trial = tried.get(names) or Trial(
                names,
                {},
                mistake=all(each.mistake for each in treatments),
                stands_in=any(each.stands_in for each in treatments),
                of_degree=_often(names, verdict, TUNING),
            )
            if placebo:
                trial = replace(trial, blind={**trial.blind, seed: math.nan if failed else effect})
            else:
                why = failed.strip().rpartition("\n")[2]
                trial = replace(trial, effects={**trial.effects, seed: effect}, acted=result.acted, error=why)
            if "found" in result.facts:
                gone = _is_gone(fixed(names, verdict), result.facts["found"], baseline, effect)
                left = {*(trial.left or ()), *(kind for kind, _ in result.facts["found"])}
                trial = replace(trial, gone={**trial.gone, seed: gone}, left=left)
            if result.facts.get("opened"):
                trial = replace(trial, gone={**trial.gone, seed: trial.gone.get(seed, True)})
            tried[names] = trial
            verdict.trials = [each for each in verdict.trials if each.names != names] + [trial]
            if not seed:
                self._queue.extend(confirmations(verdict, request, trial))
            if placebo:
                self._tell(f"{' + '.join(names)}: {number(effect)} with placebo inputs")
            elif trial.acted:
                verdict.curves.update({} if seed else {" + ".join(names): result.losses})
                self._tell(f"{' + '.join(names)}: {number(effect)} instead of {number(baseline.effect[seed])}")
            if verdict.helps(trial):
                self._tell(f"{' + '.join(names)}: confirmed in {SEEDS} of {SEEDS} seeds")

    def _name(self, tried: Sequence[Trial]) -> None:
        """Name the best treatment of those that were tried."""
        verdict = self.verdict
        rescued = [trial for trial in tried if verdict.relieves(trial) or self._believed(trial)]
        if rescued and not verdict.cures:
            # What removes a mistake goes first, then what a symptom names, then what is exact.
            ranks = {trial.names: _rank(trial.names, verdict) for trial in rescued}
            nearest = [trial for trial in rescued if ranks[trial.names] == min(ranks.values())]
            verdict.cures = nearest[:1] if verdict.refused else best(nearest)

    def _runs(self, asked: Sequence[tuple[tuple[str, ...], int]]) -> Iterator[tuple[Request, Result]]:
        self._queue = deque(Request(names, seed, self.verdict.steps) for names, seed in asked)
        for done in self._laboratory.run(self._queue):
            yield done
            if self._laboratory.cpu > self._budget:
                self.verdict.cut = self.verdict.cut or ("the CPU budget was used up" if self._queue else "")
                self._queue.clear()


def left(trials: Sequence[Trial], verdict: Verdict) -> tuple[list[Trial], list[Trial]]:
    """Return trials that may show in more steps what they do: those of what is accused, and others.

    What tunes helps many scripts in so many steps, and is one of them only where a finding names its cause.
    """
    base = verdict.baseline
    assert base is not None
    named = [each for each in trials if _named(each.names, verdict) and not _often(each.names, verdict)]
    exact = [each for each in trials if (base.ill or base.slow) and _exact(each.names)]
    near = [each for each in exact if _near(each.names, verdict) == 0]
    return [*near, *(each for each in named if base.progress > LEFT)], exact


def _ordered(treatments: Sequence[Treatment], verdict: Verdict) -> list[Treatment]:
    return sorted(treatments, key=lambda each: _near([each.name], verdict))


def _mending(verdict: Verdict) -> list[Treatment]:
    """Return the treatments that are the fix of what structure proves."""
    proved, facts = [each for each in verdict.found if each[0] in verdict.accused], verdict.facts
    evident = [each for each in of_kind(MENDING, facts) if each.evident(facts) and not verdict.refused]
    meant = [each for kind in (EXACT, MENDING) for each in of_kind(kind, facts) if each.meant(proved)]
    # What tunes is the fix of its first type alone.
    tuned = [each for each in of_kind(TUNING, facts) if each.fixes[0] in {kind for kind, _ in proved}]
    return list(dict.fromkeys([*meant, *evident, *tuned]))


def _near(names: Sequence[str], verdict: Verdict) -> int:
    """Return how near treatments are to what is accused, by symptoms or by what the first run saw: 0, 1 or 2."""
    return 0 if _evident(names, verdict) else nearness(names, verdict.suspects, verdict.found)


def _evident(names: Sequence[str], verdict: Verdict) -> bool:
    return any(find(name).evident(verdict.facts) for name in names)


def _often(names: Sequence[str], verdict: Verdict, kind: str = "") -> bool:
    """Return whether treatments help many scripts that learn: larger steps, or an unaccused choice or ``kind``."""
    chosen = (each for each in map(find, names) if each.choice or each.kind == kind)
    return any(find(n).hastens for n in names) or any(not each.evident(verdict.facts) for each in chosen)


def _structural(names: Sequence[str], verdict: Verdict) -> bool:
    """Return whether what treatments remove was seen in the script itself, and is no number that is off."""
    return all((each := find(name)).mistake or each.chosen(verdict.facts) for name in names)


def _named(names: Sequence[str], verdict: Verdict) -> bool:
    """Return whether what the first run saw, or a finding, names what treatments mend first as a cause.

    That a script learns too little names none; what structure proves is for its absence to say.
    """
    treatments = [each for each in map(find, names) if each.kind != MENDING]
    firsts = {each.fixes[0] for each in treatments if each.answers(each.fixes[0], verdict.found)}
    return not (firsts - {IssueType.NOT_LEARNING}).isdisjoint(verdict.suspects) or _evident(names, verdict)


def _rank(names: Sequence[str], verdict: Verdict) -> tuple[int, ...]:
    """Return what orders treatments that rescue, the lowest first."""
    treatments, far = [find(name) for name in names], _near(names, verdict) > 0
    return (
        any(each.stands_in for each in treatments),
        far and any(each.chosen(verdict.facts) for each in treatments),
        not all(each.mistake for each in treatments),
        far,
        any(each.kind == TUNING for each in treatments),
        _near(names, verdict),
        len(names),
    )


def fixed(names: Sequence[str], verdict: Verdict) -> frozenset[IssueType]:
    """Return what structure proves and these treatments are the fix of.

    A tuning treatment changes every script: a finding that is gone with it says something of its first type alone.
    """
    found = (find(name) for name in names)
    fixes = (each.fixes[: 1 if each.kind == TUNING else None] for each in found)
    return verdict.accused.intersection(kind for each in fixes for kind in each)


def _is_gone(meant: frozenset[IssueType], found: Sequence[tuple[str, str]], baseline: Baseline, effect: float) -> bool:
    """Return whether none of what treatments are meant for is found any more.

    Of NaN the loss says it: a gradient that is mended after the backward pass was found broken in it.
    """
    left = accused(found) & meant
    if IssueType.NUMERICAL in meant:
        finite = math.isfinite(effect) and not all(map(math.isfinite, baseline.effect))
        left = left - {IssueType.NUMERICAL} if finite else meant
    return not left


def confirmations(verdict: Verdict, request: Request, trial: Trial) -> list[Request]:
    """Return runs of two more seeds where the first one promises something; of a blind script for placebos before that.

    A loss that falls further and is as low with inputs that mean nothing is no cure of one that did so.
    """
    base = verdict.baseline
    placebo = base.placebo if base else ""
    if base and trial.stands_in:
        placebo = min(base.placebos, key=base.placebos.__getitem__, default="")
    if not trial.promises(None if verdict.refused else verdict.baseline):
        return []
    if placebo and (trial.stands_in or not trial.gone.get(0)) and not trial.informed(0):
        asked = [] if placebo in request.names else [((*trial.names, placebo), 0)]
    else:
        # The last one shows what else is gone with it.
        plain = (*trial.names, WATCH) if trial.gone else trial.names
        asked = [*((plain, seed) for seed in range(1, SEEDS - 1)), ((*trial.names, WATCH), SEEDS - 1)]
        asked += [((*trial.names, placebo), seed) for seed in range(1, SEEDS) if placebo]
    return [Request(names, seed, verdict.steps) for names, seed in asked]


def _exact(names: Sequence[str]) -> bool:
    return all(find(name).kind != TUNING for name in names)


def _tunes(names: Sequence[str]) -> bool:
    return all(find(name).kind == TUNING for name in names)
