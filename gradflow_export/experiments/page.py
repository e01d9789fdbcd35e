"""The report of ``gradflow doctor`` as one HTML file without anything outside of it, so that it can be mailed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from gradflow_export.experiments.account import beside, effect, incomplete, lines, patch, state
from gradflow_export.experiments.questions import Answer
from gradflow_export.experiments.runs import Outcome
from gradflow_export.experiments.verdict import Verdict
from gradflow_export.records.issues import Issue

WIDTH, HEIGHT = 560, 180
COLORS = ("#1f77b4", "#999999", "#bbbbbb", "#2ca02c", "#d62728", "#9467bd")

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em;color:#222}"
    "pre{background:#f4f4f4;padding:.7em;white-space:pre-wrap}h2{margin-top:2em}.cure{border-left:4px solid #2ca02c;"
    "padding-left:1em}td,th{padding:.15em .8em .15em 0;text-align:left}svg{max-width:100%}"
)


def as_html(
    name: str,
    issues: Sequence[Issue],
    verdicts: Sequence[Verdict],
    answers: Sequence[Answer],
    outcome: Outcome,
) -> str:
    """Return the whole page.

    Args:
        name: The script.
        issues: What was found.
        verdicts: What the experiments showed.
        answers: What further runs answered.
        outcome: What came of watching it.
    """
    ran = f"{'the first ' if outcome.stopped else ''}{outcome.steps} steps"
    count = f"{len(issues) or 'No'} finding{'' if len(issues) == 1 else 's'} in {ran}."
    parts = [f"<h1>{escape(name)}</h1>", f"<p>{count}</p>"]
    for issue in issues:
        where = escape(issue.layer or "the whole model")
        parts.append(f"<h3>{issue.severity.name} {escape(str(issue.issue_type))} in {where}</h3>")
        parts.append(f"<p>{escape(issue.message)}</p><pre>{escape(issue.advice)}</pre>")
    for verdict in verdicts:
        parts += _verdict(verdict, issues)
    for answer in answers:
        parts.append(f"<h2>{escape(answer.title)}</h2><p>{escape(answer.text)}</p>")
        parts.append(curves(answer.curves) if answer.curves else bars(answer.bars))
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>gradflow doctor: {escape(name)}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>"
    )


def _verdict(verdict: Verdict, issues: Sequence[Issue]) -> list[str]:
    if verdict.baseline is None or (verdict.refused and not verdict.trials):
        return ["<h2>Experiments</h2>", f"<p>{escape(lines(verdict)[0])}</p>"]
    parts = [
        "<h2>Experiments</h2>",
        f"<p>{escape(state(verdict))} {verdict.runs} runs of up to {verdict.steps} steps.</p>",
    ]
    if verdict.cut:
        parts.insert(1, f"<p>{escape(incomplete(verdict))}</p>")
    for trial in verdict.cures:
        told = any(each.cause == " + ".join(verdict.cures[0].names) for each in issues)
        code = "" if told else f"<pre>{escape(patch(trial, verdict.facts))}</pre>"
        parts.append(f'<div class="cure"><p>{escape(effect(trial, verdict))}.</p>{code}</div>')
    shown = ["as it is", *verdict.baseline.placebos, *(" + ".join(trial.names) for trial in verdict.cures)]
    parts.append(f"<p>The loss of each step. After step {verdict.steps} the weights are held, and it is compared.</p>")
    parts.append(curves({each: verdict.curves[each] for each in shown if each in verdict.curves}))
    for what, trials in beside(verdict).items():
        parts.append(f"<p>{escape(what[0].upper() + what[1:])}: {escape(', '.join(trials))}.</p>")
    return parts


def curves(series: Mapping[str, Sequence[float]]) -> str:
    """Return a line chart of positive numbers on a logarithmic axis as SVG."""
    logs = {
        name: [math.log10(each) if 0 < each < math.inf else math.nan for each in values]
        for name, values in series.items()
    }
    every = [each for values in logs.values() for each in values if math.isfinite(each)]
    if not every:
        return ""
    low, high = min(every), max(every)
    span, longest = max(high - low, 1e-6), max(max(len(values) for values in logs.values()) - 1, 1)
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20 * len(logs)}" role="img">']
    # The script as it is lies above what does not differ from it.
    for number, (name, values) in reversed(list(enumerate(logs.items()))):
        color = COLORS[number % len(COLORS)]
        points = " ".join(
            f"{50 + (WIDTH - 60) * at / longest:.1f},{10 + (HEIGHT - 30) * (high - value) / span:.1f}"
            for at, value in enumerate(values)
            if math.isfinite(value)
        )
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        out.append(f'<text x="50" y="{HEIGHT + 15 + 20 * number}" fill="{color}">{escape(name)}</text>')
    for value, at in ((high, 14), (low, HEIGHT - 18)):
        out.append(f'<text x="0" y="{at}" font-size="12">{10**value:.3g}</text>')
    return "".join([*out, "</svg>"])


def bars(values: Mapping[str, float]) -> str:
    """Return a bar chart as SVG; what is no number has no bar."""
    if not values:
        return ""
    top = max((abs(each) for each in values.values() if math.isfinite(each)), default=1.0) or 1.0
    out = [f'<svg viewBox="0 0 {WIDTH} {22 * len(values)}" role="img">']
    for number, (name, value) in enumerate(values.items()):
        y = 22 * number
        length = (WIDTH - 260) * abs(value) / top if math.isfinite(value) else 0.0
        out.append(f'<text x="0" y="{y + 15}" font-size="13">{escape(name)}</text>')
        out.append(f'<rect x="150" y="{y + 3}" width="{length:.1f}" height="14" fill="{COLORS[0]}"/>')
        out.append(f'<text x="{156 + length:.1f}" y="{y + 15}" font-size="12">{value:.3g}</text>')
    return "".join([*out, "</svg>"])
