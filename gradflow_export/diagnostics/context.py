"""A training context for one sample at a time that diagnoses itself."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradflow_export.config import read_file
from gradflow_export.diagnostics.backward import BackwardPassDiagnostics
from gradflow_export.errors import ArgumentError, ArgumentTypeError

SECTION = "train"
_PARTS = ("model", "optimizer", "criterion", "dataset")


class TrainContext(BackwardPassDiagnostics):
    """Trains a model sample by sample and diagnoses each backward pass.

    Args:
        model: What is trained.
        optimizer: Steps after each sample.
        criterion: Takes a batch of outputs and of targets.
        dataset: ``dataset[index]`` returns input and target, without a batch dimension.
        **settings: As :class:`BackwardPassDiagnostics` takes them.

    Attributes:
        model: As given, like ``optimizer``, ``criterion`` and ``dataset``.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, criterion: nn.Module, dataset: Any, **settings: Any
    ) -> None:
        super().__init__(model, criterion, **settings)
        self.model, self.optimizer, self.criterion, self.dataset = model, optimizer, criterion, dataset

    def train_single_sample(self, sample_idx: int) -> tuple[float, float]:
        """Train one step on one sample.

        Args:
            sample_idx: Place of the sample in the dataset.

        Returns:
            Loss and accuracy (1 when the greatest output is the target's, 0 when not, NaN where targets are no class
            numbers).
        """
        device = next(self.model.parameters()).device
        inputs, targets = (torch.as_tensor(part)[None].to(device) for part in self.dataset[sample_idx])
        self.model.train()
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = self.criterion(outputs, targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()), _accuracy(outputs.detach(), targets)


def _accuracy(outputs: Tensor, targets: Tensor) -> float:
    if outputs.dim() != targets.dim() + 1 or targets.is_floating_point():
        return float("nan")
    return float((outputs.argmax(dim=1) == targets).float().mean())


def create_modular_train_context(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    criterion: nn.Module | None = None,
    dataset: Any = None,
    **settings: Any,
) -> TrainContext:
    """Return a training context with diagnostics switched on.

    The configuration may name what is trained::

        train:
          factory: my_project.training:build     # returns {"model": ..., "optimizer": ..., "dataset": ...}
          arguments: {width: 64}
        diagnostics:
          gradient_explosion_threshold: 10.0

    Args:
        config: A dictionary, or path of a YAML or TOML file: an exporter's settings, with the section ``diagnostics``
            or without, and a section ``train``. The function it names is imported and called: use configurations you
            trust.
        model: What is trained; wins over the configuration, as do the following.
        optimizer: By default ``torch.optim.Adam`` with its defaults.
        criterion: By default ``nn.CrossEntropyLoss()``.
        dataset: ``dataset[index]`` returns input and target.
        **settings: As :class:`BackwardPassDiagnostics` takes them.

    Raises:
        ArgumentError: There is no model or no dataset, or ``factory`` names no function.
        ArgumentTypeError: The factory returned something other than a mapping of parts, or ``config`` is of no use.
        StorageError: The file cannot be read.
    """
    read = read_file(Path(config)) if isinstance(config, (str, os.PathLike)) else config
    values = dict(read) if isinstance(read, Mapping) else read
    parts = _built(values.pop(SECTION, None)) if isinstance(values, dict) else {}
    given = {"model": model, "optimizer": optimizer, "criterion": criterion, "dataset": dataset}
    parts.update({name: part for name, part in given.items() if part is not None})
    for name in ("model", "dataset"):
        if parts.get(name) is None:
            raise ArgumentError(
                f"create_modular_train_context needs a {name}, got none; pass {name}=..., or name a function that "
                "builds it in the configuration: train: {factory: my_project.training:build}."
            )
    if parts.get("optimizer") is None:
        parts["optimizer"] = torch.optim.Adam(parts["model"].parameters())
    if parts.get("criterion") is None:
        parts["criterion"] = nn.CrossEntropyLoss()
    return TrainContext(**{name: parts[name] for name in _PARTS}, config=values, **settings)


def _built(section: Any) -> dict[str, Any]:
    """Call the factory that a configuration names."""
    if section is None:
        return {}
    if not isinstance(section, Mapping) or not isinstance(section.get("factory"), str):
        raise ArgumentError(f"section 'train' must hold factory: 'module:function', got {section!r}.")
    place, _, name = section["factory"].partition(":")
    try:
        build = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"factory must be 'module:function' and importable, got {section['factory']!r}: {error}."
        ) from error
    parts = build(**section.get("arguments", {}))
    if not isinstance(parts, Mapping) or not set(parts) <= set(_PARTS):
        raise ArgumentTypeError(
            f"factory {section['factory']!r} must return a mapping with any of {', '.join(_PARTS)}, got {parts!r}."
        )
    return dict(parts)
