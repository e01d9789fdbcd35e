"""DiffusionModelDebugger: the parts of a diffusion pipeline, and its latents from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradflow_export.debugging.inspect.debugger import PyTorchDebugger
from gradflow_export.debugging.inspect.footprint import model_bytes
from gradflow_export.debugging.inspect.gradients import parameters_of
from gradflow_export.debugging.inspect.history import DebugEntry
from gradflow_export.debugging.inspect.latents import LatentWatch, LossByLevel
from gradflow_export.debugging.inspect.schedules import NoiseSchedule, as_timestep, fingerprint
from gradflow_export.debugging.inspect.tensor_info import TensorInfo, describe_tensors
from gradflow_export.debugging.nan.validation import tensors_in
from gradflow_export.errors import ArgumentError, ArgumentTypeError
from gradflow_export.records.step_record import Issue, IssueType, Severity
from gradflow_export.rules.base import some

_FLAT = 1e-6


class DiffusionModelDebugger(PyTorchDebugger):
    """Looks at a pipeline of modules that removes noise step by step.

    A pipeline is a module, an object whose ``components`` is a mapping (as pipelines of the package ``diffusers``
    have), or any object with modules among its attributes. It has all methods of
    :class:`~gradflow_export.debugging.inspect.debugger.PyTorchDebugger`.

    Args:
        *args: As :class:`~gradflow_export.debugging.inspect.debugger.PyTorchDebugger` takes them.
        schedule: What the latents should be at each noise level; without it only sizes are reported that none has.
        **settings: As ``*args``.

    Raises:
        ArgumentError: A value cannot be used.
        ArgumentTypeError: An argument has the wrong type.
    """

    def __init__(self, *args: Any, schedule: NoiseSchedule | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if schedule is not None and not isinstance(schedule, NoiseSchedule):
            raise ArgumentTypeError(
                f"schedule must be a NoiseSchedule, got {type(schedule).__name__}; for example "
                "NoiseSchedule.from_betas(betas)."
            )
        self._latents = LatentWatch(schedule)
        self._losses = None if schedule is None else LossByLevel(schedule)

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

    def monitor_diffusion_step(
        self, pipeline: Any, step: int, latents: Any, *, timestep: float | Tensor | None = None
    ) -> dict[str, Any]:
        """Look at the latents after one step.

        Args:
            pipeline: As for :meth:`analyze_diffusion_pipeline`; whose exporter is notified.
            step: Number of the step, from 0; one that is not above the last one begins another sampling run.
            latents: A tensor, or an output that holds one, such as one with ``sample``. Shape: any.
            timestep: Noise level that the latents are at now; by default the one after ``step`` in the schedule.

        Returns:
            ``step``, ``level``, ``latents`` (:class:`TensorInfo`), ``timestep``, ``rms`` (root mean square of the
            entries), ``expected_rms`` (the least and the greatest that the schedule has; ``None`` without one),
            ``has_anomaly``, ``anomalies`` (sentences) and, from ``ADVANCED`` on, ``memory`` (bytes of the pipeline).

        Raises:
            ArgumentTypeError: There is no module in the pipeline, or no tensor in the latents, or the timestep is no
                number.
        """
        at = as_timestep(timestep)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ArgumentTypeError(f"step must be a whole number, got {step!r}; pass the number of the step.")
        found = next(tensors_in(latents, "latents"), None)
        if found is None:
            raise ArgumentTypeError(
                f"latents must be a tensor or hold one, got {type(latents).__name__}; pass what the model returned."
            )
        parts = list(modules_of(pipeline))
        info = describe_tensors({"latents": found[1]})["latents"]
        look = self._latents.look(step, info, fingerprint(found[1]), at)
        issues = {"broken": None if info.is_finite else _issue(info, step), **look.issues}
        anomalies = _wrong_with(info) + [issue.message for issue in look.issues.values() if issue is not None]
        for name, module in parts:
            for kind, issue in issues.items():
                self._findings.report(f"latents {kind} {name}", issue, module)
        out: dict[str, Any] = {
            "step": step,
            "level": str(self.level),
            "latents": info,
            **look.as_dict(),
            "has_anomaly": bool(anomalies),
            "anomalies": anomalies,
        }
        if self.preset.memory:
            everything = nn.ModuleDict({str(index): module for index, (_, module) in enumerate(parts)})
            out["memory"] = model_bytes(everything)
        kept = out if self.preset.keeps else {}
        self.history.add(DebugEntry("diffusion step", type(pipeline).__name__, tuple(anomalies), step, details=kept))
        return out

    def monitor_diffusion_loss(self, pipeline: Any, timesteps: Any, losses: Any, step: int = 0) -> dict[str, Any]:
        """Take in the losses of one training step, each with the noise level that it was taken at.

        Args:
            pipeline: As for :meth:`analyze_diffusion_pipeline`; whose exporter is notified.
            timesteps: Of each sample. Shape: ``[batch]``.
            losses: Of each sample, or one for all of them. Shape: ``[batch]`` or scalar.
            step: Number of the training step.

        Returns:
            ``step``, ``has_anomaly`` and ``anomalies`` (sentences): losses that are NaN or Inf, and at which timesteps.

        Raises:
            ArgumentError: There is no schedule, or as many losses as timesteps are not there.
            ArgumentTypeError: They are no numbers.
        """
        if self._losses is None:
            raise ArgumentError(
                "losses by noise level need the schedule, got none; make the debugger with "
                "DiffusionModelDebugger(schedule=NoiseSchedule.from_betas(betas))."
            )
        levels, values = _listed("timesteps", timesteps), _listed("losses", losses)
        values = values * len(levels) if len(values) == 1 else values
        if len(values) != len(levels):
            raise ArgumentError(f"losses must be one for each of {len(levels)} timesteps, got {len(values)}.")
        broken = self._losses.add(levels, values)
        anomalies = [f"the loss at timestep {some(tuple(f'{level:g}' for level in broken))} is NaN or Inf."] * bool(
            broken
        )
        issue = _loss_issue(anomalies[0], len(broken), step) if broken else None
        for name, module in modules_of(pipeline):
            self._findings.report(f"diffusion loss {name}", issue, module)
        self.history.add(DebugEntry("diffusion loss", type(pipeline).__name__, tuple(anomalies), step))
        return {"step": step, "has_anomaly": bool(anomalies), "anomalies": anomalies}

    def get_loss_by_timestep(self) -> list[dict[str, Any]]:
        """Return the losses so far by noise level, from the least noise to the most.

        Returns:
            Ten rows: ``from`` and ``to`` (shares of the schedule: of its timesteps, or of the logarithm of its sigmas),
            ``count``, ``mean``, ``recent`` (a running mean) and ``nonfinite``; empty without a schedule.
        """
        return [] if self._losses is None else self._losses.table()


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


def _listed(name: str, values: Any) -> list[float]:
    if isinstance(values, Tensor) and not values.is_complex():
        return [float(value) for value in values.detach().double().flatten().tolist()]
    listed = values if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in listed):
        raise ArgumentTypeError(f"{name} must be numbers or a tensor, got {type(values).__name__}.")
    return [float(value) for value in listed]


def _loss_issue(message: str, count: int, step: int) -> Issue:
    return Issue(
        IssueType.NUMERICAL,
        Severity.CRITICAL,
        "",
        step,
        float(count),
        0.0,
        message,
        "look at the weight that the loss has at these noise levels, and at divisions by signal or noise near 0.",
    )


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
