"""What is asked of a run, and what came of it, as they travel between processes; needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradflow_export.records.issues import Issue, number_from_json, number_to_json

STEPS = 60
"""Optimizer steps for which a program trains before the effect is measured."""


@dataclass(frozen=True)
class Request:
    """A run that is wanted.

    Attributes:
        names: Treatments that are active in it.
        seed: Which of our seeds.
        steps: Optimizer steps of training.
        seconds: Time after which it is ended.
        number: What tells it from others.
    """

    names: tuple[str, ...] = ()
    seed: int = 0
    steps: int = STEPS
    seconds: float = 600.0
    number: int = 0

    def packed(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        number: Of the request.
        losses: One for each step; not all where the run ended early.
        effect: Mean loss while it was measured; infinite where a loss was no number.
        acted: Whether the treatments changed anything.
        facts: What was seen, where the run looked.
        cpu: Seconds of processor time.
        error: Why there is no effect; empty where there is one.
        measured: Values of the user's yardstick.
    """

    number: int
    losses: tuple[float, ...] = ()
    effect: float = math.inf
    acted: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    cpu: float = 0.0
    error: str = ""
    measured: tuple[float, ...] = ()

    def packed(self) -> bytes:
        """Return it as bytes."""
        told = asdict(self)
        told["losses"] = [number_to_json(each) for each in self.losses]
        told["effect"] = number_to_json(self.effect)
        told["measured"] = [number_to_json(each) for each in self.measured]
        return json.dumps(told).encode()


@dataclass(frozen=True)
class Place:
    """Where in the script something happens.

    Attributes:
        line: Line of the script, 0 when it is not known.
    """

    line: int = 0


@dataclass
class Outcome:
    """What came of running a script.

    Attributes:
        steps: Steps of training; of optimizers that take turns, those of the one that steps first.
        models: Class names of the models that were watched.
        issues: What was found in any of them, with the line of the script that it belongs to.
        error: The script's own error with its lines of the traceback, empty when there was none.
        elsewhere: Seconds of processor time of processes that the script started.
        stopped: Whether the script was stopped before its end.
    """

    steps: int = 0
    models: list[str] = field(default_factory=list)
    issues: list[tuple[Issue, Place]] = field(default_factory=list)
    error: str = ""
    elsewhere: float = 0.0
    stopped: bool = False


def unpacked_request(data: bytes) -> Request:
    """Undo :meth:`Request.packed`."""
    told = json.loads(data)
    return Request(**{**told, "names": tuple(told["names"])})


def unpacked_result(data: bytes) -> Result:
    """Undo :meth:`Result.packed`."""
    told = json.loads(data)
    losses, measured = (tuple(number_from_json(each) or 0.0 for each in told[name]) for name in ("losses", "measured"))
    effect = number_from_json(told["effect"])
    return Result(**{**told, "losses": losses, "measured": measured, "effect": math.inf if effect is None else effect})
