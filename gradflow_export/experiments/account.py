"""What the experiments showed, as lines of text, as JSON, and as issues that stand among those of the symptoms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from gradflow_export.experiments.decision import FROM_INPUTS, Baseline, Trial, number
from gradflow_export.experiments.mending.treatment import EXACT
from gradflow_export.experiments.mending.untried import UNTRIED, UNTRIED_CAUSES
from gradflow_export.experiments.treatments import find, patches
from gradflow_export.experiments.verdict import SEEDS, Verdict
from gradflow_export.records.causes import with_causes
from gradflow_export.records.issues import Issue, IssueType, Severity, number_to_json

ADAMS = MappingProxyType({"Adam with 1e-3": 1e-3, "Adam with 1e-2": 1e-2})
DEGREE = frozenset({
    IssueType.VANISHING, IssueType.EXPLODING, IssueType.DEAD, IssueType.SATURATION, IssueType.UNSTABLE,
    IssueType.BOTTLENECK, IssueType.LOSS_SPIKE, IssueType.OPTIMIZER_STATE, IssueType.DATA_SCALE,
    IssueType.LEARNING_RATE, IssueType.BAD_INIT,
})  # fmt: skip
"""Issues of degree: a number is unusual, which may or may not matter. Others are proved from structure or data."""


def effect(trial: Trial, verdict: Verdict) -> str:
    """Return what a treatment did, in one sentence."""
    assert verdict.baseline is not None
    name, what = " and ".join(trial.names), _compared(verdict)
    if trial.error:
        return f"{name}: the run failed, {trial.error}"
    before, after = number(verdict.baseline.effect[0]), number(trial.effects.get(0, math.inf))
    steps = f"{verdict.steps} steps"
    if verdict.relieves(trial) and not verdict.rescues(trial) and not trial.stands_in:
        fixes = [kind for each in trial.names for kind in find(each).fixes]
        kinds = " and ".join(sorted(verdict.accused.intersection(fixes)) or fixes[:1])
        course = "" if verdict.refused else f", the {what} is {after}, and {before} without it"
        return f"{name}: {kinds} is gone in {steps}{course}, in {len(trial.effects)} of {SEEDS} seeds"
    if not verdict.helps(trial):
        confirmed = f", not confirmed by other seeds ({len(trial.effects)} runs)" if len(trial.effects) > 1 else ""
        return f"{name}: the {what} is {after} after {steps}, and {before} without it{confirmed}"
    seeds = f"in {len(trial.effects)} of {SEEDS} seeds" + (
        "" if verdict.seeds > 1 else " (this script ignores the seed)"
    )
    if trial.blind:
        share, plain = trial.effects[0] / trial.blind[0], verdict.baseline.against_placebo
        return f"{name}: the {what} is {share:.2f} of that with placebo inputs instead of {plain:.2f}, {seeds}"
    return f"{name}: the {what} reaches {after} instead of {before} after {steps}, {seeds}"


def _compared(verdict: Verdict) -> str:
    if verdict.measured:
        return "cost"
    return "loss without its penalty on the weights" if verdict.facts.get("penalized") else "loss"


def patch(trial: Trial, facts: Mapping[str, Any]) -> str:
    """Return the code that makes a treatment for good, chosen by what the first run saw."""
    if facts.get("adam") and len(trial.names) == 1 and trial.names[0] in ADAMS:
        return f"for group in optimizer.param_groups:\n    group['lr'] = {ADAMS[trial.names[0]]:g}"
    return patches(trial.names, facts)


def separates(name: str, facts: Mapping[str, Any]) -> str:
    """Return the cause that a treatment separates: of another Adam in the place of an Adam it is the rate."""
    rate = facts.get("adam")
    if not rate or name not in ADAMS:
        return find(name).separates
    return "a learning rate that is too small" if rate < ADAMS[name] else "a learning rate that is too large"


def cures(verdict: Verdict, seen: Sequence[Issue] = ()) -> list[Issue]:
    """Return an issue for the cause that was found; one, that names all treatments that are as good.

    Args:
        verdict: What the experiments showed.
        seen: Issues that are reported with it.
    """
    if not verdict.cures or verdict.baseline is None:
        return []
    first = verdict.cures[0]
    # A treatment that mends several things has mended what was found.
    kinds = sorted(
        (kind for name in first.names for kind in find(name).fixes),
        key=lambda kind: (kind not in verdict.accused, kind not in verdict.suspects),
    )
    causes = " and ".join(separates(name, verdict.facts) for name in first.names)
    evidence = "".join(f" Seen: {each.issue_type} in {_where(each)}: {each.message}" for each in seen)
    also = "".join(f" Equally effective: {effect(trial, verdict)}." for trial in verdict.cures[1:])
    return [
        Issue(
            kinds[0],
            Severity.HIGH,
            "",
            1,
            first.effects[0],
            verdict.baseline.level(0),
            f"{_sentence(causes)}.{evidence} Tried: {effect(first, verdict)}.{also}",
            "\n# or, as good:\n".join(dict.fromkeys(patch(trial, verdict.facts) for trial in verdict.cures)),
            cause=" + ".join(first.names),
        )
    ]


def weighed(issues: Sequence[Issue], verdict: Verdict) -> list[Issue]:
    """Return issues as the experiments leave them.

    Of each it is said what its cure did. One of degree, or a loss that came back by itself, is LOW where the program
    learns and its own exact cure does not relieve it; what is proved from structure or data keeps its severity, and so
    does all where the program is ill. What its own cure does not relieve or what went by itself, while another change
    rescues, is reported with that one; so is what is found no more once that change is made. Where nothing can be
    tried, the message says why.
    """
    issues = [_untried(each) for each in issues]
    if (verdict.refused and not verdict.cures) or verdict.baseline is None:
        return list(issues)
    found, folded, gone_too = [], [], []
    new, ended = cures(verdict), _ended(verdict)
    behind = {issue.key: issue.explained_by for issue in with_causes(issues)}
    for issue in issues:
        tried = [
            each
            for each in verdict.trials
            if each.acted and each not in verdict.pending and any(issue.issue_type in find(n).fixes for n in each.names)
        ]
        cured = [each for each in tried if verdict.helps(each)]
        cured = [each for each in cured if each in verdict.cures] or cured
        shown = cured or sorted(tried, key=lambda each: each.effects.get(0, math.inf))[:1]
        known = issue
        if shown:
            text = "; ".join(effect(each, verdict) for each in shown)
            exact = any(find(name).kind == EXACT for each in tried for name in each.names)
            healed = issue.issue_type is IssueType.DIVERGING and not issue.open
            kept = cured or not (healed or issue.issue_type in DEGREE) or verdict.baseline.ill or not exact
            severity = issue.severity if kept else min(issue.severity, Severity.LOW)
            known = replace(issue, message=f"{issue.message} Tried: {text}.", severity=severity)
        vain = issue.issue_type in DEGREE and any(not verdict.helps(each) for each in tried)
        lesser = any(each.issue_type == issue.issue_type for each in new) and issue.severity < Severity.HIGH
        if issue.issue_type in ended and behind[issue.key] is None:
            gone_too.append(issue)
        elif new and (vain or lesser or not (issue.open or cured)) and behind[issue.key] is None:
            folded.append(issue)
        else:
            found.append(known)
    gone = {issue.key for issue in (*folded, *gone_too)}
    found = [issue for issue in found if behind[issue.key] not in gone]
    kinds = {each.issue_type for each in new}
    own = next((at for at, each in enumerate(found) if each.severity >= Severity.HIGH and each.issue_type in kinds), -1)
    also = f" Also resolved: {_listed(gone_too)}." if gone_too else ""
    if own < 0:
        return [*found, *(replace(each, message=each.message + also) for each in cures(verdict, folded))]
    # The cure stands with the finding that asked for it.
    also = (f" Also seen: {_listed(folded)}." if folded else "") + also
    found[own] = replace(found[own], message=found[own].message + also)
    return found


def _listed(issues: Sequence[Issue]) -> str:
    return ", ".join(dict.fromkeys(f"{each.issue_type} in {_where(each)}" for each in issues))


def _untried(issue: Issue) -> Issue:
    """Return an issue with the reason why no trial can confirm it, where there is one; said once for all models."""
    why = UNTRIED.get(issue.issue_type) or UNTRIED_CAUSES.get(issue.cause)
    reason = f" Not tried: {why}."
    return issue if not why or issue.message.endswith(reason) else replace(issue, message=issue.message + reason)


def _where(issue: Issue) -> str:
    return issue.layer or "the whole model"


def _ended(verdict: Verdict) -> frozenset[IssueType]:
    """Return what a watched run shows, and one with the cure no more, although the cure is not meant for it."""
    if not verdict.cures or verdict.cures[0].left is None:
        return frozenset()
    meant = {kind for trial in verdict.cures for name in trial.names for kind in find(name).fixes}
    return frozenset(IssueType(kind) for kind, _ in verdict.found if kind not in verdict.cures[0].left) - meant


def remark(verdict: Verdict) -> str:
    """Return what is reported, without a severity, of a program that learns slowly; empty for any other."""
    if verdict.baseline is None or not verdict.baseline.slow:
        return ""
    return " ".join(
        f"{_sentence(text)}."
        for text in (
            verdict.baseline.slow.replace("loss", "cost") if verdict.measured else verdict.baseline.slow,
            *(f"faster in the same steps: {effect(trial, verdict)}" for trial in verdict.faster),
        )
    )


def state(verdict: Verdict) -> str:
    """Return in a sentence whether the script learns as it is."""
    assert verdict.baseline is not None
    if verdict.refused:
        return f"Losses cannot be compared: {verdict.refused.rstrip('.')}."
    if not verdict.baseline.ill:
        return remark(verdict) or "The script learns."
    complaint = verdict.baseline.complaint.replace("loss", "cost") if verdict.measured else verdict.baseline.complaint
    return f"The unchanged script does not learn: {complaint}."


def lines(verdict: Verdict, shown: Sequence[Issue] = ()) -> list[str]:
    """Return the account of one training as lines of text.

    Args:
        verdict: What the experiments showed.
        shown: Issues that are printed above it: what they say of a cure is not repeated.
    """
    if verdict.refused and not verdict.trials:
        why = [f"nothing was tried: {verdict.refused.rstrip('.')}."]
        if verdict.baseline is not None:
            why[0] += " Losses of two runs cannot be compared."
        named = "  Name a value to compare: --measure higher:reward or --measure 'lower:stdout:loss=(\\S+)'."
        return why if verdict.baseline is None else [*why, named]
    if verdict.baseline is None:
        return ["the experiments were stopped before there was a result."]
    told = [f"tried in {verdict.runs} runs of up to {verdict.steps} steps, {verdict.cpu:.1f} s of CPU time:"]
    if verdict.cut:
        told.append(f"  {incomplete(verdict)}")
    if verdict.measured:
        told.append(f"  Measured: {verdict.measured}.")
    told.append(f"  {state(verdict)}")
    for trial in verdict.cures:
        told.append(f"  [{'CAUSE' if trial.stands_in else 'CURE'}] {effect(trial, verdict)}")
        if any(each.cause == " + ".join(verdict.cures[0].names) for each in shown):
            continue
        told += [f"    cause {separates(name, verdict.facts)}" for name in trial.names]
        told += [
            f"    {'patch' if not at else '     '} {line}"
            for at, line in enumerate(patch(trial, verdict.facts).split("\n"))
        ]
    if verdict.baseline.ill and not (verdict.cures or verdict.surplus or verdict.refused):
        known = "None of those tried so far" if verdict.cut else "No treatment"
        told.append(f"  {known} makes it learn{'' if verdict.cut else _advice(verdict.baseline)}.")
    told += [f"  {what}: {', '.join(trials)}" for what, trials in beside(verdict).items()]
    return told


def _brief(trial: Trial) -> str:
    known = f"the run failed, {trial.error}" if trial.error else number(trial.effects.get(0, math.inf))
    return f"{' + '.join(trial.names)} ({known})"


def incomplete(verdict: Verdict) -> str:
    """Return in a sentence why a search ended before everything was tried, and what was not."""
    names = [" + ".join(each) for each in verdict.untried if len(each) == 1]
    names += [f"combinations ({count})"] if (count := len(verdict.untried) - len(names)) else []
    left = f" Not tried: {', '.join(names)}." if names else ""
    return f"Incomplete: {verdict.cut} before everything was tried.{left}"


def beside(verdict: Verdict, *, several: bool = False) -> dict[str, list[str]]:
    """Return what was tried beside the cures, by what came of it.

    Args:
        verdict: What the experiments showed.
        several: Whether there are runs of more steps as well, so that it is said of how many these are.
    """
    assert verdict.baseline is not None
    why = "another goes before it" if verdict.cures else "not prescribed"
    found = {
        f"also confirmed in {SEEDS} of {SEEDS} seeds, {why}": verdict.surplus,
        "seems to help, not confirmed yet": verdict.pending,
        "also tried": [trial for trial in verdict.vain if trial not in verdict.cures],
    }
    steps = f" after {verdict.steps} steps" if several or verdict.shorter else ""
    plain = f"{_compared(verdict)} {number(verdict.baseline.effect[0])} unchanged{steps}"
    told = {f"{what} ({plain})": list(map(_brief, trials)) for what, trials in found.items() if trials}
    if verdict.shorter:
        told |= beside(replace(verdict.shorter, cures=verdict.cures, cut=verdict.cut), several=True)
    return told


def _advice(baseline: Baseline) -> str:
    against = baseline.against_placebo
    if against is None or against < FROM_INPUTS:
        return "; check the data, the targets and the loss"
    return (
        ", and placebo inputs give the same loss; compare some inputs with their targets (shuffled separately, or "
        "shifted by a column), then check the loss"
    )


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the account of one training, ready for JSON."""
    base = verdict.baseline
    return {
        "steps": verdict.steps,
        "refused": verdict.refused or None,
        "complaint": (base.complaint or None) if base else None,
        "remark": remark(verdict) or None,
        "first_loss": [number_to_json(each) for each in base.first] if base else [],
        "loss": [number_to_json(each) for each in base.effect] if base else [],
        "placebos": {name: number_to_json(each) for name, each in base.placebos.items()} if base else {},
        "cures": [_trial(each, verdict) for each in verdict.cures],
        "in_vain": [_trial(each, verdict) for each in verdict.vain if each not in verdict.cures] if base else [],
        "also_confirmed": [_trial(each, verdict) for each in verdict.surplus] if base else [],
        "pending": [_trial(each, verdict) for each in verdict.pending] if base else [],
        "incomplete": verdict.cut or None,
        "not_tried": [list(names) for names in verdict.untried],
        "in_fewer_steps": as_json(replace(verdict.shorter, cures=[])) if verdict.shorter else None,
        "runs": verdict.runs,
        "cpu_seconds": round(verdict.cpu, 3),
    }


def _trial(trial: Trial, verdict: Verdict) -> dict[str, Any]:
    return {
        "treatments": list(trial.names),
        "separates": [separates(name, verdict.facts) for name in trial.names],
        "loss": {str(seed): number_to_json(each) for seed, each in sorted(trial.effects.items())},
        "effect": effect(trial, verdict),
        "patch": patch(trial, verdict.facts),
        "error": trial.error or None,
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
