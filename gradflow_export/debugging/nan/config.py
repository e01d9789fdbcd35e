"""What the stability manager is asked to do: clipping, NaN handling, debugging."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradflow_export.errors import ArgumentError, ArgumentTypeError, nearest
from gradflow_export.validation import check_number

CLIPPING_MODES = ("norm", "value", "adaptive", "per_layer", "none")
NAN_POLICIES = ("detect", "skip", "zero", "clamp", "rewind", "raise")
ANOMALY_MODES = ("detect", "raise")
DEBUG_LEVELS = ("info", "warning", "error")


@dataclass(frozen=True)
class GradientClippingConfig:
    """How gradients are clipped.

    Attributes:
        mode: ``"norm"``: all gradients together are scaled down to ``max_norm`` (Pascanu et al. 2013). ``"value"``:
            each entry is brought into ``[-clip_value, clip_value]``. ``"adaptive"``: each row of a gradient is scaled
            down to ``clip_factor`` times the norm of the same row of the weight (AGC, Brock et al. 2021, equation 3).
            ``"per_layer"``: the gradients of each module are scaled down to ``max_norm`` by themselves. ``"none"``.
        max_norm: Greatest norm, in the unit of the gradient.
        norm_type: The ``p`` of the norm, for ``"norm"`` and ``"per_layer"``.
        clip_value: Greatest magnitude of an entry.
        clip_factor: Greatest ratio of gradient to weight, the lambda of AGC.
        eps: Least norm of a row of weights that AGC reckons with, so that rows of zeros can leave it.
        exclude: Names of parameters, or beginnings of names, that AGC leaves alone; the paper leaves the last linear
            layer alone.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: A value has the wrong type.
    """

    mode: str = "norm"
    max_norm: float = 1.0
    norm_type: float = 2.0
    clip_value: float = 1.0
    clip_factor: float = 0.01
    eps: float = 1e-3
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_word("mode", self.mode, CLIPPING_MODES)
        for name in ("max_norm", "clip_value", "clip_factor", "eps"):
            _check_positive(name, getattr(self, name), GradientClippingConfig)
        if self.norm_type != float("inf"):
            _check_positive("norm_type", self.norm_type, GradientClippingConfig)
        object.__setattr__(self, "exclude", _names("exclude", self.exclude))


@dataclass(frozen=True)
class NaNHandlingConfig:
    """What is done with a step whose loss or gradients are NaN or Inf.

    Attributes:
        policy: ``"detect"``: nothing but a report. ``"skip"``: the update does not happen. ``"zero"``: entries that
            are NaN or Inf become 0. ``"clamp"``: NaN becomes 0, Inf becomes ``clamp_value`` and every entry is brought
            into ``[-clamp_value, clamp_value]``. ``"rewind"``: as ``"skip"``, and where the weights themselves are
            broken the last good state comes back. ``"raise"``: :class:`NumericalAnomalyError`, before the update.
            ``docs/debugging.md`` says what each one promises.
        clamp_value: Greatest magnitude that ``"clamp"`` lets through.
        check_loss: Whether a loss that is NaN or Inf counts while the gradients are finite.
        rewind_after: Steps in a row without a finite one after which ``"rewind"`` takes weights that are finite for
            broken too and goes back.
        snapshot_every: Steps between two snapshots of ``"rewind"``; what came after the snapshot is lost with it.
        scaler_patience: Steps in a row that a ``GradScaler`` may skip before that counts as an anomaly.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: A value has the wrong type.
    """

    policy: str = "skip"
    clamp_value: float = 1.0
    check_loss: bool = True
    rewind_after: int = 3
    snapshot_every: int = 1
    scaler_patience: int = 20

    def __post_init__(self) -> None:
        _check_word("policy", self.policy, NAN_POLICIES)
        _check_positive("clamp_value", self.clamp_value, NaNHandlingConfig)
        _check_bool("check_loss", self.check_loss)
        for name in ("rewind_after", "snapshot_every", "scaler_patience"):
            _check_count(name, getattr(self, name), NaNHandlingConfig)


@dataclass(frozen=True)
class PyTorchDebuggingConfig:
    """What is debugged while a session lasts. Everything is off by default.

    Attributes:
        enable_autograd_anomaly: Look for NaN and Inf, and for where they began.
        autograd_anomaly_mode: ``"detect"`` tells and lets training go on; ``"raise"`` has PyTorch's anomaly mode on
            during the session and raises.
        enable_grad_check: Compare gradients with finite differences, in float64, every ``grad_check_interval`` steps.
        grad_check_numerical: Whether dense gradients are compared.
        grad_check_sparse_numerical: Whether sparse gradients are compared.
        enable_memory_debugging: Read memory at every step and judge whether it leaks.
        memory_tracking: The same; either of the two switches it on.
        memory_profiling: Count live tensors by group every ``memory_scan_interval`` steps, so that a leak has a name.
        enable_cuda_debugging: Read every CUDA device at every step; needed by the two below.
        cuda_synchronize: Wait for the device before a step is timed.
        cuda_memory_fraction: Share of the device's memory that this process may have; 1.0 leaves it alone.
        enable_performance_debugging: Profile some steps with ``torch.profiler``.
        profile_autograd: Whether the profile tells the shapes of what operations were given.
        profile_memory: Whether it tells the memory of each operation.
        debug_level: Least weight of what is logged: ``"info"``, ``"warning"`` or ``"error"``.
        verbose_logging: Log one line for each step.
        max_debug_iterations: Steps after which debugging ends; clipping and NaN handling go on.
        debug_timeout: Seconds after which debugging ends.
        save_debug_info: Write the JSON files.
        debug_output_dir: Folder for files.
        debug_file_prefix: First part of their names.
        grad_check_interval: Steps between two checks of gradients.
        memory_scan_interval: Steps between two counts of live tensors.
        profile_steps: Steps that one profile covers.
        keep_sessions: Sessions whose files are kept in the folder; older ones are deleted.
        max_file_mb: Greatest size of one file; beyond that the oldest steps are left out of it.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: A value has the wrong type.
    """

    enable_autograd_anomaly: bool = False
    autograd_anomaly_mode: str = "detect"
    enable_grad_check: bool = False
    grad_check_numerical: bool = True
    grad_check_sparse_numerical: bool = True
    enable_memory_debugging: bool = False
    memory_tracking: bool = False
    memory_profiling: bool = False
    enable_cuda_debugging: bool = False
    cuda_synchronize: bool = False
    cuda_memory_fraction: float = 1.0
    enable_performance_debugging: bool = False
    profile_autograd: bool = False
    profile_memory: bool = False
    debug_level: str = "info"
    verbose_logging: bool = False
    max_debug_iterations: int = 1000
    debug_timeout: float = 300.0
    save_debug_info: bool = True
    debug_output_dir: str = "debug_output"
    debug_file_prefix: str = "pytorch_debug"
    grad_check_interval: int = 100
    memory_scan_interval: int = 25
    profile_steps: int = 3
    keep_sessions: int = 5
    max_file_mb: float = 16.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                _check_bool(field.name, value)
            elif isinstance(field.default, int):
                _check_count(field.name, value, PyTorchDebuggingConfig)
            elif isinstance(field.default, float):
                _check_positive(field.name, value, PyTorchDebuggingConfig)
        _check_word("autograd_anomaly_mode", self.autograd_anomaly_mode, ANOMALY_MODES)
        _check_word("debug_level", self.debug_level, DEBUG_LEVELS)
        if self.cuda_memory_fraction > 1:
            raise ArgumentError(
                f"cuda_memory_fraction must be a share above 0 and at most 1, got {self.cuda_memory_fraction!r}; 0.8 "
                "allows 80 % of the device."
            )
        folder = self.debug_output_dir
        if not isinstance(folder, (str, Path)):
            raise ArgumentTypeError(f"debug_output_dir must be a path, got {folder!r}; for example 'debug_output'.")
        prefix = self.debug_file_prefix
        if not isinstance(prefix, str) or not prefix or prefix != Path(prefix).name:
            raise ArgumentError(
                f"debug_file_prefix must be the first part of a file name, got {prefix!r}; put folders into "
                "debug_output_dir."
            )

    @property
    def tracks_memory(self) -> bool:
        """Whether memory is read at every step."""
        return self.enable_memory_debugging or self.memory_tracking or self.memory_profiling


def _check_word(name: str, value: object, known: Iterable[str]) -> None:
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise ArgumentError(f"{name} must be one of {', '.join(words)}; got {value!r}{nearest(str(value), words)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}.")


def _default(config: type[Any], name: str) -> Any:
    return next(field.default for field in dataclasses.fields(config) if field.name == name)


def _check_positive(name: str, value: object, config: type[Any]) -> None:
    example = _default(config, name)
    check_number(name, value, example=example)
    if value == 0:
        raise ArgumentError(f"{name} must be above 0, got {value!r}; for example {name}={example:g}.")


def _check_count(name: str, value: object, config: type[Any]) -> None:
    example = _default(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be a whole number, got {value!r}; for example {name}={example}.")
    if value < 1:
        raise ArgumentError(f"{name} must be at least 1, got {value}; for example {name}={example}.")


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise ArgumentTypeError(f"{name} must be a list of names, got {value!r}; for example {name}=['head'].")
    return tuple(str(item) for item in value)
