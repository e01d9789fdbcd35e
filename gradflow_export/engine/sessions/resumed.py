"""Training that is resumed: what the run had come to is known to the rules, and compared with what it is now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from gradflow_export.engine.external_issues import ToldJudge
from gradflow_export.engine.training_loop import TrainingLoop
from gradflow_export.records.statistics import median
from gradflow_export.records.step_record import Issue, IssueType, Severity, StepRecord
from gradflow_export.report.summary import RunSummary
from gradflow_export.rules.base import Finding, Rule, number, some
from gradflow_export.rules.history import History
from gradflow_export.storage.earlier import RATE, WEIGHTS, Earlier, earlier

_RESUMED = "resumed"


def go_on(loop: TrainingLoop, judge: ToldJudge, summary: RunSummary, logdir: Path, start_step: int) -> None:
    """Go on where earlier sessions ended: with their count of steps, their losses, and the issues that they left open.

    Args:
        loop: Not attached yet.
        judge: Nothing was judged yet.
        summary: Of the session that begins.
        logdir: Where it writes.
        start_step: Steps that were completed before it.
    """
    loop.steps = loop.quiet.lapped = start_step
    loop.schedule = replace(loop.schedule, begun=start_step)
    info = summary.info
    if info is not None and info.rank == 0 and logdir.is_dir():
        before = earlier(logdir, info, start_step + 1)
        summary.recall(before, start_step)
        optimizers = loop.optimizers
        stateless = (lambda: False) if optimizers is None else optimizers.began_stateless
        judge.recall(before, *compared(before, start_step, stateless))


def compared(before: Earlier, step: int, stateless: Callable[[], bool]) -> Iterator[Resumed]:
    """Yield the rule that compares the losses of a session with those before it, where there are enough of these.

    Args:
        before: What was before it.
        step: Steps that were completed then.
        stateless: Returns whether an optimizer that keeps a state began without one.
    """
    losses = np.array([loss for _, loss in before.losses], dtype=np.float64)
    losses = losses[np.isfinite(losses)]
    if len(losses) >= LOOKED:
        last, first = losses[-2 * LOOKED :], median(losses[: LOOKED // 2])
        level, was = median(last), median(last[-LOOKED // 2 :])
        noise = 1.4826 * median(np.abs(np.diff(last))) / math.sqrt(2)  # beside what they fall by
        limit = max(level + max(6 * noise, 0.05 * (first - level), 0.1 * level), float(last.max()))
        yield Resumed(step=step, was=was, limit=limit, before=before, stateless=stateless)


LOOKED = 10
"""Losses whose median counts as the loss of now."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Rule):
    """Report a loss that is higher since training was resumed than when it stopped, and what differs.

    Higher: the median of ten losses is above each of the last twenty before, and above their median by six robust
    standard deviations, a tenth of it, and a twentieth of what the run had gained. Of weights that are others the first
    five losses tell as much. Losses of several optimizers in turn are not comparable and not judged.

    Attributes:
        step: Steps that were completed before.
        was: The loss then.
        limit: What a higher loss is above.
        before: What the log holds of the sessions before.
        stateless: Returns whether an optimizer that keeps a state began without one.
        within: Losses after which a rise is no longer put down to the resumption.
        apart: Minimum difference between two norms of the same weights, as a fraction of the larger.
    """

    step: int
    was: float
    limit: float
    before: Earlier
    stateless: Callable[[], bool]
    within: int = 100
    apart: float = 0.05
    patience: int = 1
    heal: int = 10

    name: ClassVar[str] = _RESUMED
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    remembers: ClassVar[tuple[str, ...]] = ("loss", RATE, WEIGHTS)

    def check(self, record: StepRecord, history: History) -> tuple[Finding, ...]:
        """Judge the last losses against those before the run was resumed."""
        loss = history.run("loss")
        since = loss.values[loss.steps > self.step]
        now = median(since[-LOOKED:]) if LOOKED // 2 <= len(since) <= self.within else self.was
        if record.get("optimizer.loss") is not None or not self.limit < now < math.inf:
            return ()
        if len(since) < LOOKED and not self._other_weights(history):
            return ()
        differs, fixes, grave = self._differences(history)
        return (
            Finding(
                IssueType.DIVERGING,
                Severity.HIGH if grave else Severity.MEDIUM,
                ("",),
                now,
                self.limit,
                f"the loss was {number(self.was)} at step {self.step}, when the run stopped, and is {number(now)} "
                f"since it was resumed: {differs}.",
                fixes,
                since=self.step + 1,
                cause=_RESUMED,
                urgent=True,
                origin=_RESUMED,
            ),
        )

    def lasts(self, issue: Issue, history: History) -> bool:
        """Return whether the loss is still above."""
        return issue.open and median(history.run("loss").values[-LOOKED:]) > self.limit

    def _differences(self, history: History) -> tuple[str, str, bool]:
        """Return what differs from before, what to do about it, and whether that explains the loss by itself."""
        texts, fixes, grave = [], [], False
        weights = self._other_weights(history)
        if weights:
            first, grave = weights[0], True
            norms = f"{number(self.before.weights[-1][1][first])}, now {number(self._norms(history)[first])}"
            texts.append(f"the weights of {some(weights)} are others (norm of {first}: {norms})")
            fixes.append("load the checkpoint before training: model.load_state_dict(checkpoint['model'])")
        was, now = self.before.rate, history.run(RATE).first
        if abs(now - was) > self.apart * was:
            grave = grave or now > 2 * was
            texts.append(f"the learning rate was {number(was)} and is {number(now)}")
            fixes.append(f"scheduler.load_state_dict(checkpoint['scheduler']), or a learning rate of {number(was)}")
        if self.stateless():
            texts.append("the optimizer began without its state")
            fixes.append("optimizer.load_state_dict(checkpoint['optimizer'])")
        if not texts:
            texts.append("norms of weights, learning rate and optimizer state are as before, as far as recorded")
            fixes.append("check that all layers are loaded, and data, scaling, batch size, terms of the loss, train()")
        return "; ".join(texts), "; ".join(fixes) + ".", grave

    @staticmethod
    def _norms(history: History) -> Mapping[str, float]:
        """Return the first norms of weights that were read since."""
        read = history.at_sites(WEIGHTS)
        return {site: norm for site, norm in zip(read.sites, read.first.tolist(), strict=True) if norm >= 0}

    def _other_weights(self, history: History) -> tuple[str, ...]:
        """Return parameters whose norm cannot be where training had brought it, those that differ most first."""
        if not self.before.weights:
            return ()
        (earliest, older), (latest, newest) = self.before.weights[0], self.before.weights[-1]
        far = (self.step - latest + 1) / max(latest - earliest, 1)
        largest = max(newest.values(), default=0.0)
        differ: dict[str, float] = {}
        for site, now in self._norms(history).items():
            was = newest.get(site, now)
            size = max(was, now, 1e-30)
            moved = abs(was - older.get(site, was)) / size
            beyond = abs(now - was) / size - 2 * far * moved
            if beyond > self.apart and size > self.apart * largest:  # small ones may change by much
                differ[site] = beyond
        return tuple(sorted(differ, key=lambda site: -differ[site]))
