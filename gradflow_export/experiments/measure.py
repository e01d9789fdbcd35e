"""What the user names as the yardstick where the loss is none: an expression in the script, or what it prints."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradflow_export.errors import ArgumentError

PRINTED = "stdout:"
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


def scale(values: Sequence[float], *, higher: bool) -> Scale | None:
    """Return the scale that a run without any change gives; ``None`` where it has no number."""
    numbers = [each for each in values if math.isfinite(each)]
    if not numbers:
        return None
    plain = effect(numbers)
    return Scale(plain, max(abs(plain), max(numbers) - min(numbers)) or 1.0, higher)
