"""AsyncTrainingLogger: progress, warnings and checks of a run that is trained in an event loop."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from gradflow_export.debugging.inspect.debugger import PyTorchDebugger, check_tensor
from gradflow_export.debugging.inspect.gradients import CapturedGradients, gradients_of
from gradflow_export.debugging.inspect.history import HISTORY
from gradflow_export.debugging.inspect.levels import DebugLevel
from gradflow_export.debugging.inspect.tensor_info import Captured
from gradflow_export.debugging.nan.anomaly import AnomalyMode
from gradflow_export.debugging.service.loglines import MOST_WAITING, LogLines
from gradflow_export.debugging.service.progress import Progress, TrainingPhase, error_context
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.exporter import Exporter
from gradflow_export.records.step_record import number_to_json
from gradflow_export.validation import check_module

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncTrainingLogger", "TrainingPhase"]

_log = logging.getLogger("gradflow_export.training")
_T = TypeVar("_T")


class AsyncTrainingLogger:
    """Follows a run that is trained in an event loop, and checks tensors without holding the loop up.

    What is checked is the tensor as it is when the check is called, not when it is awaited: it may change at once. All
    but one read of the tensor (or a copy of it, where that is quicker) happens on a thread of the logger's own. The log
    is written by another: a handler that is slow holds up neither the loop nor a check. The loop, the optimizer and
    the model are not touched::

        logger = AsyncTrainingLogger(user_id=123, model_name="mine", enable_autograd_debug=True)
        logger.start_training(total_epochs=10, total_steps=1000)
        ...
        info = await logger.check_tensor_anomalies_async(loss, "loss")
        gradients = await logger.check_gradient_anomalies_async(model)
        await logger.update_progress_async(epoch=0, step=0, loss=loss.item(), learning_rate=1e-3)
        ...
        logger.end_training()

    Args:
        user_id: Whose run it is.
        model_name: What is trained.
        enable_autograd_debug: Have PyTorch's anomaly mode on from ``start_training`` to ``end_training``: a backward
            pass that makes a NaN raises there and names the operation. It costs a multiple of a step.
        level: How much the debugger looks at.
        history: How many events, and how many entries of the debugger, are kept.
        exporter: Where problems are reported too; by default the exporter that watches the model, if there is one.
        most_waiting: How many log lines may wait for slow handlers; when one more comes the oldest is left out, counted
            and said. Events are kept all the same.

    Attributes:
        debugger: What checks; its history reports earlier checks.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        user_id: int | str,
        model_name: str,
        enable_autograd_debug: bool = False,
        *,
        level: DebugLevel | str = DebugLevel.BASIC,
        history: int = HISTORY,
        exporter: Exporter | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        if isinstance(user_id, bool) or not isinstance(user_id, (int, str)):
            raise ArgumentTypeError(f"user_id must be a number or a name, got {user_id!r}; for example user_id=123.")
        if not isinstance(model_name, str):
            raise ArgumentTypeError(f"model_name must be a name, got {model_name!r}; for example 'resnet50'.")
        if not isinstance(enable_autograd_debug, bool):
            raise ArgumentTypeError(f"enable_autograd_debug must be True or False, got {enable_autograd_debug!r}.")
        _check_total("most_waiting", most_waiting)
        self.user_id, self.model_name = user_id, model_name
        self.debugger = PyTorchDebugger(level, history=history, exporter=exporter)
        self._progress = Progress(history)
        self._anomaly_mode = AnomalyMode() if enable_autograd_debug else None
        if self._anomaly_mode is not None:  # a logger that is forgotten leaves no mode on behind it
            weakref.finalize(self, self._anomaly_mode.stop)
        self._thread = _one_thread()
        self._closed = False
        self._lines = LogLines(_log, most=most_waiting)
        self.debugger.log_through(self._lines.put)
        weakref.finalize(self, self._lines.close)

    @property
    def phase(self) -> TrainingPhase:
        """What the run is doing."""
        return self._progress.phase

    def start_training(self, total_epochs: int | None = None, total_steps: int | None = None) -> None:
        """Begin a run; called again, also after :meth:`end_training`, it begins anew.

        Args:
            total_epochs: As planned.
            total_steps: As planned, over all epochs.

        Raises:
            ArgumentError: A number is below 1.
            ArgumentTypeError: A number is none.
        """
        _check_total("total_epochs", total_epochs)
        _check_total("total_steps", total_steps)
        if self._closed:
            self._thread, self._closed = _one_thread(), False
            self._lines.reopen()
        if self._anomaly_mode is not None:
            self._anomaly_mode.start()
        self._progress.begin(total_epochs, total_steps)
        self._write("info", f"training of {self.model_name} began", None, {})

    def end_training(self, phase: TrainingPhase = TrainingPhase.COMPLETED) -> None:
        """End the run, switch PyTorch's anomaly mode back, and wait for checks and, a few seconds at most, for the log.

        Lines that handlers have not taken in by then are left out and counted.
        """
        if self._anomaly_mode is not None:
            self._anomaly_mode.stop()
        if not self._closed:
            self._progress.end(_phase(phase))
            self._closed = True
            self._thread.shutdown(wait=True)
            self._lines.close()

    def set_phase(self, phase: TrainingPhase) -> None:
        """Say what the run is doing from now on; time is counted by phase."""
        self._progress.enter(_phase(phase))

    def check_tensor_anomalies_async(self, tensor: Tensor, name: str = "tensor") -> Coroutine[Any, Any, dict[str, Any]]:
        """Look at a tensor as it is now.

        Args:
            tensor: Shape: any.
            name: What to call it.

        Returns:
            A coroutine, to be awaited, that returns what :class:`TensorInfo` holds as a dictionary: ``has_nan``,
            ``has_inf``, ``mean_value`` and so on, NaN and Inf as words.

        Raises:
            ArgumentTypeError: It is no tensor.
        """
        check_tensor(tensor, name)
        captured = Captured({name: tensor})
        return self._on_thread(lambda: self.debugger.note_tensor(captured.infos()[name]).as_dict())

    def check_gradient_anomalies_async(self, model: nn.Module) -> Coroutine[Any, Any, dict[str, Any]]:
        """Look at the gradients of a model as they are now.

        Args:
            model: After the backward pass, and with a gradient scaler after ``scaler.unscale_(optimizer)``.

        Returns:
            A coroutine, to be awaited, that returns ``total_params`` (tensors), ``params_with_grad``,
            ``params_with_nan_grad``, ``params_with_inf_grad``, ``total_norm``, ``max_norm``, ``min_norm`` (``None``
            without a gradient), ``exploding``, ``vanishing`` and ``nonfinite`` (names), and ``has_anomaly``.

        Raises:
            ArgumentTypeError: It is no module.
        """
        check_module(model)
        captured = CapturedGradients(gradients_of(model))
        total, step = sum(1 for _ in model.parameters()), self._progress.steps
        return self._on_thread(lambda: self._judge(captured, total, step, model))

    async def update_progress_async(
        self,
        epoch: int,
        step: int,
        loss: float | None = None,
        learning_rate: float | None = None,
        **metrics: float,
    ) -> None:
        """Take in one step.

        Args:
            epoch: Its epoch.
            step: Its number.
            loss: As a number.
            learning_rate: As a number.
            **metrics: Further numbers, kept until the next step.
        """
        self._progress.update(epoch, step, loss, learning_rate, metrics)

    def log_info(self, message: str, phase: TrainingPhase | None = None) -> None:
        """Log a message."""
        self._write("info", message, phase, {})

    def log_warning(self, message: str, phase: TrainingPhase | None = None) -> None:
        """Log a warning."""
        self._write("warning", message, phase, {})

    def log_error(
        self,
        error: BaseException | str,
        phase: TrainingPhase | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        """Log an error.

        Args:
            error: What was raised, or a message.
            phase: In which phase; the current one by default.
            context: Anything worth knowing; of tensors the shape is kept.
        """
        raised = error_context(error) if isinstance(error, BaseException) else {}
        message = f"{raised['error']}: {raised['message']}" if raised else str(error)
        self._write("error", message, phase, {**raised, **(context or {})})

    def get_training_summary(self) -> dict[str, Any]:
        """Return what is known of the run, all of one moment, JSON-ready.

        Returns:
            ``user_id``, ``model_name``, ``phase``, ``progress`` (``epoch``, ``step``, ``loss``, ``learning_rate``,
            ``metrics``, ``total_epochs``, ``total_steps``, ``steps_done``, ``best_loss``, ``fraction``,
            ``elapsed_seconds``, ``remaining_seconds``), ``seconds_by_phase``, ``warnings`` and ``errors`` (counts),
            ``events`` (the last ones), ``log`` (lines ``written``, ``waiting``, ``left_out`` and ``late``, and
            ``latest_seconds``) and ``debug`` (``total_anomalies``, ``debug_history_length``).
        """
        return {
            "user_id": self.user_id,
            "model_name": self.model_name,
            **self._progress.as_dict(),
            "log": self._lines.counts(),
            "debug": self.debugger.get_debug_summary(),
        }

    def __enter__(self) -> Self:
        """Return the logger."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the run, as failed where an error came."""
        self.end_training(TrainingPhase.COMPLETED if kind is None else TrainingPhase.FAILED)

    def _judge(self, captured: CapturedGradients, total: int, step: int, model: nn.Module) -> dict[str, Any]:
        norms = captured.norms()
        now = self.debugger.judge_gradients(norms, type(model).__name__, step, model)
        exploding, vanishing = (
            list(now[rule].layers) if rule in now else [] for rule in ("fixed-exploding", "fixed-vanishing")
        )
        return {
            "total_params": total,
            "params_with_grad": len(norms.sites),
            "params_with_nan_grad": len(norms.with_nan),
            "params_with_inf_grad": len(captured.with_inf()),
            "total_norm": number_to_json(norms.total),
            "max_norm": number_to_json(norms.extreme(max)),
            "min_norm": number_to_json(norms.extreme(min)),
            "exploding": exploding,
            "vanishing": vanishing,
            "nonfinite": list(norms.bad),
            "has_anomaly": bool(norms.bad or exploding or vanishing),
        }

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        if self._closed:
            raise ArgumentError("this logger has ended its training; call start_training() to check again.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _write(self, level: str, message: str, phase: TrainingPhase | None, context: Mapping[str, Any]) -> None:
        self._progress.note(level, message, None if phase is None else _phase(phase), context)
        if not self._closed:
            number = logging.getLevelName(level.upper())
            self._lines.put(number, "gradflow: %s [%s]: %s", self.model_name, phase or self.phase, message)


def _one_thread() -> ThreadPoolExecutor:
    """Return one thread, so that checks and log lines keep their order."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradflow-logger")


def _phase(phase: object) -> TrainingPhase:
    if not isinstance(phase, TrainingPhase):
        raise ArgumentTypeError(f"phase must be a TrainingPhase, got {phase!r}; for example TrainingPhase.TRAINING.")
    return phase


def _check_total(name: str, total: object) -> None:
    if total is None:
        return
    if isinstance(total, bool) or not isinstance(total, int):
        raise ArgumentTypeError(f"{name} must be a whole number, got {total!r}; for example {name}=10.")
    if total < 1:
        raise ArgumentError(f"{name} must be at least 1, got {total}; leave it out where it is not known.")
