"""What the sessions of a run hold for one that continues them (floor 1, part of the store)."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from gradflow_export.records.step_record import Gap, Issue, Reading, RunInfo
from gradflow_export.storage.reader import Records, continued, missing

WEIGHTS, RATE = "parameter.weight_norm", "learning_rate"


@dataclass(frozen=True)
class Earlier:
    """What earlier sessions left to the one that continues them.

    Attributes:
        issues: Those that they left open, each with the number of records after which its session reported it.
        losses: Each recorded loss with its step.
        rate: The last learning rate, NaN where none was recorded.
        records: How many records there are.
        first: The step of the first one, 0 where there is none.
        gaps: What is missing among them, and between the last one and the session that continues them.
        weights: The last two readings of the norms of parameters, each with its step; fewer where there were fewer.
    """

    issues: tuple[tuple[Issue, int], ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    rate: float = math.nan
    weights: tuple[tuple[int, Mapping[str, float]], ...] = ()
    records: int = 0
    first: int = 0
    gaps: tuple[Gap, ...] = ()


def earlier(logdir: str | os.PathLike[str], info: RunInfo, before: int) -> Earlier:
    """Read what earlier sessions of a run left; nothing if their files are too long to be read at once.

    Args:
        logdir: The log directory of the run.
        info: The session that continues them.
        before: Its first step; what they recorded from there on was taken back.

    Raises:
        StorageError: A file was written by a newer version of this package, or cannot be read.
    """
    run = continued(logdir, info, before)
    if not run:
        return Earlier()
    last: dict[tuple[str, str], tuple[Issue, int]] = {}
    firsts = [min(start.owner) for start in run]
    for start, cut in zip(run, [*firsts[1:], before], strict=True):
        steps = sorted(start.owner)
        for step, issue in start.issues:
            if step < min(cut, before):
                last[str(issue.issue_type), issue.layer] = issue, bisect_right(steps, step)
    losses: list[tuple[int, float]] = []
    rates: list[float] = [math.nan]
    weights: list[tuple[int, Reading]] = []
    records = Records(run)
    for record in records.only({"loss", RATE, WEIGHTS}):
        if record.step >= before:
            break
        loss, rate, read = record.value("loss"), record.value(RATE), record.get(WEIGHTS)
        losses += [] if loss is None else [(record.step, loss)]
        rates = rates if rate is None else [rate]
        weights = weights if read is None else [*weights[-1:], (record.step, read)]
    norms = tuple((step, {site: v for site, v in read.as_dict().items() if v is not None}) for step, read in weights)
    return Earlier(
        tuple(pair for pair in last.values() if pair[0].open),
        tuple(losses),
        rates[0],
        norms,
        bisect_left(records.steps, before),
        min(firsts),
        tuple(missing(run, before)),
    )
