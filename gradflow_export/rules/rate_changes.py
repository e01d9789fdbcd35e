"""Steps that become too large, or nothing, at once: what is known of them after three losses or gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import IssueType, Severity, StepRecord
from gradflow_export.rules.base import Finding, number
from gradflow_export.rules.history import History
from gradflow_export.rules.signals import AGAIN, begun


def leapt(history: History, leap: float, jump: float) -> Iterable[Finding]:
    """Yield where a rate beyond all before it came at once, and with it losses beyond all that were usual.

    Args:
        history: Holds ``learning_rate`` and ``loss``.
        leap: Least share of the last rate that counts as the same one.
        jump: Greatest rate that was there before, as a share of it.
    """
    rate, loss = history.run("learning_rate"), history.run("loss")
    start = int(begun(rate.steps, rate.values[:, None] >= leap * rate.last)[0]) if rate.count else 0
    if start == len(rate.steps):
        return
    since = int(rate.steps[start])
    steps, rates = rate.all()
    old = float(rates[steps < since].max())
    before, after = loss.values[loss.steps <= since][-32:], loss.values[loss.steps > since][-AGAIN:]
    if old > jump * rate.last or min(len(after), len(before) / 5) < AGAIN:
        return
    level, now = median(before), median(after)
    if not (after.min() > before.max() and now > 2.0 * level):
        return
    message = (
        f"the learning rate rose from {number(old)} to {number(rate.last)} at step {since}, and each of the last "
        f"{AGAIN} losses lies above the {len(before)} before: {number(now)}, after {number(level)}."
    )
    found = finding_of(Severity.HIGH, rate.last / old, 1 / jump, message, stay_of(old), "too large", since)
    yield replace(found, urgent=True)


def clipped(record: StepRecord, history: History, share: float, nothing: float) -> Iterable[Finding]:
    """Yield where clipping leaves, step by step, less than any optimizer can use.

    Args:
        record: The newest one.
        history: Holds ``gradient.clip_scale`` and ``gradient.total_norm``.
        share: Least share of a gradient that is left.
        nothing: Least norm that is left.
    """
    scale, whole = history.run("gradient.clip_scale"), history.run("gradient.total_norm").last
    left, steps = scale.values[-AGAIN:], scale.steps[-AGAIN:]
    close = len(steps) == AGAIN and record.step == steps[-1] < steps[0] + AGAIN
    if close and float(left.max()) < share and whole * float(left[-1]) < nothing:
        message = f"clipping leaves {number(whole * float(left[-1]))} of a gradient of {number(whole)} at each step."
        advice = limit_of(whole * float(left[-1]), whole)
        found = finding_of(Severity.MEDIUM, float(left[-1]), share, message, advice, "too small", int(steps[0]))
        yield replace(found, urgent=True)


def limit_of(left: float, whole: float) -> str:
    """Return what to do about gradients that are clipped too far."""
    return (
        f"raise the limit of clipping, which leaves {number(left)} of a gradient of {number(whole)}: "
        "clip_grad_norm_(model.parameters(), 1.0) is usual; after that, if need be, the learning rate."
    )


def stay_of(old: float) -> str:
    """Return what to do about a rate that rose from one that was good."""
    return (
        f"stay at {number(old)} or below; a schedule that is to lower the rate multiplies it with less than 1: "
        "StepLR(optimizer, step_size, gamma=0.1), lr * 0.1 ** (epoch // 30)."
    )


def finding_of(
    severity: Severity, value: float, threshold: float, message: str, advice: str, cause: str, since: int
) -> Finding:
    """Return what is wrong with a learning rate."""
    return Finding(
        IssueType.LEARNING_RATE,
        severity,
        ("",),
        value,
        threshold,
        message,
        advice,
        since=since,
        cause=cause,
        origin=cause,
    )
