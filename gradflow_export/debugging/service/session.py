"""What one debugging session holds, and the check of gradients that it makes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradflow_export.debugging.inspect.gradcheck import GradientCheck, check_gradients
from gradflow_export.debugging.nan.anomaly import AnomalyMode
from gradflow_export.debugging.nan.batch import BatchState, Call
from gradflow_export.debugging.nan.config import PyTorchDebuggingConfig
from gradflow_export.debugging.service.devices import CudaDevices
from gradflow_export.debugging.service.files import SessionFiles
from gradflow_export.debugging.service.leaks import MemoryWatch, no_memory
from gradflow_export.debugging.service.profiling import ProfilerWindow

WRITE_EVERY = 100
"""Steps between two writings of the files; they are written at the end of the session too."""

PROFILE_AFTER = 2
"""Steps before a profile begins: the first ones allocate what later ones reuse."""


@dataclass(frozen=True)
class StepFacts:
    """What the debugging of one step is given.

    Attributes:
        parameters: Number of parameter tensors of the optimizer.
        norms: L2 norm of each gradient that arrived.
        anomalies: What is wrong, ready for JSON.
        action: What was done about it.
        batch: The step's forward passes, where they were kept.
    """

    parameters: int
    norms: Sequence[float]
    anomalies: Sequence[Mapping[str, Any]] = ()
    action: str = "none"
    batch: BatchState | None = None


class Session:
    """What one debugging session holds; process-wide switches are on until :meth:`release`.

    Args:
        name: For the summary.
        config: What to debug.
        clock: Seconds.

    Raises:
        StorageError: Files are wanted and the folder cannot be written to.
    """

    def __init__(self, name: str, config: PyTorchDebuggingConfig, clock: Callable[[], float]) -> None:
        self.name, self.began, self.ended, self.over = name, clock(), 0.0, ""
        self.iterations = self.anomalies = self.next_check = 0
        self.kinds: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.history: deque[dict[str, Any]] = deque(maxlen=config.max_debug_iterations)
        self.profile: ProfilerWindow | None = None
        self.check: GradientCheck | None = None
        self.finalizer: Callable[[], object] | None = None
        self._config, self._leak_told = config, False
        self.files = _files(config) if config.save_debug_info else None
        scans = config.memory_scan_interval if config.memory_profiling else 0
        self.memory = MemoryWatch(scans) if config.tracks_memory else None
        self.devices = (
            CudaDevices(synchronize=config.cuda_synchronize, memory_fraction=config.cuda_memory_fraction)
            if config.enable_cuda_debugging
            else None
        )
        raises = config.enable_autograd_anomaly and config.autograd_anomaly_mode == "raise"
        self._mode = AnomalyMode() if raises else None
        if self._mode is not None:
            self._mode.start()

    def release(self) -> None:
        """Put process-wide switches back and write the files."""
        if self._mode is not None:
            self._mode.stop()
        if self.profile is not None:
            self.profile.stop()
        if self.files is not None:
            self.files.write()

    def read_memory(self) -> tuple[dict[str, dict[str, float | None]], list[dict[str, Any]]]:
        """Return the memory of this step, and the leak when it is first seen."""
        if self.memory is None:
            return no_memory(), []
        read = self.memory.read(self.iterations)
        if self.memory.leak is None or self._leak_told:
            return read, []
        self._leak_told = True
        leak = {"iteration": self.iterations, "type": "memory_leak", **self.memory.verdict()}
        return read, [{**leak, "parameters": [], "action": "none"}]

    def follow_profile(self, folder: Path) -> None:
        """Begin or go on with the profile, where one is wanted."""
        if not self._config.enable_performance_debugging:
            return
        if self.profile is not None:
            self.profile.step()
        elif self.iterations >= PROFILE_AFTER:
            config = self._config
            self.profile = ProfilerWindow(
                folder, steps=config.profile_steps, memory=config.profile_memory, shapes=config.profile_autograd
            )
            self.profile.start()

    def keep(self, record: dict[str, Any]) -> None:
        """Keep one step record, and write the files now and then."""
        details = record["anomaly_details"]
        self.history.append(record)
        self.anomalies += len(details)
        self.kinds.update(str(detail["type"]) for detail in details)
        self.actions.update({str(detail["action"]) for detail in details})
        files = self.files
        if files is None:
            return
        number = {"iteration": record["iteration"], "session_duration": record["session_duration"]}
        files.add("history", record)
        for detail in details:
            files.add("anomalies", detail)
        files.add("gradients", {**number, **record["gradient_stats"]})
        devices = {} if self.devices is None else {"devices": self.devices.read()}
        files.add("memory", {**number, **record["memory_info"], **devices})
        if record["iteration"] % WRITE_EVERY == 0:
            files.write()

    def summary(self, now: float) -> dict[str, Any]:
        """Return counts and verdicts."""
        files = {} if self.files is None else {kind: str(path) for kind, path in self.files.paths.items()}
        return {
            "session": self.name,
            "active": not self.over,
            "ended_because": self.over,
            "total_iterations": self.iterations,
            "anomalies_detected": self.anomalies,
            "anomalies_by_type": dict(self.kinds),
            "actions": dict(self.actions),
            "session_duration": (self.ended if self.over else now) - self.began,
            "gradient_check": None if self.check is None else self.check.as_dict(),
            "memory": None if self.memory is None else self.memory.verdict(),
            "profile": None if self.profile is None else self.profile.summary,
            "files": files,
        }


def _files(config: PyTorchDebuggingConfig) -> SessionFiles:
    return SessionFiles(
        Path(config.debug_output_dir),
        config.debug_file_prefix,
        time.strftime("%Y%m%d_%H%M%S"),
        keep=config.keep_sessions,
        most_bytes=int(config.max_file_mb * 2**20),
        entries=config.max_debug_iterations,
    )


def check_call(model: nn.Module, call: Call, *, dense: bool, sparse: bool) -> GradientCheck | None:
    """Compare a model's gradients with finite differences, on the inputs of a forward pass.

    Args:
        model: The unwrapped model.
        call: The pass.
        dense: Whether parameters with dense gradients are compared.
        sparse: Whether parameters with sparse gradients are compared.

    Returns:
        ``None`` where the inputs are gone.
    """
    inputs = call.inputs()
    if inputs is None:
        return None
    args, kwargs = inputs
    found = check_gradients(_Called(model, kwargs), args, dense=dense, sparse=sparse)
    names = {name.removeprefix("_called."): check for name, check in found.parameters.items()}
    return GradientCheck(names, found.tolerance)


class _Called(nn.Module):
    """A model that is called with some keyword arguments; parameters keep their names."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._called, self._kwargs = model, kwargs

    def forward(self, *args: Tensor) -> Any:
        """Call the model."""
        return self._called(*args, **self._kwargs)
