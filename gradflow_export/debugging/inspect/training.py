"""TrainingDebugger: looks at each step of a training loop and counts what was wrong."""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradflow_export.debugging.inspect.debugger import PyTorchDebugger
from gradflow_export.debugging.inspect.footprint import model_bytes
from gradflow_export.debugging.inspect.gradients import holds_inf, norms_of, parameters_of, read_norms
from gradflow_export.debugging.inspect.history import DebugEntry
from gradflow_export.debugging.inspect.tensor_info import TensorInfos, describe_tensors
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.instruments.runtime import RuntimeInstrument
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.metrics.arrays.tensors import flat_entries
from gradflow_export.records.step_record import Reading, issue_to_json, number_to_json
from gradflow_export.rules.base import number, some
from gradflow_export.validation import check_module

HISTOGRAMS, HISTOGRAM_BINS, HISTOGRAM_ENTRIES = 16, 32, 4096
MEMORY_STEPS = 10
LOSSES = 20
CALLERS = 5


class TrainingDebugger(PyTorchDebugger):
    """Looks at loss and gradients of each step, between the backward pass and the optimizer's step.

    It takes the same arguments as :class:`~gradflow_export.debugging.inspect.debugger.PyTorchDebugger` and has all its
    methods.
    """

    counted = ("steps", "anomaly_steps", "gradient_explosions", "gradient_vanishing", "loss_anomalies")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._memory = RuntimeInstrument()
        self._bytes: dict[str, int] = {}

    def monitor_training_step(self, model: nn.Module, loss: Tensor | float, step: int) -> dict[str, Any]:
        """Look at one step, after ``loss.backward()`` and before ``optimizer.step()``.

        With a gradient scaler, call it after ``scaler.unscale_(optimizer)``: norms are judged as they are.

        Args:
            model: What is trained.
            loss: The step's loss; of more than one entry the mean. Shape: any.
            step: The step's number; it may begin anew with each epoch.

        Returns:
            ``step``, ``level``, ``loss`` (NaN and Inf as words), ``has_anomaly``, ``anomalies`` (sentences),
            ``issues`` (those that opened or healed, as in JSON), ``gradient_norm``, ``params_with_grad``,
            ``params_with_nan_grad``, ``params_with_inf_grad``, ``exploding`` and ``vanishing`` (names); from
            ``ADVANCED`` on also ``gradients`` and ``parameters`` (:class:`TensorInfo` by name) and ``memory`` (bytes,
            read at every tenth step, and ``rss_mb``); at ``EXTREME`` ``histograms`` (``edges`` and ``counts`` by name,
            of the 16 largest) and, where something is wrong, ``context`` (``first_nonfinite``, ``losses``,
            ``called_from``).

        Raises:
            ArgumentTypeError: An argument has the wrong type.
        """
        check_module(model)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ArgumentTypeError(f"step must be a whole number, got {step!r}; pass the number of the step.")
        value, preset = _loss(loss), self.preset
        named = parameters_of(model)
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        described = describe_tensors(gradients if preset.statistics else {})
        norms = norms_of(described) if preset.statistics else read_norms(gradients)
        parameters = describe_tensors(named if preset.statistics else {})
        readings = [Reading.run("loss", value), *norms.readings(), *_weights(parameters)]
        now = self._findings.now(readings)
        issues = self._findings.judge(readings, step=step, model=model)
        broken = parameters.broken
        lost = not math.isfinite(value)
        anomalies = [f"the loss is {number(value)}."] * lost
        anomalies += [f"the gradient of {some(norms.bad)} is NaN or Inf."] * bool(norms.bad)
        anomalies += [f"the weights of {some(tuple(broken))} are NaN or Inf."] * bool(broken)
        anomalies += [finding.message for finding in now.values()]
        info: dict[str, Any] = {
            "step": step,
            "level": str(self.level),
            "loss": number_to_json(value),
            "has_anomaly": bool(anomalies),
            "anomalies": anomalies,
            "issues": [issue_to_json(issue) for issue in issues],
            "gradient_norm": number_to_json(norms.total),
            "params_with_grad": len(norms.sites),
            "params_with_nan_grad": len(norms.with_nan),
            "params_with_inf_grad": sum(holds_inf(gradients[name]) for name in norms.bad),
            "exploding": list(now["fixed-exploding"].layers) if "fixed-exploding" in now else [],
            "vanishing": list(now["fixed-vanishing"].layers) if "fixed-vanishing" in now else [],
        }
        if preset.statistics:
            info |= {"gradients": described, "parameters": parameters}
        if preset.memory:
            if self.history.counts()["steps"] % MEMORY_STEPS == 0:
                self._bytes = model_bytes(model)
            info["memory"] = {**self._bytes, "rss_mb": self._memory.numbers()["runtime.rss"]}
        if preset.histograms:
            largest = sorted(gradients, key=lambda name: -gradients[name].numel())[:HISTOGRAMS]
            info["histograms"] = {name: _histogram(gradients[name]) for name in largest}
        if preset.context and anomalies:
            info["context"] = self._context({name: gradients[name] for name in norms.bad})
        self._losses.append(value)
        counted = ["steps"] + ["anomaly_steps"] * bool(anomalies) + ["loss_anomalies"] * lost
        counted += ["gradient_explosions"] * bool(info["exploding"]) + ["gradient_vanishing"] * bool(info["vanishing"])
        kept = {key: part for key, part in info.items() if preset.keeps or key not in {"gradients", "parameters"}}
        self.history.add(
            DebugEntry("training step", type(model).__name__, tuple(anomalies), step, details=kept), counted
        )
        return info

    def get_training_summary(self) -> dict[str, Any]:
        """Return counts of steps at which something was wrong, and their shares of all steps; 0 before the first.

        Returns:
            ``total_steps``, ``anomaly_steps`` (anything at all), ``gradient_explosions``, ``gradient_vanishing``,
            ``loss_anomalies`` (NaN or Inf), ``anomaly_rate``, ``loss_anomaly_rate``, ``gradient_explosion_rate``,
            ``gradient_vanishing_rate``.
        """
        return training_summary(self.history.counts())

    def get_debug_summary(self) -> dict[str, Any]:
        """Return ``total_anomalies``, ``debug_history_length``, ``total_steps`` and two rates, all of one moment."""
        counts = self.history.counts()
        rates = training_summary(counts)
        return {
            "total_anomalies": counts["anomalies"],
            "debug_history_length": counts["entries"],
            **{key: rates[key] for key in ("total_steps", "anomaly_rate", "gradient_explosion_rate")},
        }

    def _context(self, gradients: Mapping[str, Tensor]) -> dict[str, Any]:
        places = {name: place for name, gradient in gradients.items() if (place := _first_nonfinite(gradient))}
        callers = traceback.extract_stack(limit=CALLERS + 2)[:-2]
        return {
            "first_nonfinite": places,
            "losses": [number_to_json(loss) for loss in self._losses],
            "called_from": [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(callers)],
        }


def training_summary(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the summary of a training debugger's counts."""
    steps = counts["steps"]

    def rate(count: int) -> float:
        return count / steps if steps else 0.0

    return {
        "total_steps": steps,
        "anomaly_steps": counts["anomaly_steps"],
        "gradient_explosions": counts["gradient_explosions"],
        "gradient_vanishing": counts["gradient_vanishing"],
        "loss_anomalies": counts["loss_anomalies"],
        "anomaly_rate": rate(counts["anomaly_steps"]),
        "loss_anomaly_rate": rate(counts["loss_anomalies"]),
        "gradient_explosion_rate": rate(counts["gradient_explosions"]),
        "gradient_vanishing_rate": rate(counts["gradient_vanishing"]),
    }


def _loss(loss: object) -> float:
    if isinstance(loss, Tensor):
        return float(loss.detach().double().mean())
    if isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise ArgumentTypeError(f"loss must be a tensor or a number, got {type(loss).__name__}; pass the step's loss.")
    return float(loss)


def _weights(parameters: TensorInfos) -> list[Reading]:
    norms = norms_of(parameters)
    return [Reading.of("parameter.weight_norm", norms.sites, norms.norms)] if norms.sites else []


def _first_nonfinite(tensor: Tensor) -> list[int]:
    """Return the place of the first NaN or Inf, empty when there is none; in a sparse tensor among stored entries."""
    if tensor.is_meta:
        return []
    wrong = (~torch.isfinite(flat_entries(tensor))).nonzero()
    if not len(wrong):
        return []
    first = int(wrong[0])
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return [int(place) for place in np.unravel_index(first, tensor.shape)] if dense and tensor.dim() else [first]


def _histogram(tensor: Tensor) -> dict[str, list[float]]:
    sample = flat_entries(tensor) if tensor.layout is not torch.strided else even_sample(tensor, HISTOGRAM_ENTRIES)
    magnitudes = sample.abs() if sample.is_complex() else sample
    values = magnitudes.double().cpu().numpy()
    counts, edges = np.histogram(values[np.isfinite(values)], bins=HISTOGRAM_BINS)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
