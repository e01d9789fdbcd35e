"""A first run that only counts: which optimizers step, when, how often, and how long that takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradflow_export.experiments import target as programs
from gradflow_export.experiments.interventions import weights
from gradflow_export.experiments.mending.by_hand import HandStep, HandUpdates
from gradflow_export.experiments.mending.forgotten import before_clearing
from gradflow_export.experiments.patient import MEASURED
from gradflow_export.experiments.sandbox import Sandbox, end_tree, silence
from gradflow_export.experiments.target import Target


@dataclass(frozen=True)
class Training:
    """Steps of a script that belong together: those of optimizers that take turns.

    Attributes:
        skipped: Steps of any optimizer before the first of these.
        steps: Steps of the optimizer that steps first.
        optimizers: How many take turns.
        forgotten: Whether the script makes none of them: it clears the gradients that wait for each.
        by_hand: Whether it makes them without an optimizer.
    """

    skipped: int
    steps: int
    optimizers: int
    forgotten: bool = False
    by_hand: bool = False


@dataclass(frozen=True)
class Survey:
    """What was counted.

    Attributes:
        trainings: In the order in which they begin.
        setup: Seconds before the first step.
        step: Seconds of a step; 0 where there was none.
        ended: Whether the script came to its end.
        error: The script's own error; empty where there was none.
    """

    trainings: tuple[Training, ...] = ()
    setup: float = 0.0
    step: float = 0.0
    ended: bool = True
    error: str = ""

    def run_seconds(self, steps: int) -> float:
        """Return how long a run of so many steps takes once it is set up."""
        return (steps + MEASURED) * self.step


class _Counter:
    def __init__(self, wire: Any, steps: int, seconds: float) -> None:
        self._wire, self._needed, self._seconds = wire, steps + MEASURED, seconds
        self._spans: dict[int, list[int]] = {}
        self._optimizers: list[Optimizer] = []
        self._steps = 0
        self._forgotten, self._by_hand, self._hand = True, False, HandUpdates()
        self._began = time.monotonic()
        self._first = self._last = self._enough = 0.0

    def attach(self) -> None:
        register_optimizer_step_pre_hook(self._step)
        before_clearing(self._clears)
        self._hand.attach()

    def _step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        by_hand = isinstance(optimizer, HandStep)
        if self._forgotten or (self._by_hand and not by_hand):
            # Gradients that were cleared before were wanted for something else, and so were weights that were changed.
            self._forgotten, self._spans, self._steps, self._first = False, {}, 0, 0.0
        self._by_hand = self._hand.on = by_hand
        self._count(optimizer)

    def _clears(self, optimizer: Optimizer) -> None:
        if self._forgotten and any(weight.grad is not None for weight in weights(optimizer)):
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        now = time.monotonic()
        self._first = self._first or now
        self._last = now
        if id(optimizer) not in self._spans:
            # Kept, so that no other gets its number.
            self._optimizers.append(optimizer)
            self._spans[id(optimizer)] = [self._steps, self._steps, 0]
        span = self._spans[id(optimizer)]
        span[1], span[2] = self._steps, span[2] + 1
        self._steps += 1
        if span[2] == self._needed:
            # A script that has made no step so far may be preparing its training.
            self._enough = time.process_time() + self._seconds * (10 if self._forgotten else 1)
        if span[2] > self._needed and time.process_time() > self._enough:
            self.send(ended=False, error="")

    def send(self, *, ended: bool, error: str) -> NoReturn:
        between = max(self._steps - 1, 1)
        step = (self._last - self._first) / between if self._steps > 1 else 0.0
        kind = {"forgotten": self._forgotten, "by_hand": self._by_hand}
        trainings = [{**asdict(each), **kind} for each in joined(list(self._spans.values()))]
        # Several optimizers that take turns make one step of the training together.
        turns = self._steps / max(sum(each["steps"] for each in trainings), 1)
        setup = (self._first or time.monotonic()) - self._began
        told = {"trainings": trainings, "setup": setup, "step": step * turns, "ended": ended, "error": error[-4000:]}
        self._wire.send(json.dumps(told).encode())
        end_tree(os.getpid(), itself=False)
        programs.leave(0)


def joined(spans: Sequence[Sequence[int]]) -> list[Training]:
    """Return the trainings that the optimizers' spans of steps make: those that overlap belong together.

    Args:
        spans: Of each optimizer its first and last step among all, and how many it made.
    """
    found: list[list[int]] = []
    last = -1
    for first, end, count in sorted(map(tuple, spans)):
        if found and first <= last:
            found[-1][2] += 1
        else:
            found.append([first, count, 1])
        last = max(last, end)
    return [Training(skipped, steps, turns) for skipped, steps, turns in found]


def count(target: Target, sandbox: Sandbox, wire: Any, steps: int, seconds: float) -> NoReturn:
    """Run the program in this process and send what was counted.

    Args:
        target: The program.
        sandbox: Where it is run.
        wire: Where the survey is sent to.
        steps: Steps that are needed.
        seconds: Of processor time after which it is enough, once the model that trains has made its steps.
    """
    counter = _Counter(wire, steps, seconds)
    error = ""
    try:
        sandbox.enter()
        silence(os.open(os.devnull, os.O_RDWR))
        programs.seed(0)
        counter.attach()
        programs.run_target(target)
    except SystemExit as ended:
        error = f"SystemExit: {ended.code}" if ended.code else ""
    except BaseException as raised:
        error = programs.told(raised, target)
    counter.send(ended=True, error=error)


def received(data: bytes) -> Survey:
    """Return the survey that was sent."""
    told = json.loads(data)
    return Survey(**{**told, "trainings": tuple(Training(**each) for each in told["trainings"])})


def warm() -> None:
    """Load what every run needs, so that the processes forked from this one have it."""
    weight = nn.Linear(2, 1)
    own = torch.optim.Adam(weight.parameters())
    weight(torch.zeros(1, 2)).sum().backward()
    own.step()
