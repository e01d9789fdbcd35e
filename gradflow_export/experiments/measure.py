"""The yardstick: the loss, what the user names where it is none, or the returns of an environment's episodes."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradflow_export.errors import ArgumentError
from gradflow_export.experiments.runs import Result

ECHOES = 0.5
"""Share of steps with a call without gradients from which on a loss may compare a model with what it learned itself."""
WORLDS = ("gymnasium", "gym")
"""Packages whose environments give rewards."""
EPISODES = 12
"""Steps of a run in which episodes have to end, so that their returns can take the place of the loss."""
PRINTED = "stdout:"
NEGATIVE = "its loss is negative at times, so that a smaller one need not be a better one"
LAST = 8


@dataclass(frozen=True)
class Measure:
    """A yardstick.

    Attributes:
        text: An expression of Python, or a regular expression with one group.
        printed: Whether it is looked for in what the script prints.
        higher: Whether more is better.
    """

    text: str
    printed: bool = False
    higher: bool = True

    def now(self, path: Path) -> float:
        """Return the value in the innermost frame of the script that runs; NaN where it has none.

        Args:
            path: File of the script.
        """
        frame: Any = sys._getframe(1)  # noqa: SLF001 - no public form
        while frame is not None and frame.f_code.co_filename != str(path):
            frame = frame.f_back
        try:
            return float(eval(self.text, frame.f_globals, frame.f_locals))  # noqa: S307 - the user's own words
        except Exception:
            return math.nan

    def read(self, printed: str) -> tuple[float, ...]:
        """Return every number that was printed."""
        return tuple(each for each in map(_number, re.findall(self.text, printed)) if math.isfinite(each))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse(text: str) -> Measure:
    """Return the yardstick that an option names.

    Args:
        text: ``[higher:|lower:]expression``, or ``[higher:|lower:]stdout:regular expression``.

    Raises:
        ArgumentError: The text is no expression.
    """
    higher = not text.startswith("lower:")
    left = text.removeprefix("lower:").removeprefix("higher:")
    try:
        if left.startswith(PRINTED):
            pattern = left.removeprefix(PRINTED)
            if re.compile(pattern).groups != 1:
                raise ArgumentError(f"--measure expects a pattern with one group, got {pattern!r}; write acc=(\\S+).")
            return Measure(pattern, printed=True, higher=higher)
        compile(left, "--measure", "eval")
    except (SyntaxError, re.error) as error:
        raise ArgumentError(
            f"--measure expects an expression or stdout: and a pattern, got {text!r}: {error}; for example "
            "higher:metrics['reward'] or lower:stdout:loss=(\\S+)."
        ) from error
    return Measure(left, higher=higher)


def effect(values: Sequence[float]) -> float:
    """Return the mean of the last numbers; NaN without any."""
    last = [each for each in values if math.isfinite(each)][-LAST:]
    return sum(last) / len(last) if last else math.nan


@dataclass(frozen=True)
class Scale:
    """Makes of a yardstick a cost, which is positive and better when it is smaller, as a loss is.

    The cost of the script as it is is 1. It halves where the value gets better by its own size, or by what it ranges
    over in the script as it is, whichever is more.

    Attributes:
        plain: The value of the script as it is.
        size: What the cost halves over.
        higher: Whether more is better.
    """

    plain: float
    size: float
    higher: bool

    def cost(self, value: float) -> float:
        """Return the cost of a value; infinite of what is no number."""
        if not math.isfinite(value):
            return math.inf
        gain = (value - self.plain) / self.size
        return math.pow(2.0, max(min(-gain if self.higher else gain, 100.0), -100.0))


def scale(values: Sequence[float], *, higher: bool, signed: bool = False) -> Scale | None:
    """Return the scale that a run without any change gives; ``None`` where it has no number.

    Args:
        values: Those of the run.
        higher: Whether more is better.
        signed: Whether 0 means nothing, so that what the value ranges over counts alone.
    """
    numbers = [each for each in values if math.isfinite(each)]
    if not numbers:
        return None
    plain = effect(numbers)
    return Scale(plain, max(0.0 if signed else abs(plain), max(numbers) - min(numbers)) or 1.0, higher)


@dataclass(frozen=True)
class Yardstick:
    """What runs are compared by.

    Attributes:
        scale: Makes a cost of what was measured; ``None`` where the loss is compared.
        text: What was measured; empty where the loss is compared.
        refused: Why nothing can be compared; empty where it can.
        signed: Whether it is the loss that was measured, because it is negative at times.
    """

    scale: Scale | None = None
    text: str = ""
    refused: str = ""
    signed: bool = False

    def course(self, result: Result) -> tuple[float, ...]:
        """Return losses or costs, step by step."""
        values = result.losses if self.scale is None or self.signed else result.measured
        return values if self.scale is None else tuple(map(self.scale.cost, values))

    def effect(self, result: Result) -> float:
        """Return the mean loss or cost after training."""
        value = result.effect if self.scale is None or self.signed else effect(result.measured)
        return value if self.scale is None else self.scale.cost(value)

    def start(self, result: Result, unmoved: Result | None) -> float:
        """Return the loss before training, on the batches that it is measured on after it: one batch alone is noise."""
        same = math.inf if unmoved is None or unmoved.error else self.effect(unmoved)
        return same if math.isfinite(same) else next(filter(math.isfinite, self.course(result)), math.nan)


def yardstick(
    measure: Measure | None, seeds: Sequence[Result], look: Result, still: Result | None, *, doubted: bool = False
) -> Yardstick:
    """Return what the runs of a program can be compared by.

    Args:
        measure: What the user named.
        seeds: Runs without any change.
        look: The one of them that looked.
        still: A run whose weights were never changed.
        doubted: Whether a finding says that the loss is wrong, so that its sign may be as well.
    """
    cost = "(as a cost: 1 is the script as it is, less is better)"
    if measure is not None:
        made = scale(look.measured, higher=measure.higher)
        none = "" if made else f"--measure {measure.text!r} gave no number at any step"
        return Yardstick(made, f"{measure.text} {cost}", none)
    refused = no_yardstick(seeds, look, still)
    if refused and all(sum(map(math.isfinite, each.measured)) >= EPISODES for each in seeds):
        return Yardstick(scale(look.measured, higher=True), f"returns of the episodes that ended at a step {cost}")
    if refused == NEGATIVE and not doubted:
        return Yardstick(scale(look.losses, higher=False, signed=True), f"the loss {cost}", signed=True)
    return Yardstick(refused=refused)


def failure(plain: Sequence[Result | None]) -> str:
    """Return why runs without any change show nothing.

    Args:
        plain: Those of each seed, ``None`` for what was not run.
    """
    failed = next((each.error for each in plain if each is not None and each.error), "")
    if failed:
        return f"a run without any change failed: {failed.strip().rpartition(chr(10))[2]}"
    if any(each is None for each in plain):
        return "the budget was spent before the script had run as it is with three seeds"
    return "no loss was recorded: nothing calls backward() before the optimizer steps"


def no_yardstick(seeds: Sequence[Result], look: Result, still: Result | None) -> str:
    """Return why the loss says nothing about learning; empty where it does.

    Args:
        seeds: Runs without any change.
        look: The one of them that looked.
        still: A run whose weights were never changed.
    """
    facts = look.facts
    if facts["optimizers"] > 1 and facts["places"] > 1:
        return "several optimizers follow losses of their own, as the players of a game do"
    # A run may end early, and NaN differs from itself.
    pairs = zip(facts["digests"], still.facts.get("digests", ()) if still is not None else (), strict=False)
    if any(str(one) != str(other) for one, other in pairs):
        return "its data depend on what the model has learned, as in reinforcement learning"
    if facts["echoes"] > ECHOES:
        return (
            "a model is called without gradients before most steps, so that its targets may depend on what it learned"
        )
    return NEGATIVE if any(loss < 0 for each in seeds for loss in each.losses) else ""


class Returns:
    """Adds up the rewards of each episode of the environments that the script steps in."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()
        self._running: dict[int, tuple[Any, int]] = {}
        self._ended: list[float] = []
        self._depth = 0

    def attach(self) -> None:
        """Look at each kind of environment that there is by now."""
        for package in WORLDS:
            module = sys.modules.get(package)
            bases = [getattr(module, "Env", None), getattr(getattr(module, "vector", None), "VectorEnv", None)]
            for kind in [kind for base in bases if isinstance(base, type) for kind in _below(base)]:
                if kind not in self._kinds:
                    self._kinds.add(kind)
                    for name, note in (("step", self._stepped), ("reset", self._began)):
                        if name in vars(kind):
                            setattr(kind, name, self._noted(getattr(kind, name), note))

    def now(self) -> float:
        """Return the mean return of the episodes that have ended since the last call; NaN where none has."""
        self.attach()
        ended, self._ended = self._ended, []
        return sum(ended) / len(ended) if ended else math.nan

    def _noted(self, plain: Callable[..., Any], note: Callable[[Any, Any], None]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(world: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                given = plain(world, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                # Of a wrapped environment the outermost call counts; what it gives is the script's to understand.
                with contextlib.suppress(Exception):
                    note(world, given)
            return given

        return method

    def _stepped(self, world: Any, given: Any) -> None:
        total, count = self._running.get(id(world), (0.0, 0))
        total = total + np.atleast_1d(np.asarray(given[1], dtype=float))
        over = np.atleast_1d(np.asarray(given[2], dtype=bool))
        over = over | np.atleast_1d(np.asarray(given[3], dtype=bool)) if len(given) > 4 else over
        self._ended += total[over].tolist()
        self._running[id(world)] = np.where(over, 0.0, total), 0 if over.all() else count + 1

    def _began(self, world: Any, _given: Any) -> None:
        total, count = self._running.pop(id(world), (0.0, 0))
        if count:
            # The script has ended the episode itself.
            self._ended += np.atleast_1d(total).tolist()


def _below(kind: type) -> Iterator[type]:
    """Yield a class and all that are made from it."""
    yield kind
    made: list[type] = type.__subclasses__(kind)
    for each in made:
        yield from _below(each)
