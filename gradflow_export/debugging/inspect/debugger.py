"""PyTorchDebugger: tensors, parameters, gradients and memory, looked at when asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.debugging.inspect.findings import Findings
from gradflow_export.debugging.inspect.footprint import model_bytes
from gradflow_export.debugging.inspect.gradients import GradientNorms, gradients_of, parameters_of, read_norms
from gradflow_export.debugging.inspect.history import HISTORY, DebugEntry, DebugHistory
from gradflow_export.debugging.inspect.issues import beyond, broken
from gradflow_export.debugging.inspect.levels import PRESETS, DebugLevel, Preset, as_level
from gradflow_export.debugging.inspect.tensor_info import TensorInfo, describe_tensors
from gradflow_export.debugging.nan.anomaly import anomaly_mode
from gradflow_export.debugging.nan.validation import ParameterBook, check_output, check_parameters
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.exporter import Exporter
from gradflow_export.records.step_record import IssueType
from gradflow_export.rules.base import Finding, some
from gradflow_export.validation import check_module, check_number, check_optimizer

EXPLOSION, VANISHING = 10.0, 1e-6


class PyTorchDebugger:
    """Looks at tensors and models when it is asked, and remembers what was wrong.

    It attaches nothing and keeps no tensor. Nothing it does changes training; on an accelerator each look waits for the
    device, because the answer is returned.

    Args:
        level: How much is looked at where it is left to the debugger, see :class:`DebugLevel`; a method that is called
            by name always answers in full.
        history: How many entries are remembered.
        exporter: Where problems are reported too; by default the exporter that watches the model, if there is one.
        gradient_explosion_threshold: Greatest allowed norm of a parameter's gradient.
        gradient_vanishing_threshold: Least allowed norm of a parameter's gradient.

    Attributes:
        history: Entries and counts.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: An argument has the wrong type.
    """

    counted: tuple[str, ...] = ()
    """Names of the counters that a kind of debugger keeps beside that of anomalies."""

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = HISTORY,
        exporter: Exporter | None = None,
        gradient_explosion_threshold: float = EXPLOSION,
        gradient_vanishing_threshold: float = VANISHING,
    ) -> None:
        if exporter is not None and not isinstance(exporter, Exporter):
            raise ArgumentTypeError(f"exporter must be an Exporter, got {type(exporter).__name__}; or leave it out.")
        check_number("gradient_explosion_threshold", gradient_explosion_threshold, example=EXPLOSION)
        check_number("gradient_vanishing_threshold", gradient_vanishing_threshold, example=VANISHING)
        self._level = as_level(level)
        self.history = DebugHistory(history, self.counted)
        self._parameters = ParameterBook()
        self._findings = Findings(
            exporter, explosion=gradient_explosion_threshold, vanishing=gradient_vanishing_threshold
        )

    @property
    def level(self) -> DebugLevel:
        """How much is looked at; it may be set at any time, from any thread."""
        return self._level

    @level.setter
    def level(self, level: DebugLevel | str) -> None:
        self._level = as_level(level)

    @property
    def preset(self) -> Preset:
        """What the level looks at."""
        return PRESETS[self._level]

    def analyze_tensor(self, tensor: Tensor, name: str = "tensor") -> TensorInfo:
        """Return what there is to know of one tensor.

        Args:
            tensor: Any tensor. Shape: any.
            name: What to call it.

        Raises:
            ArgumentTypeError: It is no tensor.
        """
        check_tensor(tensor, name)
        return self.note_tensor(describe_tensors({name: tensor})[name])

    def analyze_model_parameters(self, model: nn.Module) -> Mapping[str, TensorInfo]:
        """Return what there is to know of each parameter, by name.

        Raises:
            ArgumentTypeError: It is no module.
        """
        check_module(model)
        return self._describe("parameters", model, parameters_of(model))

    def analyze_gradients(self, model: nn.Module) -> Mapping[str, TensorInfo]:
        """Return what there is to know of each gradient that has arrived, by the name of its parameter.

        Raises:
            ArgumentTypeError: It is no module.
        """
        check_module(model)
        return self._describe("gradients", model, gradients_of(model))

    def check_gradient_explosion(self, model: nn.Module, threshold: float = EXPLOSION) -> list[str]:
        """Return the names of parameters whose gradient norm is above a threshold, or NaN or Inf.

        Args:
            model: After the backward pass, and with a gradient scaler after ``scaler.unscale_(optimizer)``.
            threshold: Greatest allowed L2 norm.

        Raises:
            ArgumentError: The threshold cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        check_module(model)
        check_number("threshold", threshold, example=EXPLOSION)
        norms = read_norms(gradients_of(model))
        names = norms.above(threshold)
        self._findings.report("explosion", beyond(IssueType.EXPLODING, norms, names, threshold), model)
        self._note("gradients", type(model).__name__, [f"norm above {threshold:g}: {some(tuple(names))}"] * bool(names))
        return names

    def check_gradient_vanishing(self, model: nn.Module, threshold: float = VANISHING) -> list[str]:
        """Return the names of parameters whose gradient norm is below a threshold; those without a gradient are not.

        Args:
            model: After the backward pass.
            threshold: Least allowed L2 norm.

        Raises:
            ArgumentError: The threshold cannot be used.
            ArgumentTypeError: An argument has the wrong type.
        """
        check_module(model)
        check_number("threshold", threshold, example=VANISHING)
        norms = read_norms(gradients_of(model))
        names = norms.below(threshold)
        self._findings.report("vanishing", beyond(IssueType.VANISHING, norms, names, threshold), model)
        self._note("gradients", type(model).__name__, [f"norm below {threshold:g}: {some(tuple(names))}"] * bool(names))
        return names

    def profile_memory_usage(self, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
        """Return the bytes of a model's tensors.

        Args:
            model: Its parameters, gradients and buffers are counted, shared memory once.
            optimizer: Its state is counted too.

        Returns:
            ``parameters``, ``gradients``, ``buffers``, ``optimizer`` and ``total``.

        Raises:
            ArgumentTypeError: It is no module, or the optimizer is none.
        """
        check_module(model)
        if optimizer is not None:
            check_optimizer(optimizer)
        return model_bytes(model, optimizer)

    def validate_model_parameters(self, model: nn.Module) -> dict[str, Any]:
        """Check that parameters are finite, not constant, and of the same shapes and identity as at the last call.

        Returns:
            ``valid``, ``problems`` (sentences), and by name ``nonfinite``, ``constant`` (weights of two dimensions or
            more whose entries are all equal, so that their units cannot become different), ``added``, ``removed``,
            ``replaced`` (another tensor stands there, which an optimizer made before does not know) and ``reshaped``.

        Raises:
            ArgumentTypeError: It is no module.
        """
        check_module(model)
        found = check_parameters(describe_tensors(parameters_of(model)), self._parameters.changes(model))
        self._note("validation", type(model).__name__, found["problems"])
        return found

    def validate_model_output(self, output: Any, expected_shape: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Check that the tensors in an output are finite, and of a shape.

        Args:
            output: A tensor, or any nesting of mappings, sequences and objects that holds tensors.
            expected_shape: Shape of the first tensor, -1 for any size.

        Returns:
            ``valid``, ``problems`` (sentences) and ``tensors`` (:class:`TensorInfo` by path).

        Raises:
            ArgumentTypeError: The shape is no tuple.
        """
        if expected_shape is not None and not isinstance(expected_shape, (tuple, list)):
            raise ArgumentTypeError(f"expected_shape must be a tuple, got {expected_shape!r}; for example (-1, 10).")
        found = check_output(output, expected_shape)
        self._note("validation", "output", found["problems"])
        return found

    @contextlib.contextmanager
    def autograd_anomaly_detection(self, *, check_nan: bool = True) -> Iterator[PyTorchDebugger]:
        """Have PyTorch's anomaly mode on inside the block, and as it was before after it.

        A backward pass that makes a NaN raises there, and says which operation of the forward pass it belongs to; the
        error is remembered and goes on. PyTorch does not look for Inf. It costs a multiple of a step.

        Args:
            check_nan: Whether a NaN raises; otherwise only errors tell where in the forward pass they come from.
        """
        with anomaly_mode(check_nan=check_nan):
            try:
                yield self
            except RuntimeError as error:
                self._note("autograd", type(error).__name__, [str(error).splitlines()[0] if str(error) else "error"])
                raise

    def log_through(self, put: Callable[..., None]) -> None:
        """Have what is logged go through a function that takes a level, a message and its arguments."""
        self._findings.log = put

    def note_tensor(self, info: TensorInfo) -> TensorInfo:
        """Remember a tensor that was described already, and return it."""
        self._note("tensor", info.name, info.wrong(), {info.name: info})
        self._findings.report(f"tensor {info.name}", broken(f"tensor {info.name!r}", (), [info]))
        return info

    def judge_gradients(
        self, norms: GradientNorms, name: str, step: int, model: nn.Module | None = None
    ) -> dict[str, Finding]:
        """Judge norms of gradients that were read; what is wrong is kept and reported.

        Args:
            norms: Of each gradient.
            name: What to call them all.
            step: Under which it is reported.
            model: Whose exporter is notified, where none was given.

        Returns:
            What is wrong beside NaN and Inf, by the name of the rule.
        """
        readings = norms.readings()
        now = self._findings.now(readings)
        self._findings.judge(readings, step=step, model=model)
        anomalies = [f"NaN or Inf: {some(norms.bad)}"] * bool(norms.bad) + [found.message for found in now.values()]
        self.history.add(DebugEntry("gradients", name, tuple(anomalies), step))
        return now

    def get_debug_summary(self) -> dict[str, Any]:
        """Return ``total_anomalies``, the looks at which something was wrong, and ``debug_history_length``."""
        counts = self.history.counts()
        return {"total_anomalies": counts["anomalies"], "debug_history_length": counts["entries"]}

    def clear_debug_history(self) -> None:
        """Forget everything and begin to count anew."""
        self.history.clear()

    def _describe(self, kind: str, model: nn.Module, tensors: dict[str, Tensor]) -> Mapping[str, TensorInfo]:
        infos = describe_tensors(tensors)
        wrong = [f"{name}: {what}" for name in infos.broken for what in infos[name].wrong()]
        self._note(kind, type(model).__name__, wrong, infos)
        found = broken(kind, tuple(infos.broken), [infos[name] for name in infos.broken])
        self._findings.report(kind, found, model)
        return infos

    def _note(self, kind: str, name: str, anomalies: list[str], infos: Mapping[str, TensorInfo] | None = None) -> None:
        kept = infos if infos is not None and self.preset.keeps else {}
        self.history.add(DebugEntry(kind, name, tuple(anomalies), details=kept))


def check_tensor(tensor: object, name: str) -> None:
    """Raise unless this is a tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; pass the tensor, or torch.as_tensor(value)."
        )
