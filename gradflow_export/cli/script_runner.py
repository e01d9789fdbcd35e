"""Runs somebody's training script for a few steps and watches every model that trains in it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradflow_export.experiments.interventions import weights
from gradflow_export.experiments.runs import Outcome, Place
from gradflow_export.experiments.survey import joined
from gradflow_export.experiments.target import CELL, Target, run_target, told
from gradflow_export.experiments.watched import MODELS, outermost, watch
from gradflow_export.exporter import Exporter, updates_by_hand, watching
from gradflow_export.hooks.guards import hook_all_calls
from gradflow_export.hooks.optimizer_hooks import listen
from gradflow_export.records.issues import Issue, IssueType

CALLS_PER_STEP = 20
"""Calls of watched models per wanted step after which a script without any step is stopped."""
MOST, SECONDS = 300, 6.0
"""Steps that are watched where they take little time, and the processor time for them: many mistakes show late."""

_OF_THE_STEP = frozenset({IssueType.NOT_TRAINING, IssueType.STALE_GRAD, IssueType.LEARNING_RATE, IssueType.STAGNATION})

_OF_ONE_LOSS = frozenset({IssueType.DIVERGING, IssueType.LOSS_SPIKE})


class _Enough(BaseException):
    """Ends the script once it has made its steps; no error, and nothing that ``except Exception`` should catch."""


class ScriptWatch:
    """Attaches an exporter to each outermost module that is called with gradients, and counts its steps.

    Args:
        script: File of the program, so that its lines can be named.
        steps: Steps after which it is stopped.
        stop: Whether it is stopped at all.
        longer: Whether a script whose steps take little time makes more of them, up to :data:`MOST`.
    """

    def __init__(self, script: Path, steps: int, *, stop: bool = True, longer: bool = False) -> None:
        self._script, self._steps, self._stop = str(script.resolve()), steps, stop
        self._most, self._until = (MOST if longer else 0), 0.0
        self._exporters: list[tuple[str, Exporter, Place]] = []
        self._members: set[int] = set()
        self._roots: set[int] = set()
        self._asleep: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Held until it is looked at for an update that no optimizer made: the script may let go of it before.
        self._latest: nn.Module | None = None
        self._depth = 0
        self._counts: dict[int, int] = {}
        self._spans: dict[int, list[int]] = {}
        self._calls = self._all = 0
        self._stopped = False
        self._step_place = Place()

    @property
    def steps(self) -> int:
        """Steps of the optimizer that stepped most; where none did, of the model that is updated most by hand."""
        by_hand = (updates_by_hand(exporter) for _, exporter, _ in self._exporters)
        return max(self._counts.values() or by_hand, default=0)

    def attach(self) -> contextlib.ExitStack:
        """Begin; closing the returned stack closes every exporter."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            stack.callback(hook_all_calls(self._called, before=True))
            stack.callback(hook_all_calls(self._left, always=True))
            stack.callback(listen(self._begins, self._stepped))
            return stack.pop_all()

    def outcome(self) -> Outcome:
        """Return what was found so far."""
        found: dict[Issue, Place] = {}
        together = joined([[first, last, self._counts[key]] for key, (first, last) in self._spans.items()])
        begin = {each.skipped + 1 for each in together if each.skipped}
        for _, exporter, place in self._exporters:
            for issue in exporter.issues:
                if issue.issue_type in _OF_ONE_LOSS and issue.step in begin:
                    # Where another training of the same model begins, so does another loss.
                    continue
                # Models that share a loss show the same issue of it each.
                found.setdefault(issue, place)
        placed = [
            (issue, self._step_place if issue.issue_type in _OF_THE_STEP and self._step_place.line else place)
            for issue, place in found.items()
        ]
        steps, names = sum(each.steps for each in together) or self.steps, [name for name, _, _ in self._exporters]
        return Outcome(steps, names, placed, stopped=self._stopped)

    def _called(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if id(module) in self._members:
            if id(module) in self._roots:
                self._depth += 1
                self._latest = None if self._counts else module
            self._calls += 1
            if self._stop and not self.steps and self._calls > CALLS_PER_STEP * self._steps:
                self._enough()
        elif self._depth == 0 and any(p.requires_grad for p in module.parameters()):
            if not module.training:
                self._asleep.add(module)
            elif len(self._exporters) < MODELS:
                model = outermost(module)
                self._watch(model)
                self._depth += module is model

    def _left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if id(module) in self._roots and not torch.compiler.is_compiling():
            self._depth = max(self._depth - 1, 0)
            if not self._counts and self.steps:
                # The call has shown whether the weights are others since the one before.
                self._judge()

    def _watch(self, model: nn.Module) -> None:
        place = self._here()
        self._members.update(id(member) for member in model.modules())
        self._roots.add(id(model))
        known = watching(model)
        exporter = known[0] if known else watch(model)
        self._exporters.append((type(model).__name__, exporter, place))

    def _begins(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # A model in evaluation mode is trained if the optimizer that steps has its weights.
        held = set(map(id, weights(optimizer))) if self._asleep else set()
        for module in list(self._asleep):
            known = id(module) in self._members or len(self._exporters) >= MODELS
            if not known and not held.isdisjoint(map(id, module.parameters())):
                self._watch(outermost(module))
        self._asleep.clear()
        if not self._step_place.line:
            self._step_place = self._here()
        if not self._counts:
            self._until = time.process_time() + SECONDS

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        self._spans.setdefault(id(optimizer), [self._all, self._all])[1] = self._all
        self._all += 1
        self._judge()

    def _judge(self) -> None:
        """Stop the script where it has made enough steps."""
        self._until = self._until or time.process_time() + SECONDS
        if not self._stop or self.steps < self._steps:
            return
        if self.steps >= self._most or time.process_time() > self._until:
            self._enough()

    def _enough(self) -> NoReturn:
        self._stopped = True
        raise _Enough

    def _here(self) -> Place:
        """Return the line of the script that is being run, the innermost one."""
        frame = sys._getframe(1)  # noqa: SLF001 - no public form
        while frame is not None:
            if frame.f_code.co_filename.partition(CELL)[0] == self._script:
                return Place(frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
        return Place()

    def _close(self) -> None:
        for _, exporter, _ in self._exporters:
            exporter.close()


def run_script(target: Target, steps: int, *, stop: bool = True, longer: bool = False) -> Outcome:
    """Run a program as ``python`` would, and return what its models showed.

    Arguments, search path and current folder are put back.

    Args:
        target: The program and its arguments.
        steps: Optimizer steps after which it is stopped.
        stop: Whether it is stopped; otherwise it runs to its end.
        longer: Whether a script whose steps take little time makes more of them, up to :data:`MOST`.
    """
    watch = ScriptWatch(target.path, steps, stop=stop, longer=longer)
    argv, path, folder, error = sys.argv, sys.path[:], Path.cwd(), ""
    before = _of_children()
    try:
        with watch.attach():
            try:
                run_target(target)
            except _Enough:
                pass
            except SystemExit as ended:
                error = "" if ended.code in (None, 0) else f"SystemExit: {ended.code}"
            except Exception as raised:
                error = told(raised, target)
        # Once the exporters are closed: what waits for the record after the last step is reported by then.
        outcome = watch.outcome()
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(folder)
    outcome.error, outcome.elsewhere = error, _of_children() - before
    return outcome


def _of_children() -> float:
    """Return the processor time of this process's children that have ended; 0 where the system does not say."""
    used = os.times()
    return used.children_user + used.children_system
