"""PyTorchDebuggingManager: sessions, step records, files, and the checks that run beside training."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gradflow_export.debugging.nan.batch import BatchState
from gradflow_export.debugging.nan.clipping import gradient_stats
from gradflow_export.debugging.nan.config import PyTorchDebuggingConfig
from gradflow_export.debugging.service.leaks import no_memory
from gradflow_export.debugging.service.plots import plot_debug_session
from gradflow_export.debugging.service.session import Session, StepFacts, check_call
from gradflow_export.errors import ArgumentTypeError, StorageError
from gradflow_export.exporter import Exporter, note, watching
from gradflow_export.hooks.discover import unwrap
from gradflow_export.hooks.readings import Pending
from gradflow_export.records.step_record import RUN_SITE

_log = logging.getLogger("gradflow_export")

_LEVELS = MappingProxyType({"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR})


class PyTorchDebuggingManager:
    """Keeps debugging sessions; :class:`NumericalStabilityManager` owns one and asks it at every step.

    Args:
        config: What to debug; ``None`` debugs nothing.
        exporter: Whose log folder and records are used; by default those of every exporter that watches the model.
        clock: Seconds, for tests.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        config: PyTorchDebuggingConfig | None = None,
        *,
        exporter: Exporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config is not None and not isinstance(config, PyTorchDebuggingConfig):
            raise ArgumentTypeError(
                f"debug_config must be a PyTorchDebuggingConfig, got {type(config).__name__}; pass "
                "debug_config=PyTorchDebuggingConfig(...)."
            )
        self._config, self._exporter, self._clock = config, exporter, clock
        self._session: Session | None = None

    @property
    def locates(self) -> bool:
        """Whether failing steps are repeated to find where NaN began."""
        return self._config is not None and self._config.enable_autograd_anomaly

    @property
    def checks_gradients(self) -> bool:
        """Whether gradients are compared with finite differences."""
        return self._config is not None and self._config.enable_grad_check

    @property
    def raises(self) -> bool:
        """Whether an anomaly stops training while the session lasts."""
        config = self._config
        if config is None or not config.enable_autograd_anomaly or config.autograd_anomaly_mode != "raise":
            return False
        return self._session is not None and not self._session.over

    def start_debug_session(self, name: str = "session") -> None:
        """Begin a session; one under way is ended first.

        Args:
            name: For the summary.

        Raises:
            StorageError: Files are wanted and the folder cannot be written to.
        """
        self.stop_debug_session()
        config = self._config
        if config is None:
            return
        session = Session(str(name), config, self._clock)
        self._session = session
        # A loop that ends by an exception asks nobody to stop the session.
        session.finalizer = weakref.finalize(self, session.release)
        self._say(logging.INFO, "debugging session %r begins", session.name)

    def stop_debug_session(self) -> None:
        """End the session: files are written and process-wide switches put back; without one nothing happens."""
        self._end("stopped")

    def get_debug_summary(self) -> dict[str, Any]:
        """Return counts of the session under way, or of the last one.

        Returns:
            ``session``, ``active``, ``ended_because``, ``total_iterations``, ``anomalies_detected`` (their number),
            ``anomalies_by_type``, ``actions``, ``session_duration``, ``gradient_check``, ``memory``, ``profile`` and
            ``files``.
        """
        session = self._session
        if session is None:
            return {"session": None, "active": False, "total_iterations": 0, "anomalies_detected": 0}
        return session.summary(self._clock())

    def plot(self, folder: Any = None) -> dict[str, Path]:
        """Draw the session as PNG files; see :func:`~gradflow_export.debugging.service.plots.plot_debug_session`.

        Args:
            folder: Where they go; by default ``debug_output_dir``.
        """
        default = "debug_output" if self._config is None else self._config.debug_output_dir
        return plot_debug_session([] if self._session is None else list(self._session.history), folder or default)

    def step(self, model: nn.Module, facts: StepFacts) -> dict[str, Any]:
        """Debug one step, and begin a session where there was none.

        Args:
            model: What is trained.
            facts: What is known of the step.

        Returns:
            The step record; its keys are described in ``docs/debugging.md``.
        """
        config = self._config
        if config is None:
            return self._record(facts, [dict(a) for a in facts.anomalies], no_memory(), 0)
        self.begin()
        session = self._session
        if session is None or session.over:
            return self._record(facts, [dict(a) for a in facts.anomalies], no_memory(), 0)
        session.iterations += 1
        if session.devices is not None:
            session.devices.synchronize()
        memory, details = session.read_memory()
        details = [{"iteration": session.iterations, **a, "action": facts.action} for a in facts.anomalies] + details
        if config.enable_grad_check and session.iterations >= session.next_check:
            details += self._check(model, facts.batch, session)
        exporters = self._exporters(model)
        session.follow_profile(exporters[0].logdir if exporters else Path(config.debug_output_dir))
        record = self._record(facts, details, memory, session.iterations)
        session.keep(record)
        self._tell(record)
        if session.iterations >= config.max_debug_iterations:
            self._end(f"max_debug_iterations={config.max_debug_iterations} reached")
        elif self._clock() - session.began >= config.debug_timeout:
            self._end(f"debug_timeout={config.debug_timeout:g} s reached")
        return record

    def begin(self) -> None:
        """Begin a session unless there is or was one; where files cannot be written that is said, not raised."""
        if self._session is not None or self._config is None:
            return
        try:
            self.start_debug_session()
        except StorageError as error:
            _log.warning("gradflow: no debug files are written: %s", error)
            self._config = replace(self._config, save_debug_info=False)
            self.start_debug_session()

    def _record(
        self,
        facts: StepFacts,
        details: list[dict[str, Any]],
        memory: dict[str, dict[str, float | None]],
        iteration: int,
    ) -> dict[str, Any]:
        config, session = self._config, self._session
        return {
            "debug_enabled": iteration > 0,
            "iteration": iteration,
            "session_duration": 0.0 if session is None else self._clock() - session.began,
            "anomaly_detector": config is not None and config.enable_autograd_anomaly,
            "grad_check": config is not None and config.enable_grad_check,
            "memory_debug": config is not None and config.tracks_memory,
            "anomalies_detected": bool(details),
            "anomaly_details": details,
            "gradient_stats": dict(gradient_stats(facts.parameters, facts.norms)),
            "memory_info": memory,
        }

    def _tell(self, record: dict[str, Any]) -> None:
        details = record["anomaly_details"]
        if details:
            self._say(logging.WARNING, "step %d: %s", record["iteration"], "; ".join(d["message"] for d in details))
        elif self._config is not None and self._config.verbose_logging:
            norm = record["gradient_stats"]["total_norm"]
            self._say(logging.INFO, "step %d: gradient norm %s", record["iteration"], norm)

    def _check(self, model: nn.Module, batch: BatchState | None, session: Session) -> list[dict[str, Any]]:
        """Compare gradients on the inputs of the step's last forward pass."""
        config = self._config
        if config is None or batch is None or not batch.calls:
            return []
        session.next_check = session.iterations + config.grad_check_interval
        try:
            found = check_call(
                unwrap(model),
                batch.calls[-1],
                dense=config.grad_check_numerical,
                sparse=config.grad_check_sparse_numerical,
            )
        except Exception as error:
            session.next_check = config.max_debug_iterations + 1
            _log.warning(
                "gradflow: gradients cannot be checked here and are not from now on: %s: %s",
                type(error).__name__,
                error,
            )
            return []
        if found is None:
            return []
        session.check = found
        value = torch.tensor([found.max_relative_error], dtype=torch.float64, device="cpu")
        for exporter in self._exporters(model):
            note(exporter, [Pending("debugging.check_error", (RUN_SITE,), value)])
        if found.passed:
            return []
        return [
            {
                "iteration": session.iterations, "type": "gradient_check", "message": str(found).splitlines()[0],
                "parameters": [name for name, check in found.parameters.items() if not check.passed], "action": "none",
            }
        ]  # fmt: skip

    def _exporters(self, model: nn.Module) -> list[Exporter]:
        return watching(unwrap(model)) if self._exporter is None else [self._exporter]

    def _end(self, why: str) -> None:
        session = self._session
        if session is None or session.over:
            return
        session.over, session.ended = why, self._clock()
        if session.finalizer is not None:
            session.finalizer()
        self._say(
            logging.INFO,
            "debugging session %r ends (%s): %d steps, %d anomalies",
            session.name,
            why,
            session.iterations,
            session.anomalies,
        )

    def _say(self, level: int, message: str, *args: Any) -> None:
        if self._config is not None and level >= _LEVELS[self._config.debug_level]:
            _log.log(level, "gradflow: " + message, *args)
