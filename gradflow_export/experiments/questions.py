"""Questions beyond one cause, each answered by a few more runs: a number, a sentence and a small chart."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradflow_export.experiments.decision import FROM_INPUTS, LEARNED, LEAST
from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.probes import LEAKED
from gradflow_export.experiments.runs import Request, Result
from gradflow_export.experiments.survey import Training
from gradflow_export.experiments.verdict import Verdict

OUTPUTS = "outputs"
RATES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
OTHER_MODE = 1.5
"""Ratio of losses in evaluation and training mode from which on they differ."""
AS_GREAT = 1.005
"""The same, below which they are called equal."""
BATCHES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Multiples of the batch size for which the noise of a gradient is said."""
SAME = 1e-6
"""Share of noise in a gradient below which batches are taken for equal."""
MEMORIZED = 0.99
"""Share of the first loss on one batch for ever above which model or optimizer cannot learn."""


@dataclass(frozen=True)
class Answer:
    """One page of a report.

    Attributes:
        title: The question.
        text: The answer.
        bars: Numbers by label, for a chart.
        curves: Series by label, for a chart.
        wrong: Whether it is one to act upon.
    """

    title: str
    text: str
    bars: dict[str, float] = field(default_factory=dict)
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    wrong: bool = False


def answers(laboratory: Laboratory, verdict: Verdict, trainings: Sequence[Training] = ()) -> list[Answer]:
    """Run what is missing and answer each question that can be answered of a program.

    Args:
        laboratory: Where runs are done; it examines the verdict's training.
        verdict: What the battery found.
        trainings: All of the program: of several, titles give the number.
    """
    if verdict.baseline is None or verdict.refused:
        return []
    names = [_rate(factor) for factor in RATES if factor != 1.0] + [
        "one batch for ever",
        "evaluation mode",
        "causality",
        "gradient noise",
    ]
    known = {
        trial.names[0]: trial.effects[0] for trial in verdict.trials if len(trial.names) == 1 and 0 in trial.effects
    }
    asked = deque(Request((name,), 0, verdict.steps) for name in names if name not in known)
    asked.extend([Request((OUTPUTS,), 0, verdict.steps)] * 2)
    found: dict[str, Result] = {}
    twins: list[Result] = []
    for request, result in laboratory.run(asked):
        found[request.names[0]] = result
        twins += [result] if request.names == (OUTPUTS,) else []
    known.update((name, math.inf if each.error else each.effect) for name, each in found.items())
    which = f" (model {trainings.index(verdict.training) + 1})" if len(trainings) > 1 else ""
    return [
        replace(each, title=each.title + which)
        for each in (
            _rates(known, verdict),
            _determinism(*twins),
            _inputs(verdict),
            _one_batch(found["one batch for ever"], verdict),
            _modes(found["evaluation mode"], verdict),
            _future(found["causality"]),
            _noise(found["gradient noise"], verdict.steps),
        )
        if each is not None
    ]


def _rate(factor: float) -> str:
    return f"learning rate x {factor:g}"


def _rates(known: dict[str, float], verdict: Verdict) -> Answer | None:
    assert verdict.baseline is not None
    effects = {factor: known[_rate(factor)] if factor != 1.0 else verdict.baseline.effect[0] for factor in RATES}
    stable = [factor for factor, effect in effects.items() if effect < verdict.baseline.first[0]]
    if not stable:
        return Answer("Learning-rate range", "The loss falls at none of seven learning rates.", wrong=True)
    best = min(stable, key=lambda factor: effects[factor])
    times = {factor: "the script's" if factor == 1.0 else f"{factor:g} times the script's" for factor in RATES}
    better = effects[best] < LEARNED * effects[1.0] or not math.isfinite(effects[1.0])
    least = f"it is lowest at {times[best]}" if better else "no rate is better than the script's own"
    text = (
        f"The loss falls at learning rates up to {times[max(stable)]}, and after {verdict.steps} steps {least}. Seven "
        f"rates were tried, from {RATES[0]:g} to {RATES[-1]:g} times the script's."
    )
    return Answer("Learning-rate range", text, {f"x {factor:g}": effect for factor, effect in effects.items()})


def _determinism(one: Result, other: Result) -> Answer | None:
    if one.error or other.error or not one.losses:
        return None
    # NaN differs from itself.
    pairs = enumerate(zip(map(repr, one.losses), map(repr, other.losses), strict=False), start=1)
    differ = next((at for at, (first, second) in pairs if first != second), 0)
    outputs = zip(one.facts["outputs"], other.facts["outputs"], strict=False)
    at, block = next(
        (
            (at, first[0])
            for at, steps in enumerate(outputs, start=1)
            for first, second in zip(*steps, strict=False)
            if first != second
        ),
        (0, ""),
    )
    if not differ and not at:
        return Answer("Determinism", "Two runs with the same seed have the same losses, bit for bit.")
    where = f" The first difference is in step {at}, in {block or 'the whole model'}." if at else ""
    return Answer(
        "Determinism",
        f"Two runs with the same seed differ from step {differ or at} onwards.{where}",
        curves={"first": one.losses, "second": other.losses},
        wrong=True,
    )


def _inputs(verdict: Verdict) -> Answer | None:
    base = verdict.baseline
    against = base.against_placebo if base else None
    if base is None or against is None:
        return None
    none = against >= FROM_INPUTS
    text = (
        "The loss is as low with shuffled inputs or noise: the model does not learn from the inputs."
        if none
        else f"The loss is {against:.2f} of that with placebo inputs: the model learns from the inputs."
    )
    return Answer("Input dependence", text, {"as it is": base.effect[0], **base.placebos}, wrong=none)


def _one_batch(result: Result, verdict: Verdict) -> Answer | None:
    if not result.acted or result.error or not result.losses:
        return None
    share = result.effect / max(abs(result.losses[0]), LEAST)
    fails = not share <= MEMORIZED
    text = f"Trained on its first batch only, the loss is {share:.3g} of the first one after {verdict.steps} steps" + (
        ": the model or the optimizer is at fault, not the data." if fails else "."
    )
    return Answer("Overfitting one batch", text, curves={"one batch": result.losses}, wrong=fails)


def _modes(result: Result, verdict: Verdict) -> Answer | None:
    assert verdict.baseline is not None
    if not result.acted or result.error:
        return None
    train, evaluated = verdict.baseline.effect[0], result.effect
    ratio = evaluated / max(train, LEAST)
    differ = not 1 / OTHER_MODE < ratio < OTHER_MODE
    what = "equal to" if 1 / AS_GREAT < ratio < AS_GREAT else f"{ratio:.3g} of"
    text = f"In evaluation mode the loss of the same weights is {what} that in training mode, without dropout" + (
        ": running statistics lag behind, or a layer behaves differently in the two modes." if differ else "."
    )
    return Answer("Training and evaluation mode", text, {"train": train, "eval": evaluated}, wrong=differ)


def _future(result: Result) -> Answer | None:
    change = result.facts.get("future")
    if change is None:
        return None
    if change > LEAKED:
        text = (
            "The output at a position depends on later inputs. If the model predicts the next one, this is target "
            "leakage: use a causal attention mask, causal (left) padding of convolutions, and no bidirectional layer."
        )
        return Answer("Causality", text)
    return Answer("Causality", "The output at a position does not depend on later inputs.")


def _noise(result: Result, steps: int) -> Answer | None:
    batch, spread, signal = result.facts.get("noise", (0, 0.0, 0.0))
    if not batch or result.error:
        return None
    title = "Batch size"
    if not spread and not signal:
        return None
    if spread <= SAME * signal:
        return Answer(title, f"After {steps} steps each batch has the same gradient: a larger batch would not help.")
    if not signal:
        return Answer(
            title,
            f"After {steps} steps the gradients of batches of {batch} are pure noise: a larger batch or a smaller "
            "learning rate would help, unless the loss has converged.",
        )
    ratio = spread / signal
    text = (
        f"After {steps} steps the variance of the gradient of a batch of {batch} is {ratio:.2g} times the squared "
        f"norm of the mean gradient. It falls as 1 / batch size: both are equal at about {_round(batch * ratio)} "
        "(the gradient noise scale); much larger batches gain little."
    )
    return Answer(title, text, {f"batch of {batch * each:g}": ratio / each for each in BATCHES if batch * each >= 1})


def _round(value: float) -> str:
    return f"{max(float(f'{value:.1g}'), 1.0):.0f}"
