"""Turns what a debugger reads into issues, by an exporter's rules, and tells them to an exporter if there is one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from gradflow_export.exporter import Exporter, watching
from gradflow_export.records.step_record import Issue, Reading, StepRecord
from gradflow_export.rules.base import Finding
from gradflow_export.rules.history import History
from gradflow_export.rules.judge import Judge
from gradflow_export.rules.numerical import Numerical
from gradflow_export.rules.seed import FixedExploding, FixedVanishing

_log = logging.getLogger("gradflow_export")

KEPT = 100
"""Issues that are remembered; the oldest go first."""


class Findings:
    """Judges the readings of one debugger, call by call.

    Args:
        exporter: Where issues go too; by default each exporter that watches the model in question.
        explosion: Greatest allowed norm of a gradient.
        vanishing: Least allowed norm of a gradient, of which parameters that are zero by invariance are left out.

    Attributes:
        log: Takes a level, a message and its arguments.
    """

    def __init__(self, exporter: Exporter | None, *, explosion: float, vanishing: float) -> None:
        self._exporter = exporter
        self.log: Callable[..., None] = _log.log
        self._exploding = FixedExploding(threshold=explosion)
        self._vanishing = FixedVanishing(threshold=vanishing)
        self._numerical = Numerical()
        self._judge = Judge((self._numerical, self._exploding, self._vanishing), keep=KEPT)
        self._judged = -1
        self._lock = threading.Lock()
        self._reported: dict[str, tuple[Issue, list[Exporter]]] = {}
        self._told: dict[tuple[str, str, int], tuple[Issue, list[Exporter]]] = {}

    def judge(self, readings: Sequence[Reading], *, step: int, model: nn.Module | None) -> tuple[Issue, ...]:
        """Take in the readings of one call and pass on what is new.

        Args:
            readings: Of metrics of the catalogue.
            step: The user's own number, under which issues are reported; it may begin anew with each epoch.
            model: Whose exporter is notified, where none was given.

        Returns:
            Issues that opened, and issues that healed, with the user's steps.
        """
        with self._lock:
            self._judged = max(step, self._judged + 1)
            record = StepRecord(self._judged, 0.0, tuple(readings))
            return tuple(self._pass_on(issue, step, model) for issue in self._judge.check(record))

    def now(self, readings: Sequence[Reading]) -> dict[str, Finding]:
        """Return what is wrong in one set of readings by itself, without a past: by the names of the rules."""
        record, history = StepRecord(1, 0.0, tuple(readings)), History(self._vanishing.remembers)
        present = {reading.metric for reading in readings}
        found = {}
        for rule in (self._exploding, self._vanishing):
            if present & set(rule.needs):
                for finding in rule.check(record, history):
                    found[rule.name] = finding
        return found

    def report(self, key: str, issue: Issue | None, model: nn.Module | None = None) -> None:
        """Pass on what one kind of look found, which no rule judges; the next such look that finds nothing heals it.

        Args:
            key: Kind and name of what was looked at.
            issue: What is wrong, ``None`` when nothing is.
            model: Whose exporter is notified, where none was given.
        """
        with self._lock:
            known = self._reported.get(key)
            if issue is not None and known is None:
                known = issue, self._exporters(model)
                if known[1]:
                    while len(self._reported) >= KEPT:
                        del self._reported[next(iter(self._reported))]
                    self._reported[key] = known
            elif issue is None and known is not None:
                del self._reported[key]
                known = replace(known[0], healed_step=known[0].step), known[1]
            else:
                return
        for exporter in known[1]:
            exporter.add_issue(known[0])

    def _pass_on(self, issue: Issue, step: int, model: nn.Module | None) -> Issue:
        if issue.open:
            mine = replace(issue, step=step)
            told = self._exporters(model)
            while len(self._told) >= KEPT:
                del self._told[next(iter(self._told))]
            self._told[issue.key] = mine, told
            self.log(logging.WARNING, "gradflow: %s", mine)
        else:
            mine, told = self._told.pop(issue.key, (issue, []))
            mine = replace(mine, healed_step=step)
        for exporter in told:
            exporter.add_issue(mine)
        return mine

    def _exporters(self, model: nn.Module | None) -> list[Exporter]:
        if self._exporter is not None:
            return [self._exporter]
        return [] if model is None else watching(model)
