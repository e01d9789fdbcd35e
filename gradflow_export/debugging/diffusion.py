"""DiffusionModelDebugger: the parts of a diffusion pipeline, and its latents from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gradflow_export.debugging.debugger import PyTorchDebugger
from gradflow_export.debugging.footprint import model_bytes
from gradflow_export.debugging.gradients import parameters_of
from gradflow_export.debugging.history import DebugEntry
from gradflow_export.debugging.tensor_info import TensorInfo, describe_tensors
from gradflow_export.debugging.validation import tensors_in
from gradflow_export.errors import ArgumentTypeError
from gradflow_export.records import Issue, IssueType, Severity

_FLAT = 1e-6


class DiffusionModelDebugger(PyTorchDebugger):
    """Looks at a pipeline of modules that removes noise step by step.

    A pipeline is a module, an object whose ``components`` is a mapping (as pipelines of the package ``diffusers``
    have), or any object with modules among its attributes. It takes the same arguments as
    :class:`~gradflow_export.debugging.debugger.PyTorchDebugger` and has all its methods.
    """

    def analyze_diffusion_pipeline(self, pipeline: Any) -> dict[str, Any]:
        """Return what a pipeline is made of.

        Args:
            pipeline: See above.

        Returns:
            ``pipeline`` (its class), ``total_parameters`` and ``trainable_parameters`` (entries; what components share
            counts once), ``memory_bytes``, ``devices``, ``dtypes``, ``nonfinite`` (names of broken parameters),
            ``has_anomaly`` and ``components``: by name ``class``, ``parameters``, ``trainable_parameters``,
            ``memory_bytes``, ``training``, and from ``ADVANCED`` on ``tensors`` (:class:`TensorInfo` by name).

        Raises:
            ArgumentTypeError: There is no module in it.
        """
        parts = dict(modules_of(pipeline))
        preset = self.preset
        infos = {name: describe_tensors(parameters_of(module)) for name, module in parts.items()}
        broken = [f"{part}.{name}" for part, each in infos.items() for name, i in each.items() if not i.is_finite]
        everything = nn.ModuleDict({str(index): module for index, module in enumerate(parts.values())})
        parameters = list(everything.parameters())
        out = {
            "pipeline": type(pipeline).__name__,
            "total_parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "memory_bytes": model_bytes(everything)["total"],
            "devices": sorted({str(p.device) for p in parameters}),
            "dtypes": sorted({str(p.dtype) for p in parameters}),
            "nonfinite": broken,
            "has_anomaly": bool(broken),
            "components": {
                name: {
                    "class": type(module).__name__,
                    "parameters": sum(p.numel() for p in module.parameters()),
                    "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
                    "memory_bytes": model_bytes(module)["total"],
                    "training": module.training,
                    **({"tensors": infos[name]} if preset.statistics else {}),
                }
                for name, module in parts.items()
            },
        }
        wrong = [f"NaN or Inf in {name}" for name in broken]
        self.history.add(DebugEntry("pipeline", type(pipeline).__name__, tuple(wrong)))
        return out

    def monitor_diffusion_step(self, pipeline: Any, step: int, latents: Any) -> dict[str, Any]:
        """Look at the latents after one step.

        Args:
            pipeline: As for :meth:`analyze_diffusion_pipeline`; whose exporter is told.
            step: Number of the step.
            latents: A tensor, or an output that holds one, such as one with ``sample``. Shape: any.

        Returns:
            ``step``, ``level``, ``latents`` (:class:`TensorInfo`), ``has_anomaly``, ``anomalies`` (sentences) and, from
            ``ADVANCED`` on, ``memory`` (bytes of the pipeline).

        Raises:
            ArgumentTypeError: There is no module in the pipeline, or no tensor in the latents.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise ArgumentTypeError(f"step must be a whole number, got {step!r}; pass the number of the step.")
        found = next(tensors_in(latents, "latents"), None)
        if found is None:
            raise ArgumentTypeError(
                f"latents must be a tensor or hold one, got {type(latents).__name__}; pass what the model returned."
            )
        parts = list(modules_of(pipeline))
        info = describe_tensors({"latents": found[1]})["latents"]
        anomalies = _wrong_with(info)
        issue = None if info.is_finite else _issue(info, step)
        for name, module in parts:
            self._findings.report(f"latents {name}", issue, module)
        out: dict[str, Any] = {
            "step": step,
            "level": str(self.level),
            "latents": info,
            "has_anomaly": bool(anomalies),
            "anomalies": anomalies,
        }
        if self.preset.memory:
            everything = nn.ModuleDict({str(index): module for index, (_, module) in enumerate(parts)})
            out["memory"] = model_bytes(everything)
        kept = out if self.preset.keeps else {}
        self.history.add(DebugEntry("diffusion step", type(pipeline).__name__, tuple(anomalies), step, details=kept))
        return out


def modules_of(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each part of a pipeline.

    Raises:
        ArgumentTypeError: There is none.
    """
    if isinstance(pipeline, nn.Module):
        yield type(pipeline).__name__, pipeline
        return
    held = getattr(pipeline, "components", None)
    if not isinstance(held, Mapping):
        held = pipeline if isinstance(pipeline, Mapping) else getattr(pipeline, "__dict__", {})
    found = [(str(name), part) for name, part in held.items() if isinstance(part, nn.Module)]
    if not found:
        raise ArgumentTypeError(
            f"pipeline must be a module or hold modules, got {type(pipeline).__name__} with none; pass the "
            "pipeline, or a dictionary of its modules by name."
        )
    yield from found


def _issue(info: TensorInfo, step: int) -> Issue:
    count = info.nan_count + info.inf_count
    return Issue(
        IssueType.NUMERICAL,
        Severity.CRITICAL,
        "",
        step,
        float(count),
        0.0,
        f"{count} of {info.numel} entries of the latents are NaN or Inf after step {step} of the diffusion.",
        "run the pipeline in float32 or torch.bfloat16, and look at the first step that is not finite.",
    )


def _wrong_with(info: TensorInfo) -> list[str]:
    anomalies = [f"{sentence}." for sentence in info.wrong("the latents")]
    if info.numel > 1 and info.std_value is not None and info.std_value <= _FLAT * abs(info.max_value or 0.0):
        anomalies.append(f"all entries of the latents are {info.mean_value:.3g}: nothing is left of the noise.")
    return anomalies
