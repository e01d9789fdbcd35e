"""How far a training run has come, and what was logged about it."""

from __future__ import annotations

import enum
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradflow_export.debugging.inspect.tensor_info import TensorInfo
from gradflow_export.records.step_record import number_to_json

_LONGEST = 500
_FRAMES = 8


class TrainingPhase(str, enum.Enum):
    """What a training run is doing."""

    INITIALIZATION = "initialization"
    DATA_LOADING = "data_loading"
    TRAINING = "training"
    VALIDATION = "validation"
    EVALUATION = "evaluation"
    CHECKPOINTING = "checkpointing"
    COMPLETED = "completed"
    FAILED = "failed"

    def __str__(self) -> str:
        """Return the bare word."""
        return self.value


class Progress:
    """Steps, losses, phases and the last events of one run; safe to use from several threads.

    Args:
        size: How many events are kept.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=size)
        self._counts = {"info": 0, "warning": 0, "error": 0}
        self._phase = TrainingPhase.INITIALIZATION
        self._phase_began = time.monotonic()
        self._spent: dict[TrainingPhase, float] = {}
        self._began: float | None = None
        self._ended: float | None = None
        self._totals: dict[str, int | None] = {"total_epochs": None, "total_steps": None}
        self._last: dict[str, Any] = {"epoch": None, "step": None, "loss": None, "learning_rate": None, "metrics": {}}
        self._steps = 0
        self._best: float | None = None

    @property
    def phase(self) -> TrainingPhase:
        """What the run is doing."""
        return self._phase

    @property
    def steps(self) -> int:
        """How many steps were reported."""
        return self._steps

    def begin(self, epochs: int | None, steps: int | None) -> None:
        """Begin, or begin anew; events stay."""
        with self._lock:
            self._totals = {"total_epochs": epochs, "total_steps": steps}
            self._began, self._ended, self._steps, self._best = time.monotonic(), None, 0, None
            self._spent = {}
            self._enter(TrainingPhase.TRAINING)

    def end(self, phase: TrainingPhase) -> None:
        """End; time stands still from now on."""
        with self._lock:
            self._ended = time.monotonic() if self._ended is None else self._ended
            self._enter(phase)

    def enter(self, phase: TrainingPhase) -> None:
        """Do something else from now on."""
        with self._lock:
            self._enter(phase)

    def update(self, epoch: int, step: int, loss: float | None, rate: float | None, more: Mapping[str, float]) -> None:
        """Take in one step."""
        with self._lock:
            self._steps += 1
            self._last = {"epoch": epoch, "step": step, "loss": loss, "learning_rate": rate, "metrics": dict(more)}
            if loss is not None and math.isfinite(loss):
                self._best = loss if self._best is None else min(self._best, loss)

    def note(self, level: str, message: str, phase: TrainingPhase | None, context: Mapping[str, Any]) -> None:
        """Keep one event."""
        event = {"time": time.time(), "level": level, "message": message, "context": plain(context)}
        with self._lock:
            self._counts[level] += 1
            self._events.append({**event, "phase": str(phase or self._phase)})

    def as_dict(self) -> dict[str, Any]:
        """Return everything, all of one moment, JSON-ready."""
        with self._lock:
            now = time.monotonic() if self._ended is None else self._ended
            elapsed = 0.0 if self._began is None else now - self._began
            total = self._totals["total_steps"]
            share = None if not total else min(self._steps / total, 1.0)
            left = None if not total or not self._steps else elapsed / self._steps * max(total - self._steps, 0)
            return {
                "phase": str(self._phase),
                "progress": {
                    **self._totals,
                    **plain(self._last),
                    "steps_done": self._steps,
                    "best_loss": number_to_json(self._best),
                    "fraction": share,
                    "elapsed_seconds": elapsed,
                    "remaining_seconds": left,
                },
                "seconds_by_phase": {
                    str(phase): spent for phase, spent in {**self._spent, self._phase: self._so_far(now)}.items()
                },
                "warnings": self._counts["warning"],
                "errors": self._counts["error"],
                "events": list(self._events),
            }

    def _enter(self, phase: TrainingPhase) -> None:
        now = time.monotonic()
        self._spent[self._phase] = self._so_far(now)
        self._phase, self._phase_began = phase, now

    def _so_far(self, now: float) -> float:
        return self._spent.get(self._phase, 0.0) + max(now - self._phase_began, 0.0)


def plain(value: Any) -> Any:
    """Return a JSON-ready form in which no tensor and no object of the user's is kept."""
    if isinstance(value, TensorInfo):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float)):
        return number_to_json(value)
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)[:_LONGEST]


def error_context(error: BaseException) -> dict[str, Any]:
    """Return type, message and the innermost frames of an error."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "message": str(error)[:_LONGEST], "raised_at": where}
